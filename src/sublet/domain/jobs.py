"""Jobs: what a user asks for, and what is remembered of it. The core reads the request and never the program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sublet.domain.leases import Lease
from sublet.domain.nodes import DEFAULT_TENANT
from sublet.domain.reasons import Reason


class IdlePolicy(StrEnum):
    NEVER = "never"
    ACCEPTABLE = "acceptable"  # own quota or idle, whichever is free first
    ONLY = "only"


class JobState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"  # holds a lease; its instances may still be starting or already leaving
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self not in (JobState.WAITING, JobState.RUNNING)


class Outcome(StrEnum):
    """How an instance, an attempt or a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHint:
    """What the job says of its checkpoints; None = it does not do that. Real `CheckpointSaved` events win over it."""

    every_ms: int | None = None
    on_notice_ms: int | None = None  # how long a save on notice takes


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTolerance:
    """`mode`: sync | async. `policy`: on_failure | exit_code | exit_code_and_error_msg | never.

    `same_error`: so often is final; 0 = never, None = nothing was said: twice, and under on_failure never.
    """

    enabled: bool = True
    mode: str = "sync"
    policy: str = "exit_code_and_error_msg"
    max_restarts: int = 3  # failures since the last new checkpoint
    max_restarts_total: int = 30
    same_error: int | None = None
    backoff_first_ms: int = 0
    backoff_max_ms: int = 300_000

    @property
    def most_same_errors(self) -> int:
        """0 = any number."""
        usual = 0 if self.policy == "on_failure" else 2
        return usual if self.same_error is None else self.same_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What runs in each instance. Only engines and supervisors read it. `settings`: supervisor settings, JSON text."""

    command: tuple[str, ...] = ()  # one element = a shell line for /bin/sh -c; several = argv
    workdir: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "none"  # none | torchrun | mpi
    checkpoint_dir: str = ""
    settings: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a user submits, checked and completed. `sizes` are the GPUs of each instance, in order of the instances."""

    id: str
    quota: str
    name: str = ""
    tenant: str = DEFAULT_TENANT
    workspace: str = "default"
    user: str = ""
    idle: IdlePolicy = IdlePolicy.NEVER
    priority: int = 5  # 1 to 9, 9 first
    specs: tuple[str, ...] = ("gpu",)  # acceptable kinds of node, best first
    sizes: tuple[int, ...] = (1,)
    cpu_milli: int = 0  # per instance
    memory_bytes: int = 0  # per instance
    min_instances: int | None = None  # present: elastic
    same_rack: bool = False
    nodes: tuple[str, ...] | None = None  # may only stand there
    avoid: tuple[str, ...] = ()  # nodes that it keeps away from: the same fault met it there twice
    fault_tolerance: FaultTolerance = FaultTolerance()
    checkpoint: CheckpointHint = CheckpointHint()
    grace_ms: int | None = None  # asked for; the cluster caps it; None = the cluster's default
    max_time_ms: int | None = None  # running time only
    labels: Mapping[str, str] = field(default_factory=dict)
    program: Program = Program()

    @property
    def gpus(self) -> int:
        return sum(self.sizes)

    @property
    def least_sizes(self) -> tuple[int, ...]:
        """The instances that it needs at the least: of an elastic job its smallest minimum."""
        least = self.min_instances
        return self.sizes if least is None or least >= len(self.sizes) else tuple(sorted(self.sizes)[:least])

    @property
    def least_gpus(self) -> int:
        return sum(self.least_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeGiven:
    """A notice that stands on some instances of the present attempt."""

    instances: tuple[int, ...]
    claimant: str
    reason: str
    given_ms: int
    deadline_ms: int
    lost_gpu_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """What is remembered of an attempt that is over."""

    attempt: int
    lease_kind: str
    nodes: tuple[str, ...]
    granted_ms: int
    ended_ms: int
    outcome: Outcome
    exit_code: int | None = None
    claimant: str = ""
    noticed_ms: int | None = None
    lost_gpu_ms: int = 0
    evidence: str = ""
    verdict: str = ""
    instance: int | None = None  # that the verdict is about


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One failure and the restart that followed: of the whole gang, or of `instance` alone when `is_single`.

    `phase`: start, step, save, exit or nothing. `began_ms`: when work went on, None = not yet. `avoided`: the node is
    one that the job keeps away from, from here on.
    """

    number: int
    attempt: int
    is_single: bool
    instance: int | None
    node: str
    phase: str
    failed_ms: int
    verdict: str
    evidence: str
    exit_code: int | None
    began_ms: int | None = None
    avoided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """All that is stored of a job: enough for the core to go on after a restart, and for people to ask."""

    request: JobRequest
    state: JobState
    submitted_ms: int
    attempt: int = 0  # the present or latest one
    lease: Lease | None = None
    live: tuple[int, ...] = ()  # instances that still hold their share
    begun_ms: int | None = None  # the present attempt's work began
    checkpoint_ms: int | None = None  # newest checkpoint of the present attempt
    checkpoint_step: int | None = None  # newest checkpoint of the job
    notices: tuple[NoticeGiven, ...] = ()
    stopping_since_ms: int | None = None
    stop_asked: bool = False
    failures: int = 0  # all
    failures_since_checkpoint: int = 0
    preemptions: int = 0
    eligible_ms: int = 0  # cooldown: may borrow again from here
    retry_ms: int = 0  # backoff: may start again from here
    reasons: tuple[Reason, ...] = ()
    history: tuple[AttemptEnd, ...] = ()
    restarts: tuple[Restart, ...] = ()  # the newest
    ended_ms: int | None = None
    end_why: str = ""  # why it was not started again
    core: str = ""  # what else the core must remember, JSON text; nobody else reads it
