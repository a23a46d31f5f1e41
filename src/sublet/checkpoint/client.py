"""The trainer's side of its agent: find it or start it, hold its slots, hear its events, outlive its death.

Rule: an agent that dies costs nothing that was complete: the trainer still maps the slots and hands them to the
next agent.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublet.checkpoint import wire
from sublet.checkpoint.errors import Unavailable
from sublet.checkpoint.points import reach
from sublet.checkpoint.slots import COMPLETE, Slot, close_slot, fault_in, open_slot

START_S = 30.0
REVIVALS = 5
Message = dict[str, Any]


class AgentLost(Exception):
    """The connection to the agent ended."""


@dataclass(slots=True, kw_only=True)
class Link:
    """A trainer's connection to its agent; `slots` are the agent's, mapped here too."""

    address: str
    greeting: Message
    connection: socket.socket
    process: subprocess.Popen[bytes] | None
    slots: dict[int, Slot] = field(default_factory=dict)
    orders: dict[int, list[int]] = field(default_factory=dict)  # of each slot, newest copy highest
    heard: list[Message] = field(default_factory=list)
    faulting: dict[int, threading.Thread] = field(default_factory=dict)
    agent_pid: int = 0
    signal_fd: int = -1


def start_agent(address: str) -> subprocess.Popen[bytes]:
    """An agent in a session of its own, with nothing of the trainer's open, so that no kill of the trainer reaches
    it.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.Popen(
        [sys.executable, "-m", "sublet.checkpoint.agent", address.removeprefix("\0")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        cwd="/", env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip


def open_link(directory: Path, rank: int, greeting: Message, signal_fd: int = -1) -> Link:
    """Connect to the agent of a directory and a rank, starting it if there is none.

    Unavailable if it is in use or fails.
    """
    address = wire.address(directory, rank)
    connection, process = reach_agent(address)
    link = Link(address=address, greeting=greeting, connection=connection, process=process, signal_fd=signal_fd)
    try:
        greet(link)
    except AgentLost:  # it was just leaving
        revive(link)
    return link


def reach_agent(address: str) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    process = None
    deadline = time.monotonic() + START_S
    while True:
        connection = wire.connect(address)
        if connection is not None:
            return connection, process
        if process is None:
            process = start_agent(address)
        if time.monotonic() > deadline or process.poll() not in (None, 0):
            raise Unavailable(
                what="The checkpoint agent did not start.",
                why=f"Its exit code is {process.poll()}.",
                hint="Run with agent=False to write checkpoints from the trainer itself.",
            )
        if process.poll() == 0:  # another one had the address and is leaving
            process = None
        time.sleep(0.01)


def greet(link: Link) -> None:
    """Say who we are, hand over what we hold, learn what the agent holds."""
    held = sorted(link.slots.values(), key=lambda slot: slot.generation)  # it takes the last copy for the newest
    copies = [
        {"capacity": s.capacity, "state": s.state, "copy": s.copy, "durable": s.durable,
         "sequence": link.orders.get(s.id, [0])[0]}
        for s in held
    ]  # fmt: skip
    fds = [slot.fd for slot in held] + ([link.signal_fd] if link.signal_fd >= 0 else [])
    message = {**link.greeting, "ask": "hello", "held": copies, "signals": link.signal_fd >= 0}
    reply, received = converse(link, message, tuple(fds))
    if "error" in reply:
        link.connection.close()
        raise Unavailable(what=reply["error"])
    link.agent_pid = reply["pid"]
    if held:  # a new agent: it numbered our slots in the order we gave
        close_fds(received)
        for shown, slot in zip(reply["adopted"], held, strict=True):
            if slot.id in link.faulting:
                link.faulting.pop(slot.id).join()
            slot.id = shown["slot"]
        link.slots = {slot.id: slot for slot in held}
        link.orders = {shown["slot"]: shown["order"] for shown in reply["adopted"]}
        return
    take_slots(link, reply["slots"], received)


def converse(link: Link, message: Message, fds: tuple[int, ...] = ()) -> tuple[Message, list[int]]:
    """Send and wait for the reply; events that come in between are kept. AgentLost if the agent is gone."""
    try:
        wire.send(link.connection, message, fds)
        while True:
            got = wire.receive(link.connection)
            if got is None:
                raise AgentLost
            if "reply" in got[0]:
                return got[0]["reply"], got[1]
            keep(link, *got)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise AgentLost from error


def ask(link: Link, message: Message) -> Message:
    """A reply to one question."""
    reply, fds = converse(link, message)
    close_fds(fds)
    return reply


def tell_copied(link: Link, slot: Slot, size: int, copy: Message) -> None:
    """How far a copy is, so that the agent may begin to write it. A hint: lost if the agent is busy or gone."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
        message = {"ask": "copied", "slot": slot.id, "bytes": size, "copy": copy}
        wire.send(link.connection, message, flags=socket.MSG_DONTWAIT)
    reach("copying")


def hear(link: Link, wait_ms: int = 0) -> list[Message]:
    """What the agent has said since; waits up to `wait_ms` for something. AgentLost if it is gone."""
    if wait_ms and not link.heard:
        select.select([link.connection], [], [], wait_ms / 1000)
    while True:
        try:
            got = wire.receive(link.connection, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
        if got is None:
            raise AgentLost
        keep(link, *got)
    out, link.heard = link.heard, []
    return out


def keep(link: Link, message: Message, fds: list[int]) -> None:
    if message.get("event") == "reserved":
        take_slots(link, message["facts"]["slots"], fds)
    else:
        close_fds(fds)
    if message.get("event") == "durable":
        for slot in link.slots.values():
            if slot.copy.get("name") == message["name"]:
                slot.durable = True
                link.orders[slot.id] = [message["facts"]["sequence"], 1, slot.generation]
    link.heard.append(message)


def take_slots(link: Link, shown: list[Message], fds: list[int]) -> None:
    """Map slots of the agent that we do not have yet; forget those that it no longer shows.

    Pages fault in behind us.
    """
    pairs = sorted(zip(shown, fds, strict=True), key=lambda pair: pair[0]["order"], reverse=True)
    for each, fd in pairs:  # the newest copy first: it may be wanted at once
        number = each["slot"]
        if number in link.slots:
            os.close(fd)
            continue
        slot = open_slot(number, fd, each["capacity"])
        slot.state, slot.copy, slot.durable = each["state"], each["copy"], each["durable"]
        slot.generation = each["order"][2]
        link.slots[number], link.orders[number] = slot, each["order"]
        link.faulting[number] = start_faulting(slot, list(link.faulting.values()))
    for number in set(link.slots) - {each["slot"] for each in shown}:
        drop_slot(link, number)


def start_faulting(slot: Slot, before: list[threading.Thread]) -> threading.Thread:
    """Map the slot's pages in a thread, after those that were started before."""

    def run() -> None:
        for each in before:
            each.join()
        fault_in(slot)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def copied_last(link: Link, slot: Slot, copy: Message) -> Message:
    """The copy in a slot is whole and is the newest: tell the agent. AgentLost if it is gone; the next one is told."""
    slot.generation = 1 + max(each.generation for each in link.slots.values())
    slot.state, slot.copy = COMPLETE, copy
    reply = ask(link, {"ask": "complete", "slot": slot.id, "copy": copy, "persist": True})
    link.orders[slot.id] = reply["order"]
    return reply


def drop_slot(link: Link, number: int) -> None:
    slot, thread = link.slots.pop(number), link.faulting.pop(number, None)
    if thread is not None:
        thread.join()
    with contextlib.suppress(BufferError):  # a tensor still looks into it; it goes with the tensor
        close_slot(slot)


def ready(link: Link, number: int) -> Slot:
    """A slot whose pages are all mapped here."""
    thread = link.faulting.pop(number, None)
    if thread is not None:
        thread.join()
    return link.slots[number]


def revive(link: Link) -> None:
    """The agent is gone: start another and hand it our slots. Unavailable if they die as fast as they start."""
    for _ in range(REVIVALS):
        link.connection.close()
        link.connection, link.process = reach_agent(link.address)
        with contextlib.suppress(AgentLost):  # one that was still dying took the call
            greet(link)
            return
    raise Unavailable(what="The checkpoint agent dies again and again.", hint="Its story is beside the checkpoints.")


def copies(link: Link) -> list[Slot]:
    """The complete copies: those that the agent held when we came, and our own since. Newest first."""
    whole = [slot for slot in link.slots.values() if slot.state == COMPLETE]
    return sorted(whole, key=lambda slot: link.orders.get(slot.id, []), reverse=True)


def close_link(link: Link, *, goodbye: bool) -> None:
    """Let go of the agent; with a goodbye it writes what is unwritten and ends."""
    if goodbye:
        with contextlib.suppress(AgentLost):
            ask(link, {"ask": "bye"})
    link.connection.close()
    for number in list(link.slots):
        drop_slot(link, number)
    if goodbye and link.process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(5)


def listen_to(signals: Sequence[signal.Signals]) -> int:
    """A descriptor for the agent on which it hears this process's signals, even while the main thread is busy in C."""
    if not signals:
        return -1
    hears, tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)  # the byte on the descriptor is the message
    return hears


def close_fds(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
