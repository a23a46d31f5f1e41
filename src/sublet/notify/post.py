"""One try to deliver a message.

One rule: it is over after a bounded time, whatever the other side does, and follows nobody anywhere else.
"""

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from sublet.notify.book import Hook
from sublet.notify.hooks import signature

TRY_WITHIN_S = 10  # to connect, and again to answer
MOST_ANSWER = 200  # characters of an answer that are kept


def post(hook: Hook, message_id: str, body: str, time_s: int) -> tuple[int, str]:
    """The answer's status and what it says; status 0: there was no answer, and why."""
    headers = {
        "Content-Type": "application/cloudevents+json; charset=utf-8",
        "User-Agent": "sublet-webhook",
        "webhook-id": message_id,
        "webhook-timestamp": str(time_s),
        "webhook-signature": signature(hook.secrets, message_id, time_s, body),
    }
    parts = urlsplit(hook.url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection = _connection(parts.scheme, parts.hostname or "", parts.port)
        try:
            connection.connect()
            with _deadline(connection.sock):
                connection.request("POST", path, body.encode(), headers)
                answer = connection.getresponse()
                said = answer.read(MOST_ANSWER).decode("utf-8", "replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as problem:
        return 0, f"{type(problem).__name__}: {problem}"[:MOST_ANSWER]
    return answer.status, f"{answer.status} {answer.reason} {said}".strip()[:MOST_ANSWER]


def _connection(scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=TRY_WITHIN_S, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, port, timeout=TRY_WITHIN_S)


@contextmanager
def _deadline(sock: socket.socket) -> Iterator[None]:
    """Breaks the connection off after its time: a timeout of the socket begins anew with each byte that comes."""
    timer = threading.Timer(TRY_WITHIN_S, _break_off, [sock])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _break_off(sock: socket.socket) -> None:
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of TLS too: its own shutdown would wait for the reader
    except OSError:
        return  # it is closed already
