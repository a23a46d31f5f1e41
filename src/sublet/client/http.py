"""One connection, one request, one answer: the whole HTTP client.

One rule: what goes wrong comes back as the same errors that the server raised, and never as a traceback of a socket.
"""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from sublet.domain.errors import Broken, Refused, SubletError, Unavailable

API = "/api/v1"
STREAM_SILENCE_S = 60  # the server says something at least every 15 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Calls the server at `url` in the name of `user`. Raises Refused, Unavailable or Broken, as the server told it."""

    url: str
    user: str = ""
    timeout_s: float = 30.0

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        return self.call("GET", path, query=query)

    def post(self, path: str, body: Any = None, query: Mapping[str, Any] | None = None, key: str = "") -> Any:
        return self.call("POST", path, query=query, body=body, headers={"Idempotency-Key": key} if key else {})

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON of the answer. `body`: a text is sent as YAML, anything else as JSON; None: there is none."""
        with self._answer(method, path, query, body, headers or {}, self.timeout_s) as answer:
            try:
                text = answer.read()
                return json.loads(text) if text else None
            except (OSError, http.client.HTTPException) as error:
                raise self._gone(error) from error
            except ValueError as error:
                raise Broken(what=f"What {self.url} answered is no JSON.", hint="Is it a Sublet server?") from error

    @contextmanager
    def stream(self, path: str, query: Mapping[str, Any] | None = None) -> Iterator[Iterator[bytes]]:
        """The bytes of the answer as they come, until the server ends it."""
        with self._answer("GET", path, query, None, {"Accept": "text/event-stream, */*"}, STREAM_SILENCE_S) as answer:
            yield self._chunks(answer)

    def _chunks(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        while True:
            try:
                chunk = answer.read1(65_536)
            except (OSError, http.client.HTTPException) as error:
                raise self._gone(error) from error
            if not chunk:
                return
            yield chunk

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Any,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection(timeout_s)
        content, kind = _content(body)
        said = {"Accept": "application/json", "X-Sublet-User": quote(self.user), **kind, **headers}
        try:
            try:
                connection.request(method, _target(self._base() + path, query), body=content, headers=said)
                answer = connection.getresponse()
                problem = answer.read() if answer.status >= 400 else b""
            except (OSError, http.client.HTTPException) as error:
                raise self._gone(error) from error
            if answer.status >= 400:
                raise _told(answer.status, problem)
            yield answer
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _no_url(self.url) from error
        if parts.scheme not in ("http", "https") or not host:
            raise _no_url(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(host, port, timeout=timeout_s)

    def _base(self) -> str:
        return urlsplit(self.url).path.rstrip("/")

    def _gone(self, error: Exception) -> Unavailable:
        silent = isinstance(error, TimeoutError | socket.gaierror)
        why = str(getattr(error, "strerror", None) or error) or type(error).__name__
        return Unavailable(
            what=f"The server at {self.url} {'does not answer' if silent else 'cannot be reached'}.",
            why=f"The system says: {why.rstrip('.')}.",
            hint="Start it with `sublet up`, or name another with --server URL.",
            code="server_unreachable",
        )


def _content(body: Any) -> tuple[bytes | None, dict[str, str]]:
    if body is None:
        return None, {}
    if isinstance(body, str):
        return body.encode("utf-8", "surrogateescape"), {"Content-Type": "application/yaml"}
    return json.dumps(body).encode(), {"Content-Type": "application/json"}


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    given = {key: value for key, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def segment(text: str) -> str:
    """A text as one part of a path."""
    return quote(text, safe="")


def _told(status: int, text: bytes) -> SubletError:
    """The error that the server's problem (RFC 9457) stands for."""
    kind = Unavailable if status in (429, 502, 503, 504) else Refused if status < 500 else Broken
    try:
        problem = json.loads(text)
        parts = {key: str(problem.get(key) or "") for key in ("why", "hint", "code", "field", "where")}
        parts["code"] = parts["code"] or str(problem.get("Code") or "")  # as PAI's API spells them
        what = problem.get("title") or problem.get("Message") or f"The server answered {status}."
        return kind(what=str(what), **parts)
    except (ValueError, AttributeError):
        return kind(what=f"The server answered {status}.", why="What it said cannot be read.", code=f"http_{status}")


def _no_url(url: str) -> Refused:
    hint = "Write it as http://127.0.0.1:7788."
    return Refused(what=f"{url} is no URL of a server.", hint=hint, code="malformed", field="server")
