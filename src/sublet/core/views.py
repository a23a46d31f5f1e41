"""What people look at: nodes and quotas as frozen values. Rule: in every row nominal = used + lent + free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sublet.core.capacity import lent_by_quota, unused
from sublet.core.state import QuotaBook, State
from sublet.domain.nodes import Node, NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """`leases`: GPUs by job on this node. `earmarked`: free or coming GPUs kept for claims."""

    node: Node
    state: NodeState
    free_gpu: int
    leases: Mapping[str, int]
    leaving_gpu: int = 0
    earmarked_gpu: int = 0
    suspected_until_ms: int = 0  # 0: it is not
    blamed: tuple[tuple[int, str, str], ...] = ()  # (ms, job, verdict): faults of machines that met jobs there lately


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """One quota and spec; GPUs. `used`: guaranteed. `lent`: under idle leases standing on its share, its own jobs'
    too. `borrowed`: idle leases of its own jobs, beyond its own unused promise."""

    quota: str
    spec: str
    tenant: str
    nominal: int
    used: int
    lent: int
    free: int
    borrowed: int
    idle_gpus: int
    waiting_jobs: int
    waiting_gpus: int


def node_views(state: State) -> list[NodeView]:
    views = []
    for name in sorted(state.nodes):
        book = state.nodes[name]
        leases = {}
        for job_id in sorted(book.jobs):
            job = state.jobs[job_id]
            leases[job_id] = sum(job.gpus[i] for i in job.live if job.nodes[i] == name)
        views.append(
            NodeView(
                node=book.node,
                state=book.state,
                free_gpu=book.free,
                leases=leases,
                leaving_gpu=book.leaving,
                earmarked_gpu=book.earmarked,
                suspected_until_ms=book.suspected_until_ms,
                blamed=book.blamed,
            )
        )
    return views


def quota_views(state: State) -> list[QuotaView]:
    waiting: dict[str, list[int]] = {}
    for job in state.jobs.values():
        if job.is_waiting:
            for level in job.quota.path:
                waiting.setdefault(level.name, []).append(job.request.gpus)
    lent = {key: lent_by_quota(state, pool) for key, pool in state.pools.items()}
    views = []
    for name in sorted(state.quotas):
        quota = state.quotas[name]
        for spec in sorted({*quota.nominal, *quota.used, *quota.idle}):
            by_quota = lent.get((quota.quota.tenant, spec), {})
            views.append(_quota_view(quota, spec, by_quota, waiting.get(name, [])))
    return views


def _quota_view(quota: QuotaBook, spec: str, by_quota: Mapping[str, int], waiting: list[int]) -> QuotaView:
    nominal, used, idle = quota.nominal.get(spec, 0), quota.used.get(spec, 0), quota.idle.get(spec, 0)
    inside = sum(gpus for name, gpus in by_quota.items() if name == quota.name or name.startswith(quota.name + "/"))
    lent = min(inside, max(0, nominal - used))
    return QuotaView(
        quota=quota.name,
        spec=spec,
        tenant=quota.quota.tenant,
        nominal=nominal,
        used=used,
        lent=lent,
        free=nominal - used - lent,
        borrowed=max(0, idle - max(0, unused(quota, spec))),
        idle_gpus=idle,
        waiting_jobs=len(waiting),
        waiting_gpus=sum(waiting),
    )
