"""What a program says through `sublet.job` is what the supervisor reads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.supervisor import report

SOURCE = Path(report.__file__).parents[1] / "job.py"


def run(directory: Path, program: str, **more: str) -> str:
    """The program's output; it imports `job` alone, as in an image that has nothing else of ours."""
    (directory / "only").mkdir()
    (directory / "only" / "job.py").write_text(SOURCE.read_text("utf-8"))
    environment = {"SUBLET_REPORT_FILE": f"{directory}/report.jsonl", "SUBLET_NOTICE_FILE": f"{directory}/notice.json"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env=environment | {"PYTHONPATH": str(directory / "only")} | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_steps_are_timed_without_what_is_done_aside(tmp_path: Path) -> None:
    run(
        tmp_path,
        "import time\nfrom job import phase, progress\n"
        "for step in range(1, 6):\n"
        "    time.sleep(.01)\n"
        "    if step == 3:\n"
        "        with phase('save'): time.sleep(.3)\n"
        "    progress(step, 5)\n",
        RANK="3",
        LOCAL_RANK="1",
    )
    (rank,) = report.ranks(str(tmp_path))
    assert (tmp_path / "progress.1").exists()
    assert (rank.rank, rank.step, rank.total, rank.steps, rank.phase) == ("3", 5, 5, 4, "")
    assert 10 <= rank.step_ms <= rank.longest_ms < 300
    assert rank.is_through and report.is_finished(str(tmp_path), 0, was_noticed=True)
    assert not report.is_finished(str(tmp_path), 137, was_noticed=False) and report.phase_of(str(tmp_path)) == "exit"


def test_a_phase_is_seen_while_it_lasts(tmp_path: Path) -> None:
    run(tmp_path, "import os\nfrom job import phase, progress\nprogress(1)\nphase('save').__enter__()\nos._exit(0)")
    assert report.phase_of(str(tmp_path)) == "save" and not report.is_finished(str(tmp_path), 0, was_noticed=True)


def test_waiting_for_others_is_no_work_of_ones_own(tmp_path: Path) -> None:
    program = "import time\nfrom job import progress, waiting\nfor step in range(20):\n    time.sleep(.002)\n"
    run(tmp_path, program + "    with waiting(): time.sleep(.02)\n    progress(step)\n")
    (rank,) = report.ranks(str(tmp_path))
    assert rank.busy_ms is not None and 2 <= rank.busy_ms < rank.step_ms - 15


def test_outside_of_sublet_every_call_does_nothing(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        "import job\njob.progress(1, 1)\njob.checkpointed(1)\njob.finished()\nprint(job.notice.received())\n"
        "with job.phase('save'): pass",
        SUBLET_REPORT_FILE="",
        SUBLET_NOTICE_FILE="",
    )
    assert out == "False\n" and [path.name for path in Path(tmp_path).iterdir()] == ["only"]


def test_a_notice_is_seen_and_read(tmp_path: Path) -> None:
    (tmp_path / "notice.json").write_text(json.dumps({"deadline_ms": 5, "reason": "reclaim", "claimant": "job_b"}))
    out = run(tmp_path, "from job import notice\nprint(notice.received(), notice.read()['claimant'])")
    assert out == "True job_b\n"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', "\0" * 600])
def test_what_is_not_whole_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.0").write_text(text)
    assert report.ranks(str(tmp_path)) == []


def test_a_step_costs_little(tmp_path: Path) -> None:
    """One small write a step, and a file that does not grow."""
    run(tmp_path, "from job import progress\nfor step in range(2_000): progress(step)")
    assert (tmp_path / "progress.0").stat().st_size == 512
