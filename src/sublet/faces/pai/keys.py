"""The access key of a server without people: one, of whoever started it.

One rule: only he can read it.
"""

import base64
import getpass
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sublet.faces.pai.call import Person


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    id: str
    secret: str
    user: str


def kept_key(path: Path, chance: Callable[[int], bytes]) -> Key:
    """The key in this file; a new one, readable for its owner alone, when there is none."""
    if not path.exists():
        word = base64.b32encode(chance(10)).decode().lower()
        said = {"access_key_id": f"LTAI{word}", "access_key_secret": base64.b32encode(chance(25)).decode().lower()}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(said, file)
    said = json.loads(path.read_text("utf-8"))
    return Key(id=said["access_key_id"], secret=said["access_key_secret"], user=getpass.getuser())


def find(key: Key) -> Callable[[str], tuple[str, Person] | None]:
    return lambda asked: (key.secret, Owner(user=key.user)) if asked == key.id else None
