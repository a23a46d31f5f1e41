"""How much memory may be taken for copies. Rule: asked before it is taken, of the machine and of the control groups."""

import os
from pathlib import Path

LIMIT = "SUBLET_CHECKPOINT_BUDGET_BYTES"  # a smaller budget than the machine would allow
SPARE_BYTES = 256 << 20  # left to everybody else
SPARE_SHARE = 20  # and a twentieth of the whole


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of what the machine and each control group of this process have left, less a margin."""
    memory = fields(proc / "meminfo", scale=1024)
    spare = max(SPARE_BYTES, memory.get("MemTotal:", 0) // SPARE_SHARE)
    left = [memory.get("MemAvailable:", 0), *group_limits(proc, cgroups)]
    limit = os.environ.get(LIMIT, "")
    found = max(0, min(left) - spare)
    return min(found, int(limit)) if limit.isdigit() else found


def group_limits(proc: Path, cgroups: Path) -> list[int]:
    """What each control group above this process has left; page cache that can go counts as free."""
    out = []
    for line in read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups if not controllers else cgroups / "memory"
        limit, used = ("memory.max", "memory.current") if not controllers else V1
        for group in [root / path.lstrip("/"), *(root / path.lstrip("/")).parents]:
            if not group.is_relative_to(root):
                break
            bound, taken = read_text(group / limit).strip(), read_text(group / used).strip()
            if bound.isdigit() and taken.isdigit():
                stat = fields(group / "memory.stat")
                out.append(int(bound) - int(taken) + stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    return out


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def fields(path: Path, scale: int = 1) -> dict[str, int]:
    rows = (line.split() for line in read_text(path).splitlines())
    return {row[0]: int(row[1]) * scale for row in rows if len(row) > 1 and row[1].isdigit()}


def read_text(path: Path) -> str:
    """The file's text; empty where the system has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def slots_that_fit(wanted: int, slot_bytes: int, have: int, left: int) -> int:
    """How many new slots of `slot_bytes` to make: `wanted` in all, of which `have` exist, within `left` bytes."""
    return max(0, min(wanted - have, left // max(slot_bytes, 1)))
