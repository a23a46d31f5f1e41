"""`sublet trace`, `sublet replay` and `sublet compare`, from the command line to the page."""

import json
from pathlib import Path

import pytest

from sublet.cli import front
from sublet.sim.report import NAMES


@pytest.fixture
def stream(tmp_path: Path) -> tuple[str, str]:
    out, nodes = str(tmp_path / "s.csv"), str(tmp_path / "c.yaml")
    arguments = ["--quota", "a=16", "--quota", "b=8", "--days", "2", "--load", "0.9", "--seed", "4"]
    assert front.call(["trace", "generate", *arguments, "--out", out, "--cluster-out", nodes]) == 0
    return out, nodes


def test_replay_prints_the_metrics_as_json(stream: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert front.call(["replay", stream[0], "--cluster", stream[1], "--policy", "lend", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(NAMES)
    assert found["jobs"] == Path(stream[0]).read_text("utf-8").count("\n") - 1
    assert found["borrowed_share"] > 0


def test_replay_prints_a_table_and_writes_a_page(
    stream: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = ["--policy", "isolated", "--checkpoint-every", "10m", "--restart-cost", "5s", "--report", str(page)]
    assert front.call(["replay", stream[0], "--cluster", stream[1], *arguments]) == 0
    assert "waiting, mean" in capsys.readouterr().out
    assert "policy isolated" in page.read_text("utf-8")


def test_replay_is_the_same_every_time(stream: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert front.call(["replay", stream[0], "--cluster", stream[1], "--json"]) == 0
        found.append({key: value for key, value in json.loads(capsys.readouterr().out).items() if key != "wall_s"})
    assert found[0] == found[1]


def test_compare_puts_two_settings_side_by_side(stream: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    call = ["compare", stream[0], "isolated", "lend,checkpoint-every=5m,reserve=0", "--cluster", stream[1]]
    assert front.call(call) == 0
    assert "isolated  lend,checkpoint-every=5m,reserve=0" in capsys.readouterr().out
    assert front.call([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["metric"]: row for row in found["metrics"]}
    assert found["left"] == "isolated"
    assert rows["queue_mean_s"]["right"] < rows["queue_mean_s"]["left"]
    assert rows["evictions"]["left"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "{0}", "lend,hurry=1", "lend", "--cluster", "{1}"], "There is no setting 'hurry'"),
        (["compare", "{0}", "share", "lend", "--cluster", "{1}"], "There is no policy 'share'"),
        (["compare", "{0}", "lend,reserve=much", "lend", "--cluster", "{1}"], "no percentage"),
        (["replay", "{0}", "--cluster", "{1}", "--checkpoint-every", "often"], "no time"),
        (["replay", "{1}", "--cluster", "{1}"], "no job stream"),
        (["trace", "import", "itp", "{0}"], "not in the expected format"),
        (["trace", "generate", "--quota", "a"], "NAME=GPUS"),
    ],
)
def test_what_cannot_be_is_refused(
    stream: tuple[str, str], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert front.call([each.format(*stream) for each in arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_imported_trace_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "c01.csv"
    trace.write_text("job_id,submission_time,duration,num_gpu\nx,100,60,4\ny,160,60,8\n")
    out, nodes = str(tmp_path / "s.csv"), str(tmp_path / "c.yaml")
    assert front.call(["trace", "import", "itp", str(trace), "--out", out, "--cluster-out", nodes]) == 0
    assert front.call(["replay", out, "--cluster", nodes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == 2
