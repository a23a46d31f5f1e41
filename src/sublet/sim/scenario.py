"""Reads a scenario file: a cluster, its quotas, the jobs and what happens to them.

Rule: an unknown key is an error with its place and the nearest known one; a job's absurd numbers are not: the
scheduler has to refuse those itself.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.jobs import CheckpointHint, FaultTolerance, IdlePolicy, JobRequest
from sublet.domain.nodes import DEFAULT_TENANT, Node
from sublet.domain.quotas import Quota, Scope, Strategy
from sublet.domain.rules import Rules
from sublet.engines.simulated import Behaviour

GIB = 1024**3
MOST = 1_000_000  # GPUs or instances; more is no honest number
UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, None: 1000}
KEYS = {
    "scenario": "id title source defaults nodes quotas jobs events until expect",
    "defaults": "grace max_grace stop_takes start_takes reclaim_delay cooldown max_cooldown node_timeout kill_timeout",
    "node": "name count gpu spec cpu memory rack tenant",
    "quota": "name gpu type tenant strategy balance_timeout lend borrow self_preemption sub_quota_preemption delete",
    "job": "id count quota instances sizes gpu specs idle priority at work min_instances same_rack nodes"
    " fault_tolerance max_restarts checkpoint grace on_notice stop_takes running",
    "checkpoint": "every on_notice",
    "on_notice": "exit after",
    "running": "lease on",
    "limit": "max",
    "event": "at submit stop finish exit instance node_down node_up drain quota lose repeat job after",
}
KINDS = ("submit", "stop", "finish", "node_down", "node_up", "drain", "quota", "lose", "repeat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioJob:
    """`at_ms`: when it is submitted; None: an event submits it. `running`: lease kind and nodes at the start."""

    request: JobRequest
    behaviour: Behaviour
    at_ms: int | None
    running: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioEvent:
    """`subject`: a job, a node, or for `quota` the mapping of what is changed; `jobs`: the ids it stands for."""

    at_ms: int
    kind: str
    subject: Any
    jobs: tuple[str, ...] = ()
    exit_code: int = 0
    instance: int | None = None
    after_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    id: str
    rules: Rules
    node_timeout_ms: int
    nodes: tuple[Node, ...]
    quotas: tuple[Quota, ...]
    jobs: Mapping[str, ScenarioJob]
    events: tuple[ScenarioEvent, ...]
    until_ms: int
    expect: Mapping[str, Any] = field(default_factory=dict)


def load(path: Path) -> Scenario:
    """Refused when the file cannot be read or says what no scenario can say."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        raw = YAML(typ="safe", pure=True).load(path)
    except OSError as problem:
        raise Refused(what=f"{path} cannot be read.", why=f"{problem.strerror}.", code="unreadable") from None
    except (YAMLError, UnicodeDecodeError) as problem:
        raise Refused(what=f"{path} is no YAML.", why=str(problem), code="unreadable") from None
    return read(raw)


def read(raw: Any) -> Scenario:
    """A scenario from its parsed YAML."""
    known(raw, "scenario", "the scenario")
    defaults = known(raw.get("defaults") or {}, "defaults", "defaults")
    jobs = [job for entry in raw.get("jobs") or [] for job in read_jobs(entry, defaults)]
    families: dict[str, tuple[str, ...]] = {}
    for entry in raw.get("jobs") or []:
        families[str(entry["id"])] = tuple(_ids(entry))
    events = [read_event(entry, families) for entry in raw.get("events") or []]
    return Scenario(
        id=str(raw.get("id", "")),
        rules=read_rules(defaults),
        node_timeout_ms=milliseconds(defaults.get("node_timeout", "60s"), "defaults.node_timeout"),
        nodes=tuple(node for entry in raw.get("nodes") or [] for node in read_nodes(entry)),
        quotas=tuple(read_quota(entry) for entry in raw.get("quotas") or []),
        jobs={job.request.id: job for job in jobs},
        events=tuple(sorted(events, key=lambda event: event.at_ms)),
        until_ms=milliseconds(raw.get("until", "1h"), "until"),
        expect=raw.get("expect") or {},
    )


