"""The demo's training, killed for real again and again: in the end every bit is as if nothing had happened.

The moments are drawn from a seed, which is printed; SUBLET_SEED runs another one.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STEPS, SAVE_EVERY, KILLS = 60, 8, 3


@contextmanager
def training(out: Path, instance: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """`instance`: the directory where a supervisor would write the notice and read the report."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SUBLET_")}
    if instance is not None:
        kept |= {"SUBLET_NOTICE_FILE": f"{instance}/notice.json", "SUBLET_REPORT_FILE": f"{instance}/report.jsonl"}
    command = [sys.executable, "-m", "sublet.demo.train", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE, text=True, env=kept) as process:
        try:
            yield process
        finally:
            process.kill()


def reads_until_step(process: subprocess.Popen[str], step: int) -> list[int]:
    """The steps it tells, up to this one or to its end."""
    assert process.stdout is not None
    told: list[int] = []
    for line in process.stdout:
        told += map(int, re.findall(r"^step (\d+) loss", line))
        if told and told[-1] >= step:
            break
    return told


def result(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / "result.json").read_text())
    return found


def saved(out: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in out.glob("step-*.pt"))


@pytest.mark.timeout(200)
def test_kills_and_notices_change_no_bit(tmp_path: Path) -> None:
    seed = int(os.environ.get("SUBLET_SEED", "20261201"))
    print(f"seed {seed}, {KILLS} kills")
    chance, out, instance = random.Random(seed), tmp_path / "interrupted", tmp_path / "instance"
    instance.mkdir()
    with training(tmp_path / "whole") as process:
        assert reads_until_step(process, STEPS + 1) == list(range(1, STEPS + 1))
        assert process.wait() == 0
    for at in sorted(chance.sample(range(2, STEPS - 12), KILLS)):
        before = saved(out)[-1:] or [0]
        with training(out) as process:
            told = reads_until_step(process, at)
            process.send_signal(signal.SIGKILL)
        assert told[:1] == [before[0] + 1], "it did not go on from its newest checkpoint"
        assert not (out / "result.json").exists()
    with training(out, instance) as process:
        first, *_ = reads_until_step(process, 1)
        (instance / "notice.json").write_text("{}")
        rest = reads_until_step(process, STEPS)
        assert process.wait() == 85
    left_at = saved(out)[-1]
    assert left_at == (rest or [first])[-1] < STEPS, "it left at another step than it saved"
    report = [json.loads(line) for line in (instance / "report.jsonl").read_text().splitlines()]
    told = json.loads((instance / "progress.0").read_text())
    assert (told["step"], told["total"]) == (left_at, STEPS) and report[-1] == {"checkpoint": left_at}
    with training(out) as process:
        assert reads_until_step(process, STEPS + 1) == list(range(left_at + 1, STEPS + 1))
        assert process.wait() == 0
    assert result(out) == result(tmp_path / "whole")


@pytest.mark.timeout(100)
def test_a_save_that_was_cut_short_is_no_checkpoint(tmp_path: Path) -> None:
    """What a kill leaves of a save has another name; it is removed, and the training begins before it."""
    (tmp_path / "step-000059.new").write_bytes(b"half of a checkpoint")
    with training(tmp_path) as process:
        assert reads_until_step(process, 1) == [1]
    assert list(tmp_path.glob("*.new")) == []
