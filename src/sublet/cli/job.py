"""Commands about jobs: submit, ls, show, why, logs, stop; the daily five stand at the top level, too.

One rule: what a job is called, its id, the unique beginning of its id and its name are the same thing here.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from sublet.cli.call import client
from sublet.cli.show import NONE, clock, columns, count, emit, output_option, plural
from sublet.client.http import API, Client, segment
from sublet.domain.errors import Refused
from sublet.domain.times import exact, span

IDLE_RESOURCES = {"in_quota": "In Quota", "not_in_quota": "Not in Quota", None: NONE}
EXIT_NEVER = 1
HEAD = ("ID", "NAME", "USER", "QUOTA", "GPU", "STATE", "IDLE RESOURCES", "SINCE", "RESTARTS", "PREEMPTED", "NOTE")


class _Submit(click.Command):
    """Keeps what stands behind `--` as it is: the program and its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta["sublet.program"] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)


@click.command(cls=_Submit)
@click.argument("file", required=False, type=click.Path())
@click.option("--name", help="What the job is called.")
@click.option("--quota", help="The quota that promises the capacity.")
@click.option(
    "--idle", type=click.Choice(["never", "acceptable", "only"]), help="Whether it may run on idle resources."
)
@click.option("--priority", type=int, help="1 to 9, 9 first.")
@click.option("--spec", help="The kind of node.")
@click.option("--instances", type=int, help="How many; they start all or none.")
@click.option("--gpu", type=int, help="GPUs of each instance.")
@click.option("--cpu", help="Cores of each instance: 8, 0.5 or 500m.")
@click.option("--memory", help="Memory of each instance: 800Gi.")
@click.option("--workdir", help="Where the program runs; else the folder of FILE.")
@click.option(
    "--env", "environment", multiple=True, metavar="KEY=VALUE", help="A variable for the program; repeatable."
)
@click.option("--launcher", type=click.Choice(["none", "torchrun"]), help="What starts the program.")
@click.option("--max-time", help="Running time at most: 72h.")
@click.option("--grace", help="Time between the notice and the stop: 60s.")
@click.option("--max-restarts", type=int, help="Failures it survives since its last new checkpoint.")
@click.option("--checkpoint-dir", help="Where it keeps its checkpoints.")
@click.option("--idempotency-key", default="", help="The same key gives the same job again.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only show what it would do now; nothing is submitted.")
@click.option("-f", "--follow", is_flag=True, help="Show what it prints, until it has ended.")
@output_option
@click.pass_context
def submit(
    context: click.Context,
    /,
    file: str | None,
    idempotency_key: str,
    is_dry: bool,
    follow: bool,
    output: str,
    **flags: Any,
) -> None:
    """Submit a job: FILE (- reads the standard input), or a command after --.

    \b
        sublet submit job.yaml
        sublet submit --quota nlp --gpu 1 -- python train.py
    """
    server = client(context)
    program: list[str] = context.meta.get("sublet.program") or []
    said = _flags(flags)
    if (file is None) == (not program):
        raise click.UsageError("Give a FILE, or a command after --, and not both.")
    query: dict[str, Any] = {"base": str(Path.cwd())}
    body: Any
    if file is None:
        body = {**said, "command": program[0] if len(program) == 1 else program}
    else:
        body = _content(file)
        query |= {"file": "job.yaml" if file == "-" else file, "base": str(_base(file))}
        query |= {"set": json.dumps(said)} if said else {}
    if is_dry:
        emit(output, server.post(f"{API}/plans", body, query), _planned)
        return
    view = server.post(f"{API}/jobs", body, query, key=idempotency_key)
    emit(output, view, _submitted)
    if follow:
        _copy_log(server, view["id"], None, 0, follow=True)


