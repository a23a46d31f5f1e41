"""The process beside the trainer that owns the copies, writes them to disk and hears the notice.

It outlives the trainer, so that the next one restores from memory. Rule: the newest complete copy is never written
over, and nothing is called durable before it is. A copy may be on its way to disk while the trainer still makes it; it
is committed only when it is whole. It ends by itself: when the trainer says goodbye, when trainer and
launcher are both gone, when nobody came back for a while, or when the checkpoint directory is gone; first it writes
what is unwritten.

    python -m sublet.checkpoint.agent ADDRESS          (started by the trainer; knows no torch)
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublet.checkpoint import wire
from sublet.checkpoint.budget import available_bytes, slots_that_fit
from sublet.checkpoint.errors import CheckpointError
from sublet.checkpoint.notice import Watch, answer_by_ms, heard, safe, withdrawn
from sublet.checkpoint.persist import CopyEnded, Disk, apply_retention, digests_of, open_disk, persist_copy
from sublet.checkpoint.points import reach
from sublet.checkpoint.retention import Keep
from sublet.checkpoint.slots import COMPLETE, FREE, GRAIN_BYTES, WRITING, Slot, close_slot, make_slot, open_slot
from sublet.checkpoint.words import Event

TICK_S = 0.1
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
LAST_TRIES = 3  # of a write that fails, once nobody is there any more
STALL_S = 0.5  # a trainer that copies nothing for so long is not waited for
NICE = 5
ERROR_LOG = ".agent-error.log"
IN_USE = "Give this run a directory of its own, or stop the other one."


@dataclass(slots=True, kw_only=True)
class Agent:
    """All that the agent knows; `change` guards it against the writer thread."""

    server: socket.socket
    change: threading.Condition = field(default_factory=threading.Condition)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    slots: list[Slot] = field(default_factory=list)
    next_slot: int = 0
    generation: int = 0
    trainer: socket.socket | None = None
    outbox: list[tuple[dict[str, Any], tuple[int, ...]]] = field(default_factory=list)
    launcher: int = -1  # a pidfd
    launcher_gone: bool = False
    idle_since: float = field(default_factory=time.monotonic)
    idle_s: float = 600.0
    farewell: bool = False
    greeted: bool = False
    disk: Disk | None = None
    watch: Watch = field(default_factory=Watch)
    scrubbing: threading.Thread | None = None
    wanted_slots: int = 2
    waker: int = -1
    woken: int = -1
    stopping: bool = False
    tidying: bool = False  # the writer is at work, the deleting of old checkpoints included


def newest(agent: Agent) -> Slot | None:
    """The newest complete copy."""
    complete = [slot for slot in agent.slots if slot.state == COMPLETE]
    return max(complete, key=lambda slot: slot.generation, default=None)


def may_write_over(agent: Agent, slot: Slot) -> bool:
    if slot.users or slot.state == WRITING:
        return False
    if slot.state == FREE:
        return True
    if slot is not newest(agent):
        return not (slot.wanted and not slot.durable and int(slot.copy["world"]) > 1)
    return slot.durable and len(usable(agent, slot.capacity)) == 1  # a single slot, and the disk has what it holds


def usable(agent: Agent, size: int) -> list[Slot]:
    return [slot for slot in agent.slots if slot.capacity >= size]


def tell(agent: Agent, event: Event, fds: tuple[int, ...] = (), **more: Any) -> None:
    """Queue an event for the trainer, if there is one. From any thread."""
    message = {"event": event.kind, "step": event.step, "message": event.message, "facts": event.facts, **more}
    with agent.change:
        if agent.trainer is not None:
            agent.outbox.append((message, fds))
    with contextlib.suppress(BlockingIOError):
        os.write(agent.waker, b"x")


# --- what the trainer asks


def answer(agent: Agent, message: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], tuple[int, ...]] | None:
    """What to reply, and descriptors; None if no reply is awaited."""
    asked = message["ask"]
    with agent.change:
        if asked == "copied":
            go_on(agent, message)
            return None
        if asked == "hello":
            return hello(agent, message, fds)
        if asked == "begin":
            return begin(agent, message), ()
        if asked == "complete":
            return complete(agent, message), ()
        if asked == "cancel":
            for slot in agent.slots:
                if slot.state == WRITING:
                    slot.state = FREE
            return {}, ()
        if asked == "notice":
            heard(agent.watch, message["deadline_ms"], message["reason"])
            return {}, ()
        if asked == "bye":
            agent.farewell = True
            return {}, ()
    if asked == "reserve":
        threading.Thread(target=reserve, args=(agent, message["bytes"]), daemon=True).start()
        return {}, ()
    raise ValueError(f"the trainer asks for {asked!r}")


def hello(agent: Agent, message: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A trainer is here: take over what it holds, tell it what we hold."""
    directory = Path(message["directory"])
    if agent.disk is None:
        try:
            agent.disk = open_disk(directory, message["rank"], message["world"], message["chunk_bytes"],
                                   message["direct"])  # fmt: skip
        except (CheckpointError, OSError) as error:
            agent.farewell = True
            said = f"{directory} cannot be written. {error.strerror}." if isinstance(error, OSError) else str(error)
            return {"error": said}, ()
    agent.disk.keep = Keep(**message["keep"])
    agent.disk.world = message["world"]
    agent.wanted_slots, agent.idle_s = message["slots"], message["idle_ms"] / 1000
    agent.farewell, agent.greeted = False, True
    watch_launcher(agent, message["launcher"])
    agent.watch.told = False
    agent.watch.path = Path(message["notice_file"]) if message["notice_file"] else None
    held = message["held"]
    adopted = [described(adopt(agent, copy, fd)) for copy, fd in zip(held, fds, strict=False)]
    if message["signals"]:
        agent.selector.register(fds[len(held)], selectors.EVENT_READ, "signal")
    shown = [slot for slot in agent.slots if slot.state != WRITING][: wire.MAX_FDS]
    reply = {"pid": os.getpid(), "slots": [described(slot) for slot in shown], "adopted": adopted}
    return reply, tuple(slot.fd for slot in shown)


