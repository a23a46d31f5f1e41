"""Why a job waits: a code from a closed list, with numbers. Every wait, eviction and failure has one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ReasonCode(StrEnum):
    # never: will not run as written
    TOO_LARGE_FOR_SPEC = "too_large_for_spec"
    TOO_LARGE_FOR_TENANT = "too_large_for_tenant"
    TOO_LARGE_FOR_QUOTA = "too_large_for_quota"
    SPEC_UNKNOWN = "spec_unknown"
    QUOTA_UNKNOWN = "quota_unknown"
    QUOTA_CLOSED = "quota_closed"
    NOT_PERMITTED = "not_permitted"
    MALFORMED = "malformed"
    # waiting
    OWN_QUOTA_FULL = "own_quota_full"
    IDLE_TOO_SMALL = "idle_too_small"
    BORROW_LIMIT = "borrow_limit"
    SHAPE = "shape"
    BEHIND = "behind"
    RECLAIMING = "reclaiming"
    RECLAIM_DELAY = "reclaim_delay"
    RECLAIM_NOT_ENOUGH = "reclaim_not_enough"
    EARMARKED = "earmarked"
    COOLDOWN = "cooldown"
    BACKOFF = "backoff"
    HELD = "held"
    NODE_LOST = "node_lost"
    DRAINING = "draining"
    # runs, and something is wrong with it
    HANGING = "hanging"
    EXIT_HANGING = "exit_hanging"
    SLOW_INSTANCE = "slow_instance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """`numbers` and `subjects` fill the sentence; the first of several reasons is the strongest."""

    code: ReasonCode
    numbers: Mapping[str, int] = field(default_factory=dict)
    subjects: tuple[str, ...] = ()
