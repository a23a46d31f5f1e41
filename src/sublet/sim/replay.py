"""A job stream under the production core and controller, as fast as it goes. The one rule kept: the scheduler sees of
the stream what it would see in life: submissions and endings when they happen, and nothing that lies ahead.

The world here is lean: a job runs for its duration, saves a checkpoint at each full interval of an attempt's running
time, starts again from the last one, pays for that with a fixed restart time, and leaves when its notice runs out.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heappop, heappush

from sublet.controller.loop import Controller
from sublet.core.core import Core
from sublet.domain.changes import Changes, Entry, Snapshot
from sublet.domain.effects import Effect, GiveNotice, RefuseJob, StartGang, StopInstances, UpgradeLease, WithdrawNotice
from sublet.domain.errors import Broken, Refused
from sublet.domain.events import Event, InstanceBegan, InstanceEnded, JobSubmitted, NodeJoined, QuotaSet, RulesSet
from sublet.domain.jobs import CheckpointHint, IdlePolicy, JobRecord, JobRequest
from sublet.domain.leases import LeaseKind
from sublet.domain.quotas import Quota, path_of
from sublet.domain.rules import Rules
from sublet.ports import Inbox
from sublet.sim.clock import SimulatedClock
from sublet.sim.metrics import Replayed, Run
from sublet.sim.traces import Cluster, TraceJob, sizes_of

DAY_MS = 86_400_000
PREEMPTED_EXIT = 143
PROGRESS_EVERY = 200  # arrivals


class Policy(StrEnum):
    ISOLATED = "isolated"  # every quota for itself
    NO_RECLAIM = "no-reclaim"  # lend, and wait for the borrower to end
    LEND = "lend"  # lend and reclaim


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`warm_up_ms`: what is submitted before is run and not counted; a stream that is no longer has no warm-up."""

    policy: Policy = Policy.LEND
    checkpoint_every_ms: int = 1_800_000
    restart_cost_ms: int = 60_000
    warm_up_ms: int = 7 * DAY_MS
    rules: Rules = field(default_factory=lambda: Rules(grace_ms=0))


class Forgetful:
    """A store that keeps nothing: what is measured is the scheduler, and no replay starts again from its middle."""

    def load(self) -> Snapshot:
        return Snapshot()

    def commit(self, entries: Sequence[Entry], changes: Changes, at_ms: int) -> None:
        return None

    def entries(self, *, after: int = 0, limit: int = 1000, job: str | None = None) -> list[Entry]:
        return []

    def jobs(self, *, states: Sequence[str] = (), limit: int = 1000, before: str | None = None) -> list[JobRecord]:
        return []

    def job(self, job_id: str) -> JobRecord | None:
        return None

    def find_jobs(self, text: str, *, limit: int = 2) -> list[JobRecord]:
        return []

    def close(self) -> None:
        return None


@dataclass(slots=True)
class Life:
    """What the world knows of one job: what is still to be done, and its present run."""

    left_ms: int
    instances: int
    has_run: bool = False
    run: Run | None = None
    attempt: int = 0
    leaves_ms: int | None = None  # under notice: when it leaves


