"""What commands and queries stand on.

One rule: the books are read under the controller's lock, and changed only by events through its inbox.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sublet.core.core import Core
from sublet.domain.errors import Refused
from sublet.domain.events import Event
from sublet.domain.jobs import JobRecord
from sublet.ports import Clock
from sublet.service.feed import Feed

Answer = TypeVar("Answer")


class Books(Protocol):
    """The controller, as far as it is seen from here."""

    def read(self, look: Callable[[Core], Answer]) -> Answer: ...

    def put(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """`new_id` makes job ids; `log_path`: where the output of a job's attempt and instance is, None = not known."""

    books: Books
    feed: Feed
    clock: Clock
    new_id: Callable[[], str]
    log_path: Callable[[str, int, int], Path | None]
    answer_within_ms: int = 10_000

    def record(self, text: str) -> JobRecord:
        """The job of this id, of this unique beginning of an id (4 characters or more), or of this name.

        Of several jobs with one name the one that has not ended is meant. Refused when none or several are left.
        """
        exact = self.feed.job(text)
        if exact is not None:
            return exact
        begins = text if text.startswith("job_") and len(text) >= 8 else ""
        found = [job for job in self.feed.find_jobs(text, limit=50) if begins or job.request.name == text]
        live = [job for job in found if not job.state.is_final]
        left = live or found
        if len(left) == 1:
            return left[0]
        if not left:
            hint = "See the jobs with sublet ls --all-states."
            raise Refused(what=f"There is no job {text}.", hint=hint, code="job_unknown", field="job")
        ids = ", ".join(job.request.id for job in left[:5])
        raise Refused(
            what=f"{text} stands for {len(left)} jobs.", why=f"They are {ids}.", hint="Use an id.", code="job_ambiguous"
        )