def adopt(agent: Agent, copy: dict[str, Any], fd: int) -> Slot:
    """A slot of an agent that died, handed over by the trainer that had it mapped; older copies come first."""
    slot = open_slot(agent.next_slot, fd, copy["capacity"])
    slot.state, slot.copy, slot.durable = copy["state"], copy["copy"], copy["durable"]
    slot.sequence = copy["sequence"] if slot.durable or agent.disk is None else agent.disk.sequence
    if slot.state == COMPLETE:
        agent.generation += 1
        slot.generation, slot.wanted = agent.generation, True
    agent.next_slot += 1
    agent.slots.append(slot)
    agent.change.notify_all()
    return slot


def described(slot: Slot) -> dict[str, Any]:
    return {
        "slot": slot.id,
        "capacity": slot.capacity,
        "state": slot.state,
        "durable": slot.durable,
        "order": [slot.sequence, 2 if not slot.durable else 1, slot.generation],
        "copy": slot.copy,
    }


def begin(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """A slot to write into, or why there is none now."""
    reach("begin")
    room = [slot for slot in usable(agent, message["bytes"]) if may_write_over(agent, slot)]
    if not room:
        return {"busy": "The disk has not yet taken the copies before."}
    slot = min(room, key=lambda each: (each.state != FREE, each.generation))
    slot.state, slot.copy, slot.durable, slot.wanted, slot.digests = WRITING, {}, False, False, None
    slot.copied, slot.tries, slot.retry_at = 0, 0, 0.0
    return {"slot": slot.id}


def go_on(agent: Agent, message: dict[str, Any]) -> None:
    """The copy in a slot has grown: what is there of it may go to disk."""
    reach("copied")
    for slot in agent.slots:
        if slot.id == message["slot"] and slot.state == WRITING:
            slot.copied = message["bytes"]
            if not slot.copy and not slot.users:
                slot.copy, slot.wanted = message["copy"], True
            agent.change.notify_all()


def complete(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """The copy in a slot is whole."""
    reach("complete")
    slot = next(each for each in agent.slots if each.id == message["slot"])
    agent.generation += 1
    slot.state, slot.copy, slot.generation = COMPLETE, message["copy"], agent.generation
    slot.wanted, slot.durable = message["persist"], False
    slot.sequence = agent.disk.sequence if agent.disk else 0
    slot.since_notice = agent.watch.heard_ms > 0
    gone = drop_superseded(agent)
    agent.change.notify_all()
    return {"gone": gone, "order": described(slot)["order"]}


def drop_superseded(agent: Agent) -> list[int]:
    """Slots too small for the present copy go once what they hold is not needed. Their numbers."""
    best, gone = newest(agent), []
    for slot in list(agent.slots):
        if slot is best or slot.users or slot.state == WRITING:
            continue
        if best and slot.capacity < best.capacity and (slot.durable or slot.generation < best.generation):
            agent.slots.remove(slot)
            close_slot(slot)
            gone.append(slot.id)
    return gone


def reserve(agent: Agent, size: int) -> None:
    """Make slots of at least `size` bytes, as many as wanted and as memory allows; tell the trainer. In a thread."""
    capacity = -(-size // GRAIN_BYTES) * GRAIN_BYTES
    with agent.change:
        best = newest(agent)
        for slot in list(agent.slots):  # too small now, and nothing in it that is needed
            if slot.capacity < size and slot.state != WRITING and not slot.users and slot is not best:
                agent.slots.remove(slot)
                close_slot(slot)
        have, first = len(usable(agent, size)), agent.next_slot
        count = slots_that_fit(agent.wanted_slots, capacity, have, available_bytes())
        agent.next_slot += count
    trouble = "" if have + count >= agent.wanted_slots else "There is not enough memory for more."
    for number in range(first, first + count):
        try:
            slot = make_slot(number, capacity)
        except OSError as error:
            trouble = f"{error.strerror}."
            break
        with agent.change:  # whoever sees the slot finds word of it in the outbox
            agent.slots.append(slot)
            show_slots(agent, size, trouble, last=False)  # one is enough to begin with
    show_slots(agent, size, trouble, last=True)


def show_slots(agent: Agent, size: int, trouble: str, *, last: bool) -> None:
    with agent.change:
        shown = usable(agent, size)
    slots = [described(slot) for slot in shown]
    facts = {"slots": slots, "wanted": agent.wanted_slots, "bytes": size, "last": last}
    tell(agent, Event(kind="reserved", step=0, message=trouble, facts=facts), tuple(slot.fd for slot in shown))


# --- the writer thread


def unwritten(agent: Agent) -> Slot | None:
    """The whole copy to write next: the newest alone; in order of age when several ranks have agreed on each."""
    waiting = [s for s in agent.slots if s.state == COMPLETE and s.wanted and not s.durable]
    alone = all(int(slot.copy["world"]) == 1 for slot in waiting)
    return (max if alone else min)(waiting, key=lambda each: each.generation, default=None)


def due(agent: Agent) -> Slot | None:
    """The copy to write now. If all that is whole is on disk, one that is being made."""
    slot = unwritten(agent)
    if slot is None:
        return next((s for s in agent.slots if s.state == WRITING and s.wanted and not s.tries), None)
    hurried = (agent.stopping or agent.watch.heard_ms) and slot.tries < LAST_TRIES
    return slot if hurried or slot.retry_at <= time.monotonic() else None


def write_copies(agent: Agent) -> None:
    """Until the process ends: bring each wanted copy to disk, again and again if the disk fails."""
    while True:
        with agent.change:
            while (slot := due(agent)) is None:
                agent.change.wait(TICK_S)
            slot.users += 1
            name, agent.tidying = slot.copy["name"], True
        try:
            outcome = write_one(agent, slot)
        finally:
            with agent.change:
                slot.users -= 1
                agent.change.notify_all()
        if outcome is not None:
            tell(agent, outcome, name=name)
        if (
            outcome is not None
            and outcome.kind == "durable"
            and agent.disk is not None
            and (trouble := apply_retention(agent.disk))
        ):
            tell(agent, Event(kind="alarm", step=outcome.step, message=trouble))
        agent.tidying = False


def await_bytes(agent: Agent, slot: Slot, end: int | None) -> None:
    """Until the trainer has copied the stream up to `end`, or everything, its index too (None).

    CopyEnded if it does not go on.
    """
    with agent.change:
        last, until = -1, 0.0
        while slot.state != COMPLETE and (end is None or slot.copied < end):
            if slot.copied != last:
                last, until = slot.copied, time.monotonic() + STALL_S
            if slot.state != WRITING or time.monotonic() >= until:
                slot.wanted = False  # it is written when it is whole
                raise CopyEnded
            agent.change.wait(TICK_S)


def write_one(agent: Agent, slot: Slot) -> Event | None:
    """One try. The event that tells how it ended; None if the trainer did not finish the copy."""
    disk, copy = agent.disk, slot.copy
    if disk is None:
        raise AssertionError("a copy before hello")
    began = time.monotonic()
    try:
        done = persist_copy(disk, slot, lambda end: await_bytes(agent, slot, end), lambda: must_give_up(agent, began))
    except CopyEnded:
        return None
    except (CheckpointError, OSError) as error:
        with agent.change:
            slot.tries += 1
            wait = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(slot.tries - 1, 10))
            slot.retry_at = time.monotonic() + wait
        message = f"The checkpoint of step {copy['step']} is not on disk. {error} It is tried again in {wait:.0f} s."
        return Event(kind="alarm", step=copy["step"], message=message, facts={"tries": slot.tries})
    took_ms = round((time.monotonic() - began) * 1000)
    with agent.change:
        slot.durable, slot.sequence = True, done.sequence
        slot.digests = [chunk.xxh3_128 for chunk in done.index.chunks]
        agent.watch.write_ms = took_ms
        for other in agent.slots:  # older ones that nobody needs on disk any more
            if other.state == COMPLETE and other.generation < slot.generation and int(copy["world"]) == 1:
                other.wanted = False
    facts = {"write_ms": took_ms, "bytes": done.index.stream_bytes, "fresh_bytes": done.fresh_bytes,
             "sequence": done.sequence}  # fmt: skip
    return Event(kind="durable", step=copy["step"], message=f"Step {copy['step']} is on disk.", facts=facts)


def must_give_up(agent: Agent, began: float) -> bool:
    """Other ranks are waited for up to a minute, less when a stop is announced."""
    limit = 60.0
    if agent.watch.heard_ms:
        limit = min(limit, max(1.0, (agent.watch.deadline_ms - time.time() * 1000) / 1000))
    return time.monotonic() - began > limit


def scrub(agent: Agent) -> None:
    """After a trainer's death: prove that its copies are what was written; drop one that is not. In a thread."""
    with agent.change:
        slots = [slot for slot in agent.slots if slot.state == COMPLETE]
        for slot in slots:
            slot.users += 1
    for slot in slots:
        found = digests_of(slot)
        with agent.change:
            slot.users -= 1
            if slot.digests is not None and slot.digests != found:
                slot.state = FREE
            slot.digests = found


# --- the main thread


def lose_trainer(agent: Agent) -> None:
    """The trainer is gone, however it went: what it was writing is nothing, what it had written stays."""
    if agent.trainer is None:
        return
    agent.selector.unregister(agent.trainer)
    agent.trainer.close()
    agent.trainer, agent.idle_since = None, time.monotonic()
    with agent.change:
        agent.outbox.clear()
        for slot in agent.slots:
            if slot.state == WRITING:
                slot.state = FREE
        best = newest(agent)
        if best is not None:
            best.wanted = True
        agent.change.notify_all()
    if not agent.farewell:
        agent.scrubbing = threading.Thread(target=scrub, args=(agent,))
        agent.scrubbing.start()


def take_trainer(agent: Agent) -> None:
    """A new connection: ours if it is of our user and no other trainer is alive."""
    connection, _ = agent.server.accept()
    pid, uid = wire.peer(connection)
    if agent.trainer is not None:
        with contextlib.suppress(BlockingIOError):
            hear_trainer(agent)  # its end may be waiting to be read
    if uid not in (os.getuid(), 0) or agent.trainer is not None:
        holder = wire.peer(agent.trainer)[0] if agent.trainer is not None else 0
        why = f"The trainer with process id {holder} writes it." if holder else f"Process {pid} is of user {uid}."
        connection.settimeout(1)
        with contextlib.suppress(TimeoutError, BrokenPipeError):  # hear it out, else the refusal is lost with the rest
            wire.receive(connection)
            wire.send(connection, {"reply": {"error": f"The checkpoint directory is in use. {why} {IN_USE}"}})
        connection.close()
        return
    if agent.scrubbing is not None:
        agent.scrubbing.join()
        agent.scrubbing = None
    agent.trainer = connection
    agent.selector.register(connection, selectors.EVENT_READ, "trainer")


def hear_trainer(agent: Agent) -> None:
    if agent.trainer is None:
        return
    got = wire.receive(agent.trainer, socket.MSG_DONTWAIT)
    if got is None:
        lose_trainer(agent)
        return
    if got[0]["ask"] != "copied":
        post(agent, 0)  # it waits for our reply, so it reads
    said = answer(agent, *got)
    if said is None:
        return
    reply, fds = said
    post(agent, 0)  # a reply may speak of slots of which it has to hear first
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is read next
        wire.send(agent.trainer, {"reply": reply}, fds)


def post(agent: Agent, flags: int = socket.MSG_DONTWAIT) -> None:
    """Hand queued events over as far as the trainer's buffer takes them, or all when the flags say to wait."""
    with agent.change:
        while agent.outbox and agent.trainer is not None:
            message, fds = agent.outbox[0]
            try:
                wire.send(agent.trainer, message, fds, flags)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                agent.outbox.clear()
                return
            agent.outbox.pop(0)


def watch_launcher(agent: Agent, pid: int) -> None:
    """Whoever started the trainer: as long as it lives it may start the next one."""
    if agent.launcher >= 0:
        with contextlib.suppress(KeyError):
            agent.selector.unregister(agent.launcher)
        os.close(agent.launcher)
    agent.launcher, agent.launcher_gone = -1, False
    if pid <= 1:
        return
    try:
        agent.launcher = os.pidfd_open(pid)
    except ProcessLookupError:
        agent.launcher_gone = True
        return
    except OSError:
        return
    agent.selector.register(agent.launcher, selectors.EVENT_READ, "launcher")


def keep_notice(agent: Agent) -> None:
    """What a notice asks for now: tell the trainer, fall back to the newest copy, report that a stop is safe."""
    watch = agent.watch
    change = watch.look()
    if change == "heard":
        event = Event(kind="notice", step=0, message=watch.reason, facts={"deadline_ms": watch.deadline_ms})
        tell(agent, event)
    elif change == "withdrawn":
        withdrawn(watch)
        tell(agent, Event(kind="notice", step=0, message="withdrawn", facts={"deadline_ms": 0}))
    if not watch.heard_ms or watch.safe:
        return
    with agent.change:
        best = newest(agent)
        out_of_time = agent.trainer is None or time.time() * 1000 >= answer_by_ms(watch)
        if best is not None and best.durable and (best.since_notice or out_of_time):
            safe(watch, best.copy["step"], best.copy["name"], fresh=best.since_notice)
        elif best is not None and out_of_time:
            best.wanted = True
            agent.change.notify_all()
        elif best is None and out_of_time:
            safe(watch, None, "", fresh=False)
    if watch.safe:
        step = best.copy["step"] if best is not None else 0
        tell(agent, Event(kind="safe", step=step, message="A stop costs nothing now.", facts={}))


def is_over(agent: Agent) -> bool:
    """Nobody needs this agent any more."""
    if agent.trainer is not None:
        return False
    if agent.farewell or agent.launcher_gone:
        agent.stopping = True
    if time.monotonic() - agent.idle_since > (agent.idle_s if agent.greeted else 60.0):
        agent.stopping = True
    if agent.disk is not None and not agent.disk.directory.exists():
        return True
    if not agent.stopping:
        return False
    with agent.change:
        slot = unwritten(agent)
        return (slot is None or slot.tries >= LAST_TRIES) and not agent.tidying and not agent.outbox


def run(agent: Agent) -> None:
    """The loop: hear, answer, keep the notice, until it is over."""
    agent.selector.register(agent.server, selectors.EVENT_READ, "server")
    agent.selector.register(agent.woken, selectors.EVENT_READ, "woken")
    threading.Thread(target=write_copies, args=(agent,), daemon=True).start()
    while not is_over(agent):
        turn(agent, [(key.data, key.fd) for key, _ in agent.selector.select(TICK_S)])
        keep_notice(agent)
        post(agent)


def turn(agent: Agent, ready: Iterable[tuple[str, int]]) -> None:
    for kind, fd in sorted(ready, key=lambda each: each[0] == "server"):
        if kind == "trainer":
            with contextlib.suppress(BlockingIOError):
                hear_trainer(agent)
        elif kind == "server":
            take_trainer(agent)
        elif kind == "launcher":
            agent.launcher_gone = True
            agent.selector.unregister(fd)
            os.close(fd)
            agent.launcher = -1
        elif kind == "signal":
            if os.read(fd, 64):
                heard(agent.watch, 0, "signal")
            else:
                agent.selector.unregister(fd)
                os.close(fd)
        elif kind == "woken":
            os.read(fd, 4096)


def main(name: str) -> int:
    """Run an agent at an address; 0 at once if there is one already."""
    server = wire.listen("\0" + name)
    if server is None:
        return 0
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    agent = Agent(server=server, woken=woken, waker=waker)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: heard(agent.watch, 0, "signal to the agent"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    with contextlib.suppress(OSError):
        os.nice(NICE)
    sys.excepthook = lambda kind, error, trace: leave_word(agent, error)
    threading.excepthook = lambda args: leave_word(agent, args.exc_value)
    run(agent)
    return 0


def leave_word(agent: Agent, error: BaseException | None) -> None:
    """A fault of ours: the story goes beside the checkpoints, and the trainer, which sees the end, starts another
    agent.
    """
    if agent.disk is not None and error is not None:
        with contextlib.suppress(OSError):
            (agent.disk.directory / ERROR_LOG).write_text("".join(traceback.format_exception(error)))
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
