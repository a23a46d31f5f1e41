"""Reads what people write: a YAML 1.2 mapping, key by key, each refusal with the key and its line.

One rule: nothing is guessed. A key that is not known, a value of another kind, a number without its unit is refused in
three short sentences.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from sublet.domain.errors import Refused

MAX_CHARACTERS = 256 * 1024
MAX_TEXT = 64 * 1024
MAX_BRACKETS = 1_000  # the parser's time grows with the square of their depth
MAX_DURATION_MS = 3_650 * 86_400_000

Shape = Mapping[str, Any]  # the keys of a mapping: None = a value, ANY = free keys, a Shape = a mapping of its own
ANY: Shape = {"": None}

_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?(?:(\d{1,12})ms)?")
_DURATION_MS = (86_400_000, 3_600_000, 60_000, 1_000, 1)
_SIZE = re.compile(r"(\d{1,18})([KMGTP]i?)?")
_SIZE_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SIZE_UNITS |= {f"{unit}i": 1024 ** (place + 1) for place, unit in enumerate("KMGTP")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A mapping of the document, with the path that leads to it and the line of every key below."""

    values: Mapping[Any, Any]
    file: str = ""
    path: tuple[str, ...] = ()
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def key(self, key: str) -> str:
        return ".".join((*self.path, key))

    def place(self, *keys: str) -> str:
        """`job.yaml:7`, of the key or of the nearest one above it that stands in the file; empty without a file."""
        path = (*self.path, *keys)
        found = next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)
        return f"{self.file}:{found}" if self.file and found else self.file

    def refused(self, key: str, what: str, why: str = "", hint: str = "", code: str = "malformed") -> Refused:
        return Refused(what=what, why=why, hint=hint, code=code, field=self.key(key), where=self.place(key))

    def section(self, key: str) -> "Section":
        """The mapping under this key; an empty one when it is not there."""
        values = self.values.get(key)
        if values is not None and not isinstance(values, Mapping):
            raise self.refused(key, f"{self.key(key)} is {_show(values)}, not a mapping.", hint="Write keys below it.")
        return Section(values=values or {}, file=self.file, path=(*self.path, key), lines=self.lines)

    def sections(self, key: str) -> list["Section"]:
        """The mappings of the list under this key."""
        values = self.values.get(key) or []
        if not isinstance(values, Sequence) or isinstance(values, str):
            hint = "Begin each item with `- `."
            raise self.refused(key, f"{self.key(key)} is {_show(values)}, not a list.", hint=hint)
        numbered = {str(place): item for place, item in enumerate(values)}
        inside = Section(values=numbered, file=self.file, path=(*self.path, key), lines=self.lines)
        return [inside.section(place) for place in numbered]

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            hint = "" if isinstance(value, Mapping | list) else f'Write it as "{_show(value)}".'
            raise self.refused(key, f"{self.key(key)} is {_show(value)}, not a text.", hint=hint)
        if "\0" in value or len(value) > MAX_TEXT:
            raise self.refused(key, f"{self.key(key)} is too long or holds a zero byte.", hint="Shorten it.")
        return str(value)

    def name(self, key: str, default: str = "") -> str:
        """A text on one line of at most 200 characters that can be printed."""
        value = self.text(key, default)
        if len(value) > 200 or not value.isprintable():
            raise self.refused(key, f"{self.key(key)} is no name.", "A name is one line of at most 200 characters.")
        return value

    def choice(self, key: str, choices: Iterable[str], default: str) -> str:
        value = self.values.get(key)
        known = list(choices)
        if value is None:
            return default
        if value in known and isinstance(value, str):
            return str(value)
        near = nearest(str(value), known)
        hint = f"Did you mean {near}?" if near else ""
        raise self.refused(key, f"{self.key(key)} is {_show(value)}.", f"It may be {_or(known)}.", hint)

    def whole(self, key: str, *, low: int, high: int, default: int | None = None) -> int | None:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refused(key, f"{self.key(key)} is {_show(value)}, not a whole number.", hint=_range(low, high))
        if not low <= value <= high:
            raise self.refused(key, f"{self.key(key)} is {_show(int(value))}.", f"It must be {_range(low, high)}.")
        return int(value)

    def duration_ms(self, key: str) -> int | None:
        """As `90s`, `10m`, `1h30m`, `72h`, `2d`, `500ms`; milliseconds."""
        value = self.values.get(key)
        if value is None:
            return None
        found = _DURATION.fullmatch(value) if isinstance(value, str) and value else None
        if found is None:
            unit = isinstance(value, int) and not isinstance(value, bool)
            hint = f"Write {value}s or {value}m." if unit else "Write it as 90s, 10m, 1h30m or 2d."
            raise self.refused(key, f"{self.key(key)} is {_show(value)}, not a time with its unit.", hint=hint)
        total = sum(int(count or 0) * unit for count, unit in zip(found.groups(), _DURATION_MS, strict=True))
        if total > MAX_DURATION_MS:
            raise self.refused(key, f"{self.key(key)} is {value}.", "More than ten years cannot be asked for.")
        return total

    def size_bytes(self, key: str) -> int:
        """As `800Gi`, `64G` or a whole number of bytes; 0 when it is not there."""
        value = self.values.get(key)
        if value is None:
            return 0
        found = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
        if found is None:
            raise self.refused(key, f"{self.key(key)} is {_show(value)}, not a size.", hint="Write it as 800Gi or 64G.")
        return int(found[1]) * _SIZE_UNITS.get(found[2], 1)

    def cpu_milli(self, key: str) -> int:
        """As `96`, `0.5` or `500m`; thousandths of a core, 0 when it is not there."""
        value = self.values.get(key)
        if value is None:
            return 0
        found = None if isinstance(value, bool) else re.fullmatch(r"(\d{1,9})(?:\.(\d{1,3}))?|(\d{1,12})m", str(value))
        if found is None:
            what = f"{self.key(key)} is {_show(value)}, not a count of cores."
            raise self.refused(key, what, hint="Write 8, 0.5 or 500m.")
        return int(found[3]) if found[3] else int(found[1]) * 1000 + int((found[2] or "").ljust(3, "0"))

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refused(key, f"{self.key(key)} is {_show(value)}.", "It may be true or false.")
        return value

    def texts(self, key: str) -> dict[str, str]:
        """A mapping of texts; numbers are taken as they are written."""
        inside = self.section(key)
        return {name: inside.word(name) for name in map(inside.checked_name, inside.values)}

    def words(self, key: str) -> tuple[str, ...]:
        """One text or a list of them."""
        value = self.values.get(key)
        if not isinstance(value, list):
            return (self.name(key),) if self.has(key) else ()
        if not value or not all(isinstance(item, str) and item for item in value):
            raise self.refused(
                key, f"{self.key(key)} is no list of texts.", hint=f"Write one {key} or [first, second]."
            )
        return tuple(str(item) for item in value)

    def word(self, key: str) -> str:
        value = self.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        return self.text(key)

    def checked_name(self, key: Any) -> str:
        if isinstance(key, str) and key and key.isprintable() and "=" not in key:
            return str(key)
        raise self.refused(str(key), f"{_show(key)} in {'.'.join(self.path)} is no name.", hint=f'Write it as "{key}".')


