"""The tools on real checkpoints, through their command line."""

from pathlib import Path

import pytest
import torch

from sublet.checkpoint import Checkpointer, Unavailable, tools
from sublet.checkpoint.__main__ import main
from sublet.checkpoint.store import Lock, listed
from tests.checkpoint.small import print_of, saved, small


def test_ls_show_verify_pin_gc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, 4, width=64, agent=False, keep=9)
    assert main(["ls", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["4", "3", "2", "1"]
    assert main(["show", str(tmp_path), "2"]) == 0 and '"words/epoch": 1' in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["pin", str(tmp_path), "1"]) == 0
    (tmp_path / "tmp-step-000000000009-x").mkdir()
    assert main(["gc", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    assert len(listed(tmp_path)[0]) == 4
    assert main(["gc", str(tmp_path), "--keep-last", "1"]) == 0
    assert [commit.step for commit in listed(tmp_path)[0]] == [4, 1] and not list(tmp_path.glob("tmp-*"))
    data = next((tmp_path / listed(tmp_path)[0][0].name).glob("*.data"))
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 65 and "damaged" in capsys.readouterr().out
    assert main(["show", str(tmp_path), "77"]) == 2 and "no checkpoint 77" in capsys.readouterr().err


def test_gc_waits_for_the_writer(tmp_path: Path) -> None:
    saved(tmp_path, 1, width=64, agent=False)
    lock = Lock(tmp_path)
    with pytest.raises(Unavailable):
        tools.gc(tmp_path)
    lock.release()
    assert tools.gc(tmp_path) == []


def test_diff_names_what_changed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, agent=False) as ckpt:
        ckpt.save_now(1, {"a": torch.zeros(3), "b": torch.ones(2), "n": 1})
        ckpt.save_now(2, {"a": torch.tensor([0.0, 0.5, 0]), "b": torch.ones(2), "n": 2, "c": torch.ones(1)})
    found = {each.name: each.what for each in tools.diff(tmp_path, "1", "2")}
    assert found == {"a": "differs by up to 0.5", "c": "only in 2", "n": "1 and 2"}
    assert tools.diff(tmp_path, "1", "1") == []


def test_out_and_in_again(tmp_path: Path) -> None:
    run = small(64)
    run.train()
    source = tmp_path / "ckpt"
    with Checkpointer(source, agent=False) as ckpt:
        ckpt.save_now(5, run.state)
    assert main(["export", str(source), "--to", str(tmp_path / "x.safetensors")]) == 0
    assert main(["export", str(source), "5", "--to", str(tmp_path / "x.pt"), "--format", "torch"]) == 0
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert print_of(found["model"]) == print_of(run.model.state_dict())
    for form in ("torch", "safetensors"):
        name = "x.pt" if form == "torch" else "x.safetensors"
        assert main(["import", str(tmp_path / form), str(tmp_path / name), "--format", form, "--step", "5"]) == 0
        other = small(64)
        with Checkpointer(tmp_path / form, agent=False) as ckpt:
            if form == "torch":
                assert ckpt.load(other.state) is not None
                assert print_of(other.state) == print_of(run.state)
            else:
                assert ckpt.load({"model": other.model}) is not None
                assert print_of(other.model) == print_of(run.model)


def test_the_safetensors_file_is_read_by_its_own_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved(tmp_path / "c", 1, width=64, agent=False)
    tools.export(tmp_path / "c", "newest", tmp_path / "x.safetensors", "safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found["model/0.weight"].shape == (64, 16)


def test_dcp_comes_in(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = small(64).model
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    tools.bring_in(tmp_path / "dcp", tmp_path / "ckpt", "dcp", step=3)
    other = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 64))
    with Checkpointer(tmp_path / "ckpt", agent=False) as ckpt:
        assert ckpt.load({"model": other}) is not None
    assert print_of(other) == print_of(model)


def test_the_command_line_of_sublet_has_the_same_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sublet.cli.front import call

    saved(tmp_path, 2, width=64, agent=False)
    assert call(["checkpoint", "ls", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "1"]
    assert call(["checkpoint", "show", str(tmp_path), "77"]) == 2
    data = next((tmp_path / listed(tmp_path)[0][0].name).glob("*.data"))
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    assert call(["checkpoint", "verify", str(tmp_path)]) == 65
