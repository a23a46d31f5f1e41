"""DeepSpeed: a checkpoint engine. Rule: create, save … save, commit is one checkpoint; before commit nothing exists.

DeepSpeed calls create(info), then save(state_dict, path) for each of its files, then commit(info), and load(path) for
each file at resume. All files of a tag become entries of one checkpoint of this rank. Because DeepSpeed looks for its
files by name, commit leaves a line at each path that says where the file's content is. Objects in DeepSpeed's
dictionaries that have no plain form are refused by name.

    engine.checkpoint_engine = SubletCheckpointEngine(ckpt)
"""

import argparse
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from sublet.checkpoint.checkpointer import Checkpointer
from sublet.checkpoint.errors import Refused
from sublet.checkpoint.gang import Gang
from sublet.checkpoint.load import load_newest, target_of
from sublet.checkpoint.sharding import PerRank
from sublet.checkpoint.store import find
from sublet.checkpoint.words import Loaded


class SubletCheckpointEngine:
    """The methods that DeepSpeed calls."""

    def __init__(self, ckpt: Checkpointer, config_params: Any = None) -> None:
        self.ckpt = ckpt
        self.name = "SubletCheckpointEngine"
        self.files: dict[str, Any] = {}
        self.loaded: dict[tuple[int, int], dict[str, Any]] = {}  # by step and rank

    def create(self, info: Any) -> None:
        """A checkpoint begins."""
        self.files, self.loaded = {}, {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """One of its files. The tensors stay live until commit, which copies them."""
        self.files[str(path)] = plain(state_dict)

    def commit(self, info: Any) -> bool:
        """The checkpoint is whole: copy it, let the disk follow."""
        tag = str(getattr(info, "tag", info))
        numbers = re.findall(r"\d+", tag)
        step = int(numbers[-1]) if numbers else self.ckpt.counters.copied_step + 1
        files, self.files = self.files, {}
        state = {"tag": tag, "files": PerRank({entry(path): content for path, content in files.items()})}
        done = self.ckpt.save_now(step, state) or self.ckpt.save_now(step, state, wait=True)
        for path in files if done else ():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps({"sublet_step": step, "rank": self.ckpt.rank}) + "\n")
        return done

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of one of its files. The first file of a step is loaded by all ranks together."""
        step, rank = pointed(path)
        if (step, self.ckpt.rank) not in self.loaded:
            self.loaded[step, self.ckpt.rank] = files_in(self.ckpt.load(step=step), path)
        if (step, rank) not in self.loaded:  # a file that another rank wrote for all, such as the model's
            world = find(self.ckpt.directory, str(step)).world
            alone = target_of(None, strict=True, restore_rng=False)
            found = load_newest(self.ckpt.directory, Gang(rank=rank, world=world), (), alone, step)
            self.loaded[step, rank] = files_in(found, path)
        files = self.loaded[step, rank]
        if entry(path) not in files:
            raise Refused(what=f"{path} is not in the checkpoint.", why=f"It has {', '.join(sorted(files))}.")
        return files[entry(path)]

    def is_decoupled(self) -> bool:
        """Does commit return before the checkpoint is on disk? DeepSpeed asks before it writes its `latest` file."""
        return False

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return dp_rank == 0

    def preserves_storage_sharing(self) -> bool:
        return True

    def set_commit_info(self, info: Any) -> None:
        return None

    def get_commit_info(self) -> None:
        return None

    def cleanup(self) -> None:
        self.ckpt.wait()


def pointed(path: str) -> tuple[int, int]:
    """Step and rank of a file's content, as commit has left them there."""
    try:
        word = json.loads(Path(path).read_text())
        return int(word["sublet_step"]), int(word["rank"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(what=f"{path} was not written by this engine.", why=f"{error}.") from error


def files_in(loaded: Loaded | None, path: str) -> dict[str, Any]:
    if loaded is None:
        raise Refused(what=f"There is no checkpoint to load {path} from.")
    return dict(restored(loaded.state["files"]))


def entry(path: str) -> str:
    """A file's name without its tag's folder: the same for every tag."""
    return Path(path).name


OBJECT = "deepspeed_object"
KNOWN = {  # DeepSpeed's own objects in its dictionaries: numbers with a name, so they are kept as such
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "fragment_address": "deepspeed.utils.tensor_fragment",
}


def plain(value: Any) -> Any:
    """Namespaces and DeepSpeed's known objects become dictionaries; everything else is left to the format, which
    refuses what it cannot keep.
    """
    if KNOWN.get(type(value).__name__) == type(value).__module__:
        return {OBJECT: type(value).__name__, **{key: plain(each) for key, each in vars(value).items()}}
    if isinstance(value, argparse.Namespace):
        return {key: plain(each) for key, each in vars(value).items()}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(each) for each in value) if type(value) in (list, tuple) else list(map(plain, value))
    return value


def restored(value: Any) -> Any:
    """The other way. No class is made but those of KNOWN, and of them only the numbers are set."""
    if isinstance(value, dict) and value.get(OBJECT) in KNOWN:
        made: Any = object.__new__(getattr(import_module(KNOWN[value[OBJECT]]), value[OBJECT]))
        vars(made).update({key: restored(each) for key, each in value.items() if key != OBJECT})
        return made
    if isinstance(value, dict):
        return {key: restored(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(restored(each) for each in value)
    return value
