"""What Prometheus scrapes: the present from the books, what has happened from the log.

One rule: labels are quotas, specs, reasons, causes and kinds, and never a job, a user or a node. Counters begin at zero
with the server; what the log held before is history and belongs into reports.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as Total
from prometheus_client.core import GaugeMetricFamily, Metric

from sublet.core.check import check
from sublet.core.core import Core
from sublet.domain.changes import Entry, attempts_ended
from sublet.domain.effects import (
    GiveNotice,
    ReleaseInstances,
    RequeueJob,
    RestartInstance,
    StartGang,
    UpgradeLease,
)
from sublet.domain.events import Diagnosed
from sublet.domain.faults import Trouble
from sublet.domain.jobs import JobRecord, Outcome
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import NodeState
from sublet.service.desk import Desk

BATCH = 1_000
CHECK_EVERY_MS = 60_000
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3_600, 14_400, 86_400)
TURN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
STATES = {NodeState.UP: "up", NodeState.DRAINING: "draining", NodeState.LOST: "down", NodeState.QUARANTINED: "down"}


@dataclass(slots=True, kw_only=True)
class Loan:
    """An attempt on idle resources: GPUs by lender, and until when they are counted. ms"""

    lenders: Mapping[str, int]
    borrower: str
    counted_ms: int


@dataclass(slots=True, kw_only=True)
class Metrics:
    """One a server. `scrape` reads what the log has got since the last time."""

    desk: Desk
    version: str
    lag_seconds: Callable[[], float]  # how long what has come in waits already
    registry: CollectorRegistry = field(default_factory=CollectorRegistry, init=False)
    totals: dict[str, Any] = field(default_factory=dict, init=False)
    present: list[Metric] = field(default_factory=list, init=False)
    _read_to: int = field(default=0, init=False)
    _loans: dict[tuple[str, int], Loan] = field(default_factory=dict, init=False)
    _noticed: dict[str, int] = field(default_factory=dict, init=False)  # claimants, and since when others leave
    _reasons: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)  # who leaves: for whom, and why
    _scraped_ms: int = field(default=0, init=False)
    _checked_ms: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.totals = _totals(self.registry)
        self.registry.register(Present(self))
        self._read_to = self.desk.feed.last_sequence
        self._scraped_ms = self.desk.clock.now_ms()
        for job in self.desk.books.read(lambda core: list(core.jobs())):
            if job.lease is not None and job.lease.kind is LeaseKind.IDLE:
                lenders = job.lease.lenders
                self._loans[job.request.id, job.attempt] = Loan(
                    lenders=lenders, borrower=job.request.quota, counted_ms=self._scraped_ms
                )

    def scrape(self) -> bytes:
        """The text that Prometheus reads."""
        while found := self.desk.feed.entries(after=self._read_to, limit=BATCH):
            for entry in found:
                self._count(entry)
            self._read_to = found[-1].sequence
        self.present = self.desk.books.read(self._now)
        return generate_latest(self.registry)

    def turned(self, seconds: float) -> None:
        """A turn of the controller took so long, from the first look at an event to what it changed being durable."""
        self.totals["turn_seconds"].observe(seconds)

    # ---- the log

    def _count(self, entry: Entry) -> None:
        event, at_ms = entry.event, entry.event.at_ms
        if isinstance(event, Diagnosed) and event.trouble != Trouble.SLOW and not event.is_over:
            self.totals["hangs"].labels(action="restart" if event.restart else "report").inc()
        for effect in entry.effects:
            match effect:
                case StartGang():
                    self._started(effect, at_ms)
                case GiveNotice():
                    self._noticed.setdefault(effect.claimant, at_ms)
                    self._reasons[effect.job] = effect.claimant, effect.reason
                case UpgradeLease():
                    self._end_loan((effect.job, effect.attempt), at_ms)
                case RequeueJob(cause=Outcome.FAILED):
                    self.totals["restarts"].labels(cause=self._cause(effect.job)).inc()
                case RestartInstance():
                    self.totals["restarts"].labels(cause=self._cause(effect.job)).inc()
                case _:
                    pass
        for effect in attempts_ended(entry):
            self._ended(effect, at_ms)

    def _started(self, effect: StartGang, at_ms: int) -> None:
        record, request = self.desk.feed.job(effect.job), effect.request
        ends = [end.ended_ms for end in record.history if end.attempt < effect.attempt] if record else []
        since_ms = max([record.submitted_ms if record else at_ms, *ends])
        idle = "not_in_quota" if effect.lease.kind is LeaseKind.IDLE else "in_quota"
        waited = self.totals["job_wait_seconds"].labels(quota=request.quota, idle=idle)
        waited.observe(max(0, at_ms - since_ms) / 1000)
        if effect.lease.kind is LeaseKind.IDLE:
            loan = Loan(lenders=effect.lease.lenders, borrower=request.quota, counted_ms=at_ms)
            self._loans[effect.job, effect.attempt] = loan
        told_ms = self._noticed.pop(effect.job, None)
        if told_ms is not None:
            self.totals["reclaim_seconds"].labels(quota=request.quota).observe((at_ms - told_ms) / 1000)

    def _ended(self, effect: ReleaseInstances, at_ms: int) -> None:
        record = self.desk.feed.job(effect.job)
        end = next((one for one in record.history if one.attempt == effect.attempt), None) if record else None
        if record is None or end is None:
            return
        self._end_loan((effect.job, effect.attempt), at_ms)
        claimant, reason = self._reasons.pop(effect.job, ("", ""))
        if end.outcome is Outcome.PREEMPTED and reason:
            claim = self.desk.feed.job(claimant)
            lender = claim.request.quota if claim else ""
            labels = {"lender": lender, "borrower": record.request.quota, "reason": reason}
            self.totals["preemptions"].labels(**labels).inc()
        if end.lost_gpu_ms:
            self.totals["lost_work_gpu_seconds"].labels(cause=end.outcome.value).inc(end.lost_gpu_ms / 1000)

    def _end_loan(self, key: tuple[str, int], at_ms: int) -> None:
        loan = self._loans.pop(key, None)
        if loan is not None:
            self._count_loan(loan, at_ms)

    def _count_loan(self, loan: Loan, at_ms: int) -> None:
        for lender, gpus in loan.lenders.items():
            lent = self.totals["lent_gpu_seconds"].labels(lender=lender, borrower=loan.borrower)
            lent.inc(gpus * max(0, at_ms - loan.counted_ms) / 1000)
        loan.counted_ms = max(loan.counted_ms, at_ms)

    def _cause(self, job: str) -> str:
        record = self.desk.feed.job(job)
        return record.restarts[-1].verdict if record and record.restarts else "unknown"

    # ---- with each scrape

    def _now(self, core: Core) -> list[Metric]:
        """The gauges, and what grows with time alone."""
        now_ms = self.desk.clock.now_ms()
        for loan in self._loans.values():
            self._count_loan(loan, now_ms)
        seconds = max(0, now_ms - self._scraped_ms) / 1000
        self._scraped_ms = now_ms
        views = core.nodes()
        free: Counter[str] = Counter()
        for view in views:
            if view.state is NodeState.UP:
                free[view.node.spec] += view.free_gpu
        for spec, gpus in free.items():
            self.totals["idle_gpu_seconds"].labels(spec=spec).inc(gpus * seconds)
        if now_ms - self._checked_ms >= CHECK_EVERY_MS:
            self._checked_ms = now_ms
            for _ in check(core.state, is_closed=False):
                self.totals["invariant_violations"].labels(name="books").inc()
        jobs = list(core.jobs())
        return [*_of_quotas(core), *_of_nodes(views), *_of_jobs(jobs, now_ms), *self._of_server()]

    def _of_server(self) -> Iterable[Metric]:
        yield _gauge("event_lag_seconds", "How long what has come in waits already", (), {(): self.lag_seconds()})
        yield _gauge("build_info", "Always 1", ("version",), {(self.version,): 1})


class Present:
    """What a registry asks at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._metrics.present


