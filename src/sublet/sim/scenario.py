"""Reads a scenario file: a cluster, its quotas, the jobs and what happens to them.

Rule: what no scenario can say is refused with its line, an unknown key with the nearest known one; a job's absurd
numbers are not: the scheduler has to refuse those itself.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sublet.domain.errors import Refused
from sublet.domain.jobs import CheckpointHint, FaultTolerance, IdlePolicy, JobRequest
from sublet.domain.nodes import DEFAULT_TENANT, Node
from sublet.domain.quotas import Quota, Scope, Strategy
from sublet.domain.rules import Rules
from sublet.engines.simulated import KILLED, Behaviour
from sublet.service.reading import ANY, Section, Shape, check_keys
from sublet.service.reading import read as read_yaml

Kept = TypeVar("Kept")

GIB = 1024**3
MOST = 1_000_000  # GPUs or instances; more is no honest number
MOST_OF_A_FAMILY = 100_000  # jobs or nodes that one entry stands for
LONGEST_FILE = 64 * 1024**2  # characters
UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, None: 1000}


def _keys(words: str, **inner: Shape) -> Shape:
    return {**dict.fromkeys(words.split()), **inner}


DEFAULTS = _keys("grace max_grace stop_takes start_takes reclaim_delay cooldown max_cooldown node_timeout kill_timeout")
NODE = _keys("name count gpu spec cpu memory rack tenant")
QUOTA = _keys(
    "name gpu type tenant strategy balance_timeout lend borrow self_preemption sub_quota_preemption",
    gpu=ANY,
    lend=_keys("max"),
    borrow=_keys("max"),
)
JOB = _keys(
    "id count quota instances sizes gpu specs idle priority at work min_instances same_rack nodes fault_tolerance"
    " max_restarts grace stop_takes",
    checkpoint=_keys("every on_notice"),
    on_notice=_keys("exit after"),
    running=_keys("lease on"),
)
KINDS: Mapping[str, Shape] = {  # what happens: the further keys
    "submit": {},
    "stop": {},
    "finish": _keys("exit instance"),
    "node_down": {},
    "node_up": {},
    "drain": {},
    "quota": {},
    "lose": _keys("job"),
    "repeat": _keys("job after"),
}
SCENARIO = _keys("id title source nodes quotas jobs events until", defaults=DEFAULTS, expect=ANY)
ALL: Shape = {**SCENARIO, "nodes": NODE, "quotas": QUOTA, "jobs": JOB, "events": _keys(" ".join(KINDS))}


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


def load(path: Path) -> Scenario:
    """Refused when the file cannot be read or says what no scenario can say."""
    try:
        text = path.read_text("utf-8")
    except OSError as problem:
        raise Refused(what=f"{path} cannot be read.", why=f"{problem.strerror}.", code="file") from None
    except UnicodeDecodeError:
        raise Refused(what=f"{path} is no UTF-8 text.", hint="Save it as UTF-8.", code="file") from None
    return read(read_yaml(text, path.name, max_characters=LONGEST_FILE, max_brackets=LONGEST_FILE))


def read(top: Section) -> Scenario:
    """A scenario from its document."""
    check_keys(top, SCENARIO, ALL)
    defaults = top.section("defaults")
    nodes, quotas, jobs = dict[str, Node](), dict[str, Quota](), dict[str, ScenarioJob]()
    families: dict[str, tuple[str, ...]] = {}
    for entry in top.sections("nodes"):
        for node in read_nodes(entry):
            _add(nodes, node.name, node, entry, "name")
    for entry in top.sections("quotas"):
        quota = read_quota(entry)
        _add(quotas, quota.name, quota, entry, "name")
    for entry in top.sections("jobs"):
        family = _jobs_of(entry, defaults)
        _add(families, _name(entry, "id"), tuple(job.request.id for job in family), entry, "id")
        for job in family:
            _check_start(entry, job, nodes)
            _add(jobs, job.request.id, job, entry, "id")
    families |= {job: (job,) for job in jobs if job not in families}
    events = [_read_event(entry, families, jobs, nodes) for entry in top.sections("events")]
    return Scenario(
        id=top.word("id"),
        rules=_read_rules(defaults),
        node_timeout_ms=time_ms(defaults, "node_timeout", "60s"),
        nodes=tuple(nodes.values()),
        quotas=tuple(quotas.values()),
        jobs=jobs,
        events=tuple(sorted(events, key=lambda event: event.at_ms)),
        until_ms=time_ms(top, "until", "1h"),
    )


def milliseconds(value: Any, where: str) -> int:
    """`30s`, `5m`, `2h` or plain seconds."""
    found = _span(value)
    if found is None:
        hint = "Write it as 30s, 5m, 2h or as plain seconds."
        raise Refused(what=f"{where} is {value!r}, which is no time.", hint=hint, code="malformed")
    return found


def time_ms(section: Section, key: str, default: str) -> int:
    found = maybe_ms(section, key, default)
    assert found is not None
    return found


def maybe_ms(section: Section, key: str, default: str | None = None, *, never: str = "") -> int | None:
    """As `milliseconds`; None for the word `never`, or where neither the key nor a default is there."""
    value = section.values.get(key, default)
    if value is None or (never and value == never):
        return None
    found = _span(value)
    if found is None:
        hint = f"Write it as 30s, 5m, 2h or as plain seconds{f', or {never}' if never else ''}."
        raise section.refused(key, f"{section.key(key)} is {value!r}, which is no time.", hint=hint)
    return found


def _span(value: Any) -> int | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return round(value * 1000)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?", value) if isinstance(value, str) else None
    return round(float(found[1]) * UNIT_MS[found[2]]) if found else None


# ---- the cluster


def _read_rules(defaults: Section) -> Rules:
    names = ("grace", "max_grace", "reclaim_delay", "cooldown", "max_cooldown", "kill_timeout")
    given: dict[str, Any] = {f"{name}_ms": time_ms(defaults, name, "") for name in names if defaults.has(name)}
    return Rules(**{"kill_timeout_ms": 30_000, **given})  # shorter than in production: no engine waits here


def read_nodes(entry: Section) -> Iterable[Node]:
    """With `count: 3`, a node `n` stands for n1, n2 and n3."""
    check_keys(entry, NODE, ALL)
    name, count = _name(entry, "name"), entry.whole("count", low=1, high=MOST_OF_A_FAMILY)
    for one in [name] if count is None else [f"{name}{number}" for number in range(1, count + 1)]:
        yield Node(
            name=one,
            spec=entry.word("spec") or "gpu",
            gpu=_number(entry, "gpu"),
            tenant=entry.word("tenant") or DEFAULT_TENANT,
            rack=entry.word("rack"),
            cpu_milli=_number(entry, "cpu", 1000) * 1000,
            memory_bytes=_number(entry, "memory", 1000) * GIB,
        )


def read_quota(entry: Section) -> Quota:
    if not entry.has("gpu"):
        raise entry.refused("gpu", f"{entry.key('gpu')} is missing.", "A quota promises something.", "Write gpu: 8.")
    return Quota(name=_name(entry, "name"), **_quota_fields(entry))


def quota_fields(change: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a quota that the mapping gives; the others are left out."""
    return _quota_fields(Section(values=change, path=("quota",)))


