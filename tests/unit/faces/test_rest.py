"""The HTTP interface over a real socket: shapes, problems, keys, pages, streams, and strangers kept out."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sublet.service import commands
from tests.unit.faces.listening import listening
from tests.unit.service.world import World, two_teams

JOB = "quota: team-a\ngpu: 2\ncommand: train\nname: own\n"
YAML = {"Content-Type": "application/yaml"}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return two_teams(tmp_path)


@pytest.fixture
def http(world: World) -> Iterator[httpx2.Client]:
    with listening(world) as url, httpx2.Client(base_url=url, timeout=20) as client:
        yield client


def submit(http: httpx2.Client, text: str = JOB, **headers: str) -> Any:
    return http.post("/api/v1/jobs", content=text, headers=YAML | headers, params={"file": "job.yaml", "base": "/"})


def test_submit_show_stop(http: httpx2.Client, world: World) -> None:
    answer = submit(http, **{"X-Sublet-User": "J%C3%BCrgen"})
    job = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"/api/v1/jobs/{job['id']}")
    assert (job["name"], job["user"], job["state"], job["idle_resources"]) == ("own", "Jürgen", "starting", "in_quota")
    assert http.get(f"/api/v1/jobs/{job['id']}").json()["job"] == job
    answer = http.post("/api/v1/jobs/own/stop")
    assert (answer.status_code, answer.json()["state"]) == (202, "stopping")
    world.pass_ms(60_000)
    assert http.get("/api/v1/jobs").json() == {"api": "sublet/v1", "kind": "JobList", "items": [], "next": None}


def test_a_job_that_waits_gets_another_priority(http: httpx2.Client) -> None:
    first, second = submit(http).json()["id"], submit(http).json()["id"]
    assert http.patch(f"/api/v1/jobs/{second}", json={"priority": 9}).json()["priority"] == 9
    answer = http.patch(f"/api/v1/jobs/{first}", json={"priority": 9})
    assert (answer.status_code, answer.json()["code"]) == (409, "job_not_waiting")
    assert http.patch(f"/api/v1/jobs/{second}", json={"priority": 10}).status_code == 422


def test_json_with_keys_laid_over_it(http: httpx2.Client) -> None:
    body = {"quota": "team-a", "gpu": 1, "command": ["python", "-V"]}
    answer = http.post("/api/v1/jobs", json=body, params={"set": '{"gpu": 2, "priority": 7}'})
    assert (answer.json()["gpu"], answer.json()["priority"], answer.json()["name"]) == (2, 7, "python")


def test_a_key_makes_it_once(http: httpx2.Client) -> None:
    first, again = (submit(http, **{"Idempotency-Key": "k"}).json() for _ in range(2))
    assert first["id"] == again["id"]
    other = submit(http, JOB + "priority: 9\n", **{"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_key_reused")


def test_a_problem_names_code_field_hint_and_line(http: httpx2.Client) -> None:
    answer = submit(http, "quota: team-a\nspec: demo\nresources:\n  gpu: 4\ncommand: x\n")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "urn:sublet:problem:too_large_for_spec",
        "title": "resources.gpu is 4, but no node of spec demo has more than 2.",
        "status": 422,
        "detail": "resources.gpu is 4, but no node of spec demo has more than 2. "
        "Ask for instances: 2 with gpu: 2, or choose another spec: sublet node ls.",
        "code": "too_large_for_spec",
        "field": "resources.gpu",
        "hint": "Ask for instances: 2 with gpu: 2, or choose another spec: sublet node ls.",
        "where": "job.yaml:4",
    }


PROBLEMS = [
    ("GET", "/api/v1/jobs/nobody", {}, 404, "job_unknown"),
    ("GET", "/api/v1/jobs/nobody/why", {}, 404, "job_unknown"),
    ("GET", "/api/v1/jobs/nobody/logs", {}, 404, "job_unknown"),
    ("POST", "/api/v1/jobs/nobody/stop", {}, 404, "job_unknown"),
    ("GET", "/api/v1/jobs?limit=0", {}, 422, "malformed"),
    ("GET", "/api/v1/jobs?limit=many", {}, 422, "malformed"),
    ("GET", "/api/v1/events?after=-1", {}, 422, "malformed"),
    ("GET", "/api/v1/nothing", {}, 404, "route_unknown"),
    ("DELETE", "/api/v1/jobs", {}, 405, "method"),
    ("POST", "/api/v1/nodes/n9/drain", {}, 404, "node_unknown"),
    ("DELETE", "/api/v1/quotas/team-c", {}, 422, "quota_unknown"),
    ("POST", "/api/v1/jobs", {"content": "x"}, 415, "media_type"),
    ("POST", "/api/v1/jobs", {"content": "x", "headers": {"Content-Type": "text/plain"}}, 415, "media_type"),
    ("POST", "/api/v1/jobs", {"content": b"\xff", "headers": YAML}, 422, "malformed"),
    ("POST", "/api/v1/jobs", {"content": "a" * 2_000_000, "headers": YAML}, 413, "too_long"),
    ("POST", "/api/v1/jobs?set=[1]", {"content": JOB, "headers": YAML}, 422, "malformed"),
    ("POST", "/api/v1/jobs?set={", {"content": JOB, "headers": YAML}, 422, "malformed"),
    ("PUT", "/api/v1/quotas", {"content": "quotas: {a: {b: c}}", "headers": YAML}, 422, "unknown_key"),
    ("POST", "/api/v1/jobs", {"content": JOB, "headers": {**YAML, "X-Sublet-User": "a%0Ab"}}, 422, "malformed"),
]


@pytest.mark.parametrize(("method", "path", "more", "status", "code"), PROBLEMS, ids=range(len(PROBLEMS)))
def test_problems(http: httpx2.Client, method: str, path: str, more: Any, status: int, code: str) -> None:
    answer = http.request(method, path, **more)
    assert (answer.status_code, answer.json()["status"], answer.json()["code"]) == (status, status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert http.get("/api/v1/jobs").json()["items"] == []


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}])
def test_pages_of_others_are_kept_out(http: httpx2.Client, headers: dict[str, str]) -> None:
    answer = submit(http, **headers)
    assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin")
    assert http.get("/api/v1/jobs").json()["items"] == []


def test_its_own_pages_are_not(http: httpx2.Client) -> None:
    assert submit(http, **{"Origin": str(http.base_url).rstrip("/")}).status_code == 201


def test_an_error_of_ours_is_a_problem_too(http: httpx2.Client, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.feed, "jobs", lambda **_: 1 / 0)
    answer = http.get("/api/v1/jobs")
    assert (answer.status_code, answer.json()["code"]) == (500, "broken")


def test_lists_come_in_pages(http: httpx2.Client) -> None:
    made = [submit(http).json()["id"] for _ in range(3)]
    first = http.get("/api/v1/jobs", params={"limit": 2}).json()
    rest = http.get("/api/v1/jobs", params={"limit": 2, "cursor": first["next"]}).json()
    assert [job["id"] for job in first["items"] + rest["items"]] == made[::-1]
    assert rest["next"] is None


def test_quotas_and_nodes(http: httpx2.Client, world: World) -> None:
    text = "tenant: demo\nquotas:\n  team-c: {nominal: {demo: 1}, scope: general, owner: lin}\n"
    assert http.put("/api/v1/quotas", content=text, headers=YAML).json() == {"changed": ["team-c"]}
    names = [(item["name"], item["guaranteed"]) for item in http.get("/api/v1/quotas").json()["items"]]
    assert names == [("team-a", 2), ("team-b", 2), ("team-c", 1)]
    assert http.delete("/api/v1/quotas/team-c").status_code == 204
    assert "team-c" not in world.feed.quotas
    assert http.post("/api/v1/nodes/n1/drain").json()["state"] == "draining"
    assert http.post("/api/v1/nodes/n1/resume").json()["state"] == "up"
    assert [item["name"] for item in http.get("/api/v1/nodes").json()["items"]] == ["n1", "n2"]


def test_health(http: httpx2.Client, world: World) -> None:
    assert http.get("/livez").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ok"}
    assert http.get("/readyz?verbose").json() == {"status": "ok", "checks": {"controller": "ok"}}
    assert http.get("/version").json() == {"version": "1.2.3"}
    world.controller.is_ready = False
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]) == (503, {"controller": "it rests"})


def test_the_description_is_openapi_3_1(http: httpx2.Client) -> None:
    described = http.get("/api/v1/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    operations = [entry["operationId"] for path in described["paths"].values() for entry in path.values()]
    assert len(operations) == len(set(operations)) and {"submit_job", "list_events"} <= set(operations)


def events_of(stream: Any) -> Iterator[Any]:
    return (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))


def test_the_stream_tells_the_past_and_goes_on(http: httpx2.Client, world: World) -> None:
    submit(http)
    past = http.get("/api/v1/events").json()["items"]
    with http.stream("GET", "/api/v1/events?after=0", headers={"Accept": "text/event-stream"}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        told = events_of(stream)
        assert [next(told) for _ in past] == past
        threading.Thread(target=lambda: commands.stop(world.desk, "own", "mei")).start()
        assert next(told)["type"] == "stop-asked"


def test_a_reader_goes_on_behind_the_last_event_it_saw(http: httpx2.Client) -> None:
    submit(http)
    past = http.get("/api/v1/events").json()["items"]
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(past[1]["sequence"])}
    with http.stream("GET", "/api/v1/events", headers=headers) as stream:
        assert next(events_of(stream)) == next(view for view in past if view["sequence"] > past[1]["sequence"])


def test_the_log_follows_until_the_end(http: httpx2.Client, world: World, tmp_path: Path) -> None:
    job = submit(http).json()["id"]
    log = tmp_path / f"{job}.1.0"
    log.write_text("one\n")
    assert http.get(f"/api/v1/jobs/{job}/logs").text == "one\n"
    with http.stream("GET", f"/api/v1/jobs/{job}/logs?follow=true") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "one"
        with log.open("a") as file:
            file.write("two\n")
        assert next(lines) == "two"
        commands.stop(world.desk, job, "mei")
        world.pass_ms(60_000)
        assert list(lines) == []
