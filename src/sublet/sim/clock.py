"""A clock that jumps to the next thing that happens. Rule: it never runs backwards."""


class SimulatedClock:
    def __init__(self, at_ms: int = 0) -> None:
        self._at_ms = at_ms

    def now_ms(self) -> int:
        return self._at_ms

    def move_to(self, at_ms: int) -> None:
        self._at_ms = max(self._at_ms, at_ms)
