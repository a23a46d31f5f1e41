"""Named points of the protocol at which a test may end the process or fail a call. Inert unless the variable is set.

`SUBLET_CHECKPOINT_FAULT` is `NAME=die` or `NAME=errno:ENOSPC`, with `@N` for the N-th time only:
`commit-renamed@2=die`. Rule: a point does nothing but what the variable says; no code behaves in another way
because a point exists.
"""

import errno
import os
import signal

VARIABLE = "SUBLET_CHECKPOINT_FAULT"

_met: dict[str, int] = {}


def reach(name: str) -> None:
    """Die or raise OSError here if the variable names this point."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    where, _, action = wanted.partition("=")
    where, _, time = where.partition("@")
    if where != name:
        return
    _met[name] = _met.get(name, 0) + 1
    if time and _met[name] != int(time):
        return
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, action.removeprefix("errno:"))
    raise OSError(number, os.strerror(number), name)
