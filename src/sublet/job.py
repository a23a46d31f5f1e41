"""What training code imports: is a notice there, how far is it, what was saved. Standard library only.

    from sublet.job import checkpointed, notice, progress

Rule: outside of Sublet every call does nothing, so that the same program runs anywhere.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

SAVED = 85  # exit code: saved on notice, take the GPUs back
RETRY = 75  # exit code: please start me again, it is not my fault


class Notice:
    """The word that the job has to leave. Cheap enough to be asked at each step: one look at a file."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._path = environment.get("SUBLET_NOTICE_FILE", "")

    def received(self) -> bool:
        return bool(self._path) and os.path.exists(self._path)

    def read(self) -> dict[str, Any] | None:
        """`deadline_ms` (UTC), `reason`, `claimant`; None when there is none."""
        try:
            with open(self._path, "rb") as file:
                found = json.loads(file.read())
        except OSError:
            return None
        return found if isinstance(found, dict) else None


notice = Notice()


def progress(step: int, total: int | None = None) -> None:
    """This step is done, of so many."""
    _report({"step": step} if total is None else {"step": step, "total": total})


def checkpointed(step: int) -> None:
    """A checkpoint at this step is durable: the files and their directory were synced."""
    _report({"checkpoint": step}, wakes=True)


def finished() -> None:
    """All work is done; needed only by programs that leave with 0 on a notice as well."""
    _report({"finished": True})


def _report(line: dict[str, Any], *, wakes: bool = False) -> None:
    path = os.environ.get("SUBLET_REPORT_FILE", "")
    if not path:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(descriptor)
    if wakes:
        _wake(os.path.join(os.path.dirname(path), "wake"))


def _wake(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody listens: the supervisor reads the report when it comes back
        return
    try:
        os.write(descriptor, b".")
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
