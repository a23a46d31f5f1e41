"""The door of the library: one object in the training loop. Rule: a save that fails never stops training; a load
never lies.

ckpt = Checkpointer("checkpoints", every="auto", keep=3)
state = {"model": model, "optimizer": optimizer, "position": position}
done = ckpt.load(state)
for step in range(done.step + 1 if done else 1, last + 1):
    ...train...
    ckpt.step(step, state)
    if ckpt.should_stop():
        break
ckpt.close()
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType, MethodType, TracebackType
from typing import Any

import torch

from sublet.checkpoint import gpu, rng
from sublet.checkpoint.client import (
    AgentLost,
    Link,
    ask,
    close_link,
    copied_last,
    copies,
    drop_slot,
    hear,
    listen_to,
    open_link,
    ready,
    revive,
    tell_copied,
)
from sublet.checkpoint.copying import copy_beside, copy_now, index_bytes, room_for
from sublet.checkpoint.disk import make_directory
from sublet.checkpoint.errors import CheckpointError, Refused, Unavailable
from sublet.checkpoint.gang import Gang, ask_all, gather, hear_all, join_gang, leave_gang, most
from sublet.checkpoint.inline import Writer, open_writer, write_inline
from sublet.checkpoint.interval import Interval, duration_ms, parse_interval
from sublet.checkpoint.layout import CHUNK_BYTES, PAGE_BYTES, up
from sublet.checkpoint.load import load_newest, target_of
from sublet.checkpoint.planning import Planner, estimate, made, plan_for, targets_in
from sublet.checkpoint.record import digest
from sublet.checkpoint.retention import Keep
from sublet.checkpoint.sharding import Leaf
from sublet.checkpoint.slots import FREE, WRITING, Slot
from sublet.checkpoint.state import RNG, Flat, flatten
from sublet.checkpoint.store import checkpoint_name
from sublet.checkpoint.words import Event, Loaded, Notice

log = logging.getLogger("sublet.checkpoint")
WAIT_TICK_MS = 50
NO_MEMORY = "There is not enough memory for a copy."


@dataclass(slots=True, kw_only=True)
class Last:
    """The state as it was given to the last step(), for a save at a safe point."""

    step: int
    state: Any
    metric: float | None
    rng: Any


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened since the start, for whoever shows it."""

    copies: int = 0
    skipped: int = 0
    durable: int = 0
    alarms: int = 0
    durable_step: int = 0
    copied_step: int = 0
    blocked_ms: float = 0.0


