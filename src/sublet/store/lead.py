"""Who may write, when several servers share one database: an advisory lock of PostgreSQL.

One rule: the connection that holds the lock is the only one that writes. When it breaks, lock and right to write
are gone together, so that a server that was cut off can never write beside its successor.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from sublet.domain.errors import Unavailable

KEY = 0x5375_626C_6574  # "Sublet"


class Lead:
    """`lost` is called once, when another server has taken over from this one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._guard = threading.RLock()
        self._connection: Connection | None = None
        self._has_led = False
        self.lost: Callable[[], None] = lambda: None

    def take(self) -> bool:
        """Whether this server leads now; it does not wait for another one to end."""
        with self._guard:
            if self._connection is not None:
                return True
            connection = self._engine.connect()
            try:
                is_ours = bool(connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": KEY}).scalar())
                connection.commit()  # the lock is the session's, not the transaction's
            except BaseException:
                connection.invalidate()
                connection.close()
                raise
            if not is_ours:
                connection.close()
                return False
            self._connection, self._has_led = connection, True
            return True

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction of the leader. Unavailable when another server leads."""
        with self._guard:
            if not self.take():
                if self._has_led:
                    self._has_led = False
                    self.lost()
                raise Unavailable(
                    what="This server does not lead.",
                    why="Another one holds the database's lock.",
                    hint="Ask that one; this one stands by once it is started again.",
                    code="standby",
                )
            connection = self._connection
            assert connection is not None
            try:
                with connection.begin():
                    yield connection
            except DBAPIError as error:
                if error.connection_invalidated or connection.invalidated:
                    self._drop()
                raise

    def close(self) -> None:
        with self._guard:
            if self._connection is not None:
                self._drop()

    def _drop(self) -> None:
        """The session ends, and its lock with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()
