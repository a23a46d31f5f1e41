"""Answers that go on: the log of a job as it is written, and events as they become durable.

One rule: a reader who goes away costs nothing; one who is slow is waited for and misses nothing.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from starlette.concurrency import run_in_threadpool

from sublet.service import logs, queries
from sublet.service.desk import Desk

LOOK_S = 0.2  # how often a log file is looked at
ALIVE_S = 15  # a comment at least this often, so that a dead line shows
BATCH = 500
LONGEST_LINE = 1 << 20


async def log_text(desk: Desk, place: logs.Place | None, follow: bool) -> AsyncIterator[bytes]:
    """What is there, and with `follow` what comes, until the job has ended."""
    while place is not None:
        piece, behind = await run_in_threadpool(logs.read, desk, place)
        if piece:
            yield piece
        elif behind == place:
            if not follow:
                return
            await asyncio.sleep(LOOK_S)
        place = behind


async def lines_with(text: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Of these pieces the whole lines that contain the text, and the lines between two attempts."""
    needle, rest = text.encode(), b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        found = [line for line in lines if needle in line or line.startswith(logs.SEPARATOR)]
        if found:
            yield b"\n".join(found) + b"\n"
    if rest and needle in rest:
        yield rest + b"\n"


async def event_stream(desk: Desk, after: int, job: str) -> AsyncIterator[bytes]:
    """Server-sent events behind this number, for ever."""
    news = asyncio.Event()
    loop = asyncio.get_running_loop()
    with desk.feed.listening(lambda: _tell(loop, news)):
        yield b": sublet\n\n"
        while True:
            news.clear()
            page = await run_in_threadpool(queries.events, desk, after, BATCH, job)
            for view in page.items:
                data = json.dumps(asdict(view), ensure_ascii=False)
                yield f"id: {view.sequence}\nevent: {view.type}\ndata: {data}\n\n".encode()
            after = max([after, *(view.sequence for view in page.items), int(page.next or 0)])
            if page.next is None and not await _came(news):
                yield b": alive\n\n"


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(news.set)


async def _came(news: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(ALIVE_S):
            await news.wait()
    except TimeoutError:
        return False
    return True