def _quota_fields(entry: Section) -> dict[str, Any]:
    check_keys(entry, {**QUOTA, "delete": None}, ALL)
    fields: dict[str, Any] = {}
    if entry.has("gpu"):
        fields["nominal"] = _promise(entry)
    if entry.has("tenant"):
        fields["tenant"] = entry.word("tenant")
    if entry.has("type"):
        fields["scope"] = Scope(entry.choice("type", list(Scope), ""))
    if entry.has("strategy"):
        fields["strategy"] = Strategy(entry.choice("strategy", list(Strategy), ""))
    if entry.has("balance_timeout"):
        fields["balance_timeout_ms"] = time_ms(entry, "balance_timeout", "")
    fields |= {f"{key}_max": _limit(entry, key) for key in ("lend", "borrow") if entry.has(key)}
    flags = ("self_preemption", "sub_quota_preemption")
    return fields | {key: entry.flag(key, False) for key in flags if entry.has(key)}


def _promise(entry: Section) -> dict[str, int]:
    if not isinstance(entry.values["gpu"], Mapping):
        return {"gpu": _number(entry, "gpu")}
    inside = entry.section("gpu")
    return {inside.checked_name(spec): _number(inside, spec) for spec in inside.values}


def _limit(entry: Section, key: str) -> int | None:
    """None: no limit."""
    value = entry.values[key]
    if isinstance(value, bool):
        return None if value else 0
    return _number(entry.section(key), "max")


