"""`sublet dlc` against a real server, read as runners read PAI's tool."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, serving, until

TRAIN = f"{sys.executable} {Path(__file__).parent / 'programs' / 'train.py'}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("dlc")
    with serving(folder / "data", folder) as server:
        yield server


def ran(found: Server, *words: str) -> str:
    done = found.run("dlc", *words)
    assert done.code == 0, done.err
    return done.out


def submitted(found: Server, *words: str) -> str:
    """The id, as a runner finds it: in the table behind the JSON."""
    out = ran(found, *words)
    table = re.search(r"\|\s+(dlc[0-9a-z]+)\s+\|", out)
    document, _ = json.JSONDecoder().raw_decode(out)
    assert table and document["JobId"] == table[1] and f"| {table[1]} | {document['RequestId']} |" in out
    return table[1]


def test_submit_get_logs_stop(found: Server) -> None:
    common = ["--resource_id", "team-a", "--worker_gpu", "1", "--worker_image", "i:1", "--workspace_id", "7"]
    job = submitted(
        found, "submit", "pytorchjob", "--name", "runner", "--command", f"{TRAIN} 3 0.01", *common, "--workers", "2",
        "--envs", "COLOUR=red,A=b=c", "--tags", "run=1", "--oversold_type", "AcceptQuotaOverSold", "--priority", "6",
        "--aimaster_enable", "--aimaster_args", "--job-execution-mode Sync --max-num-of-job-restart 4",
    )  # fmt: skip
    shown = until(
        lambda: (one := json.loads(ran(found, "get", "job", job)))["Status"] == "Succeeded" and one, "its success"
    )
    assert (shown["Priority"], shown["WorkspaceId"], shown["RestartTimes"]) == (6, "7", "0/4")
    assert shown["Envs"] == {"COLOUR": "red", "A": "b=c"} and shown["Settings"]["Tags"] == {"run": "1"}
    assert "RANK=1 WORLD_SIZE=2" in ran(found, "logs", job, f"{job}-worker-0")
    assert ran(found, "logs", job, f"{job}-master-0", "--max_events_num", "1") == "done at 3\n"
    pods = json.loads(ran(found, "get", "pod", job))["Pods"]
    assert [one["PodId"] for one in pods] == [f"{job}-master-0", f"{job}-worker-0"]
    assert json.loads(ran(found, "get", "pod", job, pods[1]["PodId"]))["Status"] == "Succeeded"
    assert any("succeeded" in line for line in json.loads(ran(found, "get", "job", job, "--events"))["Events"])

    other = submitted(found, "create", "job", "--kind", "BatchJob", "--name", "long", "--command", "sleep 600", *common)
    listed = json.loads(ran(found, "get", "job", "--display_name", "LONG", "--page_size", "5"))
    assert [one["JobId"] for one in listed["Jobs"]] == [other] and listed["TotalCount"] == 1
    assert ran(found, "logs", other, f"{other}-worker-0") == "[WARN] No logs found for the pod\n"
    assert found.run("dlc", "stop", "job", other).code == 130  # nobody says yes
    assert json.loads(ran(found, "stop", "job", other, "--force"))["JobId"] == other
    until(lambda: json.loads(ran(found, "get", "job", other))["Status"] == "Stopped", "its end")
    quotas = json.loads(ran(found, "get", "quota"))["Quotas"]
    assert [one["QuotaName"] for one in quotas] == ["team-a", "team-b"]
    assert json.loads(ran(found, "get", "quota", quotas[0]["QuotaId"]))["Min"]["ResourceAmount"]["GPU"] == "2"
    assert [one["InstanceType"] for one in json.loads(ran(found, "get", "specs"))["EcsSpecs"]] == ["demo", "demo.1"]


def test_what_is_wrong_is_said_in_words(found: Server, tmp_path: Path) -> None:
    done = found.run("dlc", "get", "job", "dlc000")
    assert (done.code, done.out) == (2, "") and "There is no job dlc000." in done.err
    done = found.run("dlc", "get", "job", "-c", str(tmp_path / "none"))
    assert done.code == 2 and "There is no access key" in done.err and "Traceback" not in done.err
    (tmp_path / "key").write_text('{"access_key_id": "LTAIother", "access_key_secret": "x"}')
    assert "There is no such access key." in found.run("dlc", "get", "job", "-c", str(tmp_path / "key")).err
