"""`sublet simulate`: what it prints, writes and refuses, and that it stays quick to start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.cli import front
from sublet.sim.faults import TroubledWorld

SCENARIO = """\
id: X
title: an owner takes back what was lent
source: here
nodes: [{name: n1, gpu: 4}]
quotas: [{name: A, gpu: 4}, {name: B, gpu: 0}]
jobs:
  - {id: b, quota: B, gpu: 4, idle: only, work: 10m, checkpoint: {every: 1m}}
  - {id: a, quota: A, gpu: 4, at: 150s, work: 1m}
until: 1h
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(SCENARIO)
    return path


def told(text: str) -> list[tuple[int, str, str]]:
    return [(line["at"], line["event"], line.get("job", "")) for line in map(json.loads, text.splitlines())]


def test_the_story_goes_to_standard_output(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.call(["simulate", str(scenario)]) == 0
    assert [line for line in told(capsys.readouterr().out) if line[1] not in ("quota", "waiting", "submitted")] == [
        (0, "granted", "b"), (150_000, "noticed", "b"), (151_000, "released", "b"), (151_000, "requeued", "b"),
        (151_000, "granted", "a"), (211_000, "released", "a"), (211_000, "ended", "a"), (211_000, "granted", "b"),
        (691_000, "released", "b"), (691_000, "ended", "b"),
    ]  # fmt: skip


def test_or_to_a_file(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    front.call(["simulate", str(scenario)])
    printed = capsys.readouterr().out
    assert front.call(["simulate", str(scenario), "--story", str(tmp_path / "story.jsonl")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "story.jsonl").read_text() == printed


def test_a_story_that_cannot_be_written(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = scenario.parent / "none" / "story.jsonl"
    assert front.call(["simulate", str(scenario), "--story", str(nowhere)]) == 75
    assert "cannot be written" in capsys.readouterr().err


def test_a_refused_scenario_names_its_line(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario.write_text(SCENARIO.replace("work: 10m", "wrok: 10m"))
    assert front.call(["simulate", str(scenario)]) == 2
    assert capsys.readouterr().err == (
        "Refused: jobs.0.wrok is not a known key. The nearest known key is jobs.0.work.   (x.yaml:7)\n"
        "Write jobs.0.work instead.\n"
    )


@pytest.mark.parametrize("arguments", [[], ["--faults", "-1"], ["--faults", "x"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert front.call(["simulate", *arguments]) == 2


def test_under_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.call(["simulate", "--faults", "3"]) == 0
    said = capsys.readouterr()
    assert "All held" in said.err and {"granted", "ended"} <= {line[1] for line in told(said.out)}


def test_what_does_not_hold_under_faults_is_our_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TroubledWorld, "left", lambda self: ["j07"])
    assert front.call(["simulate", "--faults", "3"]) == 70
    assert "j07 has not ended" in capsys.readouterr().err


def test_the_same_scenario_tells_the_same_story_whatever_the_hash_seed(scenario: Path) -> None:
    def story(seed: str) -> bytes:
        command = [sys.executable, "-m", "sublet", "simulate", str(scenario)]
        return subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout

    assert story("1") == story("2")


def test_it_starts_without_what_it_does_not_need(scenario: Path) -> None:
    heavy = "{'fastapi', 'sqlalchemy', 'pydantic', 'torch', 'rich', 'uvicorn', 'asyncio', 'numpy'}"
    code = (
        f"import sys; from sublet.cli import front; front.call(sys.argv[1:]); sys.exit(str({heavy} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "simulate", str(scenario)], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "set()"
