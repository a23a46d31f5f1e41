"""Quotas: promises of a count of GPUs per spec. A name with slashes is a path in the tree: `P/c1` is a child of `P`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sublet.domain.nodes import DEFAULT_TENANT


class Scope(StrEnum):
    LINGJUN = "lingjun"  # idle jobs look at the tenant's whole free capacity of the spec
    GENERAL = "general"  # only at this quota's own free share


class Strategy(StrEnum):
    """How far past a blocked head the queue looks."""

    INTELLIGENT = "intelligent"  # priority 7-9 as fifo; 1-6 are skipped, ageing up to 6
    FIFO = "fifo"
    ROUND_ROBIN = "round_robin"  # a blocked head is skipped
    BALANCE = "balance"  # the window widens by one job per timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """`nominal` is GPUs by spec; None promises the sum of the children. Limits: None = no limit, 0 = not at all."""

    name: str
    nominal: Mapping[str, int] | None = field(default_factory=dict)
    tenant: str = DEFAULT_TENANT
    scope: Scope = Scope.LINGJUN
    strategy: Strategy = Strategy.INTELLIGENT
    balance_timeout_ms: int = 120_000
    lend_max: int | None = None
    borrow_max: int | None = None
    self_preemption: bool = False  # its own jobs may preempt each other by priority
    sub_quota_preemption: bool = False  # jobs of the quotas below it, too
    owner: str = ""


def path_of(name: str) -> tuple[str, ...]:
    """The quota and its ancestors, from the leaf up."""
    parts = name.split("/")
    return tuple("/".join(parts[:end]) for end in range(len(parts), 0, -1))
