"""The three ways in which something may go wrong; each message is three short sentences: what, why, what to do."""

from dataclasses import dataclass


@dataclass(kw_only=True, eq=False)
class SubletError(Exception):
    """What happened, why, and what to do about it; `code` is stable, for programs."""

    what: str
    why: str = ""
    hint: str = ""
    code: str = "error"
    field: str = ""  # where it applies: the key of the request, as `resources.gpu`
    where: str = ""  # the place in the user's file, as `job.yaml:7`

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.hint) if part)


class Refused(SubletError):
    """The caller's fault: 4xx, exit 2."""


class Unavailable(SubletError):
    """The world's fault: 503, exit 75; the same call may go through later."""


class Broken(SubletError):
    """Our fault: 500, exit 70; the message carries the story."""
