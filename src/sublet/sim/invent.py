"""Invents scenarios: a small cluster, a tree of quotas, jobs of all kinds, and what happens to them.

Rule: all chance comes from one seed, and every job fits some day: into the promise of its quota, or as an idle job into
what the cluster has once the others have ended. Whatever is taken away is given back when the trouble is over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from sublet.domain.jobs import CheckpointHint, FaultTolerance, IdlePolicy, JobRequest
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota, Scope, Strategy
from sublet.domain.rules import Rules
from sublet.engines.simulated import Behaviour
from sublet.sim.scenario import Scenario, ScenarioEvent, ScenarioJob

TROUBLE_MS = 1_200_000  # things happen until then
UNTIL_MS = 48 * 3_600_000
LARGEST_JOB = 8  # GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Instances of a job that stand on the cluster while it is empty."""

    sizes: tuple[int, ...]
    same_rack: bool = False
    nodes: tuple[str, ...] | None = None


def scenario_of(seed: int) -> Scenario:
    """The same seed, the same scenario."""
    chance = Random(f"scenario {seed}")
    nodes = tuple(
        Node(name=f"n{i}", spec="gpu", gpu=chance.choice([2, 4, 8]), rack=chance.choice(["a", "b"]))
        for i in range(chance.randint(2, 5))
    )
    quotas = tuple(_quotas(chance, sum(node.gpu for node in nodes)))
    jobs = {job.request.id: job for job in _jobs(chance, nodes, quotas)}
    events = [*_node_events(chance, nodes), *_quota_events(chance, quotas), *_job_events(chance, list(jobs))]
    return Scenario(
        id=f"seed-{seed}",
        rules=Rules(
            grace_ms=chance.choice([0, 5_000, 30_000]),
            cooldown_ms=chance.choice([0, 10_000, 60_000]),
            reclaim_delay_ms=chance.choice([0, 0, 20_000]),
        ),
        node_timeout_ms=60_000,
        nodes=nodes,
        quotas=quotas,
        jobs=jobs,
        events=tuple(sorted(events, key=lambda event: event.at_ms)),
        until_ms=UNTIL_MS,
    )