def milliseconds(value: Any, where: str) -> int:
    """`30s`, `5m`, `2h` or plain seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return round(value * 1000)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", value) if isinstance(value, str) else None
    if not found:
        raise _wrong(f"{where} is {value!r}, which is no time.", "Write it as 30s, 5m, 2h or as plain seconds.")
    return round(float(found[1]) * UNIT_MS[found[2]])


def known(entry: Any, kind: str, where: str) -> Any:
    """The mapping itself, when all its keys are known."""
    if not isinstance(entry, Mapping):
        raise _wrong(f"{where} must be a mapping.", "")
    allowed = KEYS[kind].split()
    for key in entry:
        if key not in allowed:
            near = get_close_matches(str(key), allowed, 1)
            raise _wrong(f"{where} has the unknown key {key!r}.", f"Did you mean {near[0]!r}?" if near else "")
    return entry


def read_rules(defaults: Mapping[str, Any]) -> Rules:
    names = ("grace", "max_grace", "reclaim_delay", "cooldown", "max_cooldown", "kill_timeout")
    given: dict[str, Any] = {f"{n}_ms": milliseconds(defaults[n], f"defaults.{n}") for n in names if n in defaults}
    return Rules(**given)


def read_nodes(entry: Any) -> Iterable[Node]:
    """With `count: 3`, a node `n` stands for n1, n2 and n3."""
    known(entry, "node", f"node {entry.get('name', '')}" if isinstance(entry, Mapping) else "a node")
    name, count = str(entry["name"]), entry.get("count")
    for one in [name] if count is None else [f"{name}{number}" for number in range(1, count + 1)]:
        yield Node(
            name=one,
            spec=str(entry.get("spec", "gpu")),
            gpu=entry["gpu"],
            tenant=str(entry.get("tenant", DEFAULT_TENANT)),
            rack=str(entry.get("rack") or ""),
            cpu_milli=int(entry.get("cpu", 1000)) * 1000,
            memory_bytes=int(entry.get("memory", 1000)) * GIB,
        )


def read_quota(entry: Any) -> Quota:
    known(entry, "quota", f"quota {entry.get('name', '')}" if isinstance(entry, Mapping) else "a quota")
    return Quota(name=str(entry["name"]), **quota_fields(entry))


def quota_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a quota that the mapping gives; the others are left out."""
    fields: dict[str, Any] = {}
    if "gpu" in entry:
        gpu = entry["gpu"]
        fields["nominal"] = {str(s): int(n) for s, n in gpu.items()} if isinstance(gpu, Mapping) else {"gpu": int(gpu)}
    if "tenant" in entry:
        fields["tenant"] = str(entry["tenant"])
    if "type" in entry:
        fields["scope"] = _word(Scope, entry["type"], "type")
    if "strategy" in entry:
        fields["strategy"] = _word(Strategy, entry["strategy"], "strategy")
    if "balance_timeout" in entry:
        fields["balance_timeout_ms"] = milliseconds(entry["balance_timeout"], "balance_timeout")
    fields |= {f"{key}_max": _limit(entry[key], key) for key in ("lend", "borrow") if key in entry}
    fields |= {key: bool(entry[key]) for key in ("self_preemption", "sub_quota_preemption") if key in entry}
    return fields


def read_jobs(entry: Any, defaults: Mapping[str, Any]) -> Iterable[ScenarioJob]:
    where = f"job {entry.get('id', '')}" if isinstance(entry, Mapping) else "a job"
    known(entry, "job", where)
    return [_read_job(entry, job_id, defaults, where) for job_id in _ids(entry)]


def _ids(entry: Mapping[str, Any]) -> list[str]:
    if "count" not in entry:
        return [str(entry["id"])]
    return [f"{entry['id']}-{number}" for number in range(1, int(entry["count"]) + 1)]


