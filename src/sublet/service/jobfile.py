"""A job as people write it (YAML, or the same keys as JSON) becomes a request.

One rule: what is written is either part of the request or refused. No key is dropped on the way.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.jobs import CheckpointHint, FaultTolerance, IdlePolicy, JobRequest, Program
from sublet.service import jobkeys
from sublet.service.aimaster import Arguments
from sublet.service.aimaster import parse as parse_arguments
from sublet.service.reading import Section, Shape, check_keys, read
from sublet.service.signs import signs

MAX_INSTANCES = 10_000
MAX_GPU = 1_024  # of one instance; no machine has more
NO_HIGHER = 1_000_000
BACKOFF_FIRST_MS = 10_000
NOTIFY: Shape = {"on": None, "to": None}
TOLD = ("failed", "notice", "preempted", "hang", "lost_progress")

SHAPE = jobkeys.shape()
NOT_YET = ("image", "secrets", "data")
POLICIES = {"exit-code-and-error": "exit_code_and_error_msg", "exit-code": "exit_code", "on-failure": "on_failure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A request that was read, and where each part of it stands in the user's file. `specs` may still be empty."""

    request: JobRequest
    source: Section

    def place(self, field: str) -> str:
        """As `Section.place`; `gpu` may stand where `resources.gpu` is meant."""
        short = field == "resources.gpu" and self.source.has("gpu")
        return self.source.place("gpu") if short else self.source.place(*field.split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who submits, from where. `base`: the folder that a relative `workdir` starts from; empty: there is none."""

    job_id: str
    user: str
    file: str = ""
    base: str = ""


def parse(text: str, origin: Origin, overrides: Mapping[str, Any] | None = None) -> Draft:
    """The job in this text, with `overrides` laid over it; Refused when any part of it is not understood."""
    written = read(text, origin.file)
    return draft(_overlaid(written, overrides) if overrides else written, origin)


def draft(source: Section, origin: Origin) -> Draft:
    for key in NOT_YET:
        if source.has(key):
            raise source.refused(key, f"{key} is not done yet.", hint="Leave it out.", code="not_yet")
    check_keys(source, SHAPE, SHAPE)
    tolerance, aimaster = _with_aimaster(source.section("fault_tolerance"))
    checkpoint = source.section("checkpoint")
    resources = source.section("resources")
    request = JobRequest(
        id=origin.job_id,
        user=origin.user,
        name=source.name("name") or _default_name(source, origin),
        quota=_required(source, "quota", "Name the quota that promises the capacity: sublet quota ls."),
        idle=IdlePolicy(source.choice("idle", list(IdlePolicy), IdlePolicy.NEVER)),
        priority=source.whole("priority", low=1, high=9, default=5) or 5,
        specs=source.words("spec"),
        sizes=(_gpu(source, resources),) * (source.whole("instances", low=1, high=MAX_INSTANCES, default=1) or 1),
        cpu_milli=resources.cpu_milli("cpu"),
        memory_bytes=resources.size_bytes("memory"),
        fault_tolerance=_fault_tolerance(tolerance),
        checkpoint=CheckpointHint(every_ms=checkpoint.duration_ms("every")),
        grace_ms=tolerance.duration_ms("grace"),
        max_time_ms=source.duration_ms("max_time"),
        labels=source.texts("labels"),
        program=_program(source, checkpoint, tolerance, aimaster, origin),
    )
    return Draft(request=request, source=source)


def _with_aimaster(written: Section) -> tuple[Section, Arguments]:
    """What AIMaster's arguments stand for, below what is written beside them."""
    arguments = parse_arguments(written.text("aimaster"))
    values = {**arguments.keys, **written.values}
    hang = written.values.get("hang")
    if isinstance(hang, Mapping):
        values["hang"] = {**arguments.keys.get("hang", {}), **hang}
    return Section(values=values, file=written.file, path=written.path, lines=written.lines), arguments


def _overlaid(written: Section, overrides: Mapping[str, Any]) -> Section:
    values = {**written.values}
    for key, value in overrides.items():
        below = values.get(key)
        values[key] = {**below, **value} if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    if "gpu" in overrides and isinstance(values.get("resources"), Mapping):
        values["resources"] = {key: value for key, value in values["resources"].items() if key != "gpu"}
    lines = {path: line for path, line in written.lines.items() if path[0] not in overrides}
    return Section(values=values, file=written.file, lines=lines)


def _default_name(source: Section, origin: Origin) -> str:
    if origin.file:
        return PurePath(origin.file).stem[:200]
    words = _command(source)[0].split()
    return PurePath(words[0]).name[:200] if words else ""


def _required(source: Section, key: str, hint: str) -> str:
    value = source.name(key)
    if not value.strip():
        why = "A job cannot do without it." if not source.path else ""
        raise source.refused(key, f"{source.key(key)} is missing.", why, hint)
    return value


def _gpu(source: Section, resources: Section) -> int:
    if source.has("gpu") and resources.has("gpu"):
        raise source.refused("gpu", "gpu and resources.gpu are both given.", "They mean the same.", "Keep one of them.")
    section = source if source.has("gpu") else resources
    count = section.whole("gpu", low=1, high=MAX_GPU)
    if count is None:
        hint = "Write gpu: 1, or as many as each instance needs."
        raise source.refused("gpu", "gpu is missing.", "It says how many GPUs each instance gets.", hint)
    return count


def _command(source: Section) -> tuple[str, ...]:
    """One element is a line for the shell, several are a program and its arguments."""
    value = source.values.get("command")
    hint = "Write command: python train.py"
    if value is None:
        raise source.refused("command", "command is missing.", "It says what runs in each instance.", hint)
    if isinstance(value, list):
        if not value or not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in value):
            raise source.refused("command", "command is no list of texts.", hint=hint)
        words = tuple(str(item) for item in value)
        if any("\0" in word for word in words):
            raise source.refused("command", "command holds a zero byte.", hint=hint)
        command = words if len(words) > 1 else (shlex.quote(words[0]),) if words[0].strip() else ("",)
    else:
        command = (source.text("command"),)
    if not command[0].strip():
        raise source.refused("command", "command is empty.", "There is nothing to run.", hint)
    return command


