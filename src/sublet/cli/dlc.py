"""The commands of PAI's `dlc` tool, against this server: for people and runners that know it.

One rule: what a program reads stays as it is there: `submit` prints JSON and a table with the job's id, `get` one JSON
document. Options are spelt as `dlc` spells them.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from sublet.cli.call import client
from sublet.client.find import data_directory
from sublet.client.http import segment
from sublet.domain.errors import Refused

JOB_TYPES = {
    "pytorchjob": "PyTorchJob",
    "tfjob": "TFJob",
    "mpijob": "MPIJob",
    "xgboostjob": "XGBoostJob",
    "oneflowjob": "OneFlowJob",
    "elasticbatchjob": "ElasticBatchJob",
    "batchjob": "ElasticBatchJob",
}
OVERSOLD = ("ForbiddenQuotaOverSold", "AcceptQuotaOverSold", "ForceQuotaOverSold")
DLC, STUDIO = "2020-12-03", "2022-01-12"
KEY = "pai-key.json"  # in the data directory; access_key_id and access_key_secret


@click.group()
def dlc() -> None:
    """PAI's dlc tool: submit, create, get, stop, logs, with its options and its output."""


def _options(*options: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


config_option = click.option(
    "-c", "--config", "key_file", type=click.Path(dir_okay=False),
    help="A JSON file with access_key_id and access_key_secret; else that of the server on this machine.",
)  # fmt: skip
job_options = _options(
    click.option("--name", required=True, help="What the job is called."),
    click.option("--command", "user_command", required=True, help="What runs in each pod."),
    click.option("--resource_id", default="", help="The quota."),
    click.option("--workspace_id", default="", help="The workspace."),
    click.option("--workers", "--worker_count", "workers", type=int, default=1, show_default=True, help="Pods."),
    click.option("--worker_image", default="", help="Kept; programs run as the nodes are."),
    click.option("--worker_spec", default="", help="An instance type: see get specs."),
    click.option("--worker_gpu", default="", help="GPUs of each pod."),
    click.option("--worker_cpu", default="", help="Cores of each pod."),
    click.option("--worker_memory", default="", help="Memory of each pod: 118Gi."),
    click.option("--worker_shared_memory", default="", help="Kept."),
    click.option("--priority", type=int, default=1, show_default=True, help="1 to 9, 9 first."),
    click.option("--envs", default="", metavar="K=V,...", help="Variables for the program."),
    click.option("--tags", default="", metavar="K=V,...", help="Kept, and to be searched for."),
    click.option("--oversold_type", type=click.Choice(OVERSOLD), help="Whether it may run on idle resources."),
    click.option("--aimaster_enable", is_flag=True, help="Automatic fault tolerance."),
    click.option("--aimaster_args", default="", help="Its arguments, as AIMaster spells them."),
    click.option("--job_max_running_time_minutes", type=int, default=0, help="0: no limit."),
    click.option("--node_names", default="", help="Only on these nodes, with commas."),
    config_option,
)


@dlc.command()
@click.argument("kind", type=click.Choice(sorted(JOB_TYPES), case_sensitive=False), metavar="KIND")
@job_options
@click.pass_context
def submit(context: click.Context, /, kind: str, key_file: str | None, **said: Any) -> None:
    """Submit a job of KIND: pytorchjob, tfjob, mpijob, xgboostjob, oneflowjob, elasticbatchjob."""
    _created(_call(context, key_file, DLC, "POST", "/api/v1/jobs", _body(JOB_TYPES[kind.lower()], said)))


@dlc.command()
@click.argument("what", type=click.Choice(["job"]), metavar="job")
@click.option("--kind", default="PyTorchJob", show_default=True, help="The type of the job; BatchJob, too.")
@job_options
@click.pass_context
def create(context: click.Context, /, what: str, kind: str, key_file: str | None, **said: Any) -> None:
    """Submit a job: create job --kind PyTorchJob."""
    body = _body(JOB_TYPES.get(kind.lower(), kind), said)
    _created(_call(context, key_file, DLC, "POST", "/api/v1/jobs", body))


def _body(job_type: str, said: Mapping[str, Any]) -> dict[str, Any]:
    size = {"GPU": "gpu", "CPU": "cpu", "Memory": "memory", "SharedMemory": "shared_memory"}
    resources = {key: said[f"worker_{name}"] for key, name in size.items() if said[f"worker_{name}"]}
    worker: dict[str, Any] = {"Type": "Worker", "PodCount": said["workers"], "Image": said["worker_image"]}
    worker |= {"EcsSpec": said["worker_spec"]} if said["worker_spec"] else {"ResourceConfig": resources}
    if said["node_names"]:
        worker["AssignNodeSpec"] = {"EnableAssignNode": True, "NodeNames": said["node_names"]}
    settings = {
        "OversoldType": said["oversold_type"],
        "EnableErrorMonitoringInAIMaster": said["aimaster_enable"] or None,
        "ErrorMonitoringArgs": said["aimaster_args"] or None,
        "Tags": _pairs("tags", said["tags"]) or None,
    }
    return {
        "DisplayName": said["name"],
        "JobType": job_type,
        "JobSpecs": [worker],
        "UserCommand": said["user_command"],
        "ResourceId": said["resource_id"],
        "WorkspaceId": said["workspace_id"],
        "Priority": said["priority"],
        "Envs": _pairs("envs", said["envs"]),
        "JobMaxRunningTimeMinutes": said["job_max_running_time_minutes"],
        "Settings": {key: value for key, value in settings.items() if value is not None},
    }


def _pairs(name: str, text: str) -> dict[str, str]:
    found = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--{name}: {part} is no K=V.")
        found[key] = value
    return found


def _created(answer: Mapping[str, Any]) -> None:
    """JSON, then the table in which runners look for the id."""
    shown = {key: str(answer.get(key, "")) for key in ("JobId", "RequestId")}
    _print(shown)
    line = "+".join(["", *("-" * (len(value) + 2) for value in shown.values()), ""])
    rows = [f"| {' | '.join(key.center(len(value)) for key, value in shown.items())} |"]
    click.echo("\n".join([line, *rows, line, f"| {' | '.join(shown.values())} |", line]))


@dlc.command()
@click.argument("what", type=click.Choice(["job", "pod", "quota", "specs"]), metavar="job|pod|quota|specs")
@click.argument("name", required=False, metavar="[ID]")
@click.argument("pod", required=False, metavar="[POD]")
@click.option("--workspace_id", default="", help="Only of this workspace.")
@click.option("--display_name", default="", help="Only those whose name contains this.")
@click.option("--status", default="", help="Only in this status.")
@click.option("--resource_id", default="", help="Only of this quota.")
@click.option("--job_ids", default="", help="Only these, with commas.")
@click.option("--page_num", type=int, default=1, show_default=True, help="Which page.")
@click.option("--page_size", type=int, default=10, show_default=True, help="How many on a page.")
@click.option("--events", is_flag=True, help="Of one job: what happened, instead.")
@config_option
@click.pass_context
def get(
    context: click.Context, /, what: str, name: str | None, pod: str | None, key_file: str | None, events: bool,
    **said: Any,
) -> None:  # fmt: skip
    """One job, the pods of a job, one quota; without an ID: all. One JSON document."""
    query = {
        "WorkspaceId": said["workspace_id"], "DisplayName": said["display_name"], "Status": said["status"],
        "ResourceId": said["resource_id"], "JobIds": said["job_ids"],
    }  # fmt: skip
    query = {key: value for key, value in query.items() if value}
    query |= {"PageNumber": str(said["page_num"]), "PageSize": str(said["page_size"])}
    path = {"job": "jobs", "pod": "jobs", "quota": "quotas", "specs": "ecsspecs"}[what]
    if what == "pod" and name is None:
        raise click.UsageError("Name the job: get pod JOB [POD].")
    if name is not None:
        path, query = f"{path}/{segment(name)}{'/events' if events else ''}", {}
    answer = _call(context, key_file, STUDIO if what == "quota" else DLC, "GET", f"/api/v1/{path}", query=query)
    _print(_pod(answer, pod) if what == "pod" else answer)


def _pod(answer: Mapping[str, Any], pod: str | None) -> Any:
    pods = answer["Pods"]
    if pod is None:
        return {"JobId": answer["JobId"], "Pods": pods}
    found = next((one for one in pods if one["PodId"] == pod), None)
    if found is None:
        raise Refused(what=f"{answer['JobId']} has no pod {pod}.", hint="See dlc get pod JOB.", code="pod_unknown")
    return found


@dlc.command()
@click.argument("what", type=click.Choice(["job"]), metavar="job")
@click.argument("name", metavar="ID")
@click.option("--force", is_flag=True, help="Do not ask.")
@click.option("--quiet", is_flag=True, help="Say nothing.")
@config_option
@click.pass_context
def stop(context: click.Context, /, what: str, name: str, force: bool, quiet: bool, key_file: str | None) -> None:
    """Stop a job; without --force it asks before."""
    if not force:
        click.confirm(f"Stop the job {name}?", abort=True, err=True)
    answer = _call(context, key_file, DLC, "POST", f"/api/v1/jobs/{segment(name)}/stop")
    if not quiet:
        _print(answer)


@dlc.command()
@click.argument("name", metavar="JOB")
@click.argument("pod", metavar="POD")
@click.option("--max_events_num", type=int, default=2000, show_default=True, help="The last lines, so many.")
@config_option
@click.pass_context
def logs(context: click.Context, /, name: str, pod: str, max_events_num: int, key_file: str | None) -> None:
    """What a pod printed in its latest attempt."""
    path = f"/api/v1/jobs/{segment(name)}/pods/{segment(pod)}/logs"
    lines = _call(context, key_file, DLC, "GET", path, query={"MaxLines": str(max_events_num)})["Logs"]
    click.echo("\n".join(lines) if lines else "[WARN] No logs found for the pod")


def _print(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _call(
    context: click.Context,
    key_file: str | None,
    version: str,
    method: str,
    path: str,
    body: Any = None,
    query: Mapping[str, str] | None = None,
) -> Any:
    """The JSON of the answer to a signed request."""
    from datetime import UTC, datetime
    from urllib.parse import urlsplit

    from sublet.faces.pai.signing import Signed, authorization

    server = client(context)
    content = "" if body is None else json.dumps(body, ensure_ascii=False)
    headers = {
        "content-type": "application/json; charset=utf-8",
        "host": urlsplit(server.url).netloc,
        "x-acs-date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "x-acs-signature-nonce": secrets.token_hex(16),
        "x-acs-version": version,
    }
    key_id, secret = _key(key_file)
    text = urlencode(query or {})
    request = Signed(method=method, path=path, query=text, headers=headers, body=content.encode())
    signed = {name.title(): value for name, value in authorization(request, key_id, secret).items()}
    return server.call(method, path, query=query, body=content or None, headers=signed)


def _key(key_file: str | None) -> tuple[str, str]:
    """Of the environment, else of the file, else of the server in the data directory."""
    found = [os.environ.get(f"SUBLET_ACCESS_KEY_{name}") for name in ("ID", "SECRET")]
    if key_file is None and found[0] and found[1]:
        return found[0], found[1]
    path = Path(key_file) if key_file else data_directory(os.environ) / KEY
    try:
        said = json.loads(path.read_text("utf-8"))
        return str(said["access_key_id"]), str(said["access_key_secret"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = "It is not there, or holds no access_key_id and access_key_secret."
        hint = "Name another with --config, or set SUBLET_ACCESS_KEY_ID and SUBLET_ACCESS_KEY_SECRET."
        raise Refused(what=f"There is no access key in {path}.", why=why, hint=hint, code="access_key") from error