def _totals(registry: CollectorRegistry) -> dict[str, Any]:
    def total(name: str, text: str, *labels: str) -> Total:
        return Total(f"sublet_{name}", text, labels, registry=registry)

    def seconds(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"sublet_{name}", text, labels, registry=registry, buckets=buckets)

    return {
        "job_wait_seconds": seconds("job_wait_seconds", "From waiting to the grant", "quota", "idle"),
        "reclaim_seconds": seconds("reclaim_seconds", "From the notice to others to the claimant's grant", "quota"),
        "turn_seconds": seconds("turn_seconds", "A turn, until it is durable", buckets=TURN_SECONDS),
        "preemptions": total("preemptions", "Attempts ended for a claimant", "lender", "borrower", "reason"),
        "restarts": total("restarts", "After failures, of gangs and of single instances", "cause"),
        "lost_work_gpu_seconds": total("lost_work_gpu_seconds", "Work since the last checkpoint", "cause"),
        "lent_gpu_seconds": total("lent_gpu_seconds", "Under idle leases", "lender", "borrower"),
        "idle_gpu_seconds": total("idle_gpu_seconds", "Of nodes that are up, held by nobody", "spec"),
        "hangs": total("hangs", "Hangs and ends that did not come", "action"),
        "invariant_violations": total("invariant_violations", "Books that do not add up: our fault", "name"),
    }


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    found = GaugeMetricFamily(f"sublet_{name}", text, labels=labels)
    for key, value in sorted(values.items()):
        found.add_metric(list(key), value)
    return found


