"""Real trainers, real kills: what is complete stays, what comes back is bit for bit what was."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sublet.checkpoint import Checkpointer, Unavailable, checkpointer, copying
from sublet.checkpoint.client import Link
from sublet.checkpoint.slots import Slot
from sublet.checkpoint.store import Lock, listed
from tests.checkpoint.conftest import PROGRAMS, Run, end_agent, is_agent, until
from tests.checkpoint.small import crash, print_of, saved, small

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nothing disturbs and that saves nothing."""
    directory = tmp_path_factory.mktemp("plain")
    command = [sys.executable, str(PROGRAMS / "train.py"), str(directory), "30", "every=1000", "agent=0"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    said = [json.loads(line) for line in lines]
    return {each["step"]: each["loss"] for each in said if "loss" in each}


def test_after_a_crash_the_next_trainer_restores_from_memory(start: Start, uninterrupted: dict[int, str]) -> None:
    first = start(30, die_at=7, every=1, slots=3)
    assert first.finish() == -signal.SIGKILL
    second = start(30, every=1, slots=3)
    assert second.finish() == 0
    began = second.word("start")
    assert began["tier"] == "memory" and began["start"] == 7
    assert began["agent"] == first.word("start")["agent"]
    assert first.losses | second.losses == uninterrupted
    until(lambda: not is_agent(began["agent"]))


def test_any_number_of_interruptions_leaves_the_loss_curve_as_it_was(
    start: Start, uninterrupted: dict[int, str], tmp_path: Path
) -> None:
    losses: dict[int, str] = {}
    for die_at, without_memory in ((9, False), (14, True)):
        run = start(30, die_at=die_at, every=1, workers=2 if die_at == 9 else 0)
        assert run.finish() == -signal.SIGKILL
        losses |= run.losses
        if without_memory:
            end_agent(run.word("start")["agent"])
    last = start(30, every=1)
    assert last.finish() == 0
    assert losses | last.losses == uninterrupted


def test_an_agent_that_is_killed_costs_no_complete_copy(start: Start, tmp_path: Path) -> None:
    run = start(30, every=1, hold_at=9, hold_file=tmp_path / "go")
    run.hear("holding")
    agent = run.word("start")["agent"]
    os.kill(agent, signal.SIGKILL)
    until(lambda: not is_agent(agent))
    (tmp_path / "go").touch()
    assert run.finish() == 0
    assert run.word("done")["durable"]
    assert any("died" in message for message in run.word("done")["alarms"])
    assert listed(tmp_path / "ckpt")[0][0].step >= 9


AGENT_POINTS = [
    "begin", "complete", "chunk-write", "data-written", "data-synced", "index-written", "before-rename", "renamed",
    "committed", "retention-renamed",
]  # fmt: skip


@pytest.mark.parametrize("point", AGENT_POINTS)
@pytest.mark.parametrize("trainer_lives", [True, False], ids=["agent", "agent and trainer"])
def test_killed_at_any_point_there_are_never_fewer_checkpoints_and_nothing_is_left(
    point: str, trainer_lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2, width=64, keep=1)
    run = small(width=64)
    monkeypatch.setenv("SUBLET_CHECKPOINT_FAULT", f"{point}=die")
    ckpt = Checkpointer(tmp_path, every=1, keep=1)
    assert ckpt._link is not None
    loaded = ckpt.load(run.state)
    assert loaded is not None and loaded.step == 2
    monkeypatch.delenv("SUBLET_CHECKPOINT_FAULT")
    run.train()
    doomed = ckpt._link.agent_pid
    ckpt.save_now(3, run.state)
    until(lambda: not is_agent(doomed))
    if trainer_lives:
        ckpt.close()
        assert listed(tmp_path)[0][0].step == 3
    else:
        crash(ckpt)
        for pid in {doomed, ckpt._link.agent_pid}:
            end_agent(pid)
        assert listed(tmp_path)[0][0].step >= 2
    again, other = small(width=64), print_of(run.state)
    with Checkpointer(tmp_path, every=1, keep=1) as third:
        found = third.load(again.state)
        assert found is not None
        if found.step == 3:
            assert print_of(again.state) == other
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("tmp-", "gone-"))] == []


