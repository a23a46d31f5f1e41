"""Several real processes over gloo: disjoint parts, one step, one commit, and another number of ranks afterwards."""

from pathlib import Path

from sublet.checkpoint.record import read_index
from sublet.checkpoint.store import listed
from tests.checkpoint.conftest import end_agent
from tests.checkpoint.programs import ranks


def test_a_sharded_run_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    two = ranks.together(ranks.save_sharded, 2, tmp_path, 3)
    four = ranks.together(ranks.load_sharded, 4, tmp_path)
    assert {each[0] for each in four} == set(two) and [each[1] for each in four] == [3] * 4
    assert [each[2] for each in four] == [0, 1, 0, 0]  # its own value, or that of rank 0 if it is new
    assert len({each[3] for each in four}) == 4  # no two ranks draw the same random numbers
    more = ranks.together(ranks.save_sharded, 4, tmp_path, 2)
    for world in (2, 3):
        found = ranks.together(ranks.load_sharded, world, tmp_path)
        assert {each[0] for each in found} == set(more) and [each[1] for each in found] == [5] * world


def test_replicas_write_disjoint_shares_and_restore_from_memory_together(tmp_path: Path) -> None:
    for name in ("never", "cut"):
        (tmp_path / name).mkdir()
    whole = ranks.together(ranks.ddp_run, 2, tmp_path / "never", 6, 0)
    first = ranks.together(ranks.ddp_run, 2, tmp_path / "cut", 6, 4)
    second = ranks.together(ranks.ddp_run, 2, tmp_path / "cut", 6, 0)
    for each in first:
        end_agent(each["agent"])
    assert [(each["start"], each["tier"]) for each in second] == [(4, "memory")] * 2
    assert {each["print"] for each in second} == {each["print"] for each in whole}
    one, other = (each["bytes"] for each in whole)
    assert abs(one - other) < 0.2 * (one + other)
    commit = listed(tmp_path / "never" / "ckpt")[0][0]
    parts = [read_index(tmp_path / "never" / "ckpt" / commit.name, rank) for rank in commit.ranks]
    rows = [(t.name, t.start) for part in parts for t in part.tensors if not t.per_rank]
    assert len(rows) == len(set(rows))


def test_a_notice_to_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    steps = ranks.together(ranks.noticed, 2, tmp_path)
    assert steps[0] == steps[1] and steps[0][0] >= 4 and steps[0][1]
    assert listed(tmp_path / "ckpt")[0][0].step == steps[0][0]


def test_a_rank_whose_disk_fails_once_does_not_tear_the_checkpoint(tmp_path: Path) -> None:
    outcome = ranks.together(ranks.one_rank_fails, 2, tmp_path)
    assert not all(first for first, _ in outcome)
    commits, damaged = listed(tmp_path / "ckpt")
    assert [commit.step for commit in commits] == [1] and damaged == []


def test_tensors_that_differ_in_shape_are_refused_on_all_ranks(tmp_path: Path) -> None:
    said = ranks.together(ranks.differing, 2, tmp_path)
    assert all("x differs between ranks" in each for each in said)
