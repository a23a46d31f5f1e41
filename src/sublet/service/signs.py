"""Signs that people add to the supervisor's own: what shows in a log, or how a program ended, and the class that it is.

One rule: an expression that is none, or a class that there is not, is refused where it was written.
"""

import re
from typing import Any

from sublet.domain.faults import Fault
from sublet.service.reading import Section, Shape, check_keys

FAULTS = [fault.value for fault in Fault if fault is not Fault.PREEMPTED]
SIGN: Shape = {"match": None, "exit_code": None, "is": None}


def signs(section: Section, key: str = "verdicts") -> list[dict[str, Any]]:
    """The list under this key, as the supervisor reads it."""
    return [_sign(one) for one in section.sections(key)]


def _sign(one: Section) -> dict[str, Any]:
    check_keys(one, SIGN, SIGN)
    if not one.has("is"):
        raise one.refused("is", f"{one.key('is')} is missing.", f"It may be {', '.join(FAULTS)}.")
    if one.has("match") == one.has("exit_code"):
        raise one.refused("match", f"{one.key('match')} or exit_code: one of both is needed.")
    fault = one.choice("is", FAULTS, "")
    if one.has("match"):
        return {"match": _expression(one), "is": fault}
    return {"exit_code": one.whole("exit_code", low=0, high=255), "is": fault}


def _expression(section: Section) -> str:
    text = section.text("match")
    try:
        re.compile(text)
    except re.error as error:
        why = f"It says: {error}."
        raise section.refused("match", f"{section.key('match')} is no regular expression.", why) from error
    return text