def test_the_agent_goes_with_the_launcher_after_writing_what_is_unwritten(tmp_path: Path) -> None:
    launcher = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    program = [sys.executable, str(PROGRAMS / "train.py"), str(tmp_path / "ckpt"), "30", "die_at=8", "every=4"]
    done = subprocess.run([sys.executable, "-c", launcher, *program], capture_output=True, text=True, check=False)
    agent = json.loads(done.stdout.splitlines()[0])["agent"]
    until(lambda: not is_agent(agent))
    assert listed(tmp_path / "ckpt")[0][0].step == 8


def test_the_agent_goes_when_its_directory_goes(tmp_path: Path) -> None:
    run, ckpt = small(64), Checkpointer(tmp_path / "ckpt", every=1)
    assert ckpt.save_now(1, run.state, wait=True) and ckpt._link is not None
    agent = ckpt._link.agent_pid
    crash(ckpt)
    assert is_agent(agent)
    shutil.rmtree(tmp_path / "ckpt")
    until(lambda: not is_agent(agent))


def test_a_second_trainer_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as first:
        with pytest.raises(Unavailable, match="in use"):
            Checkpointer(tmp_path)
        assert first.save_now(1, small(64).state, wait=True)


def test_two_trainers_without_agents_cannot_write_one_directory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, agent=False), pytest.raises(Unavailable, match="another trainer"):
        Lock(tmp_path)
    Lock(tmp_path).release()


def test_too_little_memory_is_said_and_saves_go_to_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_CHECKPOINT_BUDGET_BYTES", "0")
    run = small(64)
    with Checkpointer(tmp_path, every=1) as ckpt:
        assert ckpt.step(1, run.state) and listed(tmp_path)[0][0].step == 1
        said = [event.message for event in ckpt.events if event.kind == "degraded"]
        assert said and "0 of 2 copies" in said[0]


def test_memory_for_one_copy_makes_one_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_CHECKPOINT_BUDGET_BYTES", str(3 << 20))
    run = small(64)
    with Checkpointer(tmp_path, every=1) as ckpt:
        ckpt.prepare(run.state, wait=True)
        assert ckpt._link is not None and len(ckpt._link.slots) == 1
        assert "1 of 2 copies" in next(event.message for event in ckpt.events if event.kind == "degraded")
        assert ckpt.save_now(1, run.state, wait=True)


def test_one_slot_is_enough_and_is_written_over_only_when_it_is_on_disk(tmp_path: Path) -> None:
    run, ckpt = small(64), Checkpointer(tmp_path, every=1, slots=1)
    assert ckpt.save_now(1, run.state)
    assert not ckpt.save_now(2, run.state) or listed(tmp_path)[0][0].step == 1  # put off unless the disk was faster
    run.train()
    assert ckpt.save_now(3, run.state, wait=True)
    before = print_of(run.state)
    crash(ckpt)
    again = small(64)
    with Checkpointer(tmp_path, slots=1) as ckpt:
        loaded = ckpt.load(again.state)
        assert loaded is not None and (loaded.step, loaded.tier) == (3, "memory")
    assert print_of(again.state) == before


