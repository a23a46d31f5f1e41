"""Each claim of the demo can fail: shown what is not so, it says that it does not hold."""

import json
import os
from pathlib import Path
from typing import Any

from sublet.demo import checks

BEN: dict[str, Any] = {
    "job": {"state": "succeeded", "restarts": 0, "max_restarts": 3, "preemptions": 1},
    "attempts": [
        {"outcome": "preempted", "idle_resources": "not_in_quota"},
        {"outcome": "succeeded", "idle_resources": "not_in_quota"},
    ],
}


def instance(base: Path, job: str, devices: list[int], begun_ms: int, ended_ms: int | None) -> None:
    directory = base / job / "1" / "0"
    directory.mkdir(parents=True)
    (directory / "start.json").write_text(json.dumps({"node": "n1", "devices": devices, "mark": f"{job}#1/0"}))
    (directory / "starting").write_text("{}")
    os.utime(directory / "starting", ns=(begun_ms * 1_000_000, begun_ms * 1_000_000))
    if ended_ms is not None:
        (directory / "end.json").write_text(json.dumps({"ended_ms": ended_ms}))


def test_one_owner_after_the_other(tmp_path: Path) -> None:
    instance(tmp_path, "job_a", [0, 1], 1_000, 2_000)
    instance(tmp_path, "job_b", [0, 1], 2_000, 3_000)
    assert checks.one_owner_a_device(tmp_path).holds


def test_two_owners_at_once(tmp_path: Path) -> None:
    instance(tmp_path, "job_a", [0, 1], 1_000, 2_001)
    instance(tmp_path, "job_b", [1], 2_000, 3_000)
    claim = checks.one_owner_a_device(tmp_path)
    assert not claim.holds and claim.evidence == "n1 device 1: job_a#1/0 and job_b#1/0"


def test_who_has_not_ended_holds_on(tmp_path: Path) -> None:
    instance(tmp_path, "job_a", [0], 1_000, None)
    instance(tmp_path, "job_b", [0], 2_000, 3_000)
    assert not checks.one_owner_a_device(tmp_path).holds


def test_no_files_are_no_proof(tmp_path: Path) -> None:
    assert not checks.one_owner_a_device(tmp_path).holds
    assert [claim.holds for claim in checks.same_result(tmp_path / "a", tmp_path / "b")] == [False, False]


def result(directory: Path, loss: float, parameters: str) -> Path:
    directory.mkdir()
    (directory / "result.json").write_text(json.dumps({"loss": loss.hex(), "parameters": parameters}))
    return directory


def test_the_last_bit_of_the_loss_counts(tmp_path: Path) -> None:
    first, second = result(tmp_path / "a", 0.1 + 0.2, "aa"), result(tmp_path / "b", 0.3, "ab")
    assert [claim.holds for claim in checks.same_result(first, second)] == [False, False]
    assert [claim.holds for claim in checks.same_result(first, first)] == [True, True]


def test_what_ben_went_through() -> None:
    assert checks.lent_twice(BEN).holds and checks.both_succeeded(BEN, BEN).holds
    in_quota = {**BEN, "attempts": [BEN["attempts"][0], {"outcome": "succeeded", "idle_resources": "in_quota"}]}
    assert not checks.lent_twice(in_quota).holds
    assert not checks.lent_twice({**BEN, "attempts": BEN["attempts"][1:]}).holds
    assert not checks.both_succeeded(BEN, {"job": {"state": "failed"}}).holds
    assert checks.budget_untouched(BEN["job"]).holds
    assert not checks.budget_untouched({**BEN["job"], "restarts": 1}).holds
    assert not checks.budget_untouched({**BEN["job"], "preemptions": 0}).holds


def event(kind: str, job: str, **more: str) -> dict[str, str]:
    return {"type": kind, "job": job, "time": "2026-12-01T09:00:00.000Z", "text": "", **more}


def test_the_first_submit_time_is_kept() -> None:
    again = event("requeued", "b", text="with its first submit time 09:00:00 UTC")
    first = "2026-12-01T09:00:00.000Z"
    assert checks.submit_time_kept([event("queued", "b"), again], first).holds
    assert not checks.submit_time_kept([event("queued", "b"), again], "2026-12-01T09:00:01.000Z").holds
    assert not checks.submit_time_kept([event("queued", "b"), event("queued", "b"), again], first).holds
    assert not checks.submit_time_kept([event("queued", "b")], first).holds


def test_nothing_is_granted_that_is_not_released() -> None:
    gpus = {"a": 2, "b": 2}
    story = [event("granted", "b"), event("preempted", "b"), event("granted", "a"), event("released", "a")]
    assert checks.never_more_than_there_is(story, gpus, 2).holds
    assert not checks.never_more_than_there_is([story[0], story[2], story[1], story[3]], gpus, 2).holds
    assert not checks.never_more_than_there_is(story[:3], gpus, 2).holds
    assert not checks.never_more_than_there_is([], gpus, 2).holds