# ---- jobs


def read_jobs(entry: Mapping[str, Any]) -> list[ScenarioJob]:
    """The jobs of one entry that stands in no file."""
    return _jobs_of(Section(values=entry, path=("job",)), Section(values={}))


def _jobs_of(entry: Section, defaults: Section) -> list[ScenarioJob]:
    check_keys(entry, JOB, ALL)
    name, count = _name(entry, "id"), entry.whole("count", low=1, high=MOST_OF_A_FAMILY)
    ids = [name] if count is None else [f"{name}-{number}" for number in range(1, count + 1)]
    return [_read_job(entry, job_id, defaults) for job_id in ids]


def _read_job(entry: Section, job_id: str, defaults: Section) -> ScenarioJob:
    checkpoint, least = entry.section("checkpoint"), entry.values.get("min_instances")
    every, on_notice = maybe_ms(checkpoint, "every"), maybe_ms(checkpoint, "on_notice")
    request = JobRequest(
        id=job_id,
        name=job_id,
        quota=_name(entry, "quota"),
        idle=IdlePolicy(entry.choice("idle", list(IdlePolicy), IdlePolicy.NEVER)),
        priority=entry.values.get("priority", 5),
        specs=_names(entry, "specs") or ("gpu",),
        sizes=_sizes(entry),
        min_instances=least if least is None or _is_honest(least) else 0,
        same_rack=entry.flag("same_rack", False),
        nodes=_names(entry, "nodes"),
        fault_tolerance=FaultTolerance(
            enabled=entry.flag("fault_tolerance", True),
            max_restarts=_number(entry, "max_restarts", 3),
            policy="on_failure",
            same_error=0,
        ),
        checkpoint=CheckpointHint(every_ms=every, on_notice_ms=on_notice),
        grace_ms=maybe_ms(entry, "grace"),
    )
    return ScenarioJob(
        request=request,
        behaviour=_read_behaviour(entry, defaults, every, on_notice),
        at_ms=maybe_ms(entry, "at", "0s", never="event"),
        running=_running(entry),
    )


def _read_behaviour(entry: Section, defaults: Section, every: int | None, on_notice: int | None) -> Behaviour:
    own = entry if entry.has("stop_takes") else defaults
    stop_takes = maybe_ms(own, "stop_takes", "1s", never="never" if own is entry else "")
    leaves = entry.section("on_notice")
    return Behaviour(
        work_ms=maybe_ms(entry, "work", "forever", never="forever"),
        start_takes_ms=time_ms(defaults, "start_takes", "0s"),
        stop_takes_ms=stop_takes,
        leaves_after_ms=maybe_ms(leaves, "after", never="never") if leaves.has("after") else stop_takes,
        leaves_with=_number(leaves, "exit", KILLED),
        checkpoint_every_ms=every,
        checkpoint_on_notice_ms=on_notice,
    )


def _running(entry: Section) -> tuple[str, tuple[str, ...]] | None:
    if not entry.has("running"):
        return None
    inside = entry.section("running")
    lease = inside.choice("lease", ("idle", "guaranteed"), "")
    nodes = _names(inside, "on")
    if not lease or not nodes:
        raise inside.refused("on", f"{entry.key('running')} needs lease and on.", hint="Write {lease: idle, on: [n1]}.")
    return lease, nodes


def _check_start(entry: Section, job: ScenarioJob, nodes: Mapping[str, Node]) -> None:
    """The nodes that a job names exist, and one stands for each instance that runs already."""
    for name in (*(job.request.nodes or ()), *(job.running[1] if job.running else ())):
        if name not in nodes:
            raise entry.refused("nodes" if entry.has("nodes") else "running", f"There is no node {name}.")
    if job.running and len(job.running[1]) != len(job.request.sizes):
        what = f"{entry.key('running')} names {len(job.running[1])} nodes for {len(job.request.sizes)} instances."
        raise entry.refused("running", what, hint="Name one node an instance.")


