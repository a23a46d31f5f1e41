"""Plans of one turn see each other. Rule: a victim that all the new claims together could do without is not asked.

Each plan is minimal when it is made; a later one may free so much that an earlier victim is no longer needed.
"""

from __future__ import annotations

from sublet.core import lifecycle, placement
from sublet.core.state import Claim, JobBook, State
from sublet.domain.effects import GiveNotice
from sublet.domain.jobs import NoticeGiven
from sublet.domain.leases import LeaseKind

MOST_CLAIMS = 32  # of one turn that are looked at together


def spare_victims(state: State, made: list[JobBook]) -> None:
    """Take back notices of this very turn, the dearest first, where the new claims find their room without them."""
    if not 2 <= len(made) <= MOST_CLAIMS:
        return
    ids = {job.id for job in made}
    fresh = [
        (victim, notice)
        for victim in state.noticed.values()
        for notice in victim.notices
        if notice.claimant in ids and notice.given_ms == state.now_ms and victim.kind is LeaseKind.IDLE
    ]
    for victim, notice in sorted(fresh, key=lambda one: (-one[1].lost_gpu_ms, one[0].id, one[1].instances)):
        told = _told(state, victim, notice)
        if told is not None:
            _spare(state, made, victim, notice, told)


def _told(state: State, victim: JobBook, notice: NoticeGiven) -> GiveNotice | None:
    """The command, as long as it has not left."""
    for effect in state.effects:
        if isinstance(effect, GiveNotice) and effect.job == victim.id and effect.instances == notice.instances:
            return effect
    return None


def _spare(state: State, made: list[JobBook], victim: JobBook, notice: NoticeGiven, told: GiveNotice) -> None:
    """Without the notice all claims are placed anew; if one finds no room, all stays as it was."""
    before = [(job, job.claim) for job in made]
    for job in made:
        state.count_claim(job, -1)
    lifecycle.set_notices(state, victim, tuple(one for one in victim.notices if one is not notice))
    placed = _place_all(state, made)
    if placed is None:
        lifecycle.set_notices(state, victim, (*victim.notices, notice))
    else:
        victim.lost_gpu_ms -= notice.lost_gpu_ms
        state.effects.remove(told)
    for job, claim in before:
        if placed is None:
            job.claim = claim
        state.count_claim(job, 1)


def _place_all(state: State, made: list[JobBook]) -> list[Claim] | None:
    """New claims on the same sizes, the largest first; they are written into the jobs as they are found."""
    room: dict[str, int] = {}
    found = []
    for job in sorted(made, key=lambda one: (-sum(one.claim.gpus) if one.claim else 0, one.key)):
        claim = job.claim
        assert claim is not None
        pool = state.pool_of(job, claim.spec)
        nodes = None
        for group in placement.groups(pool, job.request):
            slots = [placement.slot_of(n, job.request, n.future - room.get(n.name, 0)) for n in group]
            nodes = placement.fit(claim.gpus, [slot for slot in slots if slot])
            if nodes is not None:
                break
        if nodes is None:
            return None
        for name, gpus in zip(nodes, claim.gpus, strict=True):
            room[name] = room.get(name, 0) + gpus
        job.claim = Claim(spec=claim.spec, nodes=nodes, gpus=claim.gpus, since_ms=claim.since_ms)
        found.append(job.claim)
    return found
