"""What lies on the disk: it comes back bit for bit, or it is not taken. No damage goes unseen, none is loaded."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.checkpoint import Broken, Checkpointer, Keep, Refused, Unavailable
from sublet.checkpoint.layout import CHUNK_BYTES
from sublet.checkpoint.read import verify
from sublet.checkpoint.record import COMMIT
from sublet.checkpoint.retention import doomed
from sublet.checkpoint.state import decode, flatten
from sublet.checkpoint.store import find, in_use, listed, remove
from tests.checkpoint.small import print_of, saved, small

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=20),
    st.sampled_from([torch.float16, torch.device("cpu"), complex(1, -2), float("inf")]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.one_of(st.text(max_size=5), st.integers(-9, 9)), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_a_tree_of_values_comes_back_as_it_was(value: Any) -> None:
    tree = json.loads(json.dumps(flatten(value).tree, allow_nan=False))
    assert decode(tree, lambda name: torch.empty(0)) == value


def test_every_dtype_shape_and_number_comes_back(tmp_path: Path) -> None:
    names = [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "float8_e4m3fn",
    ]
    state = {name: torch.arange(7).to(torch.float32).to(getattr(torch, name)).reshape(7, 1) for name in names}
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "turned": torch.arange(6.0).reshape(2, 3).T}
    state |= {
        "numpy": np.arange(5, dtype=np.uint16),
        "one": np.float32(0.1),
        "nan": float("nan"),
        "tied": state["float32"],
    }
    with Checkpointer(tmp_path, agent=False) as ckpt:
        assert ckpt.save_now(1, state)
        loaded = ckpt.load()
    assert loaded is not None
    for key, value in state.items():
        found = loaded.state[key]
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and found.shape == value.shape
            assert print_of(found.contiguous()) == print_of(value.contiguous())
        elif key != "nan":
            assert type(found) is type(value) and np.array_equal(found, value)
    assert loaded.state["nan"] != loaded.state["nan"]
    assert loaded.state["tied"] is loaded.state["float32"]


def test_what_would_need_pickle_is_refused_with_its_path(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, agent=False) as ckpt, pytest.raises(Refused, match=r"a/b/1 cannot be kept"):
        ckpt.save_now(1, {"a": {"b": [1, object()]}})


def test_a_stranger_can_read_the_format_with_nothing_but_its_description(tmp_path: Path) -> None:
    """The reader of docs/explanation/checkpoints.md, word by word."""
    prints = saved(tmp_path, 1, agent=False, chunk_bytes=8192)
    directory = next(tmp_path.glob("step-*"))
    line, tail = (directory / "COMMIT").read_bytes().split(b"\n", 1)
    assert tail.split() == [b"xxh3-128", xxhash.xxh3_128_hexdigest(line + b"\n").encode()]
    rank = json.loads(line)["ranks"][0]
    raw = (directory / rank["index"]["name"]).read_bytes()
    assert xxhash.xxh3_128_hexdigest(raw) == rank["index"]["xxh3_128"]
    index = json.loads(raw.split(b"\n")[0])
    stream = b""
    for file, offset, size, digest, _ in index["chunks"]:
        data = (directory / file).read_bytes()[offset : offset + size]
        assert xxhash.xxh3_128_hexdigest(data) == digest
        stream += data
    for name, dtype, shape, _, _, offset, per_rank in index["tensors"]:
        if not per_rank:
            size = int(np.prod(shape)) * {"float32": 4, "int64": 8}[dtype]
            assert stream[offset : offset + size] == prints[1][name]


FLIPS = 12


def test_any_flipped_bit_is_seen_and_the_checkpoint_before_is_taken(tmp_path: Path) -> None:
    prints = saved(tmp_path, 2, width=64, agent=False, chunk_bytes=16384)
    newest = listed(tmp_path)[0][0]
    rng = random.Random(7)
    files = sorted((tmp_path / newest.name).iterdir())
    for number in range(FLIPS):
        path = files[number % len(files)]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        run = small(64)
        with Checkpointer(tmp_path, agent=False) as ckpt:
            loaded = ckpt.load(run.state)
        assert loaded is not None and loaded.step == 1 and print_of(run.state) == prints[1]
        assert loaded.hops[0].step == 2 and loaded.hops[0].why
        with Checkpointer(tmp_path, agent=False) as ckpt:
            alone = ckpt.load()
        assert alone is not None and alone.step == 1
        path.write_bytes(good)


@pytest.mark.parametrize("damage", ["cut", "gone", "longer", "empty"])
def test_a_file_of_another_length_is_seen(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, width=64, agent=False)
    commit = listed(tmp_path)[0][0]
    path = next((tmp_path / commit.name).glob("*.data"))
    data = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(
        {"cut": data[:-1], "longer": data + b"x", "empty": b""}[damage]
    )
    with pytest.raises(Broken):
        verify(tmp_path, commit)


def test_if_nothing_holds_the_state_is_as_it_was_and_it_is_said(tmp_path: Path) -> None:
    saved(tmp_path, 2, width=64, agent=False)
    for path in tmp_path.glob("step-*/*.data"):
        path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    run = small(64)
    run.train()
    before = print_of(run.state)
    with Checkpointer(tmp_path, agent=False) as ckpt, pytest.raises(Unavailable, match="No checkpoint"):
        ckpt.load(run.state)
    assert print_of(run.state) == before


def test_a_model_that_does_not_fit_is_refused_and_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 1, width=64, agent=False)
    other = small(65)
    before = print_of(other.state)
    with Checkpointer(tmp_path, agent=False) as ckpt, pytest.raises(Refused, match="64"):
        ckpt.load(other.state)
    assert print_of(other.state) == before
    wider = small(64).state | {"more": torch.zeros(3)}
    with Checkpointer(tmp_path, agent=False) as ckpt:
        with pytest.raises(Refused, match="more is not in it"):
            ckpt.load(wider)
        assert ckpt.load(wider, strict=False) is not None


def test_frozen_weights_cost_nothing_twice(tmp_path: Path) -> None:
    run = small(600)
    for parameter in run.model[1].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    run.optimizer = torch.optim.AdamW(run.model[0].parameters())  # type: ignore[index]
    run.state["optimizer"] = run.optimizer
    prints, fresh = {}, []
    with Checkpointer(tmp_path, every=1, keep=2, chunk_bytes=65536, agent=False) as ckpt:
        for step in range(1, 7):
            run.train()
            ckpt.save_now(step, run.state)
            prints[step] = print_of(run.state)
            fresh.append(next(e for e in reversed(ckpt.events) if e.kind == "durable").facts["fresh_bytes"])
    assert fresh[0] > 600 * 600 * 4 and all(each < 300_000 for each in fresh[1:])
    assert sum({p.stat().st_ino: p.stat().st_size for p in tmp_path.glob("step-*/*.data")}.values()) < 1.5 * fresh[0]
    for step in (5, 6):
        again = small(600)
        again.state["optimizer"] = torch.optim.AdamW(again.model[0].parameters())  # type: ignore[index]
        with Checkpointer(tmp_path, agent=False) as ckpt:
            assert ckpt.load(again.state, step=step) is not None
        assert print_of(again.state) == prints[step]


def test_a_file_of_which_little_is_used_is_let_go(tmp_path: Path) -> None:
    """A third is frozen: the first file may not stay for ever for its sake."""
    state = {"frozen": torch.zeros(100_000), "moving": torch.zeros(200_000)}
    with Checkpointer(tmp_path, keep=1, chunk_bytes=65536, agent=False) as ckpt:
        for step in range(1, 6):
            state["moving"].fill_(step)
            ckpt.save_now(step, state)
    sizes = {p.stat().st_ino: p.stat().st_size for p in tmp_path.glob("step-*/*.data")}
    assert sum(sizes.values()) < 1.2 * 1_200_000
    with Checkpointer(tmp_path, agent=False) as ckpt:
        loaded = ckpt.load()
    assert loaded is not None and float(loaded.state["moving"].sum()) == 5 * 200_000


def test_retention_keeps_last_every_best_and_pinned(tmp_path: Path) -> None:
    state = {"x": torch.zeros(3)}
    keep = Keep(last=2, every=4, best=1)
    with Checkpointer(tmp_path, keep=keep, agent=False) as ckpt:
        for step, metric in zip(range(1, 11), [9.0, 8, 1, 7, 6, 6, 6, 6, 6, 6], strict=True):
            ckpt.save_now(step, state, metric=metric)
            if step == 2:
                (tmp_path / find(tmp_path, "2").name / "PINNED").touch()
    assert [commit.step for commit in listed(tmp_path)[0]] == [10, 9, 8, 4, 3, 2]
    assert doomed([], keep) == []
    commit = find(tmp_path, "3")
    with in_use(tmp_path, commit.name):
        assert not remove(tmp_path, commit.name)
    assert remove(tmp_path, commit.name) and find(tmp_path, "4").step == 4


@pytest.mark.parametrize("point", ["chunk-write", "data-written", "before-rename", "renamed"])
@pytest.mark.parametrize("trouble", ["ENOSPC", "EIO", "EROFS", "EDQUOT"])
def test_a_disk_that_fails_costs_one_save_and_no_checkpoint(
    point: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, width=64, agent=False)
    run = small(64)
    monkeypatch.setenv("SUBLET_CHECKPOINT_FAULT", f"{point}=errno:{trouble}")
    with Checkpointer(tmp_path, agent=False) as ckpt:
        run.train()
        run.train()
        assert not ckpt.save_now(2, run.state)
        assert [event.kind for event in ckpt.events] == ["alarm"]
        assert [commit.step for commit in listed(tmp_path)[0]] == [1]
        assert not list(tmp_path.glob("tmp-*"))
        monkeypatch.delenv("SUBLET_CHECKPOINT_FAULT")
        assert ckpt.save_now(2, run.state)
    assert [commit.step for commit in listed(tmp_path)[0]] == [2, 1]


def test_the_agent_tries_again_until_the_disk_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(64)
    monkeypatch.setenv("SUBLET_CHECKPOINT_FAULT", "data-written@1=errno:ENOSPC")
    with Checkpointer(tmp_path, every=1) as ckpt:
        ckpt.save_now(1, run.state)
        assert not ckpt.wait("30s")
        assert "tried again" in next(event.message for event in ckpt.events if event.kind == "alarm")
        assert ckpt.wait("30s")
    assert [commit.step for commit in listed(tmp_path)[0]] == [1]


def test_a_file_system_without_direct_writes_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from sublet.checkpoint import disk

    real, refused = os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no direct writes here")
        return real(fd, data, offset)

    monkeypatch.setattr(disk.os, "pwrite", pwrite)
    prints = saved(tmp_path, 1, agent=False)
    run = small()
    with Checkpointer(tmp_path, agent=False) as ckpt:
        ckpt.load(run.state)
    assert print_of(run.state) == prints[1]


def test_a_record_that_leads_out_of_its_directory_is_not_followed(tmp_path: Path) -> None:
    from sublet.checkpoint.record import seal, unseal

    saved(tmp_path, 1, width=64, agent=False)
    path = next(tmp_path.glob("step-*")) / COMMIT
    value = unseal(path.read_bytes(), "")
    value["ranks"][0]["files"][0]["name"] = "../../etc/passwd"
    path.write_bytes(seal(value))
    assert listed(tmp_path)[0] == [] and len(listed(tmp_path)[1]) == 1


def test_a_checkpoint_of_the_default_chunk_size_spans_several(tmp_path: Path) -> None:
    state = {"x": torch.randn(CHUNK_BYTES // 4 * 2 + 77)}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save_now(1, state, wait=True)
    with Checkpointer(tmp_path) as ckpt:
        loaded = ckpt.load()
    assert loaded is not None and torch.equal(loaded.state["x"], state["x"])
