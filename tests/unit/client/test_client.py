"""The client against real sockets: errors come back as what they were, and a server is found where it said it is."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sublet.client import follow
from sublet.client.find import server_url
from sublet.client.http import Client
from sublet.domain.errors import Broken, Refused, SubletError, Unavailable


@contextmanager
def answering(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives one answer and keeps what it was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def act() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(_request(connection))
                connection.sendall(answer)

        thread = threading.Thread(target=act)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        thread.join()


def _request(connection: socket.socket) -> bytes:
    """Head and body, in whatever pieces they come."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += connection.recv(65_536)
    head, _, body = said.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def reply(status: int, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n".encode() + body


PROBLEM = {"title": "No.", "why": "Because.", "hint": "Ask.", "code": "no", "field": "gpu", "where": "job.yaml:2"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(422, Refused), (404, Refused), (503, Unavailable), (429, Unavailable), (502, Unavailable), (500, Broken)],
)
def test_a_problem_comes_back_as_the_error_it_was(status: int, kind: type[SubletError]) -> None:
    with answering(reply(status, json.dumps(PROBLEM).encode())) as (url, _), pytest.raises(kind) as raised:
        Client(url=url).get("/x")
    error = raised.value
    assert (error.what, error.why, error.hint, error.code, error.field, error.where) == tuple(PROBLEM.values())


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b""])
def test_an_answer_of_somebody_else_is_told(body: bytes) -> None:
    with answering(reply(404, body)) as (url, _), pytest.raises(Refused, match="The server answered 404"):
        Client(url=url).get("/x")


def test_what_is_sent() -> None:
    with answering(reply(200, b'{"a": 1}')) as (url, asked):
        answer = Client(url=f"{url}/base", user="Jürgen").post("/x", "quota: ü", {"a": ["1", "2"], "b": None}, key="k")
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert answer == {"a": 1}
    assert head.startswith(b"POST /base/x?a=1&a=2 HTTP/1.1")
    for line in (b"X-Sublet-User: J%C3%BCrgen", b"Content-Type: application/yaml", b"Idempotency-Key: k"):
        assert line in head
    assert body == "quota: ü".encode()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(
        Unavailable, match=f"The server at {url} cannot be reached. The system says: Connection refused"
    ):
        Client(url=url).get("/x")


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(Unavailable, match="does not answer"):
            Client(url=url, timeout_s=0.01).get("/x")


def test_a_connection_that_breaks() -> None:
    whole = reply(200, b"0123456789")
    with answering(whole[:-5]) as (url, _), pytest.raises(Unavailable, match="cannot be reached"):
        Client(url=url).get("/x")


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://", "http://x:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="is no URL of a server"):
        Client(url=url).get("/x")


def test_where_the_server_is(tmp_path: Path) -> None:
    environment = {"SUBLET_DATA": str(tmp_path)}
    assert server_url("127.0.0.1:1", environment) == "http://127.0.0.1:1"
    assert server_url(None, {**environment, "SUBLET_SERVER": "http://a/"}) == "http://a"
    with pytest.raises(
        Unavailable, match=r"No server is known. There is no note of one in .*server.json. Start one with"
    ):
        server_url(None, environment)
    (tmp_path / "server.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    assert server_url(None, environment) == "http://127.0.0.1:9"
    (tmp_path / "server.json").write_text("[]")
    with pytest.raises(Unavailable, match="No server is known"):
        server_url(None, environment)


@pytest.mark.parametrize(
    ("environment", "directory"),
    [({"HOME": "/h"}, "/h/.local/share/sublet"), ({"HOME": "/h", "XDG_DATA_HOME": "/x"}, "/x/sublet")],
)
def test_the_usual_data_directory(environment: dict[str, str], directory: str) -> None:
    with pytest.raises(Unavailable, match=f"in {directory}/server.json"):
        server_url(None, environment)


def test_events_in_any_pieces() -> None:
    text = ': hello\n\nid: 1\nevent: a\ndata: {"a":\ndata: "ü"}\n\n: alive\n\nid: 2\r\ndata:{"b": 2}\r\n\r\n'.encode()
    for size in (1, 2, 7, 1000):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(follow.events(pieces)) == [{"a": "ü"}, {"b": 2}]


def test_the_client_brings_nothing_of_others() -> None:
    program = "import sys, sublet.client.http, sublet.client.find, sublet.client.follow; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in loaded for name in ("click", "pydantic", "asyncio", "sqlalchemy", "ruamel.yaml"))
