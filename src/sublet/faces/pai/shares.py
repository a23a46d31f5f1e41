"""Jobs that have not ended, by quota. Rule: they are read from the books, at one moment."""

from dataclasses import dataclass

from sublet.domain.jobs import JobRecord
from sublet.domain.leases import LeaseKind
from sublet.faces.pai.call import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A job that has not ended, as far as its quota is concerned."""

    record: JobRecord
    gpus: int
    is_guaranteed: bool


def live(call: Call, quota_names: set[str]) -> list[Share]:
    records = call.desk.books.read(lambda core: list(core.jobs()))
    return [
        Share(
            record=one,
            gpus=sum(one.lease.gpus) if one.lease else one.request.gpus,
            is_guaranteed=one.lease is not None and one.lease.kind is LeaseKind.GUARANTEED,
        )
        for one in records
        if one.request.quota in quota_names
    ]
