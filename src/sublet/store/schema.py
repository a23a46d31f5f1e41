"""Brings a database to the schema of this program, or says why it cannot.

One rule: a database is changed only by the migrations, in one transaction, and never backwards.
"""

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from sublet.domain.errors import Refused
from sublet.store.statements import HEAD

SCRIPTS = Path(__file__).parent / "migrations"


def migrate(engine: Engine) -> None:
    """To `HEAD`; Refused when a newer program has written this database."""
    with engine.begin() as connection:
        migrate_on(connection)


def migrate_on(connection: Connection) -> None:
    """Within the caller's transaction."""
    present = revision(connection)
    if present == HEAD:
        return
    if present is not None and present > HEAD:
        raise Refused(
            what=f"The database is of schema {present}, this program knows {HEAD} at most.",
            why="A newer version of Sublet has written it.",
            hint="Install that version again, or start with another database.",
            code="schema_too_new",
        )
    _upgrade(connection)


def revision(connection: Connection) -> str | None:
    """The schema that the database has; None: none yet."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _upgrade(connection: Connection) -> None:
    from alembic import command  # half a second of imports, needed once in the life of a schema
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)
