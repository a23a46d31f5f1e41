"""Checkpoints that make a stop cost seconds: memory first, disk in the background, verified at every load.

An island: the standard library, torch and xxhash, nothing of the rest of Sublet. Rule: importing this package imports
no torch; the agent, which runs beside the trainer, starts in milliseconds and stays small. Names load when asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sublet.checkpoint.checkpointer import Checkpointer
    from sublet.checkpoint.data import Position, loader
    from sublet.checkpoint.errors import Broken, CheckpointError, Refused, Unavailable
    from sublet.checkpoint.retention import Keep
    from sublet.checkpoint.sharding import PerRank, Shard
    from sublet.checkpoint.words import Hop, Loaded, Notice

__all__ = [
    "EXIT_CODE",
    "Broken",
    "CheckpointError",
    "Checkpointer",
    "Hop",
    "Keep",
    "Loaded",
    "Notice",
    "PerRank",
    "Position",
    "Refused",
    "Shard",
    "Unavailable",
    "loader",
]

EXIT_CODE = 85  # how a trainer says: saved, stopped because of a notice, start me again

_HOMES = {
    "Checkpointer": "checkpointer",
    "Position": "data",
    "loader": "data",
    "Broken": "errors",
    "CheckpointError": "errors",
    "Refused": "errors",
    "Unavailable": "errors",
    "Keep": "retention",
    "PerRank": "sharding",
    "Shard": "sharding",
    "Hop": "words",
    "Loaded": "words",
    "Notice": "words",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
