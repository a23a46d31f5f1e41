"""Watches over the gangs that run on this machine: hangs, ends that do not come, instances that hold the others up.

Rule: what was told of an attempt is a file in its directory, so that a new server goes on where the old one was; each
finding is told until it is durable, and once more when it is over.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublet.domain.events import Diagnosed
from sublet.domain.faults import Trouble
from sublet.supervisor import files, hang, processes, stacks
from sublet.supervisor.hang import Finding, Limits, Seen

LOOK_MS = 5_000  # at a gang, at the latest
LOOKS_IN_A_LIMIT = 4
STACKS_WITHIN_MS = 15_000
AGAIN_MS = 60_000  # a hang that the job does not want to sit out is told again, in case it could not be acted on
IDLE_SHARE = 0.05  # of one processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance of a gang, as it lies on disk."""

    directory: str
    settings: dict[str, Any]  # its start.json

    def see(self) -> Seen:
        one = self.settings
        return hang.see(self.directory, one["instance"], one["run"], one["log"])

    def pids(self) -> list[int]:
        keeper = files.read(self.directory, files.KEEPER) or {"pid": None}
        return processes.members(keeper["pid"], self.settings["mark"], self.settings["cgroup"])


@dataclass(slots=True, kw_only=True)
class Gang:
    """One attempt; all its instances are here, those too that have ended."""

    job: str
    attempt: int
    members: Sequence[Member]
    limits: Limits
    is_async: bool
    asked_ms: int = 0  # when stacks were asked for
    collectors: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sample: tuple[int, int] = (0, 0)  # ms and processor ticks, at the first look of this silence
    told_ms: int = 0

    @property
    def directory(self) -> str:
        return str(Path(self.members[0].directory).parent)

    def look_every_ms(self) -> int:
        return max(100, min(LOOK_MS, self.limits.smallest_ms() // LOOKS_IN_A_LIMIT))


def gang_of(job: str, attempt: int, directories: Sequence[Path]) -> Gang | None:
    """None while not all of it exists."""
    members = [
        Member(directory=str(path), settings=start)
        for path in directories
        if (start := files.read(str(path), files.START)) is not None
    ]
    if not members or len({one.settings["instance"] for one in members}) < members[0].settings["instances"]:
        return None
    newest = {one.settings["instance"]: one for one in sorted(members, key=lambda one: int(one.settings["run"]))}
    first = members[0].settings
    limits = hang.limits_of(first["settings"])
    is_async = first["mode"] == "async"
    return Gang(job=job, attempt=attempt, members=list(newest.values()), limits=limits, is_async=is_async)


def look(gang: Gang, now_ms: int, tell: Callable[[Diagnosed], None]) -> None:
    """Tell what is new about the gang."""
    seen = [member.see() for member in gang.members]
    known = {(one["trouble"], one["instance"]): one for one in files.read(gang.directory, files.TROUBLE) or []}
    found = hang.judge(seen, gang.limits, now_ms, is_async=gang.is_async)
    if any(finding.trouble is not Trouble.SLOW for finding in found) and not _is_idle(gang, now_ms):
        spared = [Seen(**{**_fields(one), "is_idle": False}) for one in seen]
        found = hang.judge(spared, gang.limits, now_ms, is_async=gang.is_async)
    lasting = {key: one for key, one in known.items() if _lasts(gang, key, found, seen)}
    new = [one for one in found if not any(_is_same(gang, key, one) for key in lasting)]
    if not any(one.trouble is not Trouble.SLOW for one in found):
        gang.asked_ms, gang.sample = 0, (0, 0)
    for finding in new:
        text = _explained(gang, finding, now_ms)
        if text is not None:
            lasting[finding.trouble, text[0]] = {"trouble": finding.trouble, "instance": text[0], "text": text[1]}
    _tell(gang, known, lasting, now_ms, tell)


def _fields(seen: Seen) -> dict[str, Any]:
    return {name: getattr(seen, name) for name in Seen.__slots__}


def _lasts(gang: Gang, key: tuple[str, int | None], found: Sequence[Finding], seen: Sequence[Seen]) -> bool:
    if key[0] == Trouble.SLOW:
        return hang.is_still_slow(seen, key[1])
    return any(_is_same(gang, key, one) for one in found)


def _is_same(gang: Gang, key: tuple[str, int | None], finding: Finding) -> bool:
    """In a gang that keeps step there is one hang, whoever stands out; else each instance has its own."""
    return key[0] == finding.trouble and (not gang.is_async or key[1] == finding.instance)


def _is_idle(gang: Gang, now_ms: int) -> bool:
    """Next to no processor time was used since the first look at which this silence had lasted too long."""
    ticks = processes.cpu_ticks([pid for member in gang.members for pid in member.pids()])
    if not gang.sample[0]:
        gang.sample = now_ms, ticks
        return False
    elapsed_s = (now_ms - gang.sample[0]) / 1000
    used_s = (ticks - gang.sample[1]) / os.sysconf("SC_CLK_TCK")
    return elapsed_s > 0 and used_s <= IDLE_SHARE * elapsed_s


def _explained(gang: Gang, finding: Finding, now_ms: int) -> tuple[int | None, str] | None:
    """The instance that stands out and the whole sentence; None while the stacks are still being collected."""
    if finding.trouble is Trouble.SLOW:
        return finding.instance, finding.text
    if not gang.asked_ms:
        gang.asked_ms = now_ms
        gang.collectors = [_collector(member.directory) for member in _live(gang)]
        return None
    for collector in gang.collectors:
        if collector.poll() is None and now_ms - gang.asked_ms < STACKS_WITHIN_MS:
            return None
    for collector in gang.collectors:
        if collector.poll() is None:
            collector.kill()
        collector.wait()
    gang.collectors = []
    return _with_stacks(gang, finding)


def _with_stacks(gang: Gang, finding: Finding) -> tuple[int | None, str]:
    collected = [(member, *stacks.read(member.directory)) for member in _live(gang)]
    all_stacks = [
        (member.settings["instance"], stack)
        for member, at_ms, found in collected
        if at_ms >= gang.asked_ms
        for stack in found
        if finding.instance is None or not gang.is_async or finding.instance == member.settings["instance"]
    ]
    sentence = stacks.sentence(all_stacks)
    if not sentence:
        return finding.instance, finding.text
    odd = stacks.odd_one(all_stacks)
    for member, _, _ in collected:
        _show(member.settings["log"], finding.text, sentence, stacks.merged(all_stacks))
    instance = finding.instance if gang.is_async or odd is None else odd[0]
    return instance, f"{finding.text}; {sentence}"


def _show(log: str, *parts: str) -> None:
    """In the log, where people look first; that it was written to is no progress of the program."""
    before = Path(log).stat()
    with Path(log).open("ab") as file:
        file.write("\n".join(["", "--- sublet: " + parts[0], *parts[1:]]).encode() + b"---\n")
    os.utime(log, ns=(before.st_atime_ns, before.st_mtime_ns))


def _live(gang: Gang) -> list[Member]:
    return [member for member in gang.members if not files.exists(member.directory, files.END)]


def _collector(directory: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "sublet.supervisor", "--stacks", directory],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _tell(
    gang: Gang,
    known: dict[tuple[str, int | None], dict[str, Any]],
    now: dict[tuple[str, int | None], dict[str, Any]],
    now_ms: int,
    tell: Callable[[Diagnosed], None],
) -> None:
    if now.keys() != known.keys():
        files.write(gang.directory, files.TROUBLE, list(now.values()))
    runs = {member.settings["instance"]: member.settings["run"] for member in gang.members}
    is_due_again = now_ms - gang.told_ms >= AGAIN_MS and gang.limits.action == "restart"
    for key, one in [*known.items(), *now.items()]:
        is_over = key not in now
        if key in known and key in now and not (is_due_again and key[0] != Trouble.SLOW):
            continue
        gang.told_ms = now_ms
        tell(
            Diagnosed(
                at_ms=now_ms,
                job=gang.job,
                attempt=gang.attempt,
                trouble=key[0],
                instance=key[1],
                evidence="" if is_over else one["text"],
                restart=not is_over and gang.limits.action == "restart" and key[0] != Trouble.SLOW,
                is_over=is_over,
                run=runs.get(key[1], 0) if key[1] is not None else 0,
            )
        )
