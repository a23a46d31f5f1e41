"""Transformers: a callback that saves, and a resume without the Trainer's own files. Rule: the Trainer decides what
it skips.

ckpt = Checkpointer("checkpoints", capture_rng=False)
hook = CheckpointCallback(ckpt)
trainer = Trainer(…, callbacks=[hook])            # save_strategy="no": this replaces the Trainer's own saving
trainer.train(resume_from_checkpoint=hook.resume(trainer))
"""

# mypy: disable-error-code="misc, import-not-found"

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sublet.checkpoint import rng
from sublet.checkpoint.checkpointer import Checkpointer
from sublet.checkpoint.words import Loaded

STATE_FILE = "trainer_state.json"


class CheckpointCallback(TrainerCallback):
    """Saves after optimizer steps; listens for a notice at every step, sub-step and prediction step."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self.ckpt = ckpt
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.ckpt.step(state.global_step, lambda: state_of(state, found))
        if self.ckpt.should_stop():
            control.should_training_stop = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.ckpt.safe_point()

    def on_evaluate(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.ckpt.safe_point()

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.ckpt.wait()

    def resume(self, trainer: Any) -> str | None:
        """Load the newest checkpoint; what to give to train(resume_from_checkpoint=…), None to begin anew."""
        loaded = self.ckpt.load()
        if loaded is None:
            return None
        self.folder = tempfile.TemporaryDirectory(prefix="sublet-resume-")
        (Path(self.folder.name) / STATE_FILE).write_text(loaded.state["trainer"])
        stand_in(trainer, loaded)
        return self.folder.name


def state_of(state: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The whole training state of a Trainer between two steps."""
    out = {"model": found["model"], "optimizer": found["optimizer"], "rng": rng.capture()}
    if found.get("lr_scheduler") is not None:
        out["scheduler"] = found["lr_scheduler"]
    return out | {"trainer": json.dumps(dataclasses.asdict(state))}


def stand_in(trainer: Any, loaded: Loaded) -> None:
    """Where the Trainer would read its files during this resume, it gets what was loaded."""
    state = loaded.state

    def model(_: str, model: Any = None) -> None:
        trainer.model.load_state_dict(state["model"])

    def optimizer(_: str | None) -> None:
        trainer.optimizer.load_state_dict(state["optimizer"])
        if "scheduler" in state:
            trainer.lr_scheduler.load_state_dict(state["scheduler"])

    trainer._load_from_checkpoint = model
    trainer._load_optimizer_and_scheduler = optimizer
    trainer._load_scaler = lambda _: None
    trainer._load_rng_state = lambda _: rng.restore(state["rng"])
