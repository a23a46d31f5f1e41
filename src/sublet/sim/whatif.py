"""A change tried on a scenario, at some time of it. Rule: the same trial as on the live books."""

from collections.abc import Mapping
from typing import Any

from sublet.domain.jobs import JobRecord
from sublet.service import preview
from sublet.sim.scenario import Scenario, read_jobs
from sublet.sim.world import World


def try_on(scenario: Scenario, at_ms: int | None, supposed: Mapping[str, Any]) -> preview.ChangesView:
    """`at_ms` None: when the scenario is over. Jobs are written as in a scenario. Refused for unknown names."""
    world = World(scenario)
    for _ in world.run(until_ms=at_ms):
        pass
    now_ms = world.clock.now_ms() if at_ms is None else at_ms
    quotas = {quota.name: quota for quota in world.store.load().quotas}

    def look(job: str) -> JobRecord | None:
        return world.store.job(job)

    return world.controller.read(
        lambda core: preview.changes(core, _supposed(scenario, supposed), quotas, look, now_ms)
    )


def _supposed(scenario: Scenario, given: Mapping[str, Any]) -> preview.Supposed:
    default = scenario.nodes[0].spec if scenario.nodes else "gpu"
    jobs = [job for entry in given["submit"] for job in read_jobs({"id": entry.get("name", "draft"), **entry})]
    return preview.Supposed(
        submits=tuple(job.request for job in jobs),
        quotas={
            name: {spec or default: gpus for spec, gpus in promise.items()} for name, promise in given["quotas"].items()
        },
        lost=tuple(given["lose"]),
        drained=tuple(given["drain"]),
        returned=tuple(given["resume"]),
        stopped=tuple(given["stop"]),
    )