def _flags(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, as keys of a job file."""
    plain = ("name", "quota", "idle", "priority", "spec", "instances", "gpu", "workdir", "launcher", "max_time")
    said = {key: flags[key] for key in plain if flags[key] is not None}
    if flags["workdir"] is not None:
        said["workdir"] = str(Path.cwd() / flags["workdir"])
    nested = {
        "resources": {"cpu": flags["cpu"], "memory": flags["memory"]},
        "checkpoint": {"dir": flags["checkpoint_dir"]},
        "fault_tolerance": {"grace": flags["grace"], "max_restarts": flags["max_restarts"]},
        "env": dict(map(_pair, flags["environment"])),
    }
    kept = {key: {name: value for name, value in inner.items() if value is not None} for key, inner in nested.items()}
    return said | {key: inner for key, inner in kept.items() if inner}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.UsageError(f"--env {text} is no KEY=VALUE.")
    return key, value


def _content(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except OSError as error:
        raise Refused(what=f"{file} cannot be read.", why=f"The system says: {error.strerror}.", code="file") from error
    except UnicodeDecodeError as error:
        raise Refused(what=f"{file} is no text in UTF-8.", why=f"Byte {error.start} is none.", code="file") from error


def _base(file: str) -> Path:
    return Path.cwd() if file == "-" else Path(file).resolve().parent


def _planned(view: dict[str, Any]) -> str:
    lines = [view["headline"], f"  would         {view['would']}"]
    lines += [f"                because {reason}" for reason in view["reasons"]]
    for one in view["victims"]:
        who = " ".join(part for part in (one["job"], one["name"], f"({one['user']})" if one["user"] else "") if part)
        cost = (
            f"{count(one['gpu'])} GPU, notice {one['notice_seconds']} s, {one['lost_gpu_seconds']} GPU-s lost at most"
        )
        lines.append(f"  would stop    {who}: {cost}")
    return "\n".join([*lines, f"  can be taken  {view['can_be_taken']}", f"  restarts      {view['restarts']}"])


def _submitted(view: dict[str, Any]) -> str:
    each = view["gpu"] // view["instances"]
    size = f"{view['instances']} x {each} GPU {' or '.join(view['specs'])}, idle: {view['idle']}"
    state = view["state"].capitalize()
    where = f", {IDLE_RESOURCES[view['idle_resources']]}" if view["idle_resources"] else ""
    note = f": {view['note']}" if view["note"] else ""
    follow = f"sublet why {view['id']}" if state == "Waiting" else f"sublet logs -f {view['id']}"
    return f"{view['id']}  {view['name']} submitted to {view['quota']}: {size}\n{state}{where}{note}\nNext: {follow}"


@click.command()
@click.option("-a", "--all-users", is_flag=True, help="Everyone's jobs; so it is anyway while there is no login.")
@click.option("--all-states", is_flag=True, help="Also those that have ended.")
@click.option("--quota", default="", help="Only of this quota.")
@click.option("--user", default="", help="Only of this user.")
@click.option("--state", multiple=True, help="Only in this state; repeatable.")
@click.option("--idle", type=click.Choice(["in", "not-in"]), help="Only In Quota, or only Not in Quota.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, help="How many at most.")
@output_option
@click.pass_context
def ls(
    context: click.Context,
    all_users: bool,
    all_states: bool,
    quota: str,
    user: str,
    state: Sequence[str],
    idle: str | None,
    limit: int,
    output: str,
) -> None:
    """List jobs, newest first."""
    query: dict[str, Any] = {
        "quota": quota,
        "user": "" if all_users else user,
        "state": [word.lower() for word in state],
    }
    query |= {"idle": {"in": "in_quota", "not-in": "not_in_quota"}.get(idle or "", ""), "all_states": all_states}
    answer = _pages(client(context), query, limit)
    emit(output, answer, _jobs_table)
    if output == "table" and not answer["items"]:
        click.echo("No jobs. Ended ones: sublet ls --all-states" if not all_states else "No jobs.", err=True)


def _pages(server: Client, query: dict[str, Any], limit: int) -> dict[str, Any]:
    answer: dict[str, Any] = server.get(f"{API}/jobs", {**query, "limit": min(limit, 1000)})
    while answer["next"] and len(answer["items"]) < limit:
        left = min(limit - len(answer["items"]), 1000)
        more = server.get(f"{API}/jobs", {**query, "limit": left, "cursor": answer["next"]})
        answer = {**answer, "items": answer["items"] + more["items"], "next": more["next"]}
    return answer


def _jobs_table(answer: dict[str, Any]) -> str:
    if not answer["items"]:
        return ""
    return columns(HEAD, [_row(view) for view in answer["items"]], right=("GPU", "SINCE"))


def _row(view: dict[str, Any]) -> list[str]:
    return [
        view["id"],
        view["name"],
        view["user"],
        view["quota"],
        count(view["gpu"]),
        view["state"].capitalize(),
        IDLE_RESOURCES[view["idle_resources"]],
        span(view["since_seconds"]),
        f"{view['restarts']}/{view['max_restarts']}",
        str(view["preemptions"]),
        view["note"],
    ]


@click.command()
@click.argument("job")
@output_option
@click.pass_context
def show(context: click.Context, job: str, output: str) -> None:
    """All that is known of a job."""
    detail = client(context).get(f"{API}/jobs/{segment(job)}")
    emit(output, detail if output != "name" else detail["job"], _detail)


def _detail(detail: dict[str, Any]) -> str:
    view = detail["job"]
    hidden = "hidden while on idle resources" if view["idle_resources"] == "not_in_quota" else NONE
    saved = NONE if detail["checkpoint_step"] is None else f"step {detail['checkpoint_step']:,}"
    limit = detail["max_time_seconds"]
    lines = [
        ("job", f"{view['id']}  {view['name']}"),
        ("user", view["user"]),
        ("quota", f"{view['quota']}, priority {view['priority']}, idle: {view['idle']}"),
        ("size", f"{view['instances']} x {detail['sizes'][0]} GPU {' or '.join(view['specs'])}"),
        ("state", f"{view['state'].capitalize()} since {clock(view['since'])}, {span(view['since_seconds'])}"),
        ("idle resources", IDLE_RESOURCES[view["idle_resources"]]),
        ("nodes", ", ".join(view["nodes"]) if view["nodes"] else hidden),
        ("submitted", clock(view["submitted"])),
        ("restarts", f"{view['restarts']} of {view['max_restarts']} since the last new checkpoint"),
        ("preempted", plural(view["preemptions"], "time")),
        ("checkpoint", saved if not detail["checkpoint_dir"] else f"{saved}, in {detail['checkpoint_dir']}"),
        ("grace", f"{detail['grace_seconds']}s between notice and stop"),
        ("max time", NONE if limit is None else span(limit)),
        ("command", " ".join(detail["command"])),
        ("workdir", detail["workdir"] or NONE),
        ("note", view["note"] or NONE),
    ]
    lines += [("keeps away from", ", ".join(detail["avoids"]))] if detail["avoids"] else []
    text = "\n".join(f"{name:<16}{value}".rstrip() for name, value in lines)
    parts = [text, "\n".join(f"warning: {one}" for one in detail["warnings"])]
    parts += [_attempts(detail["attempts"])] if detail["attempts"] else []
    parts += [_restarts(detail["restarts"])] if detail["restarts"] else []
    return "\n\n".join(part for part in parts if part)


def _restarts(restarts: Sequence[dict[str, Any]]) -> str:
    head = ("RESTART", "OF", "FAILED", "WENT ON AFTER", "PHASE", "CAUSE", "NODE", "EVIDENCE")
    rows = [
        [
            f"{item['number']} (attempt {item['attempt']})",
            "the job" if item["level"] == "job" else f"instance {item['instance']}",
            clock(item["failed"]),
            NONE if item["seconds"] is None else span(item["seconds"]),
            item["phase"] or NONE,
            item["cause"].replace("_", " "),
            (item["node"] or NONE) + (", avoided since" if item["avoided"] else ""),
            item["evidence"] or (NONE if item["exit_code"] is None else f"exit code {item['exit_code']}"),
        ]
        for item in restarts
    ]
    return columns(head, rows, right=("WENT ON AFTER",))


def _attempts(attempts: Sequence[dict[str, Any]]) -> str:
    head = ("ATTEMPT", "IDLE RESOURCES", "FROM", "FOR", "ENDED AS", "NOTICE USED", "LOST", "NOTE")
    outcomes = {"preempted": "Resource Preempted", "node_lost": "Node Lost", "": NONE}
    rows = [
        [
            str(item["attempt"]),
            IDLE_RESOURCES[item["idle_resources"]],
            clock(item["granted"]),
            span(item["seconds"]),
            outcomes.get(item["outcome"], item["outcome"].capitalize()),
            NONE if item["notice_used_ms"] is None else exact(item["notice_used_ms"]),
            f"{item['lost_gpu_seconds']:,} GPU s",
            " · ".join(part for part in (item["claimant"] and f"for {item['claimant']}", item["evidence"]) if part),
        ]
        for item in attempts
    ]
    return columns(head, rows, right=("ATTEMPT", "FOR", "NOTICE USED", "LOST"))


@click.command()
@click.argument("job")
@output_option
@click.pass_context
def why(context: click.Context, job: str, output: str) -> int:
    """Why a job waits, who is ahead, and what would change it. Exit code 1: it never runs as written."""
    answer = client(context).get(f"{API}/jobs/{segment(job)}/why")
    emit(output, answer, _why)
    return EXIT_NEVER if answer["kind"] == "never" else 0


def _why(answer: dict[str, Any]) -> str:
    lines = [answer["headline"]]
    width = max((len(reason["sentence"]) for reason in answer["reasons"]), default=0)
    for place, reason in enumerate(answer["reasons"], 1):
        lines.append(f" {place}  {reason['code'].replace('_', ' '):<18}  {reason['sentence']:<{width}}".rstrip())
    if answer["order"]:
        lines.append(f" {NONE}  {'order':<18}  {answer['order']}")
    if answer["would_change"]:
        lines += ["It starts when one of these happens", *(f"    {item}" for item in answer["would_change"])]
    if answer["mirror"]:
        lines.append(answer["mirror"])
    return "\n".join([*lines, f"As of event {answer['sequence']:,}.   -o json for the same as data"])


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--attempt", type=int, help="Only this one; otherwise all, one after the other.")
@click.option("--instance", type=int, default=0, show_default=True, help="Of which instance.")
@click.option("--search", "--grep", "search", metavar="TEXT", help="Only the lines that contain this.")
@click.pass_context
def logs(
    context: click.Context, job: str, follow: bool, attempt: int | None, instance: int, search: str | None
) -> None:
    """What a job printed."""
    server = client(context)
    if _copy_log(server, job, attempt, instance, follow, search):
        return
    is_over = server.get(f"{API}/jobs/{segment(job)}")["job"]["state"] in ("succeeded", "failed", "stopped")
    what = "line with that" if search else "output"
    said = f"It ended without any {what}." if is_over else f"There is no {what} yet."
    click.echo(f"{said} Why: sublet why {job}", err=True)


def _copy_log(
    server: Client, job: str, attempt: int | None, instance: int, follow: bool, search: str | None = None
) -> int:
    """Bytes copied."""
    query = {"attempt": attempt, "instance": instance, "follow": "true" if follow else None, "search": search}
    out, copied = sys.stdout.buffer, 0
    with server.stream(f"{API}/jobs/{segment(job)}/logs", query) as chunks:
        for chunk in chunks:
            copied += out.write(chunk)
            out.flush()
    return copied


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@output_option
@click.pass_context
def stop(context: click.Context, jobs: Sequence[str], output: str) -> None:
    """Stop jobs; each ends as stopped."""
    server = client(context)
    for job in jobs:
        view = server.post(f"{API}/jobs/{segment(job)}/stop")
        emit(output, view, lambda view: f"{view['id']}  {view['name']} is {view['state']}")


@click.command("set")
@click.argument("job")
@click.option("--priority", type=click.IntRange(1, 9), required=True, help="1 to 9, 9 first.")
@output_option
@click.pass_context
def change(context: click.Context, job: str, priority: int, output: str) -> None:
    """Give a job that waits another priority."""
    view = client(context).call("PATCH", f"{API}/jobs/{segment(job)}", body={"priority": priority})
    emit(output, view, lambda view: f"{view['id']}  {view['name']} has priority {view['priority']}")


@click.group()
def job() -> None:
    """Jobs: the same commands under one noun."""


for _command in (submit, ls, show, why, logs, stop, change):
    job.add_command(_command)
