"""Times as people read them. One rule: inside are whole milliseconds; words are made at the edges, here."""


def span(seconds: int) -> str:
    """`12s`, `41m`, `2h04m`, `3d04h`; whole seconds from 0."""
    if seconds < 60:
        return f"{seconds}s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes}m"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def exact(milliseconds: int) -> str:
    """`30s`, `3.1s`, and from a minute on as `span`."""
    if milliseconds >= 60_000:
        return span(milliseconds // 1000)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 < 50 else f"{milliseconds / 1000:.1f}s"