def _quotas(chance: Random, total: int) -> Iterator[Quota]:
    """Some of the capacity may be promised to nobody; one quota may be a tree of two."""
    count = chance.randint(2, 3)
    share = total // count if chance.random() < 0.7 else max(1, total // (count + 1))
    split = chance.randrange(count) if share >= 4 and chance.random() < 0.4 else None
    for i in range(count):
        if i == split:
            yield Quota(name=f"Q{i}", nominal={"gpu": share}, sub_quota_preemption=chance.random() < 0.3)
            yield _leaf(chance, f"Q{i}/a", share // 2)
            yield _leaf(chance, f"Q{i}/b", share - share // 2)
        else:
            yield _leaf(chance, f"Q{i}", share)


def _leaf(chance: Random, name: str, promised: int) -> Quota:
    return Quota(
        name=name,
        nominal={"gpu": promised},
        scope=Scope.GENERAL if chance.random() < 0.15 else Scope.LINGJUN,
        strategy=chance.choice(list(Strategy)),
        borrow_max=chance.choice([None, None, None, 2]),
        self_preemption=chance.random() < 0.2,
    )


def _jobs(chance: Random, nodes: tuple[Node, ...], quotas: tuple[Quota, ...]) -> Iterator[ScenarioJob]:
    leaves = [quota for quota in quotas if quota.strategy and (quota.nominal or {}).get("gpu")]
    for number in range(chance.randint(8, 20)):
        quota = chance.choice(leaves)
        shape = _shape(chance, nodes, min((quota.nominal or {})["gpu"], LARGEST_JOB))
        is_elastic = len(shape.sizes) > 1 and chance.random() < 0.3
        every, on_notice = chance.choice([None, 10_000, 60_000]), chance.choice([None, 1_000])
        request = JobRequest(
            id=f"j{number:02d}",
            name=f"j{number:02d}",
            quota=quota.name,
            idle=chance.choice(list(IdlePolicy)),
            priority=chance.randint(1, 9),
            sizes=shape.sizes,
            min_instances=chance.randint(1, len(shape.sizes)) if is_elastic else None,
            same_rack=shape.same_rack,
            nodes=shape.nodes,
            fault_tolerance=FaultTolerance(max_restarts=50, max_restarts_total=100, policy="on_failure", same_error=0),
            checkpoint=CheckpointHint(every_ms=every, on_notice_ms=on_notice),
            grace_ms=chance.choice([None, 10_000]),
        )
        behaviour = _behaviour(chance, every, on_notice)
        yield ScenarioJob(request=request, behaviour=behaviour, at_ms=chance.randint(0, TROUBLE_MS // 3))


def _shape(chance: Random, nodes: tuple[Node, ...], most: int) -> Shape:
    """Drawn until it fits into `most` GPUs and onto the empty cluster; a single GPU always does."""
    for _ in range(5):
        same_rack = chance.random() < 0.2
        group = [n for n in nodes if n.rack == nodes[0].rack] if same_rack else list(nodes)
        pinned = chance.random() < 0.1 and not same_rack
        group = chance.sample(group, chance.randint(1, len(group))) if pinned else group
        sizes = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
        if sum(sizes) <= most and _stands(sizes, {node.name: node.gpu for node in group}):
            named = tuple(sorted(node.name for node in group)) if pinned else None
            return Shape(sizes=sizes, same_rack=same_rack, nodes=named)
    return Shape(sizes=(1,))


def _stands(sizes: tuple[int, ...], free: Mapping[str, int]) -> bool:
    """Largest first, wherever it goes: all ways are tried."""
    if not sizes:
        return True
    first, rest = max(sizes), sorted(sizes)[:-1]
    return any(_stands(tuple(rest), {**free, name: gpus - first}) for name, gpus in free.items() if gpus >= first)


def _behaviour(chance: Random, every: int | None, on_notice: int | None) -> Behaviour:
    return Behaviour(
        work_ms=chance.choice([5_000, 60_000, 300_000, 600_000]) + chance.randint(0, 60_000),
        start_takes_ms=chance.choice([0, 2_000]),
        stop_takes_ms=chance.choice([0, 1_000, 1_000, 5_000]),
        leaves_after_ms=chance.choice([None, 0, 1_000, 8_000]),
        leaves_with=chance.choice([0, 1, 85, 143]),
        checkpoint_every_ms=every,
        checkpoint_on_notice_ms=on_notice,
    )


def _node_events(chance: Random, nodes: tuple[Node, ...]) -> Iterator[ScenarioEvent]:
    for node in nodes:
        for _ in range(chance.randint(0, 2)):
            kind = chance.choice(["node_down", "node_down", "drain"])
            at = chance.randint(0, TROUBLE_MS - 200_000)
            yield ScenarioEvent(at_ms=at, kind=kind, subject=node.name)
            yield ScenarioEvent(at_ms=at + chance.randint(1_000, 180_000), kind="node_up", subject=node.name)
        yield ScenarioEvent(at_ms=TROUBLE_MS, kind="node_up", subject=node.name)


def _quota_events(chance: Random, quotas: tuple[Quota, ...]) -> Iterator[ScenarioEvent]:
    """Leaves are cut, deleted, and made again as they were."""
    parents = {quota.name.rpartition("/")[0] for quota in quotas}
    for quota in quotas:
        if quota.name in parents or chance.random() < 0.6:
            continue
        promised = (quota.nominal or {})["gpu"]
        at = chance.randint(0, TROUBLE_MS - 200_000)
        cut = {"name": quota.name, "gpu": chance.randrange(promised)} if promised else {"name": quota.name}
        gone = {"name": quota.name, "gpu": 0, "delete": True}
        yield ScenarioEvent(at_ms=at, kind="quota", subject=gone if chance.random() < 0.2 else cut)
        whole = {
            "name": quota.name,
            "gpu": promised,
            "type": str(quota.scope),
            "strategy": str(quota.strategy),
            "borrow": True if quota.borrow_max is None else {"max": quota.borrow_max},
            "self_preemption": quota.self_preemption,
        }
        yield ScenarioEvent(at_ms=at + chance.randint(1_000, 180_000), kind="quota", subject=whole)


def _job_events(chance: Random, jobs: list[str]) -> Iterator[ScenarioEvent]:
    for job in jobs:
        at = chance.randint(0, TROUBLE_MS)
        match chance.randint(0, 8):
            case 0:
                yield ScenarioEvent(at_ms=at, kind="stop", subject=job, jobs=(job,))
            case 1:
                yield ScenarioEvent(at_ms=at, kind="finish", subject=job, jobs=(job,), exit_code=chance.choice([0, 1]))
            case 2:
                yield ScenarioEvent(at_ms=at, kind="lose", subject="released", jobs=(job,))
            case 3:
                yield ScenarioEvent(at_ms=at, kind="repeat", subject="released", jobs=(job,), after_ms=90_000)
            case _:
                pass
