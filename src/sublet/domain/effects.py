"""What the core asks for: commands. They leave only after the event and the new state are durable, and may be repeated.

StartGang, RestartInstance, GiveNotice, WithdrawNotice, StopInstances, UpgradeLease and DowngradeLease go to the engine;
all of them, and the others, are the story that people read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sublet.domain.jobs import JobRequest, Outcome
from sublet.domain.leases import Lease
from sublet.domain.nodes import NodeState
from sublet.domain.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueJob:
    """Accepted into the queue."""

    job: str
    quota: str
    idle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseJob:
    """Not accepted: no change of nodes or quotas could make it possible."""

    job: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGang:
    """Capacity is held from now on. `instances` are the indexes to start; lease.nodes has one entry for each."""

    job: str
    attempt: int
    lease: Lease
    instances: tuple[int, ...]
    request: JobRequest
    grace_ms: int = 30_000  # from a notice to the stop


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartInstance:
    """One instance failed and starts again in its place, `run` 1, 2, … of this attempt, while the others go on."""

    job: str
    attempt: int
    instance: int
    run: int
    not_before_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveNotice:
    """Told to leave by the deadline, for a named claimant."""

    job: str
    attempt: int
    instances: tuple[int, ...]
    reason: str
    claimant: str
    deadline_ms: int
    lost_gpu_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawNotice:
    job: str
    attempt: int
    instances: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopInstances:
    """Told to end at once: SIGTERM to the leader, later SIGKILL to all that is left. `reason`: stopped, gang."""

    job: str
    attempt: int
    instances: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseInstances:
    """Capacity is free from now on."""

    job: str
    attempt: int
    instances: tuple[int, ...]
    outcome: Outcome
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeLease:
    job: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DowngradeLease:
    job: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowReasons:
    """Why the job waits, strongest first; written when the codes change."""

    job: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueJob:
    """Back in the queue, with its first submit time."""

    job: str
    submitted_ms: int
    cause: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Final. `outcome` is succeeded, failed or stopped."""

    job: str
    outcome: Outcome
    failures: int
    preemptions: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkNode:
    node: str
    state: NodeState
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectNode:
    """Faults of machines met several jobs there. `until_ms` 0: it is trusted again."""

    node: str
    until_ms: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkQuota:
    """Created, changed (its own numbers now) or deleted (nothing)."""

    quota: str
    nominal: Mapping[str, int] = field(default_factory=dict)


Effect = (
    QueueJob
    | RefuseJob
    | StartGang
    | RestartInstance
    | GiveNotice
    | WithdrawNotice
    | StopInstances
    | ReleaseInstances
    | UpgradeLease
    | DowngradeLease
    | ShowReasons
    | RequeueJob
    | EndJob
    | MarkNode
    | SuspectNode
    | MarkQuota
)
