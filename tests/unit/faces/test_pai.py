"""PAI's API over a simulated world: routes, refusals, orders, lists, quotas. Every request is signed."""

import asyncio
import hashlib
import hmac
import json
import os
import uuid
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from sublet.faces.pai import orders
from sublet.faces.pai.app import Pai, beside
from sublet.faces.pai.book import Book
from sublet.faces.pai.keys import Owner, kept_key
from sublet.faces.pai.operations import OPERATIONS, VERSIONS, Operation
from sublet.faces.pai.signing import Signed, Verifier, acs3_string
from sublet.service import commands
from tests.unit.faces.test_pai_signing import NOW_MS
from tests.unit.service.world import World, two_teams

KNOWN = Path(__file__).resolve().parents[4] / "shared" / "reference" / "pai_ops.json"
NUMBERS = count(1)
SPECS = [{"Type": "Worker", "PodCount": 1, "Image": "i", "ResourceConfig": {"GPU": "2"}}]
JOB = {"DisplayName": "one", "JobType": "PyTorchJob", "JobSpecs": SPECS, "UserCommand": "train", "ResourceId": "team-a"}
SAFE = {"Settings": {"EnableErrorMonitoringInAIMaster": True}}
VERSION_OF = {product: version for version, product in VERSIONS.items()}