def _of_quotas(core: Core) -> Iterable[Metric]:
    views = core.quotas()
    columns: dict[str, tuple[str, Callable[[Any], int]]] = {
        "guaranteed": ("GPUs promised", lambda view: view.nominal),
        "own": ("GPUs of the promise under guaranteed leases", lambda view: view.used),
        "lent": ("GPUs of the promise under idle leases", lambda view: view.lent),
        "free": ("GPUs of the promise that nobody holds", lambda view: view.free),
        "borrowed": ("GPUs that its jobs hold beyond its promise", lambda view: view.borrowed),
    }
    for name, (text, value) in columns.items():
        values = {(view.quota, view.spec): float(value(view)) for view in views}
        yield _gauge(f"quota_{name}_gpus", text, ("quota", "spec"), values)


def _of_nodes(views: Iterable[Any]) -> Iterable[Metric]:
    gpus: Counter[tuple[str, str]] = Counter()
    agents: Counter[tuple[str]] = Counter()
    for view in views:
        gpus[view.node.spec, STATES[view.state]] += view.node.gpu
        agents[(STATES[view.state],)] += 1
    yield _gauge("gpus", "GPUs by the state of their node", ("spec", "state"), gpus)
    yield _gauge("agents", "Nodes, as the engine sees them", ("state",), agents)


def _of_jobs(jobs: Iterable[JobRecord], now_ms: int) -> Iterable[Metric]:
    states: Counter[tuple[str, str]] = Counter()
    waiting: Counter[tuple[str, str]] = Counter()
    ages: dict[tuple[str], float] = {}
    for job in jobs:
        quota = job.request.quota
        states[quota, job.state.value] += 1
        if job.reasons and not job.live:
            waiting[quota, job.reasons[0].code.value] += 1
        since_ms = job.checkpoint_ms or job.begun_ms
        if job.live and since_ms is not None:
            ages[(quota,)] = max(ages.get((quota,), 0.0), max(0, now_ms - since_ms) / 1000)
    yield _gauge("jobs", "Jobs that have not ended", ("quota", "state"), states)
    yield _gauge("jobs_waiting", "Jobs that wait, by the strongest reason", ("quota", "reason"), waiting)
    yield _gauge("checkpoint_age_seconds", "Of the running job that saved longest ago", ("quota",), ages)
