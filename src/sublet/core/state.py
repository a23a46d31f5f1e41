"""The books: what is known now of jobs, nodes and quotas, with the sums that follow from it.

Rule: every sum changes through `count` and `count_claim` alone, so that it always equals what a recount would give.
`touch` a job before it is changed: that is how the store learns of it and how a trial is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from sublet.core.placement import NodeIndex
from sublet.domain.effects import Effect
from sublet.domain.jobs import AttemptEnd, IdlePolicy, JobRequest, JobState, NoticeGiven, Outcome, Restart
from sublet.domain.leases import LeaseKind
from sublet.domain.nodes import Node, NodeState
from sublet.domain.quotas import Quota, path_of
from sublet.domain.reasons import Reason
from sublet.domain.rules import Rules

Key = tuple[int, int, str]  # (-priority, first submit time, id): the one order of waiting, upgrade and re-grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Earmarked capacity of a job that waits for notices to run out; nobody else may take it."""

    spec: str
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    since_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why the attempt fails, as far as is known; all empty while nothing has."""

    exit_code: int | None = None
    verdict: str = ""
    evidence: str = ""
    error: str = ""
    phase: str = ""
    instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleSeen:
    """What is wrong with an attempt that runs."""

    trouble: str
    instance: int | None
    evidence: str
    since_ms: int


class NodeBook:
    """A node and what stands on it. `avail` is what it can give now, `potential` what it could if borrowers left."""

    __slots__ = (
        "avail", "blamed", "cpu_free", "earmarked", "free", "idle", "jobs", "leaving", "memory_free", "name", "node",
        "pool", "potential", "state", "suspected_until_ms", "was_drained",
    )  # fmt: skip

    def __init__(self, node: Node, pool: Pool) -> None:
        self.node, self.name, self.pool = node, node.name, pool
        self.state = NodeState.UP
        self.was_drained = False  # before it was lost
        self.blamed: tuple[tuple[int, str, str], ...] = ()  # (ms, job, verdict): faults of machines that met jobs here
        self.suspected_until_ms = 0
        self.free = node.gpu
        self.cpu_free, self.memory_free = node.cpu_milli, node.memory_bytes
        self.idle = 0  # under idle leases that nobody told to leave
        self.leaving = 0  # on its way out
        self.earmarked = 0  # for claims
        self.jobs: dict[str, int] = {}  # instances by job
        self.avail = self.potential = 0

    @property
    def is_up(self) -> bool:
        return self.state is NodeState.UP

    @property
    def future(self) -> int:
        """GPUs that nobody is promised once all that leave have left."""
        return self.free + self.leaving - self.earmarked

    def reindex(self) -> None:
        """After any of its numbers changed."""
        if self.state is NodeState.UP:
            short = self.earmarked - self.leaving
            avail = self.free - short if short > 0 else self.free
            potential = self.free + self.leaving - self.earmarked + self.idle
        else:
            avail = potential = 0
        if avail != self.avail:
            self.pool.move(self, self.avail, avail)
        if potential != self.potential:
            self.pool.moves += 1
            counts = self.pool.potentials
            if self.potential > 0:
                counts[self.potential] -= 1
            if potential > 0:
                counts[potential] = counts.get(potential, 0) + 1
            self.potential = potential
        unsettled = self.pool.unsettled
        if self.leaving or self.earmarked:
            unsettled[self.name] = self
        elif unsettled:
            unsettled.pop(self.name, None)


class Pool:
    """The nodes of one tenant and spec: what is interchangeable."""

    __slots__ = (
        "available", "blamed", "capacity", "guaranteed", "idle", "index", "lenders", "limited", "moves", "nodes",
        "not_up", "potentials", "promised", "revocable", "sizes", "spec", "steady", "suspects", "tenant", "unsettled",
        "varying", "version",
    )  # fmt: skip

    def __init__(self, tenant: str, spec: str) -> None:
        self.tenant, self.spec = tenant, spec
        self.nodes: dict[str, NodeBook] = {}
        self.not_up: dict[str, NodeBook] = {}
        self.blamed: dict[str, NodeBook] = {}
        self.suspects: dict[str, NodeBook] = {}  # blamed by several jobs
        self.sizes: dict[int, int] = {}  # GPUs of a node -> nodes, whatever their state
        self.index = NodeIndex()
        self.available = 0  # sum of avail
        self.potentials: dict[int, int] = {}  # potential -> nodes
        self.unsettled: dict[str, NodeBook] = {}  # with leaving or earmarked GPUs
        self.capacity = 0  # of nodes that are up, and what is held on draining ones
        self.guaranteed = self.idle = 0  # GPUs under leases
        self.revocable: dict[str, JobBook] = {}  # idle leases with an instance that nobody told to leave
        self.steady: dict[int, list[tuple[int, str]]] = {}  # of those, by GPUs held: (-begun or saved at, id), sorted
        self.varying: dict[str, JobBook] = {}  # the others: what they lose does not simply grow with time
        self.lenders: list[QuotaBook] = []  # the tenant's quotas
        self.limited: list[QuotaBook] = []  # those that limit what they lend
        self.promised = 0  # by the roots of the quota trees
        self.version = 0  # grows when something may have become possible
        self.moves = 0  # grows with every change

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)

    @property
    def most_at_once(self) -> int:
        """The most GPUs that a node could give if its borrowers left."""
        return max((level for level, count in self.potentials.items() if count), default=0)

    @property
    def total(self) -> int:
        return sum(gpus * count for gpus, count in self.sizes.items())

    @property
    def free(self) -> int:
        """GPUs that nobody holds on nodes that are up, earmarked or not."""
        return self.available + sum(n.free - n.avail for n in self.unsettled.values() if n.is_up and n.free > n.avail)

    def away(self) -> list[NodeBook]:
        """Nodes that take nobody now."""
        return list(self.not_up.values())

    def move(self, node: NodeBook, old: int, new: int) -> None:
        node.avail = new
        self.moves += 1
        self.available += (new if new > 0 else 0) - (old if old > 0 else 0)
        self.index.move(node, old, new)
        if new > old:
            self.version += 1


class QuotaBook:
    """A quota and its counters by spec, each summed over the jobs of the quota and of all below it."""

    __slots__ = (
        "asked_ms", "barrier", "borrow_max", "children", "claimed", "claims", "classes", "closed", "head", "head_ms",
        "idle", "idle_barrier", "implicit", "is_general", "leaving", "lend_max", "may_preempt", "moves", "name",
        "nominal", "own", "own_idle", "own_used", "path", "quota", "reserved", "root", "used", "version", "widens_ms",
    )  # fmt: skip

    def __init__(self, quota: Quota, *, implicit: bool = False) -> None:
        self.quota, self.name = quota, quota.name
        self.implicit = implicit  # made because a child or a job names it
        self.closed = False
        self.path: tuple[QuotaBook, ...] = (self,)
        self.root = self
        self.children: list[QuotaBook] = []
        self.nominal: dict[str, int] = {}
        self.own: dict[str, int] = {}  # nominal less that of the children
        self.is_general = False
        self.used: dict[str, int] = {}
        self.own_used: dict[str, int] = {}
        self.idle: dict[str, int] = {}
        self.own_idle: dict[str, int] = {}
        self.leaving: dict[str, int] = {}  # guaranteed and under notice
        self.claimed: dict[str, int] = {}
        self.reserved: dict[str, int] = {}  # within one pass, for entitled jobs that look for a claim
        self.lend_max = quota.lend_max
        self.borrow_max = quota.borrow_max
        self.classes: dict[object, JobClass] = {}
        self.claims: dict[str, JobBook] = {}
        self.barrier: Key | None = None  # jobs behind this key are blocked by a strict head
        self.idle_barrier: Key | None = None  # as far as lending goes
        self.head = ""  # balance: the first in the queue, and since when
        self.head_ms = 0
        self.widens_ms = -1
        self.asked_ms = -1  # when its own jobs last started or claimed
        self.may_preempt = False  # some quota on the path allows preemption inside
        self.version = 0  # of a root: grows when something in the tree may have become possible,
        self.moves = 0  # and with every change


class JobClass:
    """Jobs of one quota that are alike: what the first cannot have, the others cannot have either."""

    __slots__ = (
        "explained", "hopeless", "is_upgrade", "jobs", "key", "largest", "least", "no_loan", "no_plan", "pools",
        "quota", "told",
    )  # fmt: skip

    def __init__(self, quota: QuotaBook, key: object, first: JobBook, pools: tuple[Pool, ...], *,
                 is_upgrade: bool) -> None:  # fmt: skip
        self.quota, self.key, self.is_upgrade = quota, key, is_upgrade
        self.pools = pools  # of its specs, best first
        self.least = first.request.least_gpus
        self.largest = max(first.request.least_sizes)  # GPUs of its largest instance
        self.jobs: list[tuple[Key, JobBook]] = []
        self.hopeless: int | None = None  # the stamp at which the promise could do nothing for its first job,
        self.no_plan: int | None = None  # no reclaim could,
        self.no_loan: int | None = None  # and no lending
        self.explained: object = None  # see explain.py
        self.told: object = None


class JobBook:
    """A job that has not ended. All fields hold values that are replaced, never changed in place."""

    __slots__ = (
        "attempt", "began", "begun_ms", "broken", "checkpoint_ms", "checkpoint_step", "claim", "cls", "eligible_ms",
        "end_why", "ended_ms", "errors", "failures", "failures_since", "fault", "faults", "final", "gpus", "granted_ms",
        "history", "id", "key", "kind", "leaving", "lenders", "live", "lost_gpu_ms", "nodes", "notices", "outcomes",
        "preemptions", "quota", "ran_ms", "rank", "reasons", "request", "restarts", "retry_ms", "runs", "spec",
        "steady_at", "stop_asked", "stopping_ms", "streak", "submitted_ms", "troubles", "was_claimed", "was_withdrawn",
    )  # fmt: skip

    def __init__(self, request: JobRequest, quota: QuotaBook, submitted_ms: int) -> None:
        self.request, self.id, self.quota = request, request.id, quota
        self.submitted_ms = submitted_ms
        self.rank = request.priority  # the priority after ageing
        self.key: Key = (-request.priority, submitted_ms, request.id)
        self.attempt = 0
        self.final: JobState | None = None
        self.ended_ms: int | None = None
        self.end_why = ""
        self.reasons: tuple[Reason, ...] = ()
        self.claim: Claim | None = None
        self.cls: JobClass | None = None
        self.steady_at: tuple[int, int] | None = None  # where its pool lists it among the steady ones
        self.history: tuple[AttemptEnd, ...] = ()
        self.failures = self.failures_since = self.preemptions = self.streak = 0
        self.eligible_ms = self.retry_ms = 0
        self.ran_ms = 0  # in attempts that are over
        self.checkpoint_step: int | None = None
        self.stop_asked = False
        self.was_claimed = False  # it had a claim that a node or quota took; it comes first, still
        self.errors: tuple[str, ...] = ()  # of the failures since the last new checkpoint
        self.restarts: tuple[Restart, ...] = ()  # the newest
        self.faults: tuple[tuple[str, str], ...] = ()  # node and verdict of failures that were a machine's
        self.clear_lease()

    def clear_lease(self) -> None:
        """It holds nothing and nothing is known of an attempt."""
        self.kind: LeaseKind | None = None
        self.spec = ""
        self.nodes: tuple[str, ...] = ()
        self.gpus: tuple[int, ...] = ()
        self.granted_ms = 0
        self.lenders: dict[str, int] = {}
        self.live: tuple[int, ...] = ()
        self.leaving: tuple[int, ...] = ()  # live, and under notice or told to end
        self.began: tuple[int, ...] = ()
        self.begun_ms: int | None = None
        self.checkpoint_ms: int | None = None
        self.notices: tuple[NoticeGiven, ...] = ()
        self.was_withdrawn = False
        self.stopping_ms: int | None = None
        self.outcomes: tuple[Outcome, ...] = ()
        self.broken: Outcome | None = None
        self.fault = Cause()
        self.runs: dict[int, int] = {}  # of instances that started again alone
        self.troubles: tuple[TroubleSeen, ...] = ()
        self.lost_gpu_ms = 0

    @property
    def is_waiting(self) -> bool:
        return not self.live and self.final is None

    @property
    def held(self) -> int:
        """GPUs that its live instances hold."""
        gpus, live = self.gpus, self.live
        return gpus[0] if len(live) == 1 == len(gpus) else sum(gpus[i] for i in live)

    @property
    def idle_policy(self) -> IdlePolicy:
        return self.request.idle

    @property
    def is_leaving_whole(self) -> bool:
        return len(self.leaving) == len(self.live)


def add(counts: dict[str, int], spec: str, amount: int) -> None:
    counts[spec] = counts.get(spec, 0) + amount


class State:
    """All books together. Iteration order of its dicts is never used where it could show."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now_ms = 0
        self.jobs: dict[str, JobBook] = {}
        self.nodes: dict[str, NodeBook] = {}
        self.quotas: dict[str, QuotaBook] = {}
        self.pools: dict[tuple[str, str], Pool] = {}
        self.claims: dict[str, JobBook] = {}
        self.firm: dict[str, JobBook] = {}  # wait without a claim, since a node or quota took theirs: they come first
        self.noticed: dict[str, JobBook] = {}
        self.fresh: dict[str, JobBook] = {}  # wait, and have no reasons yet
        self.effects: list[Effect] = []
        self.deadlines: list[tuple[int, str, str, int]] = []  # (ms, kind, job or quota, attempt)
        self.epoch = 0  # grows when quotas, rules or time may have made something possible
        self.will_explain = False
        self.explained_ms = -1  # when all reasons were last gone through
        self.changes = 0  # grows with every decision: the scheduler goes on until it stands still
        self.may_be_cut = False  # a quota changed: some guaranteed leases may be more than is promised now
        self.is_unsettled = False  # some notice may no longer be needed
        self.dirty_jobs: dict[str, JobBook] = {}
        self.dirty_nodes: dict[str, None] = {}
        self.dirty_quotas: dict[str, None] = {}
        self.dirty_rules = False
        self.core_text = ""  # as it was last handed to the store
        self.memory: dict[tuple[str, str, bool], int] = {}  # see reserve.py: (quota, spec, whole nodes) -> thousandths
        self.memory_step = self.memory_since_ms = -1
        self.before: dict[str, tuple[JobBook, tuple[object, ...]] | None] | None = None
        self.undo: list[Callable[[], None]] = []

    # ---- changing

    def touch(self, job: JobBook) -> None:
        """The job is about to change."""
        self.dirty_jobs[job.id] = job
        if self.before is not None and job.id not in self.before:
            self.before[job.id] = (job, fields_of(job))

    def on_undo(self, restore: Callable[[], None]) -> None:
        """How to take back, after a trial, a change that is not of a job."""
        if self.before is not None:
            self.undo.append(restore)

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def remind(self, at_ms: int, kind: str, name: str, attempt: int = 0) -> None:
        heappush(self.deadlines, (at_ms, kind, name, attempt))

    def pop_first(self) -> None:
        heappop(self.deadlines)

    def pop_due(self) -> tuple[int, str, str, int] | None:
        if self.deadlines and self.deadlines[0][0] <= self.now_ms:
            return heappop(self.deadlines)
        return None

    def pool(self, tenant: str, spec: str) -> Pool:
        pool = self.pools.get((tenant, spec))
        if pool is None:
            pool = self.pools[tenant, spec] = Pool(tenant, spec)
            self.know_quotas(pool)
        return pool

    def know_quotas(self, pool: Pool) -> None:
        """After quotas changed, or for a new pool: who may lend there, and what is promised in all."""
        pool.lenders = [quota for quota in self.quotas.values() if quota.quota.tenant == pool.tenant]
        pool.limited = [quota for quota in pool.lenders if quota.lend_max is not None]
        pool.promised = sum(q.nominal.get(pool.spec, 0) for q in pool.lenders if len(q.path) == 1)

    def pool_of(self, job: JobBook, spec: str) -> Pool:
        return self.pool(job.quota.quota.tenant, spec)

    # ---- counting

    def count(self, job: JobBook, sign: int, instances: Iterable[int]) -> None:
        """Add (1) or take away (-1) all that these instances mean for nodes, pool and quotas."""
        if job.kind is None:
            return
        request, guaranteed, total, leaving = job.request, job.kind is LeaseKind.GUARANTEED, 0, 0
        for instance in instances:
            node, gpus = self.nodes[job.nodes[instance]], job.gpus[instance] * sign
            total += gpus
            node.free -= gpus
            node.cpu_free -= request.cpu_milli * sign
            node.memory_free -= request.memory_bytes * sign
            if instance in job.leaving:
                node.leaving += gpus
                leaving += gpus
            elif not guaranteed:
                node.idle += gpus
            if node.state is NodeState.DRAINING:
                node.pool.capacity += gpus
            here = node.jobs.get(job.id, 0) + sign
            if here:
                node.jobs[job.id] = here
            else:
                del node.jobs[job.id]
            node.reindex()
        self._count_quota(job, total, leaving if job.notices else 0)

    def _count_quota(self, job: JobBook, total: int, noticed: int) -> None:
        spec, quota, pool = job.spec, job.quota, self.pool_of(job, job.spec)
        pool.moves += 1
        quota.root.moves += 1
        if job.kind is LeaseKind.GUARANTEED:
            pool.guaranteed += total
            add(quota.own_used, spec, total)
            for level in quota.path:
                add(level.used, spec, total)
                if noticed:
                    add(level.leaving, spec, noticed)
            if total < 0 or noticed > 0:
                quota.root.version += 1
        else:
            pool.idle += total
            add(quota.own_idle, spec, total)
            for level in quota.path:
                add(level.idle, spec, total)

    def count_claim(self, job: JobBook, sign: int) -> None:
        """Add or take away what the job's claim keeps on nodes and in quotas."""
        claim = job.claim
        assert claim is not None
        for name, gpus in zip(claim.nodes, claim.gpus, strict=True):
            node = self.nodes[name]
            node.earmarked += sign * gpus
            node.reindex()
        total = sign * sum(claim.gpus)
        job.quota.root.moves += 1
        for level in job.quota.path:
            add(level.claimed, claim.spec, total)
        if sign > 0:
            self.claims[job.id] = job.quota.claims[job.id] = job
        else:
            del self.claims[job.id]
            del job.quota.claims[job.id]
            job.quota.root.version += 1

    # ---- nodes and quotas

    def set_node_state(self, node: NodeBook, state: NodeState, *, was_drained: bool = False) -> None:
        before, drained = node.state, node.was_drained
        self.on_undo(lambda: self.set_node_state(node, before, was_drained=drained))
        self.dirty_nodes[node.name] = None
        node.pool.capacity -= _usable(node)
        node.state, node.was_drained = state, was_drained
        node.pool.capacity += _usable(node)
        if state is NodeState.UP:
            node.pool.not_up.pop(node.name, None)
        else:
            node.pool.not_up[node.name] = node
        node.reindex()
        node.pool.version += 1
        node.pool.moves += 1

    def add_node(self, node: Node, state: NodeState = NodeState.UP) -> NodeBook:
        pool = self.pool(node.tenant, node.spec)
        book = NodeBook(node, pool)
        self.on_undo(lambda: self.drop_node(book))
        self.nodes[node.name] = pool.nodes[node.name] = book
        pool.sizes[node.gpu] = pool.sizes.get(node.gpu, 0) + 1
        pool.capacity += _usable(book)
        self.set_node_state(book, state)
        return book

    def put_back(self, book: NodeBook) -> None:
        """The opposite of `drop_node`; the node counts as lost."""
        pool = book.pool
        self.nodes[book.name] = pool.nodes[book.name] = book
        pool.not_up[book.name] = book
        if book.blamed:
            pool.blamed[book.name] = book
        if book.suspected_until_ms:
            pool.suspects[book.name] = book
        pool.sizes[book.node.gpu] = pool.sizes.get(book.node.gpu, 0) + 1

    def resize_node(self, book: NodeBook, node: Node) -> None:
        """The same machine with other numbers; what stands on it stays."""
        before, pool = book.node, book.pool
        self.on_undo(lambda: self.resize_node(book, before))
        pool.capacity -= _usable(book)
        pool.sizes[before.gpu] -= 1
        if not pool.sizes[before.gpu]:
            del pool.sizes[before.gpu]
        pool.sizes[node.gpu] = pool.sizes.get(node.gpu, 0) + 1
        book.free += node.gpu - before.gpu
        book.cpu_free += node.cpu_milli - before.cpu_milli
        book.memory_free += node.memory_bytes - before.memory_bytes
        book.node = node
        pool.capacity += _usable(book)
        pool.version += 1
        book.reindex()
        self.dirty_nodes[book.name] = None

    def drop_node(self, book: NodeBook) -> None:
        """It must be empty."""
        pool = book.pool
        self.set_node_state(book, NodeState.LOST)
        del self.nodes[book.name], pool.nodes[book.name]
        pool.not_up.pop(book.name, None)
        pool.blamed.pop(book.name, None)
        pool.suspects.pop(book.name, None)
        pool.unsettled.pop(book.name, None)
        pool.sizes[book.node.gpu] -= 1
        if not pool.sizes[book.node.gpu]:
            del pool.sizes[book.node.gpu]
        self.dirty_nodes[book.name] = None

    def add_quota(self, quota: Quota, *, implicit: bool = False) -> QuotaBook:
        """A new quota, with those above it that nobody has named."""
        book = self.quotas[quota.name] = QuotaBook(quota, implicit=implicit)
        self.on_undo(lambda: self.drop_quota(book))
        above = path_of(quota.name)[1:]
        if above:
            parent = self.quotas.get(above[0])
            if parent is None:
                parent = self.add_quota(Quota(name=above[0], nominal=None, tenant=quota.tenant), implicit=True)
            parent.children.append(book)
            book.path, book.root = (book, *parent.path), parent.root
        return book

    def drop_quota(self, book: QuotaBook) -> None:
        del self.quotas[book.name]
        if len(book.path) > 1:
            book.path[1].children.remove(book)

    # ---- trial

    @property
    def is_trial(self) -> bool:
        return self.before is not None

    def added(self, job: JobBook) -> None:
        """A job that was not there before."""
        self.jobs[job.id] = job
        self.dirty_jobs[job.id] = job
        if self.before is not None:
            self.before.setdefault(job.id, None)


def fields_of(job: JobBook) -> tuple[object, ...]:
    return tuple(getattr(job, name) for name in JobBook.__slots__)


def _usable(node: NodeBook) -> int:
    """What the node adds to its pool's capacity."""
    if node.state is NodeState.UP:
        return node.node.gpu
    return node.node.gpu - node.free if node.state is NodeState.DRAINING else 0
