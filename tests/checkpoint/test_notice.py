"""A coming stop: the agent hears it, the next step saves, or the newest copy goes to disk;
then a stop is called safe.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.checkpoint import Checkpointer, notice
from sublet.checkpoint.store import listed
from tests.checkpoint.conftest import Run, until
from tests.checkpoint.small import small

Start = Callable[..., Run]


def give(path: Path, grace_ms: int) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"deadline_ms": notice.now_ms() + grace_ms, "reason": "team-a needs its GPUs"}))
    part.rename(path)


def test_the_next_step_saves_afresh_and_the_trainer_leaves(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "notice"
    run = start(100_000, every=1_000_000, pace_ms=5, env={"SUBLET_NOTICE_FILE": str(file)})
    run.hear("step")
    give(file, 30_000)
    assert run.finish() == 85
    stopped = run.word("stopped")["stopped"]
    said = notice.read_safe(file)
    assert said is not None and (said["step"], said["fresh"]) == (stopped, True)
    assert said["at_ms"] < json.loads(file.read_text())["deadline_ms"]
    assert listed(tmp_path / "ckpt")[0][0].step == stopped


def test_a_trainer_that_sits_in_one_call_loses_no_more_than_the_newest_copy(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "notice"
    run = start(30, every=4, hold_at=6, hold_file=tmp_path / "go", env={"SUBLET_NOTICE_FILE": str(file)})
    run.hear("holding")
    give(file, 1_000)
    said = until(lambda: notice.read_safe(file))
    assert (said["step"], said["fresh"]) == (4, False)
    run.process.kill()


def test_a_signal_is_heard_while_the_main_thread_is_busy(start: Start, tmp_path: Path) -> None:
    run = start(100_000, every=1_000_000, pace_ms=5, signals="SIGTERM")
    run.hear("step")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 85
    assert listed(tmp_path / "ckpt")[0][0].step == run.word("stopped")["stopped"]


def test_a_dead_trainer_makes_the_newest_copy_safe_at_once(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "notice"
    run = start(30, every=1, slots=3, die_at=9, env={"SUBLET_NOTICE_FILE": str(file)})
    run.finish()
    give(file, 600_000)
    said = until(lambda: notice.read_safe(file))
    assert said["step"] == 9 and listed(tmp_path / "ckpt")[0][0].step == 9


def test_a_notice_may_be_withdrawn(tmp_path: Path) -> None:
    file, run = tmp_path / "notice", small(64)
    with Checkpointer(tmp_path / "ckpt", every=1_000_000, notice_file=str(file)) as ckpt:
        give(file, 60_000)
        until(lambda: ckpt.notice)
        assert ckpt.step(1, run.state) and ckpt.should_stop()
        until(lambda: notice.read_safe(file))
        file.unlink()
        until(lambda: ckpt.notice is None)
        assert not ckpt.should_stop() and notice.read_safe(file) is None


def test_a_notice_by_call_and_a_safe_point_between_steps(tmp_path: Path) -> None:
    run = small(64)
    with Checkpointer(tmp_path, every=1_000_000) as ckpt:
        ckpt.safe_point()
        ckpt.step(1, run.state)
        assert not ckpt.safe_point()
        ckpt.give_notice(notice.now_ms() + 60_000)
        assert ckpt.safe_point() and ckpt.should_stop()
        assert not ckpt.safe_point()
    assert [commit.step for commit in listed(tmp_path)[0]] == [1]


def test_the_deadline_leaves_time_for_a_write() -> None:
    watch = notice.Watch(write_ms=4_000)
    notice.heard(watch, 100_000, "")
    assert notice.answer_by_ms(watch) == 100_000 - 5_000 - notice.MARGIN_MS


def test_a_notice_that_cannot_be_read_is_a_notice_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000]
    monkeypatch.setattr(notice, "now_ms", lambda: now[0])
    (tmp_path / "n").write_text('{"deadline_ms": ')
    watch = notice.Watch(path=tmp_path / "n")
    assert watch.look() == ""
    now[0] += 2_000
    assert watch.look() == "heard" and watch.deadline_ms == now[0] + notice.DEFAULT_GRACE_MS
