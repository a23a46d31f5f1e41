"""The ways in which a checkpoint may go wrong; each message is three short sentences: what, why, what to do."""

from dataclasses import dataclass


@dataclass(kw_only=True, eq=False)
class CheckpointError(Exception):
    """What happened, why, and what to do about it."""

    what: str
    why: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.hint) if part)


class Refused(CheckpointError):
    """The caller's fault: a state that cannot be kept, a setting that makes no sense."""


class Unavailable(CheckpointError):
    """The world's fault: a full disk, a directory in use, an agent that does not start. May go through later."""


class Broken(CheckpointError):
    """Bytes that are not what was written: a hash does not hold, a record is torn."""
