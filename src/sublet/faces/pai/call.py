"""A request to PAI's API, as a handler sees it.

One rule: the wire's habits are undone here: `True` for true, numbers and times as texts, lists with commas.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from sublet.domain.errors import Refused
from sublet.faces.pai.book import Book
from sublet.service.desk import Desk


class Person(Protocol):
    """Whose access key signed the request."""

    @property
    def user(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`path`: the parts of the path in braces, by name. `body`: the JSON object, empty when there is none."""

    desk: Desk
    book: Book
    who: Person
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]

    def text(self, name: str, usual: str = "") -> str:
        return self.query.get(name) or usual

    def flag(self, name: str, usual: bool = False) -> bool:
        return is_true(self.query[name]) if self.query.get(name) else usual

    def whole(self, name: str, usual: int, low: int, high: int) -> int:
        text = self.query.get(name, "")
        if not text:
            return usual
        if not re.fullmatch(r"-?\d{1,18}", text) or not low <= int(text) <= high:
            raise invalid(name, text, f"It must be {low:,} to {high:,}.")
        return int(text)

    def words(self, name: str) -> tuple[str, ...]:
        """A list with commas."""
        return tuple(word for part in self.query.get(name, "").split(",") if (word := part.strip()))

    def time_ms(self, name: str) -> int | None:
        return time_ms(name, self.query.get(name, ""))

    def tags(self, name: str) -> Mapping[str, str]:
        """A JSON object in the query."""
        text = self.query.get(name, "")
        try:
            found = json.loads(text) if text else {}
        except ValueError as error:
            raise invalid(name, text, "It is no JSON object.") from error
        if not isinstance(found, dict):
            raise invalid(name, text, "It is no JSON object.")
        return {str(key): str(value) for key, value in found.items()}


def is_true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1")


def time_ms(name: str, text: str) -> int | None:
    """`2021-01-12T14:35:01Z`, with fractions or an offset too; None for nothing."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError as error:
        raise invalid(name, text, "It is no time: write 2021-01-12T14:35:01Z.") from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


def time_of(at_ms: int | None) -> str | None:
    """Whole seconds in UTC, as PAI writes them."""
    return None if at_ms is None else datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def event_time_of(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def invalid(name: str, value: Any, why: str = "", hint: str = "") -> Refused:
    shown = json.dumps(value, ensure_ascii=False)[:60] if not isinstance(value, str) else value[:60]
    return Refused(what=f"{name} is {shown or 'empty'}.", why=why, hint=hint, code="InvalidParameter", field=name)


def missing(name: str, why: str = "") -> Refused:
    return Refused(what=f"{name} is missing.", why=why, code="MissingParameter", field=name)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not known: a client reads a missing key as nothing."""
    return {key: value for key, value in values.items() if value is not None}


def page(call: Call, name: str, items: Sequence[Any], usual: int = 10) -> dict[str, Any]:
    """The page that is asked for, with the count of all."""
    number = call.whole("PageNumber", 1, 1, 1_000_000)
    size = call.whole("PageSize", usual, 1, 1_000)
    return {name: list(items[(number - 1) * size : number * size]), "TotalCount": len(items)}
