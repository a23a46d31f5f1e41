"""Which server is meant: the one named, or the one that said in its data directory where it listens.

One rule: the file is a note, not a promise; whether anybody answers there shows when it is called.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from sublet.domain.errors import Unavailable

NOTE = "server.json"  # url and pid, written by a server when it listens


def data_directory(environment: Mapping[str, str]) -> Path:
    """`SUBLET_DATA`, or `sublet` below the user's data directory."""
    named = environment.get("SUBLET_DATA")
    if named:
        return Path(named)
    base = environment.get("XDG_DATA_HOME") or Path(environment.get("HOME", "/")) / ".local" / "share"
    return Path(base) / "sublet"


def server_url(named: str | None, environment: Mapping[str, str]) -> str:
    """The URL to call, without a slash at the end; Unavailable when nobody ever said where a server is."""
    url = named or environment.get("SUBLET_SERVER")
    if url:
        return (url if "://" in url else f"http://{url}").rstrip("/")
    note = data_directory(environment) / NOTE
    try:
        said = json.loads(note.read_text("utf-8"))
        return str(said["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(
            what="No server is known.",
            why=f"There is no note of one in {note}.",
            hint="Start one with `sublet up`, or name one with --server URL or SUBLET_SERVER.",
            code="server_unknown",
        ) from error
