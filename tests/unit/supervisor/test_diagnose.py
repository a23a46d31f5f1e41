"""The verdict on a failed program, held to log excerpts that were written after public reports."""

from collections import Counter
from pathlib import Path

import pytest

from sublet.domain.faults import Fault
from sublet.supervisor.diagnose import diagnose, same_text

HERE = Path(__file__).parent
EXCERPTS = sorted((HERE / "fixtures").glob("*.log"))
PAGE = HERE.parents[2] / "docs" / "explanation" / "fault-tolerance.md"


def read(path: Path) -> tuple[Fault, int, str]:
    """What it shows, as its name says; the exit code; the log."""
    head, _, log = path.read_text("utf-8").partition("\n")
    return Fault(path.name.partition("--")[0]), int(head.removeprefix("exit ")), log


def test_there_are_enough_of_them() -> None:
    assert len(EXCERPTS) >= 60
    assert {read(path)[0] for path in EXCERPTS} == set(Fault) - {Fault.PREEMPTED}


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.stem)
def test_the_class_and_the_line_that_shows_it(path: Path) -> None:
    fault, code, log = read(path)
    found = diagnose(code, log)
    assert (found.fault, bool(found.evidence)) == (fault, True), found
    assert found.evidence.startswith("exit code") or found.evidence in log


def test_the_page_shows_the_confusion_as_it_is() -> None:
    assert confusion_table() in PAGE.read_text("utf-8"), confusion_table()


def confusion_table() -> str:
    """Rows: what the excerpt shows; columns: what was found."""
    counts = Counter((read(path)[0], diagnose(*read(path)[1:]).fault) for path in EXCERPTS)
    faults = [fault for fault in Fault if fault is not Fault.PREEMPTED]
    words = [fault.replace("_", " ") for fault in faults]
    lines = [f"| shown \\ found | {' | '.join(words)} |", "|---|" + "---|" * len(faults)]
    for row, word in zip(faults, words, strict=True):
        lines.append(f"| {word} | {' | '.join(str(counts[row, column] or '') for column in faults)} |")
    return "\n".join(lines)


def test_what_a_job_names_itself_comes_first() -> None:
    own = {"verdicts": [{"match": "license server", "is": "network"}, {"exit_code": 42, "is": "hardware"}]}
    assert diagnose(1, "RuntimeError: license server is away", wishes=own).fault is Fault.NETWORK
    assert diagnose(1, "RuntimeError: license server is away").fault is Fault.UNKNOWN
    assert diagnose(42, "SyntaxError: x", wishes=own).fault is Fault.HARDWARE


def test_a_kill_by_the_memory_limit_needs_no_line() -> None:
    assert diagnose(137, "step 1", oom_kills=1).fault is Fault.OUT_OF_MEMORY
    assert diagnose(137, "step 1").fault is Fault.INFRASTRUCTURE


def test_nobody_saw_how_it_ended() -> None:
    assert diagnose(None, "").fault is Fault.INFRASTRUCTURE


def test_two_failures_are_the_same_whatever_their_numbers() -> None:
    one = diagnose(1, "x\nRuntimeError: rank 3 failed at 0x7f3a11 after 600029 milliseconds (17:31:22)")
    two = diagnose(1, "y\nRuntimeError: rank 5 failed at 0x1100aa after 612 milliseconds (04:01:09)")
    other = diagnose(1, "RuntimeError: rank 3 was lost at 0x7f3a11")
    assert one.error == two.error != other.error


def test_same_text_keeps_the_words() -> None:
    assert same_text("step 12 failed at 2026-12-01 10:11:12.123 in job_7k") == "step # failed at # in job_#k"
