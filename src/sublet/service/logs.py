"""What a job printed, of all its attempts, as one stream with a line between two attempts.

One rule: nothing that was written is lost or told twice, whatever pieces it is read in.
"""

from dataclasses import dataclass, replace

from sublet.domain.errors import Refused
from sublet.domain.jobs import JobRecord
from sublet.service.desk import Desk
from sublet.service.views import attempt_views
from sublet.supervisor import logs as supervisor_logs

PIECE_BYTES = 64 * 1024
SEPARATOR = b"--- attempt "


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far a reader has come: so many bytes of this attempt. `only`: this attempt and no other."""

    job: str
    instance: int
    attempt: int
    offset: int = 0
    only: bool = False


def begin(desk: Desk, text: str, attempt: int | None, instance: int) -> Place:
    """At the first attempt, or at the one that is named; Refused when there is none such."""
    record = desk.record(text)
    count = len(record.request.sizes)
    if not 0 <= instance < count:
        why = f"It has {count}, numbered from 0."
        raise Refused(what=f"{record.request.id} has no instance {instance}.", why=why, code="instance_unknown")
    if attempt is not None and not 1 <= attempt <= record.attempt:
        why = f"It had {record.attempt} so far."
        raise Refused(what=f"{record.request.id} has no attempt {attempt}.", why=why, code="attempt_unknown")
    return Place(job=record.request.id, instance=instance, attempt=attempt or 1, only=attempt is not None)


def read(desk: Desk, place: Place) -> tuple[bytes, Place | None]:
    """The next piece and the place behind it.

    An empty piece at the same place: nothing more is there now. None: there will never be more.
    """
    piece, behind = _piece(desk, place)
    record = desk.record(place.job)
    if not piece and _is_over(record, place.attempt):
        piece, behind = _piece(desk, place)  # what was written between the first look and the end of the attempt
    if piece:
        head = _separator(desk, record, place) if place.offset == 0 and not place.only else b""
        return head + piece, replace(place, offset=behind)
    if not _is_over(record, place.attempt):
        return b"", place
    if place.only:
        return b"", None
    if place.attempt < record.attempt:
        return b"", replace(place, attempt=place.attempt + 1, offset=0)
    return b"", None if record.state.is_final else place


def _is_over(record: JobRecord, attempt: int) -> bool:
    return record.state.is_final or attempt < record.attempt or any(end.attempt == attempt for end in record.history)


def _piece(desk: Desk, place: Place) -> tuple[bytes, int]:
    """And the offset behind it."""
    path = desk.log_path(place.job, place.attempt, place.instance)
    if path is None:
        return b"", place.offset
    try:
        return supervisor_logs.read(str(path), place.offset, PIECE_BYTES)
    except FileNotFoundError:  # the instance has not begun to write
        return b"", place.offset


def _separator(desk: Desk, record: JobRecord, place: Place) -> bytes:
    """The line before an attempt's output; nothing where there is only one attempt."""
    attempts = attempt_views(record, desk.clock.now_ms())
    shown = next((item for item in attempts if item.attempt == place.attempt), None)
    if record.attempt < 2 or shown is None:
        return b""
    kind = {"in_quota": "In Quota", "not_in_quota": "Not in Quota"}[shown.idle_resources]
    return SEPARATOR + f"{place.attempt} · {kind} · {shown.granted} ---\n".encode()
