"""Which checkpoints may go. Rule: this only names them; the newest is never named, nor a pinned one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sublet.checkpoint.errors import Refused
from sublet.checkpoint.record import Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Keep the `last` newest, those at multiples of `every` steps, and the `best` by metric; what is pinned stays."""

    last: int = 3
    every: int = 0
    best: int = 0
    best_is: Literal["lowest", "highest"] = "lowest"

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0 or self.best < 0 or self.best_is not in ("lowest", "highest"):
            raise Refused(
                what=f"{self} cannot be kept to.",
                why="`last` is at least 1, `every` and `best` are not negative, best_is is lowest or highest.",
            )


def doomed(commits: Sequence[Commit], keep: Keep, pinned: frozenset[str] = frozenset()) -> list[Commit]:
    """The commits that `keep` does not ask for, oldest first. Takes them in any order."""
    newest_first = sorted(commits, key=lambda commit: -commit.sequence)
    kept = {commit.name for commit in newest_first[: keep.last]} | pinned
    if keep.every:
        kept |= {commit.name for commit in commits if commit.step % keep.every == 0}
    sign = 1 if keep.best_is == "lowest" else -1
    scored = sorted((sign * c.metric, -c.sequence, c.name) for c in commits if c.metric is not None)
    kept |= {name for _, _, name in scored[: keep.best]}
    return [commit for commit in reversed(newest_first) if commit.name not in kept]
