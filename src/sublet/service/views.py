"""What people see of a job, a quota, a node, an event: the shape of the API's answers.

One rule: a job that is Not in Quota does not show its nodes, and another's program is never shown in a list.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from sublet.domain.jobs import JobRecord, JobState
from sublet.domain.leases import Lease, LeaseKind

Item = TypeVar("Item")

IDLE_RESOURCES = {LeaseKind.GUARANTEED: "in_quota", LeaseKind.IDLE: "not_in_quota"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """`state`: waiting, starting, running, leaving, stopping, succeeded, failed or stopped, since `since`."""

    id: str
    name: str
    user: str
    quota: str
    idle: str
    priority: int
    specs: tuple[str, ...]
    instances: int
    gpu: int
    state: str
    idle_resources: str | None
    submitted: str
    since: str
    since_seconds: int
    attempt: int
    nodes: tuple[str, ...] | None
    restarts: int
    max_restarts: int
    preemptions: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One attempt; `outcome` is empty while it lasts."""

    attempt: int
    idle_resources: str
    nodes: tuple[str, ...] | None
    granted: str
    ended: str | None
    seconds: int
    outcome: str
    exit_code: int | None
    claimant: str
    notice_used_ms: int | None
    lost_gpu_seconds: int
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartView:
    """A failure and the restart after it: of the whole gang (`level` job) or of one instance alone (`level` instance).

    `seconds`: from the failure until work went on, None = not yet. `avoided`: the job keeps away from `node` since.
    """

    number: int
    attempt: int
    level: str
    instance: int | None
    node: str | None
    phase: str
    failed: str
    seconds: int | None
    cause: str
    evidence: str
    exit_code: int | None
    avoided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    job: JobView
    sizes: tuple[int, ...]
    command: tuple[str, ...]
    workdir: str
    launcher: str
    labels: Mapping[str, str]
    grace_seconds: int
    max_time_seconds: int | None
    checkpoint_dir: str
    checkpoint: str | None
    checkpoint_step: int | None
    failures: int
    attempts: tuple[AttemptView, ...]
    restarts: tuple[RestartView, ...]  # the newest
    avoids: tuple[str, ...]  # nodes that it keeps away from
    warnings: tuple[str, ...]  # about what was written in the job file


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonView:
    code: str
    sentence: str
    numbers: Mapping[str, int]
    subjects: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyView:
    """`kind`: never, waiting, starting, running or ended. Of several reasons the first is the strongest."""

    job: str
    kind: str
    headline: str
    reasons: tuple[ReasonView, ...]
    order: str
    would_change: tuple[str, ...]
    mirror: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """GPUs of one spec; `guaranteed` = `own` + `lent` + `free`."""

    name: str
    spec: str
    owner: str
    scope: str
    guaranteed: int
    own: int
    lent: int
    free: int
    borrowed: int
    waiting_jobs: int
    waiting_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """A fault of machines that a job met there."""

    time: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """`jobs`: ids of those that stand there In Quota; `lent`: GPUs under idle leases, of whom is not said.

    `suspected_until`: faults of machines met several jobs there; others are preferred so long. `faults`: those that are
    held against it, the oldest first; `faulted_jobs`: how many jobs they met.
    """

    name: str
    spec: str
    state: str
    gpu: int
    own: int
    lent: int
    free: int
    jobs: tuple[str, ...]
    suspected_until: str | None = None
    faults: tuple[NodeFault, ...] = ()
    faulted_jobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    sequence: int
    time: str
    type: str
    job: str
    name: str
    user: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Item]):
    """`next`: what to pass as `cursor` for the items behind these; None = there are no more."""

    api: str = "sublet/v1"
    kind: str
    items: tuple[Item, ...]
    next: str | None = None


