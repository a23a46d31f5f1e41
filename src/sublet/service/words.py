"""Reasons as sentences, for those who have a reason and no books: the log, the lists, a refusal.

One rule: the sentence of a code is the core's; here only the numbers are filled in.
"""

from sublet.core.explain import SENTENCES
from sublet.domain.jobs import JobRequest
from sublet.domain.reasons import Reason


def words(reason: Reason, request: JobRequest, at_ms: int) -> str:
    """The reason as it was at `at_ms`."""
    numbers = reason.numbers
    until_ms = numbers.get("by_ms", numbers.get("until_ms", at_ms))
    values: dict[str, object] = {
        **numbers,
        "first": reason.subjects[0] if reason.subjects else "",
        "names": ", ".join(reason.subjects[:3]),
        "spec": request.specs[0] if request.specs else "",
        "seconds": max(0, until_ms - at_ms + 999) // 1000,
        "idle_policy": request.idle.value,
    }
    return SENTENCES[reason.code].format_map(values)
