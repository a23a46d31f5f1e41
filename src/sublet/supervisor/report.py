"""What the program says of itself in `report.jsonl`, and word to the engine that something has changed.

Rule: a line that is not whole or not ours is passed over; a program cannot harm its supervisor.
"""

import contextlib
import json
import os
import socket
from typing import Any

from sublet.supervisor import files


def lines(directory: str, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from there on, and how far they reach."""
    try:
        with open(os.path.join(directory, files.REPORT), "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    whole = data.rpartition(b"\n")[0]
    said = []
    for line in whole.split(b"\n"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                said.append(value)
    return said, offset + (len(whole) + 1 if whole else 0)


def says_finished(said: list[dict[str, Any]]) -> bool:
    """It said so, or its last step was the last there is."""
    steps = [line for line in said if isinstance(line.get("step"), int)]
    last = steps[-1] if steps else {}
    return any(line.get("finished") is True for line in said) or (
        isinstance(last.get("total"), int) and last["step"] >= last["total"]
    )


def tell_engine(directory: str) -> None:
    """Nothing, when no engine listens: it reads the files when it comes back."""
    parts = os.path.normpath(directory).split(os.sep)
    descriptor = os.open(os.path.join(directory, "..", "..", ".."), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            # A path through the descriptor is short, however long the data directory's own path is.
            sender.sendto("/".join(parts[-3:]).encode(), f"/proc/self/fd/{descriptor}/{files.SOCKET}")
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        return
    finally:
        os.close(descriptor)
