"""What may be wrong with a program: the classes of a verdict, and the troubles of one that still runs."""

from enum import StrEnum


class Fault(StrEnum):
    """The strongest first: of several that show in one gang, the first is the cause and the rest follow from it."""

    HARDWARE = "hardware"
    OUT_OF_MEMORY = "out_of_memory"
    USER_ERROR = "user_error"
    INFRASTRUCTURE = "infrastructure"
    HANG = "hang"
    UNKNOWN = "unknown"
    NETWORK = "network"  # late: the peers of an instance that died see a broken connection
    PREEMPTED = "preempted"  # it saved and left, as it was asked to


class Trouble(StrEnum):
    HANG = "hang"  # no progress for longer than the limit
    EXIT_HANG = "exit_hang"  # one instance is done, the others do not end
    SLOW = "slow"  # an instance holds the others up