def _read_job(entry: Mapping[str, Any], job_id: str, defaults: Mapping[str, Any], where: str) -> ScenarioJob:
    checkpoint = known(entry.get("checkpoint") or {}, "checkpoint", f"{where}.checkpoint")
    every, on_notice = (_maybe_ms(checkpoint.get(key), where) for key in ("every", "on_notice"))
    running, at = entry.get("running"), entry.get("at", "0s")
    request = JobRequest(
        id=job_id,
        name=job_id,
        quota=str(entry["quota"]),
        idle=_word(IdlePolicy, entry.get("idle", "never"), f"{where}.idle"),
        priority=entry.get("priority", 5),
        specs=tuple(entry.get("specs") or ("gpu",)),
        sizes=_sizes(entry),
        min_instances=entry.get("min_instances"),
        same_rack=bool(entry.get("same_rack", False)),
        nodes=tuple(entry["nodes"]) if entry.get("nodes") is not None else None,
        fault_tolerance=FaultTolerance(
            enabled=bool(entry.get("fault_tolerance", True)),
            max_restarts=entry.get("max_restarts", 3),
            policy="on_failure",
            same_error=0,
        ),
        checkpoint=CheckpointHint(every_ms=every, on_notice_ms=on_notice),
        grace_ms=_maybe_ms(entry.get("grace"), where),
    )
    return ScenarioJob(
        request=request,
        behaviour=_read_behaviour(entry, defaults, where, every, on_notice),
        at_ms=None if at == "event" else milliseconds(at, f"{where}.at"),
        running=None if running is None else _running(running, where),
    )


def _read_behaviour(
    entry: Mapping[str, Any], defaults: Mapping[str, Any], where: str, every: int | None, on_notice: int | None
) -> Behaviour:
    stop_takes = _maybe_ms(entry.get("stop_takes", defaults.get("stop_takes", "1s")), where, never="never")
    leaves = known(entry.get("on_notice") or {}, "on_notice", f"{where}.on_notice")
    return Behaviour(
        work_ms=_maybe_ms(entry.get("work", "forever"), where, never="forever"),
        start_takes_ms=milliseconds(defaults.get("start_takes", "0s"), "defaults.start_takes"),
        stop_takes_ms=stop_takes,
        leaves_after_ms=_maybe_ms(leaves["after"], where, never="never") if "after" in leaves else stop_takes,
        leaves_with=leaves.get("exit", 143),
        checkpoint_every_ms=every,
        checkpoint_on_notice_ms=on_notice,
    )


def read_event(entry: Any, families: Mapping[str, tuple[str, ...]]) -> ScenarioEvent:
    known(entry, "event", "an event")
    kinds = [key for key in entry if key in KINDS]
    if len(kinds) != 1:
        raise _wrong(f"The event {dict(entry)!r} says not exactly one thing that happens.", "")
    kind = kinds[0]
    subject = known(entry["quota"], "quota", "the quota of an event") if kind == "quota" else str(entry[kind])
    named = str(entry["job"]) if kind in ("lose", "repeat") else subject if isinstance(subject, str) else ""
    return ScenarioEvent(
        at_ms=milliseconds(entry["at"], "the time of an event"),
        kind=kind,
        subject=subject,
        jobs=families.get(named, (named,)),
        exit_code=int(entry.get("exit", 0)),
        instance=entry.get("instance"),
        after_ms=milliseconds(entry.get("after", 0), "after"),
    )


def _running(entry: Any, where: str) -> tuple[str, tuple[str, ...]]:
    known(entry, "running", f"{where}.running")
    return str(entry["lease"]), tuple(str(name) for name in entry["on"])


def _sizes(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """GPUs of each instance; nothing at all where the numbers are no honest numbers: the scheduler refuses that."""
    if "sizes" in entry:
        sizes = entry["sizes"]
        return tuple(sizes) if isinstance(sizes, list) and all(map(_is_honest, sizes)) else ()
    gpu, instances = entry.get("gpu", 1), entry.get("instances", 1)
    return (gpu,) * instances if _is_honest(gpu) and _is_honest(instances) else ()


def _is_honest(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MOST


def _limit(value: Any, key: str) -> int | None:
    if isinstance(value, bool):
        return None if value else 0
    return int(known(value, "limit", key)["max"])


def _maybe_ms(value: Any, where: str, never: str = "") -> int | None:
    return None if value is None or (never and value == never) else milliseconds(value, where)


def _word(kind: Any, value: Any, where: str) -> Any:
    allowed = [str(word) for word in kind]
    if value not in allowed:
        raise _wrong(f"{where} is {value!r}.", f"It is one of {', '.join(allowed)}.")
    return kind(value)


def _wrong(what: str, hint: str) -> Refused:
    return Refused(what=what, hint=hint, code="malformed")