class Client:
    """Signs as an SDK does, and calls the application itself."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        find = {"LTAI": ("secret", Owner(user="mei"))}.get
        book = Book(folder / "pai.db")
        pai = Pai(desk=world.desk, book=book, verifier=Verifier(find=find), new_request_id=lambda: str(uuid.uuid4()))
        self.app = beside(pai, self._other)

    async def _other(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def call(
        self,
        product: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        action: str = "",
        raw: bytes = b"",
        **query: Any,
    ) -> tuple[int, Any]:
        content = raw or (b"" if body is None else json.dumps(body).encode())
        headers = {
            "host": "x",
            "x-acs-content-sha256": hashlib.sha256(content).hexdigest(),
            "x-acs-date": "2026-12-01T04:30:35Z",
            "x-acs-signature-nonce": str(next(NUMBERS)),
            "x-acs-version": VERSION_OF.get(product, product),
        } | ({"x-acs-action": action} if action else {})
        request = Signed(method=method, path=path, query=urlencode(query), headers=headers, body=content)
        names = sorted(headers)
        mac = hmac.new(b"secret", acs3_string(request, names).encode(), "sha256").hexdigest()
        said = f"ACS3-HMAC-SHA256 Credential=LTAI,SignedHeaders={';'.join(names)},Signature={mac}"
        return self.send(replace(request, headers={**headers, "authorization": said}))

    def send(self, request: Signed) -> tuple[int, Any]:
        scope = {
            "type": "http", "method": request.method, "path": request.path, "raw_path": request.path.encode(),
            "query_string": request.query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in request.headers.items()],
        }  # fmt: skip
        told: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Any) -> None:
            told.append(message)

        asyncio.run(self.app(scope, receive, send))
        return told[0]["status"], json.loads(told[1]["body"])

    def dlc(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        status, answer = self.call("DLC", method, f"/api/v1/{path}", body, **query)
        assert status == 200, answer
        return answer

    def studio(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        status, answer = self.call("PaiStudio", method, f"/api/v1/{path}", body, **query)
        assert status == 200, answer
        return answer

    def refused(self, product: str, method: str, path: str, body: Any = None, **query: Any) -> str:
        status, answer = self.call(product, method, f"/api/v1/{path}", body, **query)
        assert 400 <= status < 500 and answer["Message"] and answer["RequestId"], (status, answer)
        return str(answer["Code"])

    def submit(self, **changes: Any) -> str:
        return str(self.dlc("POST", "jobs", {**JOB, **changes})["JobId"])

    def job(self, job: str) -> Any:
        return self.dlc("GET", f"jobs/{job}")

    def found(self, **query: Any) -> list[str]:
        return [one["DisplayName"] for one in self.dlc("GET", "jobs", **query)["Jobs"]]


@pytest.fixture
def pai(tmp_path: Path) -> Client:
    world = two_teams(tmp_path)
    world.clock.ms = NOW_MS
    return Client(world, tmp_path)


def idle(kind: str, **more: Any) -> dict[str, Any]:
    return {"Settings": {"OversoldType": kind, "EnableErrorMonitoringInAIMaster": True, **more}}


# ---- routes


def filled(operation: Operation) -> str:
    return operation.path.replace("{", "").replace("}", "")


@pytest.mark.parametrize("one", [one for one in OPERATIONS if one.handler is None], ids=lambda one: one.action)
def test_what_is_not_done_says_so(pai: Client, one: Operation) -> None:
    status, answer = pai.call(one.product, one.method, filled(one), {}, action=one.action)
    assert (status, answer["Code"]) == (400, "UnsupportedOperation")
    assert one.action in answer["Message"] and one.note in answer["Message"] and answer["RequestId"]


@pytest.mark.parametrize("one", [one for one in OPERATIONS if one.handler], ids=lambda one: one.product + one.action)
def test_what_is_done_answers_even_to_nonsense(pai: Client, one: Operation) -> None:
    status, answer = pai.call(one.product, one.method, filled(one), {"Min": 3, "JobSpecs": [7]}, action=one.action)
    assert status == 200 or (400 <= status < 500 and answer["Code"] != "UnsupportedOperation"), answer


def test_the_table_has_every_operation_that_the_sdks_know() -> None:
    if not KNOWN.exists() and not os.environ.get("SUBLET_CI"):
        pytest.skip(f"{KNOWN} is not there")
    known = json.loads(KNOWN.read_text())
    names = {"pai-dlc": "DLC", "PaiStudio": "PaiStudio", "AIWorkSpace": "AIWorkspace"}
    listed = {
        (names[product], one["action"], one["method"], one["path"].rstrip("/"))
        for product, its in known.items()
        for one in its["operations"]
    }
    ours = {(one.product, one.action, one.method, one.path) for one in OPERATIONS}
    assert ours - listed == {  # known from elsewhere; no SDK calls it
        ("PaiStudio", "GetQuotaWorkloadDiagnosis", "GET", "/api/v1/quotas/{QuotaId}/workloads/{WorkloadId}/diagnosis")
    }
    assert listed <= ours


def test_it_is_told_apart_by_version_method_and_path(pai: Client) -> None:
    assert pai.refused("2019-01-01", "GET", "jobs") == "InvalidVersion"
    assert pai.refused("DLC", "PATCH", "jobs") == "InvalidAction.NotFound"
    assert pai.refused("DLC", "GET", "quotas") == "InvalidAction.NotFound"
    assert pai.call("DLC", "GET", "/api/v1/jobs", action="StopJob")[1]["Code"] == "InvalidAction.NotMatch"
    assert pai.studio("GET", "quotas/")["TotalCount"] == 2
    status, answer = pai.call("AIWorkspace", "GET", "/api/v1/quotas")
    assert (status, [one["Name"] for one in answer["Quotas"]]) == (200, ["team-a", "team-b"])
    plain = Signed(method="GET", path="/api/v1/jobs", query="", headers={"host": "x"}, body=b"")
    assert pai.send(plain)[0] == 418  # ours, not PAI's
    unsigned = replace(plain, headers={"host": "x", "x-acs-version": "2020-12-03"})
    assert pai.send(unsigned)[1]["Code"] == "IncompleteSignature"


def test_bodies_that_are_too_much(pai: Client) -> None:
    for raw, code in (
        (b"x" * (1024 * 1024 + 1), "RequestBodyTooLarge"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "InvalidParameter"),
        (b"[" * 100_000, "InvalidParameter"),
        (b"\xff\xfe", "InvalidParameter"),
        (b"[1]", "InvalidParameter"),
    ):
        assert pai.call("DLC", "POST", "/api/v1/jobs", raw=raw)[1]["Code"] == code


def test_the_key_is_for_its_owner_alone_and_stays(tmp_path: Path) -> None:
    first = kept_key(tmp_path / "key.json", lambda length: bytes(range(length)))
    assert (tmp_path / "key.json").stat().st_mode & 0o777 == 0o600
    assert kept_key(tmp_path / "key.json", lambda length: b"\0" * length) == first


# ---- jobs


@pytest.mark.parametrize(
    "wrong",
    [
        {"DisplayName": ""}, {"JobType": "SlurmJob"}, {"JobSpecs": []}, {"UserCommand": " "}, {"ResourceId": ""},
        {"Priority": 10}, {"Settings": {"OversoldType": "Perhaps"}}, {"JobMaxRunningTimeMinutes": -1},
        {"JobSpecs": [{"Type": "Worker", "PodCount": 0, "ResourceConfig": {"GPU": "1"}}]},
        {"JobSpecs": [{"Type": "Worker", "PodCount": 1, "ResourceConfig": {"GPU": "0.5"}}]},
        {"JobSpecs": [{"Type": "Worker", "PodCount": 1, "ResourceConfig": {"GPU": "1"}, "EcsSpec": "demo"}]},
        {"JobSpecs": [{"Type": "Worker", "PodCount": 1, "EcsSpec": "ecs.gn7"}]},
        {"JobSpecs": [{"Type": "Worker", "PodCount": 1, "UseSpotInstance": True, "ResourceConfig": {"GPU": "1"}}]},
        {"JobSpecs": [{"Type": "Worker", "PodCount": 9, "ResourceConfig": {"GPU": "2"}}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_job_that_cannot_be_is_refused(pai: Client, wrong: dict[str, Any]) -> None:
    code = pai.refused("DLC", "POST", "jobs", {**JOB, **wrong})
    assert code in ("InvalidParameter", "MissingParameter") and pai.found() == []
    assert pai.refused("DLC", "POST", "jobs", {**JOB, "ResourceId": "nowhere"}) == "QuotaNotFound"


def test_what_has_no_meaning_here_comes_back_as_it_was_sent(pai: Client) -> None:
    more = {
        "Settings": {"QuotaInstanceTypes": ["a"], "Tags": {"t": "v"}}, "DataSources": [{"MountPath": "/mnt"}],
        "NewKey": {"x": [1]}, "Envs": {"A": "b"}, "CustomEnvs": [
            {"Key": "SECRET", "Value": "s3cr3t", "Visible": "private"}
        ],
    }  # fmt: skip
    found = pai.job(pai.submit(**more))
    assert found["Settings"]["QuotaInstanceTypes"] == ["a"] and found["Settings"]["Tags"] == {"t": "v"}
    assert (found["DataSources"], found["NewKey"], found["Envs"]) == ([{"MountPath": "/mnt"}], {"x": [1]}, {"A": "b"})
    assert found["CustomEnvs"] == [{"Key": "SECRET", "Visible": "private"}] and "s3cr3t" not in json.dumps(found)
    (record,) = pai.world.desk.feed.jobs()
    assert record.request.program.environment["SECRET"] == "s3cr3t"


def test_the_arguments_of_aimaster_become_settings(pai: Client) -> None:
    said = "--job-execution-mode=Async --enable-job-restart True --max-num-of-job-restart 7 --strange 1"
    settings = {
        "EnableErrorMonitoringInAIMaster": True,
        "ErrorMonitoringArgs": said,
        "TerminationGracePeriodSeconds": 45,
    }
    job = pai.submit(Settings=settings)
    request = pai.world.desk.feed.jobs()[0].request
    tolerance = request.fault_tolerance
    assert (tolerance.enabled, tolerance.mode, tolerance.max_restarts, request.grace_ms) == (True, "async", 7, 45_000)
    assert pai.job(job)["RestartTimes"] == "0/7" and pai.job(job)["Settings"]["ErrorMonitoringArgs"] == said


def test_roles_become_instances_with_the_master_first(pai: Client) -> None:
    specs = [
        {"Type": "Worker", "PodCount": 2, "ResourceConfig": {"GPU": "1"}},
        {"Type": "Master", "PodCount": 1, "ResourceConfig": {"GPU": "2"}},
    ]
    found = pai.job(pai.submit(JobSpecs=specs, **idle("AcceptQuotaOverSold")))
    assert [one["PodId"].partition("-")[2] for one in found["Pods"]] == ["master-0", "worker-0", "worker-1"]
    assert pai.world.desk.feed.jobs()[0].request.sizes == (2, 1, 1) and found["RequestGPU"] == 4.0


def test_priority_counts_while_it_waits_and_is_passed_over_later(pai: Client) -> None:
    first, second, third = (pai.submit(DisplayName=name, Priority=5) for name in ("first", "second", "third"))
    assert [pai.job(one)["Status"] for one in (first, second)] == ["EnvPreparing", "Queuing"]
    pai.dlc("PUT", f"jobs/{third}", {"Priority": 9, "Description": "urgent"})
    pai.dlc("PUT", f"jobs/{first}", {"Priority": 9})
    assert [pai.job(one)["Priority"] for one in (first, second, third)] == [5, 5, 9]
    waiting = pai.studio("GET", "quotas/team-a/workloads", Status="Enqueued")["Workloads"]
    assert [(one["WorkloadName"], one["Position"]) for one in waiting] == [("third", 1), ("second", 2)]
    pai.dlc("POST", f"jobs/{first}/stop")
    pai.world.pass_ms(60_000)
    assert pai.job(third)["Status"] in ("EnvPreparing", "Running") and pai.job(second)["Status"] == "Queuing"
    assert pai.job(third)["Description"] == "urgent" and pai.found(Description="URG") == ["third"]
    assert pai.refused("DLC", "PUT", f"jobs/{third}", {"Priority": 0}) == "InvalidParameter"
    assert pai.refused("DLC", "PUT", f"jobs/{third}", {"UserCommand": "x"}) == "UnsupportedParameter"
    pai.dlc("PUT", f"jobs/{third}", {"Accessibility": "PUBLIC"})
    assert pai.refused("DLC", "PUT", f"jobs/{third}", {"Accessibility": "PRIVATE"}) == "InvalidParameter"


def test_lists_by_idle_resources(pai: Client) -> None:
    pai.submit(DisplayName="own", **idle("AcceptQuotaOverSold"))
    pai.submit(DisplayName="lent", **idle("AcceptQuotaOverSold"))
    pai.submit(DisplayName="waits", **idle("ForceQuotaOverSold"))
    pai.submit(DisplayName="never", ResourceId="team-b")
    assert pai.found(OversoldInfo="AcceptQuotaOverSold-true") == ["lent"]
    assert pai.found(OversoldInfo="acceptquotaoversold-false") == ["own"]
    assert pai.found(OversoldInfo="ForceQuotaOverSold") == ["waits"]
    assert pai.found(OversoldInfo="ForbiddenQuotaOverSold") == ["never"]
    assert pai.refused("DLC", "GET", "jobs", OversoldInfo="Perhaps") == "InvalidParameter"
    items = {one["DisplayName"]: one for one in pai.dlc("GET", "jobs")["Jobs"]}
    assert items["own"]["NodeNames"] and not items["lent"]["NodeNames"] and items["lent"]["UseOversoldResource"]


def test_lists_by_time_page_and_order(pai: Client) -> None:
    for day in range(10):
        pai.world.clock.ms = NOW_MS - (9 - day) * 86_400_000
        asked = {**JOB, "DisplayName": f"day{day}"}
        commands.submit(pai.world.desk, orders.draft_of(pai.world.desk, asked, pai.world.desk.new_id(), "mei"))
    assert pai.found(PageSize=100) == [f"day{day}" for day in range(9, 1, -1)]  # seven days, to the millisecond
    assert pai.found(PageSize=100, StartTime="2026-11-01T00:00:00Z")[-1] == "day0"
    assert pai.found(EndTime="2026-11-23T12:00:00Z") == ["day1", "day0"]
    assert pai.found(PageSize=3, PageNumber=2) == ["day6", "day5", "day4"]
    assert pai.found(PageSize=2, SortBy="DisplayName", Order="asc") == ["day2", "day3"]
    assert pai.dlc("GET", "jobs", PageSize=3)["TotalCount"] == 8
    assert pai.found(DisplayName="DAY7") == ["day7"] and pai.found(ShowOwn="True", Username="nobody") == []
    assert pai.found(JobIds=",".join(pai.dlc("GET", "jobs", PageSize=2)["Jobs"][n]["JobId"] for n in (0, 1))) == [
        "day9", "day8"
    ]  # fmt: skip
    assert pai.found(Tags="{}", PaymentType="Spot") == [] and pai.refused("DLC", "GET", "jobs", PageSize=-1)


def test_a_preempted_job_without_aimaster_is_stopped(pai: Client) -> None:
    job = pai.submit(DisplayName="lent", ResourceId="team-a", Settings={"OversoldType": "ForceQuotaOverSold"},
                     JobSpecs=[{**SPECS[0], "PodCount": 2}])  # fmt: skip
    pai.submit(DisplayName="owner", ResourceId="team-b")
    assert pai.job(job)["Status"] == "Stopping" and pai.job(job)["Pods"][0]["SubStatus"] == "Evicted"
    pai.world.pass_ms(120_000)
    found = pai.job(job)
    assert (found["Status"], found["ReasonCode"]) == ("Stopped", "ResourcePreempted")
    assert found["Pods"][0]["SubStatus"] == "Evicted" and "NodeName" not in found["Pods"][0]
    assert any("Resource Preempted" in line for line in pai.dlc("GET", f"jobs/{job}/events")["Events"])


def test_why_a_workload_waits(pai: Client) -> None:
    pai.submit()
    job = pai.submit(DisplayName="second")
    (waiting,) = pai.studio("GET", "quotas/team-a/workloads", WorkloadNames="second")["Workloads"]
    assert waiting["Code"] == "NotEnoughGPU" and waiting["CodeType"] == "QuotaLimit" and "2" in waiting["Reason"]
    found = pai.studio("GET", f"quotas/team-a/workloads/{job}/diagnosis")["Diagnosis"]
    own = found["ResourceDiagnosis"]["SelfQuotaLimit"]
    assert (own["Status"], own["ExceedResources"], own["Limit"]) == ("Exceeded", {"GPU": "2"}, {"GPU": "2"})
    usage = pai.studio("GET", "quotas/team-a/activeuserusages")["QuotaUserUsages"]
    assert usage[0]["Resources"] == {"Submitted": {"GPU": "4"}, "Used": {"GPU": "2"}}
    assert usage[0]["WorkloadCount"] == 2


# ---- quotas


@pytest.mark.parametrize(
    "promise",
    [
        {"NodeSpecs": [{"Type": "demo", "Count": 1}]},
        {"NodeSpec": [{"Type": "demo", "Count": 1}]},
        {"ResourceAmount": {"GPU": "2", "GPUType": "demo"}},
        {"ResourceAmount": {"GPU": 2}},
    ],
    ids=str,
)
def test_min_in_each_spelling(pai: Client, promise: dict[str, Any]) -> None:
    for name in ("team-a", "team-b"):
        pai.studio("PUT", f"quotas/{name}/action/scale", {"Min": {"ResourceAmount": {"GPU": "0"}}})
    quota = pai.studio("POST", "quotas", {"QuotaName": "new", "Min": promise})["QuotaId"]
    found = pai.studio("GET", f"quotas/{quota}")
    assert found["Min"]["NodeSpecs"] == [{"Type": "demo", "Count": 1}]
    assert found["Min"]["ResourceAmount"] == {"GPU": "2", "GPUType": "demo"} and found["ResourceType"] == "ECS"


def test_a_tree_of_quotas_and_its_settings(pai: Client) -> None:
    strategies = ("PaiStrategyIntelligent", "PaiStrategyBalance", "PaiStrategyRoundRobin", "PaiStrategyStrictFIFO")
    config = {
        "OversoldUsageConfig": {"Disabled": True, "DisabledBy": "mei"}, "EnableSelfQuotaPreemption": True,
        "EnablePreemptSubquotaWorkloads": True, "SelfQuotaPreemptionConfig": {"PreemptorPriorities": [9]},
    }  # fmt: skip
    parent = pai.studio("GET", "quotas/", QuotaName="team-a")["Quotas"][0]["QuotaId"]
    for number, strategy in enumerate(strategies):
        asked = {"QuotaName": f"c{number}", "ParentQuotaId": parent, "QueueStrategy": strategy, "QuotaConfig": config}
        pai.studio("POST", "quotas", asked)
    below = pai.studio("GET", "quotas/", ParentQuotaId=parent)["Quotas"]
    assert [one["QueueStrategy"] for one in below] == list(strategies)
    assert [one["QuotaName"] for one in pai.studio("GET", "quotas/", ParentQuotaId="")["Quotas"]] == [
        "team-a",
        "team-b",
    ]
    quota = pai.world.desk.feed.quotas["team-a/c0"]
    assert (quota.lend_max, quota.borrow_max, quota.self_preemption, quota.sub_quota_preemption) == (0, 0, True, True)
    child = f"quotas/{below[0]['QuotaId']}"
    pai.studio("PUT", child, {"QuotaConfig": {"OversoldUsageConfig": {"Disabled": False}}, "Description": "d"})
    found = pai.studio("GET", child)
    assert found["QuotaConfig"]["SelfQuotaPreemptionConfig"] == {"PreemptorPriorities": [9]}
    assert found["QuotaConfig"]["OversoldUsageConfig"]["Disabled"] is False and found["Description"] == "d"
    quota = pai.world.desk.feed.quotas["team-a/c0"]
    assert (quota.lend_max, quota.borrow_max, quota.self_preemption) == (None, None, True)
    assert pai.refused("PaiStudio", "DELETE", f"quotas/{parent}") == "QuotaInUse"
    assert pai.refused("PaiStudio", "PUT", child, {"QuotaName": "other"}) == "InvalidParameter"
    big = {"Min": {"NodeSpecs": [{"Type": "demo", "Count": 9}]}}
    assert pai.refused("PaiStudio", "PUT", f"{child}/action/scale", big) == "InvalidParameter"
    pai.studio("DELETE", child)
    assert pai.refused("PaiStudio", "GET", child) == "QuotaNotFound"


def test_nodes_name_no_job_on_idle_resources(pai: Client) -> None:
    pai.submit(DisplayName="own")
    pai.submit(DisplayName="lent", **idle("ForceQuotaOverSold"))
    pods = [pod for name in ("n1", "n2") for pod in pai.studio("GET", f"nodes/{name}/Pods")["NodePodInfos"]]
    assert sorted(bool(pod["PodName"]) for pod in pods) == [False, True]
    forced = [
        pod
        for n in ("n1", "n2")
        for pod in pai.studio("GET", f"nodes/{n}/Pods", OversoldTypes="ForceQuotaOversold")["NodePodInfos"]
    ]
    assert [pod["WorkloadId"] for pod in forced] == [""]
    assert pai.refused("PaiStudio", "POST", "nodes/n1", {"Operation": "Drain"}) == "UnsupportedOperation"
    assert pai.refused("PaiStudio", "POST", "nodes/n9", {"Operation": "Cordon"}) == "NodeNotFound"
