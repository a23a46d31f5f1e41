"""Lightning: its checkpoints go through ours. Rule: a path that Lightning knows is a small file that names a
checkpoint.

ckpt = Checkpointer("checkpoints")
trainer = Trainer(plugins=[SubletCheckpointIO(ckpt)], callbacks=[SaveInLoop(ckpt)], enable_checkpointing=False)
trainer.fit(model, ckpt_path=resume_path(ckpt))
"""

# mypy: disable-error-code="misc, import-not-found"

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import CheckpointIO

from sublet.checkpoint import rng
from sublet.checkpoint.checkpointer import Checkpointer
from sublet.checkpoint.errors import Refused

MARK = ".sublet"
RNG_KEY = "sublet_rng"


class SubletCheckpointIO(CheckpointIO):
    """Lightning's way to store: save_checkpoint returns when the copy is in memory; teardown waits for the disk."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self.ckpt = ckpt

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        step = int(checkpoint["global_step"])
        if not self.ckpt.save_now(step, checkpoint):
            self.ckpt.save_now(step, checkpoint, wait=True)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"step": step}))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        wanted = json.loads(Path(path).read_text())["step"]
        loaded = self.ckpt.load(step=wanted)
        if loaded is None:
            raise Refused(what=f"There is no checkpoint of step {wanted}.", why=f"{path} names it.")
        found = dict(loaded.state)
        if RNG_KEY in found:
            rng.restore(found.pop(RNG_KEY))
        return found

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        self.ckpt.wait()


class SaveInLoop(Callback):
    """Saves after each batch if a save is due; stops the Trainer once a notice has been answered."""

    def __init__(self, ckpt: Checkpointer) -> None:
        self.ckpt = ckpt

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ckpt.step(trainer.global_step, lambda: dumped(trainer))
        if self.ckpt.should_stop():
            trainer.should_stop = True

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ckpt.safe_point()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ckpt.wait()


def dumped(trainer: Any) -> dict[str, Any]:
    """What Lightning itself would store, and the random states."""
    return {**trainer._checkpoint_connector.dump_checkpoint(weights_only=False), RNG_KEY: rng.capture()}


def resume_path(ckpt: Checkpointer) -> str | None:
    """What to give to fit(ckpt_path=…): the newest checkpoint that holds; None to begin anew."""
    loaded = ckpt.load()
    if loaded is None:
        return None
    path = ckpt.directory / f"newest{MARK}"
    path.write_text(json.dumps({"step": loaded.step}))
    return str(path)