def _sizes(entry: Section) -> tuple[int, ...]:
    """GPUs of each instance; nothing at all where the numbers are no honest numbers: the scheduler refuses that."""
    if entry.has("sizes"):
        sizes = entry.values["sizes"]
        return tuple(sizes) if isinstance(sizes, list) and all(map(_is_honest, sizes)) else ()
    gpu, instances = entry.values.get("gpu", 1), entry.values.get("instances", 1)
    return (gpu,) * instances if _is_honest(gpu) and _is_honest(instances) else ()


def _is_honest(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MOST


# ---- what happens


def _read_event(
    entry: Section, families: Mapping[str, tuple[str, ...]], jobs: Mapping[str, ScenarioJob], nodes: Mapping[str, Node]
) -> ScenarioEvent:
    kinds = [key for key in entry.values if key in KINDS]
    if len(kinds) != 1:
        hint = f"Write one of {', '.join(KINDS)}."
        raise entry.refused("at", f"The event says {len(kinds)} things that happen.", "It must be one.", hint)
    kind = kinds[0]
    check_keys(entry, {"at": None, kind: None, **KINDS[kind]}, ALL)
    if kind == "quota":
        return _quota_event(entry)
    named = _name(entry, "job" if kind in ("lose", "repeat") else kind)
    if kind in ("node_down", "node_up", "drain"):
        if named not in nodes:
            raise entry.refused(kind, f"There is no node {named}.")
        return ScenarioEvent(at_ms=_at_ms(entry), kind=kind, subject=named)
    if named not in families:
        raise entry.refused(kind, f"There is no job {named}.")
    if kind == "submit" and any(jobs[job].at_ms is not None for job in families[named]):
        raise entry.refused(kind, f"The job {named} is submitted by itself.", hint="Give it `at: event`.")
    if kind in ("lose", "repeat"):
        entry.choice(kind, ("released",), "")
    return ScenarioEvent(
        at_ms=_at_ms(entry),
        kind=kind,
        subject=entry.values[kind],
        jobs=families[named],
        exit_code=_number(entry, "exit", 0),
        instance=entry.whole("instance", low=0, high=MOST),
        after_ms=time_ms(entry, "after", "0s"),
    )


def _quota_event(entry: Section) -> ScenarioEvent:
    change = entry.section("quota")
    _name(change, "name")
    _quota_fields(change)
    return ScenarioEvent(at_ms=_at_ms(entry), kind="quota", subject=dict(change.values))


def _at_ms(entry: Section) -> int:
    if not entry.has("at"):
        raise entry.refused("at", "The event has no time.", hint="Write at: 10s.")
    return time_ms(entry, "at", "")


# ---- words and numbers


def _add(found: dict[str, Kept], name: str, value: Kept, entry: Section, key: str) -> None:
    if found.setdefault(name, value) is not value:
        raise entry.refused(key, f"{name} is there twice.", hint=f"Give one of them another {key}.")


def _name(entry: Section, key: str) -> str:
    """A name that must be there; one that looks like a number is taken as it is written."""
    found = entry.word(key)
    if not found:
        raise entry.refused(key, f"{entry.key(key)} is missing.", hint=f"Write {key}: and a name.")
    return found


def _names(entry: Section, key: str) -> tuple[str, ...] | None:
    if not entry.has(key):
        return None
    values = entry.values[key]
    if not isinstance(values, list) or not all(isinstance(one, str | int) for one in values):
        raise entry.refused(key, f"{entry.key(key)} must be a list of names.", hint=f"Write {key}: [one, two].")
    return tuple(str(one) for one in values)


def _number(entry: Section, key: str, default: int | None = None) -> int:
    found = entry.whole(key, low=0, high=MOST, default=default)
    if found is None:
        raise entry.refused(key, f"{entry.key(key)} is missing.", hint="Write a whole number.")
    return found