class World:
    """The engine of a replay: runs what it is told to run and reports what happens, at the clock's time."""

    def __init__(self, jobs: Sequence[TraceJob], cluster: Cluster, settings: Settings, clock: SimulatedClock) -> None:
        self.clock, self.settings = clock, settings
        self.lives = [Life(job.duration_ms, len(sizes_of(job.gpus, cluster.node_gpus(job.spec)))) for job in jobs]
        self.runs: list[Run] = []
        self.due: list[tuple[int, int, int]] = []  # (ms, job, attempt): it may end or leave then
        self.inbox: Inbox | None = None
        self.events = 0

    def connect(self, inbox: Inbox) -> None:
        self.inbox = inbox

    def acknowledge(self, event: Event) -> None:
        return None

    def close(self) -> None:
        return None

    def put(self, event: Event) -> None:
        assert self.inbox is not None
        self.events += 1
        self.inbox.put(event)

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, StartGang):
            self.start(effect)
        elif isinstance(effect, UpgradeLease):
            run = self.lives[place_of(effect.job)].run
            if run is not None:
                run.guaranteed_ms = self.clock.now_ms()
        elif isinstance(effect, GiveNotice):
            self.notice(effect.job, effect.attempt, max(effect.deadline_ms, self.clock.now_ms()))
        elif isinstance(effect, StopInstances):
            self.notice(effect.job, effect.attempt, self.clock.now_ms())
        elif isinstance(effect, WithdrawNotice):
            self.lives[place_of(effect.job)].leaves_ms = None
        elif isinstance(effect, RefuseJob):
            raise Broken(what=f"The scheduler refused {effect.job}: {effect.reason.code.value}.", code="replay_refused")

    def start(self, effect: StartGang) -> None:
        place = place_of(effect.job)
        life, now, lease = self.lives[place], self.clock.now_ms(), effect.lease
        is_idle = lease.kind is LeaseKind.IDLE
        life.run = Run(job=place, start_ms=now, guaranteed_ms=None if is_idle else now, lenders=lease.lenders)
        self.runs.append(life.run)
        life.attempt, life.leaves_ms = effect.attempt, None
        heappush(self.due, (now + self.restart_ms(life) + life.left_ms, place, effect.attempt))
        for instance in effect.instances:
            self.put(InstanceBegan(at_ms=now, job=effect.job, attempt=effect.attempt, instance=instance))

    def restart_ms(self, life: Life) -> int:
        return self.settings.restart_cost_ms if life.has_run else 0

    def notice(self, job: str, attempt: int, leaves_ms: int) -> None:
        life = self.lives[place_of(job)]
        if life.run is not None and life.attempt == attempt:
            life.leaves_ms = leaves_ms
            if leaves_ms <= self.clock.now_ms():
                self.leave(place_of(job))
            else:
                heappush(self.due, (leaves_ms, place_of(job), attempt))

    def next_ms(self) -> int | None:
        return self.due[0][0] if self.due else None

    def run_until_now(self) -> None:
        """Everything that falls due at the clock's time happens."""
        while self.due and self.due[0][0] <= self.clock.now_ms():
            _, place, attempt = heappop(self.due)
            life = self.lives[place]
            if life.run is None or life.attempt != attempt:
                continue
            if self.clock.now_ms() - life.run.start_ms >= self.restart_ms(life) + life.left_ms:
                self.finish(place)
            elif life.leaves_ms is not None and life.leaves_ms <= self.clock.now_ms():
                self.leave(place)

    def finish(self, place: int) -> None:
        life = self.lives[place]
        assert life.run is not None
        life.run.lost_ms = self.restart_ms(life)
        life.left_ms = 0
        self.end(place, exit_code=0)

    def leave(self, place: int) -> None:
        """It goes with what its last checkpoint keeps."""
        life = self.lives[place]
        assert life.run is not None
        ran = self.clock.now_ms() - life.run.start_ms
        every = self.settings.checkpoint_every_ms
        kept = max(0, ran // every * every - self.restart_ms(life)) if every else 0
        life.left_ms -= kept
        life.run.lost_ms = ran - kept
        life.run.preempted = life.has_run = True
        self.end(place, exit_code=PREEMPTED_EXIT)

    def end(self, place: int, exit_code: int) -> None:
        life, now = self.lives[place], self.clock.now_ms()
        assert life.run is not None
        life.run.end_ms = now
        life.run = None
        for instance in range(life.instances):
            self.put(
                InstanceEnded(
                    at_ms=now,
                    job=job_id(place),
                    attempt=life.attempt,
                    instance=instance,
                    exit_code=exit_code,
                    finished=exit_code == 0,
                )
            )


def job_id(place: int) -> str:
    """Names that sort as the stream does."""
    return f"job_{place:08d}"


def place_of(name: str) -> int:
    return int(name[4:])


def replay(
    jobs: Sequence[TraceJob],
    cluster: Cluster,
    settings: Settings,
    on_progress: Callable[[int], None] = lambda arrived: None,
) -> Replayed:
    """Run all jobs to their end. `on_progress` is told how many more have arrived. `Refused`: one never fits."""
    started = time.perf_counter()
    nominal = promised(jobs, cluster)
    for job in jobs:
        refuse_unfit(job, nominal, cluster, settings)
    clock = SimulatedClock()
    world = World(jobs, cluster, settings, clock)
    controller = Controller(Forgetful(), world, clock)
    controller.recover()
    for event in setup(cluster, settings):
        world.put(event)
    drive(jobs, cluster, settings, world, controller, on_progress)
    return Replayed(
        jobs=jobs,
        runs=world.runs,
        nominal=nominal,
        capacity=cluster.gpus,
        warm_up_ms=settings.warm_up_ms if jobs[-1].submit_ms > settings.warm_up_ms else 0,
        events=world.events,
        wall_s=time.perf_counter() - started,
    )


def promised(jobs: Sequence[TraceJob], cluster: Cluster) -> dict[tuple[str, str], int]:
    """GPUs by quota and spec, for every spec that is asked for; a parent without a number promises its children's."""
    specs = sorted({job.spec for job in jobs})
    names = {name for quota in cluster.quotas for name in path_of(quota.name)}
    own = {quota.name: quota.nominal for quota in cluster.quotas}
    found: dict[tuple[str, str], int] = {}
    for name in sorted(names, key=lambda one: (-one.count("/"), one)):
        said = own.get(name)
        for spec in specs:
            below = sum(found[child, spec] for child in names if path_of(child)[1:2] == (name,))
            found[name, spec] = below if said is None else said.get(spec, 0)
    return found


def refuse_unfit(job: TraceJob, nominal: Mapping[tuple[str, str], int], cluster: Cluster, settings: Settings) -> None:
    """`Refused` for a job that would wait for ever."""
    if (job.quota, job.spec) not in nominal:
        why = f"The cluster has no quota {job.quota}."
    elif job.gpus > (exist := sum(node.gpu for node in cluster.nodes if node.spec == job.spec)):
        why = f"It asks for {job.gpus} GPUs of {job.spec}, and {exist} exist."
    elif may_borrow(job, settings) or job.gpus <= min(nominal[name, job.spec] for name in path_of(job.quota)):
        return
    else:
        why = f"It asks for {job.gpus} GPUs and may not borrow, and {job.quota} is promised fewer."
    raise Refused(
        what=f"Job {job.id} of the stream can never run.",
        why=why,
        hint="Give its quota or the cluster more GPUs, or leave it out of the stream.",
        code="stream_unfit",
    )


def may_borrow(job: TraceJob, settings: Settings) -> bool:
    return settings.policy is not Policy.ISOLATED and job.idle is not IdlePolicy.NEVER


def drive(
    jobs: Sequence[TraceJob],
    cluster: Cluster,
    settings: Settings,
    world: World,
    controller: Controller,
    on_progress: Callable[[int], None],
) -> None:
    """One turn an instant, and more while the world has something to say to what was decided in it."""
    arrived, told = 0, 0
    while True:
        deadline = controller.read(Core.next_deadline)
        coming = [jobs[arrived].submit_ms] if arrived < len(jobs) else []
        coming += [ms for ms in (world.next_ms(), deadline) if ms is not None]
        if not coming:
            return
        world.clock.move_to(min(coming))
        world.run_until_now()
        while arrived < len(jobs) and jobs[arrived].submit_ms <= world.clock.now_ms():
            world.put(
                JobSubmitted(at_ms=world.clock.now_ms(), request=request_of(arrived, jobs[arrived], cluster, settings))
            )
            arrived += 1
        seen = -1
        while seen != world.events:
            seen = world.events
            controller.turn()
        if arrived - told >= PROGRESS_EVERY or arrived == len(jobs):
            on_progress(arrived - told)
            told = arrived


def setup(cluster: Cluster, settings: Settings) -> Iterable[Event]:
    is_reclaiming = settings.policy is not Policy.NO_RECLAIM
    rules = replace(settings.rules, restart_cost_ms=settings.restart_cost_ms, reclaim=is_reclaiming)
    yield RulesSet(at_ms=0, rules=rules)
    for quota in cluster.quotas:
        yield QuotaSet(at_ms=0, quota=isolated(quota) if settings.policy is Policy.ISOLATED else quota)
    for node in cluster.nodes:
        yield NodeJoined(at_ms=0, node=node)


def isolated(quota: Quota) -> Quota:
    return replace(quota, lend_max=0, borrow_max=0)


def request_of(place: int, job: TraceJob, cluster: Cluster, settings: Settings) -> JobRequest:
    every = settings.checkpoint_every_ms or None
    return JobRequest(
        id=job_id(place),
        quota=job.quota,
        idle=IdlePolicy.NEVER if settings.policy is Policy.ISOLATED else job.idle,
        specs=(job.spec,),
        sizes=sizes_of(job.gpus, cluster.node_gpus(job.spec)),
        checkpoint=CheckpointHint(every_ms=every),
        grace_ms=settings.rules.grace_ms,
    )