def test_a_copy_that_is_being_made_is_on_its_way_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer goes on, stands still for a while, and goes on again: each time the bits are right."""
    real, seen = checkpointer.tell_copied, [0]
    monkeypatch.setattr(copying, "TELL_BYTES", 1 << 16)
    run = small(500)

    def tell(link: Link, slot: Slot, size: int, copy: dict[str, Any]) -> None:
        real(link, slot, size, copy)
        if size > 0.95 * copy["stream_bytes"] and copy["step"] <= 2:
            until(lambda: list(tmp_path.glob("tmp-step-*/*.data")))
            seen[0] += 1
            if copy["step"] == 2:
                until(lambda: not list(tmp_path.glob("tmp-step-*")))  # given up

    monkeypatch.setattr(checkpointer, "tell_copied", tell)
    with Checkpointer(tmp_path, every=1, keep=9, chunk_bytes=1 << 16) as ckpt:
        prints = {}
        for step in (1, 2, 3):
            run.train()
            assert ckpt.save_now(step, run.state, wait=True)
            prints[step] = print_of(run.state)
        assert [event.kind for event in ckpt.events if event.kind == "alarm"] == []
    assert seen[0] >= 2
    with Checkpointer(tmp_path, agent=False) as ckpt:
        for step in (1, 2, 3):
            again = small(500)
            assert ckpt.load(again.state, step=step) is not None and print_of(again.state) == prints[step]


def test_a_trainer_killed_in_the_middle_of_a_copy_leaves_the_copy_before(
    start: Start, uninterrupted: dict[int, str], tmp_path: Path
) -> None:
    """Of this state a copy tells about ten times how far it is; the sixth save dies at one of them."""
    options: dict[str, object] = {"every": 1, "wait_each": 1, "tell_bytes": 4096, "chunk_bytes": 4096}
    first = start(30, env={"SUBLET_CHECKPOINT_FAULT": "copying@62=die"}, **options)
    assert first.finish() == -signal.SIGKILL
    died = max(first.losses)
    second = start(30, every=1, wait_each=1)
    assert second.finish() == 0
    began = second.word("start")
    assert began["start"] == died - 1 and began["tier"] == "memory"
    assert first.losses | second.losses == uninterrupted
    assert not list((tmp_path / "ckpt").glob("tmp-*"))


def meets_another(ckpt: Checkpointer, agents: set[int]) -> bool:
    return ckpt.notice is None and ckpt._link is not None and ckpt._link.agent_pid not in agents


def test_the_next_agent_knows_which_copy_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three saves in two slots: the newest lies in the first slot. The disk takes none, and the agent dies."""
    run = small(64)
    monkeypatch.setenv("SUBLET_CHECKPOINT_FAULT", "data-written=errno:EIO")
    ckpt = Checkpointer(tmp_path, every=1, slots=2)
    for step in (1, 2, 3):
        run.train()
        until(lambda: ckpt.save_now(step, run.state))  # noqa: B023  the disk may be at the other slot just now
    wanted = print_of(run.state)
    assert ckpt._link is not None
    agents = {ckpt._link.agent_pid}
    for _ in range(2):
        end_agent(ckpt._link.agent_pid)
        until(lambda: meets_another(ckpt, agents))
        agents.add(ckpt._link.agent_pid)
    until(lambda: ckpt.save_now(4, run.state))  # over the older of the two
    crash(ckpt)
    again = small(64)
    with Checkpointer(tmp_path, every=1) as second:
        loaded = second.load(again.state)
        assert loaded is not None and (loaded.step, loaded.tier) == (4, "memory")
        assert second.load(small(64).state, step=3) is not None
    assert print_of(again.state) == wanted


def test_a_copy_of_ones_own_is_loaded_from_memory_before_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_CHECKPOINT_FAULT", "data-written=errno:EIO")  # it stays in memory alone
    run = small(64)
    with Checkpointer(tmp_path, every=1) as ckpt:
        run.train()
        until(lambda: ckpt.save_now(1, run.state))
        run.train()
        before = print_of(run.state)
        until(lambda: ckpt.save_now(2, run.state))
        run.train()
        loaded = ckpt.load(run.state)
        assert loaded is not None and (loaded.step, loaded.tier) == (2, "memory")
        assert print_of(run.state) == before


def test_an_agent_whose_disk_fails_for_good_goes_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies are unwritten: nobody would ever ask for the older one."""
    run = small(64)
    monkeypatch.setenv("SUBLET_CHECKPOINT_FAULT", "data-written=errno:EIO")
    ckpt = Checkpointer(tmp_path, every=1)
    assert ckpt._link is not None
    agent = ckpt._link.agent_pid
    for step in (1, 2):
        until(lambda at=step: ckpt.save_now(at, run.state))  # type: ignore[misc]
    ckpt.close()
    until(lambda: not is_agent(agent))
    assert any("tried again" in event.message for event in ckpt.events)
