"""Ids in PAI's shape beside ours: `dlc…` and `train…` for jobs, `quota…` for quotas, `<job>-worker-0` for pods.

One rule: nothing is stored. A job's id is ours in other clothes, with three characters that show whether it is one; a
quota's follows from its name.
"""

import hashlib
import re

from sublet.domain.ids import JOB_ID_ALPHABET

DLC, TRAIN, QUOTA = "dlc", "train", "quota"
_CHECKED = re.compile(rf"({DLC}|{TRAIN})([{JOB_ID_ALPHABET}]+)([{JOB_ID_ALPHABET}]{{3}})")
_POD = re.compile(r"(.+)-([a-z]+)-(\d+)")


def dlc_id(job: str) -> str:
    """`dlc` and 13 characters, for any job of ours."""
    return _shaped(DLC, job)


def train_id(job: str) -> str:
    return _shaped(TRAIN, job)


def job_of(text: str) -> str | None:
    """Our id of a job that is named in either way; None when it is neither."""
    if text.startswith("job_"):
        return text
    found = _CHECKED.fullmatch(text)
    return f"job_{found[2]}" if found and found[3] == _digest(found[2], 3) else None


def quota_id(name: str) -> str:
    """`quota` and 13 characters."""
    return QUOTA + _digest(name, 13)


def pod_id(job: str, role: str, number: int) -> str:
    return f"{job}-{role}-{number}"


def pod_of(text: str) -> tuple[str, int] | None:
    """Role and number."""
    found = _POD.fullmatch(text)
    return (found[2], int(found[3])) if found else None


def _shaped(prefix: str, job: str) -> str:
    core = job.removeprefix("job_")
    return f"{prefix}{core}{_digest(core, 3)}"


def _digest(text: str, length: int) -> str:
    return "".join(JOB_ID_ALPHABET[byte % 32] for byte in hashlib.sha256(text.encode()).digest()[:length])
