"""Keeps web pages of others away from a server that has no login yet.

One rule: what comes from a browser page of another origin, or under a foreign host name, changes and sees nothing.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from sublet.domain.errors import Refused
from sublet.faces.rest import problems

LOCAL = ("127.0.0.1", "localhost", "[::1]")


def guarded(app: ASGIApp) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_trusted(dict(scope["headers"])):
            what, why = "This request comes from another site.", "The server listens for this machine alone."
            await problems.response(Refused(what=what, why=why, code="foreign_origin"))(scope, receive, send)
            return
        await app(scope, receive, send)

    return call


def _is_trusted(headers: dict[bytes, bytes]) -> bool:
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin")
    name = re.sub(r":\d+$", "", host)
    return name in LOCAL and (origin is None or origin.decode("latin-1") == f"http://{host}")
