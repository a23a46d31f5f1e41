"""`sublet whatif`: a change tried on the live books, or on a scenario at some time, and taken back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from sublet.cli.call import client
from sublet.cli.show import clock, emit, output_option, plural
from sublet.client.http import API
from sublet.domain.errors import Refused


@click.command()
@click.option("--submit", "files", multiple=True, type=click.Path(exists=True, dir_okay=False), help="A job file.")
@click.option("--quota", "quotas", multiple=True, metavar="NAME=GPU[:SPEC]", help="The quota's promise is changed.")
@click.option("--lose", multiple=True, metavar="NODE", help="The node is lost.")
@click.option("--drain", multiple=True, metavar="NODE", help="The node takes nobody new.")
@click.option("--resume", multiple=True, metavar="NODE", help="The node is back.")
@click.option("--stop", multiple=True, metavar="JOB", help="The job is stopped.")
@click.option(
    "--scenario", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Try it on this, not live."
)
@click.option("--at", default="", help="With --scenario: at this time, as 10m; else at its end.")
@output_option
@click.pass_context
def command(context: click.Context, /, scenario: Path | None, at: str, output: str, **changes: tuple[str, ...]) -> None:
    """What would happen if all of this happened now: who starts, who is evicted, what is lost. Nothing is changed.

    \b
        sublet whatif --submit job.yaml --quota team-a=4
        sublet whatif --scenario day.yaml --at 2h --lose n3
    """
    if not any(changes.values()):
        raise click.UsageError(
            "Say what is supposed to happen: --submit, --quota, --lose, --drain, --resume or --stop."
        )
    body = {
        "submit": [_job(file) for file in changes["files"]],
        "quotas": dict(map(_promise, changes["quotas"])),
        **{key: list(changes[key]) for key in ("lose", "drain", "resume", "stop")},
    }
    if scenario is not None:
        emit(output, _on_scenario(scenario, at, body), _shown)
        return
    emit(output, client(context).post(f"{API}/whatif", body), _shown)


def _job(file: str) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe", pure=True).load(Path(file))
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise Refused(what=f"{file} cannot be read.", why=f"{error}.", code="file") from error
    if not isinstance(found, Mapping):
        raise Refused(what=f"{file} is no job file.", why="It must be a mapping of keys.", code="malformed")
    return dict(found)


def _promise(text: str) -> tuple[str, dict[str, int]]:
    name, equals, promise = text.partition("=")
    gpus, _, spec = promise.partition(":")
    if not name or not equals or not gpus.isdigit():
        raise click.UsageError(f"--quota {text} is no NAME=GPU[:SPEC].")
    return name, {spec: int(gpus)}


def _on_scenario(path: Path, at: str, body: dict[str, Any]) -> dict[str, Any]:
    import dataclasses

    from sublet.sim import scenario as scenarios
    from sublet.sim.whatif import try_on

    limit_ms = scenarios.milliseconds(at, "--at") if at else None
    return dataclasses.asdict(try_on(scenarios.load(path), limit_ms, body))


def _shown(view: dict[str, Any]) -> str:
    lines = [
        f"{clock(event['time'])}  {event['type']:<11} {_about(event)}  {event['text']}" for event in view["events"]
    ]
    evicted, lost = len(view["evicted"]), view["lost_gpu_seconds"]
    total = f"{plural(len(view['starts']), 'job')} would start, {evicted} would leave, {lost} GPU-seconds lost at most."
    return "\n".join([*lines, total, "Nothing was changed."])


def _about(event: dict[str, Any]) -> str:
    return " ".join(part for part in (event["subject"], event["name"]) if part)
