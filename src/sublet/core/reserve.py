"""GPUs that are not lent because their owners lately had to take such GPUs back. Rule: learned from the past alone, it
fades, it is never more than an owner could ask for now, and without a day of history it is nothing.

Whenever an entitled job takes lent capacity back, its quota is remembered with what the job needed: as single GPUs or,
where an instance needs more than half a node, as whole nodes, for eight free GPUs on eight nodes are of no use to it. A
share of what is remembered stays free, and halves about every 83 minutes. Owners may use it at once, only borrowers may
not. The whole nodes are the emptiest ones: what runs there may stay, but nobody borrows there anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sublet.core.capacity import unused
from sublet.core.state import JobBook, NodeBook, Pool, State

STEP_MS = 600_000  # it fades in steps of ten minutes
FADES_TO = 920  # thousandths that are left after a step
HISTORY_MS = 86_400_000  # nothing is kept before so much time has passed since the first reclaim
FORGOTTEN = 50  # thousandths below which a memory is dropped


def remember(state: State, job: JobBook, spec: str, gpus: Sequence[int]) -> None:
    """An owner's job takes capacity back, with so many GPUs for each instance."""
    fade(state)
    before, since = state.memory, state.memory_since_ms

    def restore() -> None:
        state.memory, state.memory_since_ms = before, since

    state.on_undo(restore)
    is_whole = 2 * max(gpus) > state.pool_of(job, spec).largest
    key = (job.quota.name, spec, is_whole)
    amount = 1000 * (len(gpus) if is_whole else sum(gpus))
    if not before:
        state.remind((state.now_ms // STEP_MS + 1) * STEP_MS, "fade", "")
    state.memory = {**before, key: before.get(key, 0) + amount}
    state.memory_since_ms = state.now_ms if since < 0 else since


def fade(state: State) -> bool:
    """Bring the memory up to now; True when a step has passed."""
    step = state.now_ms // STEP_MS
    passed, before, at = step - state.memory_step, state.memory, state.memory_step
    if not passed:
        return False

    def restore() -> None:
        state.memory, state.memory_step = before, at

    state.on_undo(restore)
    state.memory_step = step
    for _ in range(min(passed, 100)):
        state.memory = {
            key: left for key, amount in state.memory.items() if (left := amount * FADES_TO // 1000) >= FORGOTTEN
        }
    return True


def fall_due(state: State) -> None:
    """A step of fading: what was kept may be lent again."""
    if fade(state):
        state.epoch += 1
    if state.memory:
        state.remind((state.memory_step + 1) * STEP_MS, "fade", "")


def restore(state: State, *, since_ms: int, step: int, memory: Sequence[tuple[str, str, bool, int]]) -> None:
    """As it was stored."""
    state.memory_since_ms, state.memory_step = since_ms, step
    state.memory = {(name, spec, is_whole): amount for name, spec, is_whole, amount in memory}
    if state.memory:
        state.remind((step + 1) * STEP_MS, "fade", "")


def kept(state: State, pool: Pool) -> tuple[int, int]:
    """Single GPUs and whole nodes of the pool that are kept for owners now."""
    share = state.rules.reserve_percent
    if not state.memory or not share or state.now_ms - state.memory_since_ms < HISTORY_MS:
        return 0, 0
    gpus = nodes = 0
    for name in sorted({name for name, spec, _ in state.memory if spec == pool.spec}):
        quota = state.quotas.get(name)
        if quota is None or quota.quota.tenant != pool.tenant:
            continue
        could_ask = max(0, unused(quota, pool.spec)) * 1000
        whole = (state.memory.get((name, pool.spec, True), 0) * share // 100 + 500) // 1000
        whole = min(whole, could_ask // (1000 * max(1, pool.largest)))
        nodes += whole
        single = state.memory.get((name, pool.spec, False), 0) * share // 100
        gpus += min(single, could_ask - whole * 1000 * pool.largest)
    return (gpus + 500) // 1000, nodes


def owners(state: State, pool: Pool) -> tuple[str, ...]:
    """The quotas for which something is remembered, by name."""
    return tuple(sorted({name for name, spec, _ in state.memory if spec == pool.spec}))


def emptiest(pool: Pool, count: int) -> list[NodeBook]:
    """The nodes with most free GPUs, by name where they are alike."""
    found: list[NodeBook] = []
    for level in reversed(pool.index.levels):
        if len(found) >= count:
            break
        found += pool.index.some(level, count - len(found))
    return found


@contextmanager
def held_back(state: State, pool: Pool) -> Iterator[int]:
    """Inside, the nodes that are kept whole give nothing; yields the GPUs that may be lent on the others."""
    single, whole = kept(state, pool)
    aside = [(node, node.avail) for node in emptiest(pool, whole)] if whole else []
    version = pool.version
    for node, avail in aside:
        pool.move(node, avail, 0)
    try:
        yield pool.available - single
    finally:
        for node, avail in aside:
            pool.move(node, 0, avail)
        pool.version = version
