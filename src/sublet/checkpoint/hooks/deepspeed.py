"""DeepSpeed: a checkpoint engine. Rule: create, save … save, commit is one checkpoint; before commit nothing exists.

DeepSpeed calls create(tag), then save(state_dict, path) for each of its files, then commit(tag), and load(path) for
each file at resume. All files of a tag become entries of one checkpoint of this rank. It was written against the
interface of DeepSpeed's CheckpointEngine and is tested against that interface, not inside DeepSpeed: it does not
run on the machines that test this library. Objects in DeepSpeed's dictionaries that have no plain form are refused
by name.

    engine.checkpoint_engine = SubletCheckpointEngine(ckpt)
"""

import argparse
import re
from pathlib import Path
from typing import Any

from sublet.checkpoint.checkpointer import Checkpointer
from sublet.checkpoint.errors import Refused
from sublet.checkpoint.sharding import PerRank


class SubletCheckpointEngine:
    """The methods that DeepSpeed calls."""

    def __init__(self, ckpt: Checkpointer, config_params: Any = None) -> None:
        self.ckpt = ckpt
        self.files: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}

    def create(self, info: Any) -> None:
        """A checkpoint begins."""
        self.files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """One of its files. The tensors stay live until commit, which copies them."""
        self.files[entry(path)] = plain(state_dict)

    def commit(self, info: Any) -> bool:
        """The checkpoint is whole: copy it, let the disk follow."""
        tag = str(getattr(info, "tag", info))
        numbers = re.findall(r"\d+", tag)
        step = int(numbers[-1]) if numbers else self.ckpt.counters.copied_step + 1
        state = {"tag": tag, "files": PerRank(dict(self.files))}
        self.files = {}
        return self.ckpt.save_now(step, state) or self.ckpt.save_now(step, state, wait=True)

    def load(self, path: str, map_location: Any = None) -> Any:
        """One of the files of the newest checkpoint, or of the tag in the path if there is one of that step."""
        if not self.loaded:
            found = self.ckpt.load()
            if found is None:
                raise Refused(what=f"There is no checkpoint to load {path} from.")
            self.loaded = found.state["files"]
        if entry(path) not in self.loaded:
            raise Refused(what=f"{path} is not in the checkpoint.", why=f"It has {', '.join(sorted(self.loaded))}.")
        return self.loaded[entry(path)]

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


def entry(path: str) -> str:
    """A file's name without its tag's folder: the same for every tag."""
    return Path(path).name


def plain(value: Any) -> Any:
    """Namespaces become dictionaries; everything else is left to the format, which refuses what it cannot keep."""
    if isinstance(value, argparse.Namespace):
        return {key: plain(each) for key, each in vars(value).items()}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(each) for each in value) if type(value) in (list, tuple) else list(map(plain, value))
    return value
