"""PAI's API as an application: who asks, which operation, which answer.

One rule: what is not signed sees nothing, and what is not implemented says so by a code of its own.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from sublet.domain.errors import Broken, Refused, SubletError
from sublet.faces.pai import answers
from sublet.faces.pai.book import Book
from sublet.faces.pai.call import Call, Person, invalid
from sublet.faces.pai.operations import Operation, operation_of
from sublet.faces.pai.signing import Signed, Verifier
from sublet.service.desk import Desk

MAX_BODY = 1024 * 1024
MAX_DEPTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Pai:
    """What the face needs. `new_request_id`: a UUID in capitals, for each request."""

    desk: Desk
    book: Book
    verifier: Verifier[Person]
    new_request_id: Callable[[], str]


def beside(pai: Pai, other: ASGIApp) -> ASGIApp:
    """Requests that name a version of PAI's API go to it, all others to `other`."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name == b"x-acs-version" for name, _ in scope["headers"]):
            await _answer(pai, scope, receive, send)
        else:
            await other(scope, receive, send)

    return call


async def _answer(pai: Pai, scope: Scope, receive: Receive, send: Send) -> None:
    request_id = pai.new_request_id()
    try:
        signed = await _signed(scope, receive)
        response = answers.success(await run_in_threadpool(_done, pai, signed), request_id)
    except SubletError as error:
        response = answers.failure(error, request_id)
    except Exception as error:  # the edge: what nobody foresaw is a fault of ours
        logging.getLogger("sublet").exception("a request to PAI's API has failed")
        what = f"{type(error).__name__}: {error}".rstrip(".") + "."
        broken = Broken(what=what, why="This is a fault of Sublet.", hint="Please report it.")
        response = answers.failure(broken, request_id)
    await response(scope, receive, send)


def _done(pai: Pai, request: Signed) -> Mapping[str, Any]:
    who = pai.verifier.who(request, pai.desk.clock.now_ms())
    path, _, _ = request.path.partition("?")
    operation, parts = operation_of(request.headers["x-acs-version"], request.method, path)
    action = request.headers.get("x-acs-action", operation.action)
    if action != operation.action:
        why = f"{request.method} {path} is {operation.action}."
        raise Refused(what=f"x-acs-action is {action}.", why=why, code="InvalidAction.NotMatch")
    handler = operation.handler
    if handler is None:
        raise _not_there(operation)
    query = dict(parse_qsl(request.query, keep_blank_values=True))
    call = Call(
        desk=pai.desk,
        book=pai.book,
        who=who,
        path={name: unquote(value) for name, value in parts.items()},
        query=query,
        body=_body(request.body),
    )
    return handler(call)


def _not_there(operation: Operation) -> Refused:
    what = f"{operation.action} is not implemented."
    return Refused(what=what, why=operation.note, hint="See docs/reference/pai.md.", code="UnsupportedOperation")


def _body(text: bytes) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(what="The body is no JSON.", why=f"{error}.", code="InvalidParameter", field="body") from error
    if not isinstance(found, dict):
        raise invalid("body", found, "It is no JSON object.")
    if _depth(found) > MAX_DEPTH:
        raise Refused(what="The body is nested too deeply.", code="InvalidParameter", field="body")
    return found


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            below
            for one in level
            if isinstance(one, dict | list)
            for below in (one.values() if isinstance(one, dict) else one)
        ]
    return deepest


async def _signed(scope: Scope, receive: Callable[[], Awaitable[Any]]) -> Signed:
    """The request as it came over the wire: the raw path, the raw value of Host."""
    headers: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        if name in headers:
            raise Refused(what=f"The header {name} comes twice.", code="InvalidParameter", field=name)
        headers[name] = value.decode("utf-8", "replace")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(what="The client has gone.", code="InvalidParameter")
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise Refused(what="The body is longer than 1 MiB.", hint="Send less.", code="too_long")
        if not message.get("more_body"):
            break
    path = scope.get("raw_path") or scope["path"].encode()
    return Signed(
        method=scope["method"],
        path=path.decode("latin-1"),
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
        body=bytes(body),
    )
