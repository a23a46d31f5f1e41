"""A log that grows too large keeps its first and its last part, and every reader sees the same."""

from pathlib import Path

import pytest

from sublet.supervisor import logs

FIRST, LAST = 8_192, 16_384


def whole(path: Path, most: int = 5_000) -> bytes:
    """All that a reader gets, piece by piece."""
    offset, pieces = 0, []
    while True:
        piece, offset = logs.read(str(path), offset, most)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %07d\n" % n for n in range(20_000)))
    return path


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("short\n")
    assert logs.bound(str(tmp_path), str(path), FIRST, LAST) and whole(path) == b"short\n"
    assert not (tmp_path / "log.cut").exists()


def test_the_middle_is_given_back_and_the_rest_stays(log: Path) -> None:
    text, before = log.read_bytes(), log.stat().st_blocks
    assert logs.bound(str(log.parent), str(log), FIRST, LAST)
    read = whole(log)
    assert read.startswith(text[:FIRST]) and read.endswith(text[-LAST:])
    assert b"bytes are left out here" in read and b"\0" not in read
    assert len(read) < FIRST + LAST + 4_096 + 100
    assert log.stat().st_size == len(text) and log.stat().st_blocks < before


def test_it_can_grow_and_be_cut_again_while_it_is_written_to(log: Path) -> None:
    logs.bound(str(log.parent), str(log), FIRST, LAST)
    with log.open("ab") as file:
        file.write(b"x" * 100_000 + b"the end\n")
    logs.bound(str(log.parent), str(log), FIRST, LAST)
    read = whole(log)
    assert read.count(b"left out") == 1 and read.endswith(b"the end\n")
    assert log.stat().st_blocks * 512 < FIRST + LAST + 20_000


def test_the_end_of_it(log: Path) -> None:
    assert logs.tail(str(log), 26) == "line 0019998\nline 0019999\n"
    assert logs.tail(str(log.parent / "none"), 10) == ""
