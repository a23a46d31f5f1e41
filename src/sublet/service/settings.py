"""All that can be set of a server, as one frozen value that was checked whole.

One rule: it is read once, at the edge; everything else receives values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.domain.errors import Refused
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.domain.rules import Rules

DEFAULT_PORT = 7788


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """`secret_file`: where its secret stands, beside the configuration; empty: one is made and kept."""

    name: str
    url: str
    on: tuple[str, ...] = ()
    quota: str = ""
    secret_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a configuration file describes; None = it says nothing of it.

    `verdicts`: signs of faults for all jobs, see signs.py. `webhooks`: those that it does not name stay as they are.
    """

    nodes: tuple[Node, ...] | None = None
    quotas: tuple[Quota, ...] | None = None
    rules: Rules | None = None
    verdicts: tuple[Mapping[str, Any], ...] = ()
    webhooks: tuple[Webhook, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`port` 0: any free one. `cluster`: laid over what the store remembers."""

    data: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    cluster: Cluster = Cluster()
    database: str = ""  # postgresql://…; empty: a file in `data`
    takes_sha1: bool = False  # PAI's older signatures, which do not cover the body
    answer_within_ms: int = 10_000  # how long a command may wait to become durable

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            what, why = f"The port is {self.port}.", "It must be 0 to 65,535."
            raise Refused(what=what, why=why, code="malformed", field="port")
        if self.host not in ("127.0.0.1", "::1", "localhost"):
            why = "Without a login it would be open to everybody who reaches that address."
            raise Refused(what=f"The server cannot listen on {self.host}.", why=why, hint="Leave it at 127.0.0.1.")
