"""Times as people read them."""

import pytest

from sublet.domain.times import exact, span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (3_599, "59m"), (3_600, "1h00m"), (7_440, "2h04m"), (172_800, "2d00h")],
)
def test_spans(seconds: int, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(0, "0s"), (3_100, "3.1s"), (30_000, "30s"), (30_049, "30s"), (90_000, "1m")]
)
def test_exact_times(milliseconds: int, text: str) -> None:
    assert exact(milliseconds) == text
