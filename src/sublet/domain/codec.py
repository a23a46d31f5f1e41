"""Domain values as JSON text and back, so that what is stored or sent has one spelling.

One rule: the dataclass is the format. Every field is written, in the order of the class, mappings by sorted key; a key
that the class does not have is refused, a missing one takes the default. Text of an older version therefore stays
readable as long as fields are only ever added with a default.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import ModuleType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from sublet.domain import changes, effects, events, ids, jobs, leases, nodes, quotas, reasons, rules

TAG = "type"  # the key that names the class; no field may be called so
_MODULES: tuple[ModuleType, ...] = (changes, effects, events, ids, jobs, leases, nodes, quotas, reasons, rules)
_Coder = Callable[[Any], Any]


def to_json(value: object) -> str:
    """A domain value, or a sequence of them, as one line of ASCII; its class stands in `type`."""
    return json.dumps(to_plain(value), separators=(",", ":"))


def from_json(text: str) -> Any:
    """The inverse of `to_json`, a sequence comes back as a tuple; ValueError when the text is no domain value."""
    return from_plain(json.loads(text))


def to_plain(value: object) -> Any:
    """As `to_json`, but as dicts and lists; a dict that is returned belongs to the caller."""
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return _tagged(value)


def from_plain(plain: Any) -> Any:
    """The inverse of `to_plain`; ValueError when it is no domain value."""
    if isinstance(plain, list):
        return tuple(from_plain(item) for item in plain)
    return _untagged(plain, known_classes())


@cache
def known_classes() -> Mapping[str, type]:
    """All domain classes that have a spelling, by name."""
    found = (item for module in _MODULES for item in vars(module).values())
    return {item.__name__: item for item in found if isinstance(item, type) and is_dataclass(item)}


def _tagged(value: object) -> dict[str, Any]:
    kind: Any = type(value)
    name: str = kind.__name__
    if known_classes().get(name) is not kind:
        raise ValueError(f"{name} is no class of the domain")
    return {TAG: name, **_class_encoder(kind)(value)}


def _untagged(plain: Any, allowed: Mapping[str, type]) -> Any:
    name = plain.get(TAG) if isinstance(plain, dict) else None
    kind = allowed.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"{name!r} is none of {', '.join(allowed)}" if name else f"{plain!r:.80} names no type")
    return _class_decoder(kind)({key: item for key, item in plain.items() if key != TAG})


@cache
def _class_encoder(kind: type) -> Callable[[Any], dict[str, Any]]:
    names = tuple(item.name for item in fields(kind))
    hints = get_type_hints(kind)
    coders = [(name, coder) for name in names if (coder := _encoder(hints[name])) is not None]
    get = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)

    def encode(value: Any) -> dict[str, Any]:
        plain = dict(zip(names, get(value), strict=True))
        for name, coder in coders:
            plain[name] = coder(plain[name])
        return plain

    return encode


@cache
def _class_decoder(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    coders = {item.name: _decoder(hints[item.name]) for item in fields(kind)}
    required = [item.name for item in fields(kind) if _has_no_default(item)]

    def decode(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise ValueError(f"{plain!r:.80} is no {kind.__name__}")
        values = {}
        for name, item in plain.items():
            coder = coders.get(name)
            if coder is None:
                raise ValueError(f"{kind.__name__} has no field {name!r}")
            values[name] = coder(item)
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(f"{kind.__name__} needs {', '.join(missing)}")
        return kind(**values)

    return decode


def _has_no_default(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _encoder(hint: Any) -> _Coder | None:
    """None: `json` writes the value as it is (texts, numbers, enums, tuples of them)."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _class_encoder(hint)
    if origin is tuple:
        inner = _encoder(arguments[0])
        return None if inner is None else lambda value: [inner(item) for item in value]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_encoder(_encoder(arguments[1]))
    if origin in (Union, UnionType):
        return _union_encoder([part for part in arguments if part is not NoneType])
    return None


def _mapping_encoder(inner: _Coder | None) -> _Coder:
    if inner is None:
        return lambda value: {key: value[key] for key in sorted(value)}
    return lambda value: {key: inner(value[key]) for key in sorted(value)}


def _union_encoder(parts: Iterable[Any]) -> _Coder | None:
    known = tuple(parts)
    if len(known) > 1:
        return _tagged
    inner = _encoder(known[0])
    return None if inner is None else lambda value: None if value is None else inner(value)


def _decoder(hint: Any) -> _Coder:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _tuple_decoder(_decoder(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_decoder(_decoder(arguments[1]))
    if origin in (Union, UnionType):
        return _union_decoder(arguments)
    if isinstance(hint, type) and is_dataclass(hint):
        return _class_decoder(hint)
    return hint if issubclass(hint, StrEnum) else _scalar_decoder(hint)


def _scalar_decoder(kind: type) -> _Coder:
    def decode(plain: Any) -> Any:
        if type(plain) is not kind:
            raise ValueError(f"{plain!r:.80} is no {kind.__name__}")
        return plain

    return decode


def _tuple_decoder(inner: _Coder) -> _Coder:
    def decode(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise ValueError(f"{plain!r:.80} is no list")
        return tuple([inner(item) for item in plain])

    return decode


def _mapping_decoder(inner: _Coder) -> _Coder:
    def decode(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise ValueError(f"{plain!r:.80} is no mapping")
        return {key: inner(item) for key, item in plain.items()}

    return decode


def _union_decoder(arguments: tuple[Any, ...]) -> _Coder:
    parts = [part for part in arguments if part is not NoneType]
    if len(parts) > 1:
        allowed = {part.__name__: part for part in parts}
        inner: _Coder = lambda plain: _untagged(plain, allowed)  # noqa: E731
    else:
        inner = _decoder(parts[0])
    if NoneType not in arguments:
        return inner
    return lambda plain: None if plain is None else inner(plain)
