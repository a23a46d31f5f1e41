"""The routes of /api/v1: nouns in the plural, errors as problems, lists in pages with a cursor.

One rule: what a route returns is what the service returned.
"""

import json
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from sublet.domain.errors import Refused
from sublet.faces.rest import streams
from sublet.service import clusterfile, commands, jobfile, logs, preview, queries
from sublet.service.desk import Desk
from sublet.service.views import EventView, JobDetail, JobView, NodeView, Page, QuotaView, WhyView

MAX_BODY = 1024 * 1024
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/yaml": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "object"}},
        },
    }
}

router = APIRouter()


def desk_of(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


def user_of(x_sublet_user: Annotated[str, Header()] = "") -> str:
    """Who asks, as the client says; there is no login yet."""
    user = unquote(x_sublet_user)
    if len(user) > 200 or not user.isprintable():
        raise Refused(what="The user's name is no name.", code="malformed", field="user")
    return user


At = Annotated[Desk, Depends(desk_of)]
User = Annotated[str, Depends(user_of)]
State = Literal["waiting", "starting", "running", "leaving", "stopping", "succeeded", "failed", "stopped"]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.post("/jobs", status_code=201, openapi_extra=BODY)
async def submit_job(
    request: Request,
    response: Response,
    desk: At,
    user: User,
    file: str = "",
    base: str = "",
    set: str = "",
    idempotency_key: Annotated[str, Header(max_length=200)] = "",
) -> JobView:
    """Submit a job, written as a job file (YAML) or as the same keys in JSON.

    `file` and `base`: what the file is called and the folder that a relative workdir starts from. `set`: a JSON object
    of keys laid over the file. The same `Idempotency-Key` gives the same job again.
    """
    text = await _text(request)
    overrides = _object(set)

    def act() -> JobView:
        origin = jobfile.Origin(
            job_id=commands.id_for(desk, idempotency_key, user), user=user, file=file[-400:], base=base
        )
        return queries.job(desk, commands.submit(desk, jobfile.parse(text, origin, overrides)))

    view = await run_in_threadpool(act)
    response.headers["Location"] = f"/api/v1/jobs/{view.id}"
    return view


@router.post("/plans", openapi_extra=BODY)
async def plan_job(
    request: Request, desk: At, user: User, file: str = "", base: str = "", set: str = ""
) -> preview.PlanView:
    """The dry run of a submission: what it would do at this instant. Nothing is stored."""
    text = await _text(request)
    overrides = _object(set)

    def act() -> preview.PlanView:
        origin = jobfile.Origin(job_id=commands.id_for(desk, "", user), user=user, file=file[-400:], base=base)
        return preview.submission(desk, jobfile.parse(text, origin, overrides))

    return await run_in_threadpool(act)


class WhatIf(BaseModel, extra="forbid"):
    """What is supposed to happen at once. `quotas`: the new promise, by quota and spec. `submit`: job files as JSON."""

    submit: list[dict[str, Any]] = Field(default=[], max_length=100)
    quotas: dict[str, dict[str, int]] = {}
    lose: list[str] = []
    drain: list[str] = []
    resume: list[str] = []
    stop: list[str] = []


@router.post("/whatif")
def what_if(desk: At, user: User, body: WhatIf) -> preview.ChangesView:
    """Who would start, who would be evicted and what would be lost, if all of this happened now. Nothing is stored."""
    requests = []
    for job in body.submit:
        origin = jobfile.Origin(job_id=commands.id_for(desk, "", user), user=user, file="", base="")
        requests.append(commands.accepted(desk, jobfile.parse(json.dumps(job), origin, {})))
    supposed = preview.Supposed(
        submits=tuple(requests),
        quotas=body.quotas,
        lost=tuple(body.lose),
        drained=tuple(body.drain),
        returned=tuple(body.resume),
        stopped=tuple(desk.record(job).request.id for job in body.stop),
    )
    return preview.supposed_of_desk(desk, supposed)


@router.get("/jobs")
def list_jobs(
    desk: At,
    quota: str = "",
    user: str = "",
    state: Annotated[list[State] | None, Query()] = None,
    idle: Literal["", "in_quota", "not_in_quota"] = "",
    all_states: bool = False,
    limit: Limit = 1000,
    cursor: str | None = None,
) -> Page[JobView]:
    """Jobs, newest first: those that have not ended, unless `all_states` or `state` asks for others."""
    wanted = queries.JobFilter(
        quota=quota, user=user, states=tuple(state or ()), idle_resources=idle, all_states=all_states
    )
    return queries.jobs(desk, wanted, limit, cursor)


@router.get("/jobs/{job}")
def show_job(desk: At, job: str) -> JobDetail:
    """All that is known of a job, named by its id, a unique beginning of it, or its name."""
    return queries.detail(desk, job)


@router.get("/jobs/{job}/why")
def why_job(desk: At, job: str) -> WhyView:
    """Why it waits, in which order of weight, and what would change it."""
    return queries.why(desk, job)


class JobChange(BaseModel, extra="forbid"):
    """What can be changed of a job that waits."""

    priority: int = Field(ge=1, le=9)


@router.patch("/jobs/{job}")
def change_job(desk: At, user: User, job: str, body: JobChange) -> JobView:
    """Gives a job that waits another priority, 9 first."""
    return queries.job(desk, commands.set_priority(desk, job, body.priority, user))


@router.post("/jobs/{job}/stop", status_code=202)
def stop_job(desk: At, user: User, job: str) -> JobView:
    return queries.job(desk, commands.stop(desk, job, user))


@router.get("/jobs/{job}/logs", response_class=StreamingResponse)
def job_logs(
    desk: At, job: str, attempt: int | None = None, instance: int = 0, follow: bool = False, search: str = ""
) -> StreamingResponse:
    """What an instance printed, of all attempts or of one; with `follow` until the job has ended.

    `search`: only the lines that contain this text.
    """
    pieces = streams.log_text(desk, logs.begin(desk, job, attempt, instance), follow)
    shown = streams.lines_with(search, pieces) if search else pieces
    return StreamingResponse(shown, media_type="text/plain; charset=utf-8")


@router.get("/quotas")
def list_quotas(desk: At) -> Page[QuotaView]:
    return queries.quotas(desk)


@router.put("/quotas", openapi_extra=BODY)
async def apply_quotas(request: Request, desk: At, file: str = "") -> dict[str, list[str]]:
    """Sets the quotas (and rules) that a file describes; those that it does not name stay."""
    text = await _text(request)
    changed = await run_in_threadpool(lambda: commands.apply(desk, clusterfile.parse(text, file[-400:])))
    return {"changed": changed}


@router.delete("/quotas/{name:path}", status_code=204)
def delete_quota(desk: At, name: str) -> None:
    commands.delete_quota(desk, name)


@router.get("/nodes")
def list_nodes(desk: At) -> Page[NodeView]:
    return queries.nodes(desk)


@router.get("/nodes/{name}")
def get_node(desk: At, name: str) -> NodeView:
    return queries.node(desk, name)


@router.post("/nodes/{name}/drain", status_code=202)
def drain_node(desk: At, name: str) -> NodeView:
    commands.drain(desk, name)
    return queries.node(desk, name)


@router.post("/nodes/{name}/resume", status_code=202)
def resume_node(desk: At, name: str) -> NodeView:
    commands.resume(desk, name)
    return queries.node(desk, name)


@router.get("/events", response_model=Page[EventView])
def list_events(
    request: Request,
    desk: At,
    after: Annotated[int | None, Query(ge=0)] = None,
    job: str = "",
    limit: Limit = 1000,
    last_event_id: Annotated[int | None, Header(ge=0)] = None,
) -> Any:
    """What happened, as sentences. Asked for as `text/event-stream` it goes on for ever.

    `after`: only behind this number; of a stream without it only what comes from now on.
    """
    if "text/event-stream" not in request.headers.get("accept", ""):
        return queries.events(desk, after or 0, limit, job)
    job_id = desk.record(job).request.id if job else ""
    start = last_event_id if last_event_id is not None else desk.feed.last_sequence if after is None else after
    return StreamingResponse(streams.event_stream(desk, start, job_id), media_type="text/event-stream")


async def _text(request: Request) -> str:
    """The body as text; YAML and JSON are read by the same rules."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", *YAML_TYPES):
        hint = "Send application/yaml or application/json."
        raise Refused(what=f"The body is {kind or 'of no named type'}.", hint=hint, code="media_type")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise Refused(what="The body is longer than 1 MiB.", hint="Send less.", code="too_long")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            what="The body is no text in UTF-8.", why=f"Byte {error.start} is none.", code="malformed"
        ) from error


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise Refused(what="set is no JSON.", why=f"{error}.", code="malformed", field="set") from error
    if not isinstance(found, dict):
        raise Refused(what="set is no JSON object.", hint='Write {"gpu": 2}.', code="malformed", field="set")
    return found