def time_of(at_ms: int) -> str:
    """RFC 3339 in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown_state(record: JobRecord) -> str:
    """The state in the words of people: a running job may still be starting, or be on its way out."""
    if record.state is not JobState.RUNNING:
        return record.state.value
    if record.stopping_since_ms is not None or record.stop_asked:
        return "stopping"
    if record.notices:
        return "leaving"
    return "starting" if record.begun_ms is None else "running"


def since_ms(record: JobRecord) -> int:
    """When the shown state began; of a waiting job: when it was first submitted."""
    known = {
        "waiting": record.submitted_ms,
        "starting": record.lease.granted_ms if record.lease else None,
        "running": record.begun_ms,
        "leaving": min((notice.given_ms for notice in record.notices), default=None),
        "stopping": record.stopping_since_ms,
    }
    found = known.get(shown_state(record), record.ended_ms)
    return record.submitted_ms if found is None else found


def shown_nodes(lease: Lease | None) -> tuple[str, ...] | None:
    """None while it is hidden or there is none."""
    return lease.nodes if lease and lease.kind is LeaseKind.GUARANTEED else None


def job_view(record: JobRecord, now_ms: int, note: str) -> JobView:
    request, tolerance = record.request, record.request.fault_tolerance
    since, budget = since_ms(record), tolerance.max_restarts if tolerance.enabled else 0
    return JobView(
        id=request.id,
        name=request.name,
        user=request.user,
        quota=request.quota,
        idle=request.idle.value,
        priority=request.priority,
        specs=request.specs,
        instances=len(request.sizes),
        gpu=request.gpus,
        state=shown_state(record),
        idle_resources=IDLE_RESOURCES[record.lease.kind] if record.lease else None,
        submitted=time_of(record.submitted_ms),
        since=time_of(since),
        since_seconds=max(0, now_ms - since) // 1000,
        attempt=record.attempt,
        nodes=shown_nodes(record.lease),
        restarts=min(record.failures_since_checkpoint, budget),  # the failure that ends the job restarts nothing
        max_restarts=budget,
        preemptions=record.preemptions,
        note=note,
    )


def restart_views(record: JobRecord) -> tuple[RestartView, ...]:
    """Where an attempt stood on idle resources, its nodes are not said."""
    kinds = {end.attempt: end.lease_kind for end in record.history}
    present = record.lease.kind if record.lease else ""
    return tuple(
        RestartView(
            number=one.number,
            attempt=one.attempt,
            level="instance" if one.is_single else "job",
            instance=one.instance,
            node=one.node if one.node and kinds.get(one.attempt, present) == LeaseKind.GUARANTEED else None,
            phase=one.phase,
            failed=time_of(one.failed_ms),
            seconds=None if one.began_ms is None else (one.began_ms - one.failed_ms) // 1000,
            cause=one.verdict,
            evidence=one.evidence,
            exit_code=one.exit_code,
            avoided=one.avoided,
        )
        for one in record.restarts
    )


def attempt_views(record: JobRecord, now_ms: int) -> tuple[AttemptView, ...]:
    """Those that are over, then the present one."""
    over = tuple(
        AttemptView(
            attempt=end.attempt,
            idle_resources=IDLE_RESOURCES[LeaseKind(end.lease_kind)],
            nodes=end.nodes if end.lease_kind == LeaseKind.GUARANTEED else None,
            granted=time_of(end.granted_ms),
            ended=time_of(end.ended_ms),
            seconds=(end.ended_ms - end.granted_ms) // 1000,
            outcome=end.outcome.value,
            exit_code=end.exit_code,
            claimant=end.claimant,
            notice_used_ms=None if end.noticed_ms is None else end.ended_ms - end.noticed_ms,
            lost_gpu_seconds=end.lost_gpu_ms // 1000,
            evidence=end.evidence,
        )
        for end in record.history
    )
    lease = record.lease
    if lease is None:
        return over
    present = AttemptView(
        attempt=record.attempt,
        idle_resources=IDLE_RESOURCES[lease.kind],
        nodes=shown_nodes(lease),
        granted=time_of(lease.granted_ms),
        ended=None,
        seconds=max(0, now_ms - lease.granted_ms) // 1000,
        outcome="",
        exit_code=None,
        claimant=", ".join(sorted({notice.claimant for notice in record.notices})),
        notice_used_ms=None,
        lost_gpu_seconds=0,
        evidence="",
    )
    return (*over, present)
