"""The warning before a stop, as the agent keeps it. Rule: the deadline is the notice's; what we add is measured,
not guessed.

$SUBLET_NOTICE_FILE        appears: {"deadline_ms": 1767225600000, "reason": "…"}; vanishes: the notice is withdrawn
$SUBLET_NOTICE_FILE.safe   ours: {"safe": true, "step": 120, …} once the last copy is on disk
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MARGIN_MS = 200
DEFAULT_GRACE_MS = 20_000  # of a signal, which names no deadline
UNKNOWN_WRITE_MS = 2_000  # before the first write has been measured


@dataclass(slots=True, kw_only=True)
class Watch:
    """Where a notice comes from and what was heard. `heard_ms` is 0 while there is none."""

    path: Path | None = None
    heard_ms: int = 0
    deadline_ms: int = 0
    reason: str = ""
    from_file: bool = False
    told: bool = False
    safe: bool = False
    write_ms: int = 0
    torn_since_ms: int = 0

    def look(self) -> Literal["", "heard", "withdrawn"]:
        """Read the notice file; what changed since the last look."""
        if self.path is not None:
            found = read_notice(self, self.path)
            if found is not None and not self.heard_ms:
                heard(self, found["deadline_ms"], found["reason"])
                self.from_file = True
            elif self.from_file and found is None and not self.path.exists():
                return "withdrawn"
        if self.heard_ms and not self.told:
            self.told = True
            return "heard"
        return ""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def read_notice(watch: Watch, path: Path) -> dict[str, Any] | None:
    """The notice in the file. One that stays unreadable for a second counts as a notice without a deadline."""
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        value = json.loads(text)
        return {"deadline_ms": int(value["deadline_ms"]), "reason": str(value.get("reason", ""))}
    except (ValueError, KeyError, TypeError, AttributeError):
        watch.torn_since_ms = watch.torn_since_ms or now_ms()
        if now_ms() - watch.torn_since_ms < 1000:
            return None
        return {"deadline_ms": 0, "reason": "a notice that cannot be read"}


def heard(watch: Watch, deadline_ms: int, reason: str) -> None:
    """A notice has come; one without a deadline gets the default grace. The first one counts."""
    if watch.heard_ms:
        return
    watch.heard_ms = now_ms()
    watch.deadline_ms = deadline_ms or watch.heard_ms + DEFAULT_GRACE_MS
    watch.reason = reason
    watch.safe = watch.told = False


def withdrawn(watch: Watch) -> None:
    """There is no notice any more."""
    if watch.path is not None:
        safe_path(watch.path).unlink(missing_ok=True)
    watch.heard_ms = watch.deadline_ms = watch.torn_since_ms = 0
    watch.reason, watch.from_file, watch.safe, watch.told = "", False, False, False


def answer_by_ms(watch: Watch) -> int:
    """Until when a fresh copy may come: the deadline less one and a quarter of the measured time of a write."""
    write_ms = watch.write_ms or UNKNOWN_WRITE_MS
    return watch.deadline_ms - write_ms * 5 // 4 - MARGIN_MS


def safe_path(path: Path) -> Path:
    return path.with_name(path.name + ".safe")


def safe(watch: Watch, step: int | None, name: str, *, fresh: bool) -> None:
    """Say beside the notice that a stop loses nothing that is not on disk; at once, so that the owner need not wait.

    Where the file cannot be written now, it is tried again at the next look.
    """
    if watch.path is not None and watch.path.parent.is_dir():
        target = safe_path(watch.path)
        part = target.with_name(target.name + ".part")
        try:
            part.write_text(json.dumps({"safe": True, "step": step, "name": name, "fresh": fresh, "at_ms": now_ms()}))
            part.rename(target)
        except OSError:
            return
    watch.safe = True


def read_safe(path: Path) -> dict[str, Any] | None:
    """What the agent said beside a notice file, for whoever gave the notice; None while it has said nothing."""
    try:
        return dict(json.loads(safe_path(path).read_text()))
    except FileNotFoundError:
        return None