def read(text: str, file: str, *, max_characters: int = MAX_CHARACTERS, max_brackets: int = MAX_BRACKETS) -> Section:
    """The document's mapping; Refused when it is no YAML mapping."""
    if len(text) > max_characters:
        raise Refused(what=f"The file is longer than {max_characters // 1024} KiB.", code="malformed", where=file)
    if text.count("[") + text.count("{") > max_brackets:
        raise _no_yaml(file, f"It has more than {max_brackets:,} brackets.")
    try:
        tree = YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        why = f"The parser says: {str(error.problem).splitlines()[0]}."
        raise _no_yaml(f"{file}:{line}" if file else f"line {line}", why) from error
    except (YAMLError, RecursionError, ValueError) as error:
        why = "It is nested too deeply." if isinstance(error, RecursionError) else str(error).splitlines()[0] + "."
        raise _no_yaml(file, why) from error
    if not isinstance(tree, Mapping):
        raise _no_yaml(file, "It holds no `key: value` lines.")
    return Section(values=tree, file=file, lines=dict(_lines(tree, ())))


def check_keys(section: Section, shape: Shape, everywhere: Shape) -> None:
    """Refused at the first key that `shape` does not know, with the nearest one of it or of the whole document."""
    for key, value in section.values.items():
        name = str(key)
        if shape is ANY:
            return
        if name not in shape:
            raise _unknown(section, name, shape, everywhere)
        inner = shape[name]
        if inner is not None and isinstance(value, Mapping):
            check_keys(section.section(name), inner, everywhere)


def nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def _unknown(section: Section, name: str, shape: Shape, everywhere: Shape) -> Refused:
    near = nearest(name, shape)
    paths = {".".join(path): path[-1] for path in _paths(everywhere, ())}
    if near:
        near = section.key(near)
    else:
        leaf = nearest(name, paths.values())
        near = next((path for path, last in paths.items() if last == leaf), "") if leaf else ""
    hint = f"Write {near} instead." if near else f"Known here: {', '.join(shape)}."
    why = f"The nearest known key is {near}." if near else ""
    return section.refused(name, f"{section.key(name)} is not a known key.", why, hint, code="unknown_key")


def _paths(shape: Shape, path: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    for key, inner in shape.items():
        if key:
            yield (*path, key)
            yield from _paths(inner or {}, (*path, key))


def _lines(tree: Any, path: tuple[str, ...], depth: int = 0) -> Iterable[tuple[tuple[str, ...], int]]:
    marks = getattr(getattr(tree, "lc", None), "data", None) or {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if key in marks:
            yield (*path, str(key)), marks[key][0] + 1
        if depth < 6:
            yield from _lines(value, (*path, str(key)), depth + 1)


def _no_yaml(where: str, why: str) -> Refused:
    return Refused(what="The file is no YAML mapping.", why=why, hint="Correct it.", code="malformed", where=where)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = str(value)
    return text if text and len(text) <= 60 else repr(text[:60])


def _range(low: int, high: int) -> str:
    return f"{low:,} to {high:,}"


def _or(words: Sequence[str]) -> str:
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