def _fault_tolerance(section: Section) -> FaultTolerance:
    backoff = section.section("backoff")
    usual = FaultTolerance()
    policy = section.choice("policy", [*POLICIES, "never"], "exit-code-and-error")
    on_preempt = section.choice("on_preempt", ["requeue", "stop"], "requeue")
    if on_preempt == "stop" and policy != "never":
        why = "A job that is stopped when it is preempted is not restarted at all."
        raise section.refused("on_preempt", "on_preempt: stop needs policy: never.", why, "Add policy: never.")
    first, longest = backoff.duration_ms("first"), backoff.duration_ms("max")
    return FaultTolerance(
        enabled=on_preempt == "requeue",
        mode=section.choice("mode", ["sync", "async"], usual.mode),
        policy=POLICIES.get(policy, policy),
        max_restarts=_whole(section, "max_restarts", 0, usual.max_restarts),
        max_restarts_total=_whole(section, "max_restarts_total", 0, usual.max_restarts_total),
        same_error=section.whole("same_error", low=1, high=NO_HIGHER),
        backoff_first_ms=BACKOFF_FIRST_MS if first is None else first,
        backoff_max_ms=usual.backoff_max_ms if longest is None else longest,
    )


def _whole(section: Section, key: str, low: int, default: int) -> int:
    value = section.whole(key, low=low, high=NO_HIGHER)
    return default if value is None else value


