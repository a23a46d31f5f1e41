"""Server-sent events, as far as Sublet uses them.

One rule: an event is given once, in order; after a break the reader goes on behind the last number it has seen.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Whole lines, without their ends, of bytes that come in any pieces."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.rstrip(b"\r").decode("utf-8", "replace") for line in whole)


def events(chunks: Iterable[bytes]) -> Iterator[Any]:
    """The JSON of each event; comments, which only keep the line alive, are left out."""
    said: list[str] = []
    for line in lines(chunks):
        if line.startswith("data:"):
            said.append(line[5:].removeprefix(" "))
        elif not line and said:
            yield json.loads("\n".join(said))
            said = []
