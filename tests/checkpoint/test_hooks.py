"""Each framework for real where it runs here; the others against the interface that they call.

Transformers, Lightning and accelerate are no dependencies of the library; whoever develops it has them.
"""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from sublet.checkpoint import Checkpointer, Position, Refused, loader
from sublet.checkpoint.hooks import autockpt, megatron
from sublet.checkpoint.hooks.deepspeed import SubletCheckpointEngine
from sublet.checkpoint.store import listed
from tests.checkpoint.programs import ranks
from tests.checkpoint.small import print_of, small


def test_transformers_resumes_to_the_same_weights(tmp_path: Path) -> None:
    import transformers

    from sublet.checkpoint.hooks.transformers import CheckpointCallback

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 40

        def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
            x = torch.randn(8, generator=torch.Generator().manual_seed(place))
            return {"x": x, "labels": x.sum()}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.inner(x).squeeze(-1) - labels).pow(2).mean()}

    def train(directory: Path, stop_at: int) -> tuple[dict[str, bytes], int]:
        class StopAt(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop = state.global_step >= stop_at

        with Checkpointer(directory, every=3, capture_rng=False) as ckpt:
            hook = CheckpointCallback(ckpt)
            args = transformers.TrainingArguments(
                output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, num_train_epochs=2, report_to=[],
                save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, learning_rate=1e-2,
                logging_strategy="no",
            )  # fmt: skip
            trainer = transformers.Trainer(Model(), args, train_dataset=Rows(), callbacks=[hook, StopAt()])
            trainer.train(resume_from_checkpoint=hook.resume(trainer))
            return print_of(trainer.model), trainer.state.global_step

    whole, _ = train(tmp_path / "a", 999)
    _, stopped = train(tmp_path / "b", 13)
    assert stopped == 13
    resumed, steps = train(tmp_path / "b", 999)
    assert steps == 20 and resumed == whole


def test_lightning_resumes_to_the_same_weights(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    from sublet.checkpoint.hooks.lightning import SaveInLoop, SubletCheckpointIO, resume_path

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.inner(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train(directory: Path, stop_at: int) -> dict[str, bytes]:
        data = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
        batches = loader(torch.utils.data.TensorDataset(data), Position(40, batch_size=4))
        with Checkpointer(directory, every=2) as ckpt:
            trainer = lightning.Trainer(
                max_steps=stop_at, plugins=[SubletCheckpointIO(ckpt)], callbacks=[SaveInLoop(ckpt)], logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                default_root_dir=str(tmp_path),
            )  # fmt: skip
            model = Model()
            path = resume_path(ckpt)
            trainer.fit(model, batches, ckpt_path=path, **({"weights_only": False} if path else {}))
            assert trainer.global_step == stop_at
            return print_of(model)

    whole = train(tmp_path / "a", 16)
    train(tmp_path / "b", 6)
    assert train(tmp_path / "b", 16) == whole


def test_accelerate_state_comes_back(tmp_path: Path) -> None:
    import accelerate

    from sublet.checkpoint.hooks.accelerate import state_of

    def prepared() -> tuple[Any, Any, Any]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True)
        run = small(64)
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
        model, optimizer, scheduler = accelerator.prepare(run.model, run.optimizer, scheduler)
        run.model, run.optimizer = model, optimizer
        return accelerator, run, scheduler

    accelerator, run, scheduler = prepared()
    with Checkpointer(tmp_path, every=1) as ckpt:
        for step in range(1, 4):
            run.train()
            scheduler.step()
            ckpt.save_now(step, state_of(accelerator, step=step), wait=True)
    other, _, again_scheduler = prepared()
    state = state_of(other, step=0)
    with Checkpointer(tmp_path, every=1) as ckpt:
        assert ckpt.load(state) is not None
    assert state["step"] == 3
    assert print_of(state_of(other)) == print_of(state_of(accelerator))
    assert again_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_dcp_saves_and_loads_through_our_format(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from sublet.checkpoint.hooks.dcp import SubletReader, SubletWriter

    state = {"model": small(64).model.state_dict(), "step": 7, "words": ["a", "b"]}
    dcp.save(state, storage_writer=SubletWriter(tmp_path, step=7), no_dist=True)
    assert [commit.step for commit in listed(tmp_path)[0]] == [7]
    other: dict[str, Any] = {
        "model": {k: torch.zeros_like(v) for k, v in state["model"].items()},
        "step": 0,
        "words": ["", ""],
    }
    dcp.load(other, storage_reader=SubletReader(tmp_path), no_dist=True)
    assert print_of(other["model"]) == print_of(state["model"]) and other["step"] == 7 and other["words"] == ["a", "b"]


def test_megatron_and_autockpt_names(tmp_path: Path) -> None:
    run = small(64)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    with pytest.raises(Refused):
        autockpt.save_checkpoint_if_needed(1, [run.model], run.optimizer, scheduler)
    autockpt.initialize_autockpt(2, 10, 2, str(tmp_path))
    assert autockpt.load_checkpoint([run.model], run.optimizer, scheduler) == 0
    made = []
    for step in range(1, 5):
        run.train()
        scheduler.step()
        made.append(autockpt.save_checkpoint_if_needed(step, [run.model], run.optimizer, scheduler))
    autockpt.save_checkpoint_done()
    assert made == [False, True, False, True]
    other = small(64)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other.optimizer, 1)
    with Checkpointer(tmp_path) as ckpt:
        assert megatron.load_checkpoint(ckpt, [other.model], other.optimizer, other_scheduler) == 4
        assert megatron.save_checkpoint(ckpt, 5, [other.model], other.optimizer, other_scheduler)
    assert print_of(other.state) == print_of(run.state) and other_scheduler.last_epoch == 4


def test_a_deepspeed_engine_keeps_all_files_of_a_tag_or_none(tmp_path: Path) -> None:
    run, place = small(64), tmp_path / "ds"
    with Checkpointer(tmp_path / "ours") as ckpt:
        engine = SubletCheckpointEngine(ckpt)
        for step in (5, 6):
            engine.create(f"global_step{step}")
            engine.makedirs(str(place / f"global_step{step}"), exist_ok=True)
            run.train()
            args = argparse.Namespace(lr=step)
            engine.save(
                {"module": run.model.state_dict(), "args": args}, str(place / f"global_step{step}" / "mp_00.pt")
            )
            engine.save({"optimizer": run.optimizer.state_dict()}, str(place / f"global_step{step}" / "zero_00.pt"))
            if step == 5:
                before = print_of(run.model.state_dict())
                assert engine.commit("global_step5")
        engine.cleanup()
    with Checkpointer(tmp_path / "ours") as ckpt:
        engine = SubletCheckpointEngine(ckpt)
        found = engine.load(str(place / "global_step5" / "mp_00.pt"), map_location="cpu")
        assert found["args"] == {"lr": 5} and print_of(found["module"]) == before
        with pytest.raises(Refused, match="not written by this engine"):
            engine.load(str(place / "global_step6" / "mp_00.pt"))
    assert [commit.step for commit in listed(tmp_path / "ours")[0]] == [5]


def test_a_deepspeed_file_of_one_rank_is_read_by_all(tmp_path: Path) -> None:
    found = ranks.together(ranks.deepspeed_files, 2, tmp_path)
    assert found == [["model of 0", "part of 0"], ["model of 0", "part of 1"]]
