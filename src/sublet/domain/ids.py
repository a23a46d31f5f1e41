"""How jobs, attempts and instances are named: `job_7k3m9q2x4t`, its third attempt `…#3`, instance 0 of that `…#3/0`."""

from dataclasses import dataclass

JOB_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's: no i l o u
JOB_ID_LENGTH = 10


def job_id_from_bytes(entropy: bytes) -> str:
    """A job id from at least 10 random bytes; the caller brings the chance."""
    return "job_" + "".join(JOB_ID_ALPHABET[byte % 32] for byte in entropy[:JOB_ID_LENGTH])


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class InstanceRef:
    """One instance of one attempt. Messages about an older attempt change nothing."""

    job: str
    attempt: int
    instance: int

    def __str__(self) -> str:
        return f"{self.job}#{self.attempt}/{self.instance}"


def parse_instance_ref(text: str) -> InstanceRef:
    """The inverse of `str(ref)`; ValueError when it is none."""
    job, _, rest = text.rpartition("#")
    attempt, _, instance = rest.partition("/")
    if not job:
        raise ValueError(f"{text!r} names no instance")
    return InstanceRef(job=job, attempt=int(attempt), instance=int(instance))
