"""Leases: the right of one attempt to named GPUs on named nodes, stamped at the grant."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class LeaseKind(StrEnum):
    GUARANTEED = "guaranteed"  # charged to the job's quota and all its ancestors
    IDLE = "idle"  # stands on free capacity, revocable at any time


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`nodes` and `gpus` have one entry an instance. `lenders`: GPUs by quota as of the grant, idle leases only."""

    kind: LeaseKind
    spec: str
    nodes: tuple[str, ...]
    gpus: tuple[int, ...]
    granted_ms: int
    lenders: Mapping[str, int] = field(default_factory=dict)
