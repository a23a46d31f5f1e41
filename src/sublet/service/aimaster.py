"""The argument string of PAI's AIMaster as keys of `fault_tolerance`.

One rule: nothing in it is ever fatal. What is not known, or not understood, is kept word for word, with a warning.
Names and defaults: PAI's documentation of AIMaster; the older names are those of its open operator. Where it is not
public what a value means, what follows here is our choice and stands in docs/reference/aimaster.md.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sublet.service.reading import MAX_DURATION_MS

POLICIES = {
    "onfailure": "on-failure",
    "exitcode": "exit-code",
    "exitcodeanderrormsg": "exit-code-and-error",
    "never": "never",
}
MODES = {"sync": "sync", "async": "async"}
OLDER = {
    "execution-mode": "job-execution-mode",
    "enable-log-hang-detection": "enable-job-hang-detection",
    "log-hang-interval-in-seconds": "job-hang-interval",
    "enable-pod-completed-detection": "enable-job-exit-hang-detection",
    "pod-completed-interval-in-seconds": "job-exit-hang-interval",
}
# Known names that nothing follows from here, and why.
WITHOUT_EFFECT = {
    "job-restart-timeout": "what it bounds is not public",
    "enable-c4d-hang-detection": "the odd instance is named from the stacks of all, without it",
    "enable-local-detection": "what it does is not public",
    "enable-perftracker": "a slow instance is found from its step times",
    "max-tolerate-failure-rate": "failures are counted since the last new checkpoint",
    "enable-log-redirect-to-nas": "logs are kept by the server",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """`keys`: below `fault_tolerance`. `unknown`: as they were written, one text an argument."""

    keys: Mapping[str, Any]
    unknown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def parse(text: str) -> Arguments:
    """`--name value`, `--name=value`, and `--name` alone for a switch; of a repeated one the last counts."""
    said: dict[str, tuple[str, str]] = {}
    unknown, warnings = [], []
    for raw, name, value in _pairs(text):
        known = OLDER.get(name, name)
        if known in _READERS or known in WITHOUT_EFFECT:
            said[known] = (raw, value)
        else:
            unknown.append(raw)
            warnings.append(f"{raw} is not known; it is kept, and nothing follows from it")
    keys: dict[str, Any] = {}
    for name, (raw, value) in said.items():
        if name in WITHOUT_EFFECT:
            unknown.append(raw)
            warnings.append(f"{raw}: nothing follows from it here, {WITHOUT_EFFECT[name]}")
            continue
        path, reader = _READERS[name]
        found = reader(value)
        if found is None:
            unknown.append(raw)
            warnings.append(f"{raw} is not understood; what holds without it holds")
        else:
            _put(keys, path, found)
    return Arguments(keys=_settled(keys, said), unknown=tuple(unknown), warnings=tuple(warnings))


def _pairs(text: str) -> list[tuple[str, str, str]]:
    """As written, the name without its dashes, the value."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is not closed
        words = text.split()
    found, place = [], 0
    while place < len(words):
        word, place = words[place], place + 1
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            found.append((word, "", ""))
            continue
        if not equals and place < len(words) and not words[place].startswith("--"):
            value, place = words[place], place + 1
            word = f"{word} {value}"
        found.append((word, name.lstrip("-").replace("_", "-").lower(), value))
    return found


def _put(keys: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *above, last = path
    level = keys
    for name in above:
        level = level.setdefault(name, {})
    level[last] = value


def _settled(keys: dict[str, Any], said: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Switches that stand for the value of another key."""
    if keys.pop("is_restarted", True) is False:
        keys["policy"] = "never"
    is_hang, is_exit_hang = keys.pop("is_hang", None), keys.pop("is_exit_hang", None)
    if is_hang or is_exit_hang:
        _put(keys, ("hang", "action"), "restart")
    elif is_hang is False:
        _put(keys, ("hang", "action"), "off")
    if is_exit_hang is False:
        keys["exit_hang"] = "off"
    if "job-hang-interval" in said and is_hang is None:  # whoever sets the interval wants to know
        keys.get("hang", {}).setdefault("action", "report")
    return keys


def _flag(value: str) -> bool | None:
    return {"true": True, "1": True, "yes": True, "": True, "false": False, "0": False, "no": False}.get(value.lower())


def _count(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def _seconds(value: str) -> str | None:
    count = _count(value)
    return f"{count}s" if count and count * 1000 <= MAX_DURATION_MS else None


def _same_error(value: str) -> int | None:
    return _count(value) or None


def _one_of(known: Mapping[str, str]) -> Callable[[str], str | None]:
    return lambda value: known.get(value.lower().replace("_", "").replace("-", ""))


_READERS: Mapping[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "job-execution-mode": (("mode",), _one_of(MODES)),
    "enable-job-restart": (("is_restarted",), _flag),
    "max-num-of-job-restart": (("max_restarts",), _count),
    "max-num-of-same-error": (("same_error",), _same_error),
    "fault-tolerant-policy": (("policy",), _one_of(POLICIES)),
    "enable-job-hang-detection": (("is_hang",), _flag),
    "job-hang-interval": (("hang", "after"), _seconds),
    "enable-job-exit-hang-detection": (("is_exit_hang",), _flag),
    "job-exit-hang-interval": (("exit_hang",), _seconds),
}
KNOWN = (*_READERS, *WITHOUT_EFFECT, *OLDER)
