"""Nodes: the machines that are lost and drained. A node is of one spec and of one tenant."""

from dataclasses import dataclass
from enum import StrEnum

DEFAULT_TENANT = "t"


class NodeState(StrEnum):
    UP = "up"
    DRAINING = "draining"  # takes nobody new, who is there stays
    LOST = "lost"  # silent past the node timeout, or fenced
    QUARANTINED = "quarantined"  # something on it outlived its kill; counts as lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine; cpu in thousandths of a core, memory in bytes, 0 = not counted."""

    name: str
    spec: str
    gpu: int
    tenant: str = DEFAULT_TENANT
    rack: str = ""
    cpu_milli: int = 0
    memory_bytes: int = 0
    address: str = ""