def _program(source: Section, checkpoint: Section, tolerance: Section, aimaster: Arguments, origin: Origin) -> Program:
    launcher = source.choice("launcher", ["none", "torchrun", "mpi"], "none")
    return Program(
        command=_launched(_command(source), launcher),
        workdir=_workdir(source, origin),
        environment=source.texts("env"),
        launcher=launcher,
        checkpoint_dir=checkpoint.text("dir").replace("{job}", origin.job_id),
        settings=_settings(source, checkpoint, tolerance, aimaster),
    )


def _launched(command: tuple[str, ...], launcher: str) -> tuple[str, ...]:
    """With torchrun it is named once, whether or not it was written: engines put it before the words of a program."""
    if launcher != "torchrun":
        return command
    words = command[1:] if len(command) > 1 and command[0] == "torchrun" else command
    if len(words) > 1:
        return words
    line = words[0] if len(command) == 1 else shlex.quote(words[0])
    return (line,) if line.split()[0] == "torchrun" else (f"torchrun {line}",)


def _workdir(source: Section, origin: Origin) -> str:
    """Absolute. Where nothing is said: the folder of the file."""
    path = PurePath(origin.base) / source.text("workdir", ".")
    if path.is_absolute():
        return str(path)
    if not source.has("workdir"):
        return ""
    hint = "Write it from the root on."
    raise source.refused("workdir", f"workdir is {path}, a relative path.", "It is not known relative to what.", hint)


def _settings(source: Section, checkpoint: Section, tolerance: Section, aimaster: Arguments) -> str:
    """What the supervisor must know, only what was written; JSON text."""
    hang, notice = tolerance.section("hang"), tolerance.section("notice")
    is_off = tolerance.values.get("exit_hang") == "off"
    said: dict[str, Any] = {
        "checkpoint_exit_code": checkpoint.whole("exit_code", low=1, high=255),
        "policy": tolerance.choice("policy", [*POLICIES, "never"], "") or None,
        "hang_action": hang.choice("action", ["off", "report", "restart"], "") or None,
        "hang_after_ms": hang.duration_ms("after"),
        "hang_start_ms": hang.duration_ms("start"),
        "hang_save_ms": hang.duration_ms("save"),
        "hang_watch": _watch(hang) or None,
        "exit_hang_ms": 0 if is_off else tolerance.duration_ms("exit_hang"),
        "notice_signal": notice.choice("signal", ["none", "SIGUSR1", "SIGTERM"], "") or None,
        "notice_to": notice.choice("to", ["leader", "all"], "") or None,
        "verdicts": signs(tolerance) or None,
        "compat": source.choice("compat", ["dlc"], "") or None,
        "notify": _notify(source) or None,
        "aimaster_unknown": list(aimaster.unknown) or None,
        "warnings": list(aimaster.warnings) or None,
    }
    said = {key: value for key, value in said.items() if value is not None}
    return json.dumps(said, sort_keys=True, separators=(",", ":")) if said else ""


def _notify(source: Section) -> list[dict[str, Any]]:
    """Webhooks that are told of this job, beside those that hear of all."""
    found = []
    for one in source.sections("notify"):
        check_keys(one, NOTIFY, NOTIFY)
        to = _required(one, "to", "Name a webhook: sublet notify ls.").removeprefix("webhook:")
        kinds = one.words("on")
        for kind in kinds:
            if kind not in TOLD:
                raise one.refused("on", f"{one.key('on')} names {kind}.", f"It may name {', '.join(TOLD)}.")
        found.append({"to": to, "on": list(kinds or TOLD)})
    return found


def _watch(hang: Section) -> Sequence[str]:
    words = hang.words("watch")
    for word in words:
        if word not in ("output", "step"):
            raise hang.refused("watch", f"{hang.key('watch')} names {word}.", "It may name output and step.")
    return words


def refused_at(draft_: Draft, error: Refused) -> Refused:
    """The same refusal with the line of the user's file where the field stands."""
    return Refused(
        what=error.what, why=error.why, hint=error.hint, code=error.code, field=error.field,
        where=draft_.place(error.field) if error.field else draft_.source.file,
    )  # fmt: skip
