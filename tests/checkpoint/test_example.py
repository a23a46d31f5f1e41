"""examples/03-resume as its README tells it: killed, noticed, resumed; the end is the same bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from sublet.checkpoint.notice import now_ms

PROGRAM = Path(__file__).parents[2] / "examples" / "03-resume" / "train.py"


def begin(directory: Path, steps: int, **env: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(PROGRAM), "--steps", str(steps), "--directory", str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})


def read_to(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if text in line)


def test_the_end_is_the_same_however_it_was_stopped(tmp_path: Path) -> None:
    whole = begin(tmp_path / "whole", 24)
    expected = read_to(whole, "done")
    assert whole.wait() == 0

    cut = begin(tmp_path / "cut", 24)
    read_to(cut, "step 9 ")
    cut.send_signal(signal.SIGKILL)
    cut.wait()

    file = tmp_path / "notice"
    noticed = begin(tmp_path / "cut", 24, SUBLET_NOTICE_FILE=str(file))
    assert "from memory" in read_to(noticed, "from step")
    file.write_text(json.dumps({"deadline_ms": now_ms() + 60_000, "reason": "a test"}))
    noticed.communicate()
    assert noticed.returncode in (85, 0)  # it may have come to its end before it heard
    file.unlink()

    last = begin(tmp_path / "cut", 24)
    assert read_to(last, "done") == expected
    assert last.wait() == 0