class Checkpointer:
    """Saves a training state to memory and to disk, and brings it back. Not for use from several threads.

    `directory`: one run's own. On several nodes it must be the same shared directory for all ranks.
    `every`: 100 (steps), "10m", or "auto": from the measured cost and from `reclaimed_every`, how often the job is
    stopped.
    `keep`: how many to keep, or a Keep. `slots`: copies in memory, 2 or 3; fewer are used where memory is short.
    `agent=False`: no process beside; each save then blocks until it is on disk.
    `signals`: signals that mean "you will be stopped soon"; only from the main thread.
    `notice_file`: by default $SUBLET_NOTICE_FILE. `on_event` hears each Event, on the training thread.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | str = "auto",
        keep: int | Keep = 3,
        slots: int = 2,
        agent: bool = True,
        signals: Sequence[signal.Signals] = (),
        notice_file: str | None = None,
        reclaimed_every: str | None = None,
        capture_rng: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
        direct: bool = True,
        idle: str = "10m",
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        if slots < 0 or slots > 8 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
            raise Refused(what=f"slots={slots}, chunk_bytes={chunk_bytes} make no sense.",
                          why=f"Slots are 0 to 8, a chunk is whole pages of {PAGE_BYTES} bytes.")  # fmt: skip
        self.directory = Path(directory).absolute()
        self.interval: Interval = parse_interval(every, reclaimed_every)
        self.keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self.events: list[Event] = []
        self.counters = Counters()
        self._on_event = on_event
        self._capture_rng, self._chunk_bytes, self._direct = capture_rng, chunk_bytes, direct
        self._gang: Gang = join_gang()
        self._run = gather(self._gang, os.urandom(4).hex())[0]
        self._count = 0
        self._notice: Notice | None = None
        self._stop = self._asked = self._answered = False
        self._planner = Planner(gang=self._gang, chunk_bytes=chunk_bytes)
        self._last: Last | None = None
        self._hooked = False
        self._device: gpu.Device | None = None
        self._unfinished: tuple[Slot, dict[str, Any], torch.cuda.Event] | None = None
        self._reserving = 0
        self._skipping = False
        self._undurable: set[str] = set()
        self._failed = ""
        self._writer: Writer | None = None
        self._link: Link | None = None
        self._closed = False
        self._make_directory()
        if agent and slots and hasattr(os, "memfd_create"):
            self._open_agent(slots, notice_file or os.environ.get("SUBLET_NOTICE_FILE", ""), tuple(signals), idle)
        else:
            self._writer = open_writer(self.directory, self._gang, self.keep, chunk_bytes, direct)

    # --- the loop

    def step(self, step: int, state: Any, *, metric: float | None = None) -> bool:
        """Call after each training step. Saves if a save is due; True if it did. `metric` is for Keep(best=…).

        `state` may be a function that gives the state: it is called only when a save is due.
        """
        self._hear()
        due = self._agree(step)
        if self._hooked:
            self._last = Last(step=step, state=state, metric=metric, rng=rng.capture() if self._capture_rng else None)
        if not due:
            lazy = isinstance(state, FunctionType | MethodType)
            if self._planner.plan is None and not lazy and self._link is not None and not self._link.slots:
                self.prepare(state)
            return False
        return self._save(step, state, metric, None)

    def safe_point(self) -> bool:
        """Call where the state is still that of the last step(): in evaluation, before the next batch is drawn.

        Saves only if a notice asks for a fresh copy. With several ranks it does nothing: they agree at step() alone.
        """
        self._hooked = True
        if self._gang.world > 1 or self._last is None:
            return False
        self._hear()
        last = self._last
        if self._notice is None or self._answered or last.step == self.counters.copied_step:
            return False
        return self._save(last.step, last.state, last.metric, last.rng)

    def save_now(self, step: int, state: Any, *, metric: float | None = None, wait: bool = False) -> bool:
        """Save whatever the interval says. With `wait`, return only when it is on disk. On every rank alike."""
        self._hear()
        saved = self._save(step, state, metric, None)
        if not saved and wait and self._link is not None:  # the disk is behind: let it catch up, then once more
            self.wait()
            saved = self._save(step, state, metric, None)
        if wait:
            self.wait()
        return saved

    def should_stop(self) -> bool:
        """Has a notice come, and has this state been saved for it? Then leave the loop, close(), and exit with
        EXIT_CODE.
        """
        return self._stop

    @property
    def rank(self) -> int:
        """Of this process among those that save together."""
        return self._gang.rank

    @property
    def notice(self) -> Notice | None:
        """The notice that stands now."""
        self._hear()
        return self._notice

    def give_notice(self, deadline_ms: int = 0, reason: str = "asked by the training program") -> None:
        """Tell the agent of a coming stop: for platforms that speak to the program itself.

        UTC milliseconds, 0 if unknown.
        """
        if self._link is not None:
            self._ask({"ask": "notice", "deadline_ms": deadline_ms, "reason": reason})
        self._notice = self._notice or Notice(deadline_ms=deadline_ms, reason=reason)

    def prepare(self, state: Any, *, wait: bool = False) -> None:
        """Have the memory for copies made now, in the background, so that the first save costs no more than the
        others.
        """
        if self._link is None or self._reserving:
            return
        self._reserve(estimate(self._planner, flatten(state)))
        while wait and self._reserving:
            self._hear(WAIT_TICK_MS)
        for number in list(self._link.slots) if wait else ():
            ready(self._link, number)

    def load(self, state: Any = None, *, step: int | None = None, strict: bool = True) -> Loaded | None:
        """The newest copy whose hashes hold, filled into `state` in place (or just returned); None if there is none.

        Memory before disk, newer before older; `hops` tells what was passed over and why. Refused if it does not
        fit the state, Unavailable if there are checkpoints and none of them holds: nothing has been changed then.
        `step` asks for one step alone; `strict=False` lets the state have tensors that the checkpoint lacks.
        """
        slots = [(slot, self._link.orders[slot.id]) for slot in copies(self._link)] if self._link else []
        target = target_of(state, strict=strict, restore_rng=state is not None and self._capture_rng)
        loaded = load_newest(self.directory, self._gang, slots, target, step)
        if loaded is not None:
            self.interval.last_step = loaded.step
            for hop in loaded.hops:
                text = f"Passed over {hop.tier} {hop.name}. {hop.why}" if hop.why else f"Loaded {hop.tier} {hop.name}."
                self._note(Event(kind="alarm" if hop.why else "loaded", step=hop.step, message=text, facts=asdict(hop)))
        if state is not None:
            self.prepare(state)
        return loaded

    def wait(self, limit: str | None = None) -> bool:
        """Until every save that was made is on disk, or replaced there by a newer one.

        False if the disk fails or time is up.
        """
        deadline = time.monotonic() + duration_ms(limit) / 1000 if limit else float("inf")
        self._finish_device()
        failed_before = self.counters.alarms
        while self._undurable and self._link is not None:
            self._hear(WAIT_TICK_MS)
            if self.counters.alarms > failed_before or time.monotonic() > deadline:
                return False
        return not self._failed

    def close(self) -> None:
        """Bring the last copy to disk as well as the disk allows, say goodbye to the agent, give the memory back."""
        if self._closed:
            return
        self._closed = True
        self.wait(None if self._notice is None else "60s")
        self._planner.spots.clear()
        if self._device is not None:
            gpu.unpin_all(self._device)
        if self._link is not None:
            close_link(self._link, goodbye=True)
        if self._writer is not None and self._writer.lock is not None:
            self._writer.lock.release()
        leave_gang(self._gang)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self.close()
        elif self._link is not None:  # a crash: the agent keeps the copies for the next start
            close_link(self._link, goodbye=False)
        elif self._writer is not None and self._writer.lock is not None:
            self._writer.lock.release()

    def _make_directory(self) -> None:
        """Unavailable on all ranks if it cannot be made on one."""
        why = ""
        try:
            make_directory(self.directory)
        except OSError as error:
            why = f"{error.strerror}."
        first = next((each for each in gather(self._gang, why) if each), "")
        if first:
            raise Unavailable(what=f"The directory {self.directory} cannot be made.", why=why or first)

    # --- agreement

    def _agree(self, step: int) -> bool:
        """Is a save due after this step, on all ranks alike? Clocks and notices are heard one step later than alone."""
        wanted = self._notice is not None
        if self._gang.world == 1:
            if wanted and self._answered:
                self._stop = True
            return self.interval.is_due(step) or (wanted and not self._answered)
        heard = hear_all(self._gang) or [0, 0]
        by_clock = self.interval.kind != "steps"
        ask_all(self._gang, [int(wanted), int(by_clock and self._gang.rank == 0 and self.interval.is_due(step))])
        self._asked = bool(heard[0])
        if self._asked and self._answered:
            self._stop = True
        return bool(heard[1]) or (not by_clock and self.interval.is_due(step)) or (self._asked and not self._answered)

    # --- saving

    def _save(self, step: int, state: Any, metric: float | None, random: Any) -> bool:
        """Copy the state; False if it was skipped. Never raises for what memory or disk do."""
        began = time.perf_counter()
        if isinstance(state, FunctionType | MethodType):
            state = state()
        flat = self._flat(state)
        self._finish_device()
        tree: dict[str, Any] = {"state": flat.tree, "rng": None}
        leaves = flat.leaves
        if self._capture_rng:
            random_flat = flatten(random or rng.capture(), RNG)
            tree["rng"] = random_flat.tree
            leaves = leaves + random_flat.leaves
        mine = plan_for(self._planner, leaves)
        record = index_bytes(made(self._planner), rank=self._gang.rank, world=self._gang.world, step=step, tree=tree)
        if self._link is None:
            done = self._save_inline(step, mine, record, metric)
        else:
            done = self._save_to_slot(step, flat, mine, record, metric)
        if done:
            blocked_ms = (time.perf_counter() - began) * 1000
            self.interval.saved(step, blocked_ms)
            self.counters.copies += 1
            self._skipping = False
            self.counters.copied_step, self.counters.blocked_ms = step, blocked_ms
            if self._notice is not None or self._asked:
                self._answered = self._stop = True
            facts = {"blocked_ms": round(blocked_ms, 3), "bytes": made(self._planner).stream_bytes}
            self._note(Event(kind="copied", step=step, message=f"Step {step} is copied.", facts=facts))
        return done

    def _flat(self, state: Any) -> Flat:
        """The state taken apart; Refused on all ranks if it is on one."""
        flat, refused = Flat(), None
        try:
            flat = flatten(state)
        except Refused as error:
            refused = error
        if most(self._gang, [int(refused is not None)])[0]:
            raise refused or Refused(what="The state cannot be kept.", why="Another rank refused its part.")
        return flat

    def _save_to_slot(self, step: int, flat: Flat, mine: list[Leaf], record: bytes, metric: float | None) -> bool:
        """Into a slot of the agent; skipped if on any rank there is none."""
        plan = made(self._planner)
        room = room_for(plan, record)
        slot, why = self._begin(room)
        taken, unaffordable = most(self._gang, [int(slot is None), int(why == NO_MEMORY)])
        if taken and slot is not None:
            self._ask({"ask": "cancel"})
            slot.state = FREE
        if unaffordable:
            return self._save_inline(step, mine, record, metric)
        if taken:
            self._skip(step, why or "Another rank has no room for it.")
            return False
        if slot is None:
            raise AssertionError("agreed to save without a slot")
        targets = targets_in(self._planner, slot.id, slot.map)
        start = up(plan.stream_bytes, PAGE_BYTES)
        copy = {
            "name": self._next_name(step), "step": step, "run": self._run, "world": self._gang.world, "metric": metric,
            "stream_bytes": plan.stream_bytes, "chunk_bytes": plan.chunk_bytes,
            "index_bytes": len(record), "index_xxh3_128": digest(record),
        }  # fmt: skip
        event = self._copy(slot, targets, flat, mine, copy)
        slot.map[start : start + len(record)] = record
        if event is None:
            self._complete(slot, copy)
        else:
            self._unfinished = (slot, copy, event)
        return True

    def _begin(self, room: int) -> tuple[Slot | None, str]:
        """A slot to write into, its pages present; waits for memory that is being made."""
        if self._link is None:
            raise AssertionError("no agent")
        for _ in range(2):
            if not any(slot.capacity >= room for slot in self._link.slots.values()):
                self._reserve(room)
            while self._reserving and not any(slot.capacity >= room for slot in self._link.slots.values()):
                self._hear(WAIT_TICK_MS)
            reply = self._ask({"ask": "begin", "bytes": room})
            if "slot" in reply:
                slot = ready(self._link, reply["slot"])
                slot.state, slot.copy, slot.durable = WRITING, {}, False
                return slot, ""
            if any(slot.capacity >= room for slot in self._link.slots.values()):
                return None, str(reply["busy"])
        return None, NO_MEMORY

    def _copy(
        self, slot: Slot, targets: list[torch.Tensor], flat: Flat, mine: list[Leaf], copy: dict[str, Any]
    ) -> "torch.cuda.Event | None":
        """Copy all leaves; an event if the copy goes on beside the next step."""
        if self._link is None:
            raise AssertionError("no agent")
        if not any(leaf.tensor.is_cuda for leaf in mine):
            link = self._link
            copy_now(made(self._planner), targets, mine, lambda size: tell_copied(link, slot, size, copy))
            return None
        device = self._device = self._device or gpu.open_device()
        gpu.pin(device, slot.map, slot.capacity)
        event = copy_beside(targets, mine, device.stream)
        if not gpu.gate(device, flat.objects):
            event.synchronize()
            return None
        device.pending = event
        return event

    def _complete(self, slot: Slot, copy: dict[str, Any]) -> None:
        if self._link is None:
            raise AssertionError("no agent")
        self._undurable.add(copy["name"])
        try:
            reply = copied_last(self._link, slot, copy)
        except AgentLost:
            self._revive()  # the slot is handed over as complete
            return
        for number in reply["gone"]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._planner.spots.pop(number, None)
        if self._link is not None and number in self._link.slots:
            drop_slot(self._link, number)

    def _next_name(self, step: int) -> str:
        self._count += 1
        return checkpoint_name(step, self._run, self._count)

    def _save_inline(self, step: int, mine: list[Leaf], record: bytes, metric: float | None) -> bool:
        """Without memory for copies: to disk, now."""
        if self._writer is None:
            self._writer = open_writer(
                self.directory, self._gang, self.keep, self._chunk_bytes, self._direct, lock=False
            )
        name = self._next_name(step)
        try:
            facts = write_inline(
                self._writer, self._gang, made(self._planner), mine, record, name=name, run=self._run, metric=metric
            )
        except (CheckpointError, OSError) as error:
            self._failed = str(error)
            message = f"The checkpoint of step {step} is not on disk. {error}"
            self._note(Event(kind="alarm", step=step, message=message))
            return False
        self._failed = ""
        self._note(Event(kind="durable", step=step, message=f"Step {step} is on disk.", facts=facts))
        return True

    def _skip(self, step: int, why: str) -> None:
        self.counters.skipped += 1
        if self._skipping:  # said once for each save that is put off
            return
        self._skipping = True
        self._note(Event(kind="skipped", step=step, message=f"Step {step} was not saved. {why}"))

    # --- the device

    def _finish_device(self, *, wait: bool = True) -> None:
        if self._unfinished is None:
            return
        slot, copy, event = self._unfinished
        if not wait and not event.query():  # type: ignore[no-untyped-call]
            return
        event.synchronize()
        self._unfinished = None
        self._complete(slot, copy)

    # --- the agent

    def _open_agent(self, slots: int, notice_file: str, signals: tuple[signal.Signals, ...], idle: str) -> None:
        greeting = {
            "directory": str(self.directory), "rank": self._gang.rank, "world": self._gang.world,
            "chunk_bytes": self._chunk_bytes, "direct": self._direct, "keep": asdict(self.keep), "slots": slots,
            "idle_ms": duration_ms(idle), "launcher": os.getppid(),
            "notice_file": str(Path(notice_file).absolute()) if notice_file else "",
        }  # fmt: skip
        why = ""
        try:
            self._link = open_link(self.directory, self._gang.rank, greeting, listen_to(signals))
        except CheckpointError as error:
            why = str(error)
            if self._gang.world == 1:
                raise
        first = next((each for each in gather(self._gang, why) if each), "")
        if first:
            raise Unavailable(what="An agent of this run is not there.", why=why or first)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the agent; if it has died, ask the next one."""
        if self._link is None:
            raise AssertionError("no agent")
        try:
            return ask(self._link, message)
        except AgentLost:
            self._revive()
            return ask(self._link, message)

    def _revive(self) -> None:
        if self._link is None:
            raise AssertionError("no agent")
        step = self.counters.copied_step
        self._note(Event(kind="agent_lost", step=step, message="The agent died. Another one takes the copies over."))
        self._planner.spots.clear()
        revive(self._link)
        if self._reserving:
            size, self._reserving = self._reserving, 0
            self._reserve(size)

    def _reserve(self, size: int) -> None:
        self._reserving = size
        self._ask({"ask": "reserve", "bytes": size})

    def _hear(self, wait_ms: int = 0) -> None:
        """Take in what the agent has said."""
        self._finish_device(wait=False)
        if self._link is None:
            return
        try:
            messages = hear(self._link, wait_ms)
        except AgentLost:
            self._revive()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        kind, facts = message["event"], message["facts"]
        if kind == "reserved":
            if not facts["last"]:
                return
            self._reserving = 0
            have = len(facts["slots"])
            if have < facts["wanted"]:
                size = f"{facts['bytes'] >> 20} MiB"
                text = f"{have} of {facts['wanted']} copies of {size} fit into memory. {message['message']}"
                self._note(Event(kind="degraded", step=0, message=text, facts={"slots": have}))
            return
        if kind == "notice":
            standing = facts["deadline_ms"] > 0
            self._notice = Notice(deadline_ms=facts["deadline_ms"], reason=message["message"]) if standing else None
            if not standing:
                self._stop = self._answered = False
        if kind == "durable":
            name = message["name"]
            order = int(name.rsplit("-", 1)[1][-5:], 16)
            newer = {each for each in self._undurable if int(each.rsplit("-", 1)[1][-5:], 16) > order}
            self._undurable = newer
            self.interval.write_ms = facts["write_ms"]
        self._note(Event(kind=kind, step=message["step"], message=message["message"], facts=facts))

    def _note(self, event: Event) -> None:
        self.events.append(event)
        del self.events[:-1000]
        if event.kind == "durable":
            self.counters.durable += 1
            self.counters.durable_step = event.step
        elif event.kind == "alarm":
            self.counters.alarms += 1
        loud = event.kind in ("alarm", "degraded", "agent_lost", "skipped")
        log.log(logging.WARNING if loud else logging.DEBUG, "%s", event.message)
        if self._on_event is not None:
            self._on_event(event)
