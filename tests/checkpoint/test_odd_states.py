"""States and records that nobody would think of: bit for bit what they were, or refused with a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sublet.checkpoint import Broken, Checkpointer, Refused, Unavailable
from sublet.checkpoint.record import COMMIT, parse_index, seal, sealed, unseal
from sublet.checkpoint.store import listed


def raw(value: Any) -> Any:
    """A value in a form that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().resolve_conj().resolve_neg().contiguous()
        return str(value.dtype), tuple(value.shape), bytes(whole.reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, np.ndarray):
        return str(value.dtype.newbyteorder("=")), value.shape, value.astype(value.dtype.newbyteorder("=")).tobytes()
    if isinstance(value, dict):
        return {key: raw(each) for key, each in value.items()}
    return [raw(each) for each in value] if isinstance(value, list) else repr(value)


def odd() -> dict[str, Any]:
    torch.manual_seed(3)
    waves, row, eights = torch.randn(5, dtype=torch.complex64), torch.arange(10.0), torch.arange(8, dtype=torch.uint8)
    narrow = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float16", "uint16", "uint64", "complex32")
    return {
        "keys": {"ключ/é~x": row[:2], "": row[:1], "a/b": row[:3], "a": {"b": row[1:5], "": row[5:]}, "~2": row[2:4]},
        "nothing": {"": {"keys": torch.ones(3)}}, "keys ": torch.zeros(1), "x" * 3000: torch.ones(1), "\n\0": 1,
        "sizes": {"none": torch.zeros(0), "flat": torch.zeros(3, 0, 2), "scalar": torch.tensor(True)},
        "dtypes": {name: eights.clone().view(getattr(torch, name)) for name in narrow},
        "conj": {"as it is": waves, "turned": waves.conj(), "negative": waves.conj().imag, "whole": -waves.imag},
        "shared": {"whole": row, "head": row[:3], "rest": row[3:], "again": [row], "other": row.view(torch.int32)},
        "strides": {"turned": torch.arange(12.0).reshape(3, 4).T, "third": row[::3], "wide": torch.ones(1).expand(9, 9),
                    "far": torch.as_strided(torch.zeros(1_000_001), (2,), (1_000_000,))},
        "numbers": [10**400, -0.0, 5e-324, float("inf"), float("nan"), 1 + 2j, b"\0\xff", "\ud800"],
        "numpy": [np.arange(3)[::-1], np.arange(3, dtype=">i4"), np.zeros((0, 3)), np.array(3)],
        "kind": "tensor", "name": {"kind": "dict", "items": 3},
    }  # fmt: skip


@pytest.mark.parametrize("agent", [True, False], ids=["through the agent", "straight to disk"])
def test_an_odd_state_comes_back_bit_for_bit(agent: bool, tmp_path: Path) -> None:
    state = odd()
    with Checkpointer(tmp_path, agent=agent) as ckpt:
        assert ckpt.save_now(1, state, wait=True)
    with Checkpointer(tmp_path, agent=False) as ckpt:
        loaded = ckpt.load()
    assert loaded is not None and raw(loaded.state) == raw(state)


def circle() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["me"] = [state]
    return state


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: {1: torch.ones(1), "1": torch.zeros(1)}, "a number and a string"),
        (lambda: {"sublet.rng": {"torch": torch.ones(3)}}, "under that name"),
        (circle, "holds itself"),
        (lambda: {"a": torch.ones(2, device="meta")}, "meta"),
        (lambda: {"a": torch.eye(3).to_sparse()}, "sparse"),
        (lambda: {"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "nested"),
        (lambda: {(1, 2): 1}, "strings or integers"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_kept_is_refused(make: Callable[[], Any], why: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, agent=False) as ckpt, pytest.raises(Refused, match=f"(?i){why}"):
        ckpt.save_now(1, make())
    assert listed(tmp_path) == ([], [])


@pytest.mark.parametrize(
    "target", [torch.zeros(1).expand(3, 4), torch.zeros(3, 4, dtype=torch.int32)], ids=["expanded", "whole numbers"]
)
def test_a_target_that_cannot_hold_the_values_is_refused_and_nothing_is_filled(
    target: torch.Tensor, tmp_path: Path
) -> None:
    state = {"first": torch.zeros(4), "then": target}
    with Checkpointer(tmp_path, agent=False) as ckpt:
        ckpt.save_now(1, {"first": torch.ones(4), "then": torch.full((3, 4), 0.5)})
        with pytest.raises(Refused, match="then is"):
            ckpt.load(state)
        assert not state["first"].any()
        other = {"first": torch.zeros(8)[::2], "then": torch.zeros(4, 3, dtype=torch.float64).T}
        assert ckpt.load(other) is not None and other["first"].all() and (other["then"] == 0.5).all()


def test_a_state_may_change_its_shape_from_save_to_save(tmp_path: Path) -> None:
    sizes = [10, 1000, 900_000, 5, 0, 1_500_000, 100]
    with Checkpointer(tmp_path, every=1, keep=99) as ckpt:
        for step, size in enumerate(sizes, 1):
            assert ckpt.save_now(
                step, {"a": torch.full((size,), float(step)), **({"more": 1} if step == 3 else {})}, wait=True
            )
    with Checkpointer(tmp_path, agent=False) as ckpt:
        for step, size in enumerate(sizes, 1):
            loaded = ckpt.load(step=step)
            assert loaded is not None and torch.equal(loaded.state["a"], torch.full((size,), float(step)))


@pytest.mark.parametrize("line", [b"[]\n", b"null\n", b"{}\n", b"\n", b"no json\n", b"\xff\n", b"[" * 5000 + b"\n"])
def test_a_commit_record_that_is_none_although_its_hash_holds_is_passed_over(line: bytes, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, agent=False) as ckpt:
        ckpt.save_now(1, {"a": 1})
        ckpt.save_now(2, {"a": 2})
    path = tmp_path / listed(tmp_path)[0][0].name / COMMIT
    whole = path.read_bytes()
    path.write_bytes(sealed(line))
    with Checkpointer(tmp_path, agent=False) as ckpt:
        loaded = ckpt.load()
    assert loaded is not None and loaded.step == 1 and loaded.hops[0].why
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        assert [commit.step for commit in listed(tmp_path)[0]] == [1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stream_bytes", 10**15),
        ("chunk_bytes", 0),
        ("tensors", [["a", "float32", [4], [4], [0], 10**6, False]]),
        ("tensors", [["a", "float32", [4], [4], [2], 0, False]]),
        ("tensors", [["a", "float32", ["4"], [4], [0], 0, False]]),
        ("tensors", [["a", "object", [4], [4], [0], 0, False]]),
    ],
)
def test_an_index_that_contradicts_itself_is_broken(key: str, value: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, agent=False, capture_rng=False) as ckpt:
        ckpt.save_now(1, {"a": torch.ones(4)})
    data = next(tmp_path.glob("step-*/rank-00000.json")).read_bytes()
    parse_index(data, "of the test")
    with pytest.raises(Broken):
        parse_index(seal({**unseal(data, ""), key: value}), "of the test")


@pytest.mark.parametrize("agent", [True, False])
def test_a_directory_that_cannot_be_is_told_in_a_sentence(agent: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Unavailable, match="Not a directory"):
            Checkpointer(path, agent=agent)
