"""An engine whose machines and programs are pretended, on a clock that somebody else moves.

Rule: it behaves as a real one would. What it tells it tells until that is acknowledged, a silent node tells nothing and
hears nothing, and what a program does follows from its `Behaviour` alone, so that the same calls give the same events.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from sublet.domain.effects import (
    Effect,
    GiveNotice,
    MarkNode,
    RestartInstance,
    StartGang,
    StopInstances,
    WithdrawNotice,
)
from sublet.domain.events import CheckpointSaved, Event, InstanceBegan, InstanceEnded, NodeLost, NodeReturned
from sublet.domain.ids import InstanceRef
from sublet.domain.nodes import NodeState
from sublet.ports import Clock, Inbox

KILLED = 143
RETELL = 6  # what is not acknowledged is told again, so many times in a node timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What a job's program does. None: never."""

    work_ms: int | None = None  # running time needed, all instances together
    start_takes_ms: int = 0
    stop_takes_ms: int | None = 1000  # from being told to end until it is confirmed gone
    leaves_after_ms: int | None = 1000  # from the notice
    leaves_with: int = KILLED  # exit code, when it leaves on a notice
    checkpoint_every_ms: int | None = None
    checkpoint_on_notice_ms: int | None = None


@dataclass(slots=True, kw_only=True)
class Process:
    """One instance that runs on a node."""

    ref: InstanceRef
    node: str
    gpus: int
    begin_ms: int
    noticed_ms: int | None = None
    gone_ms: int | None = None  # when it will be gone, as things stand
    exit_code: int = KILLED
    is_stopped: bool = False  # told to end at once, which no withdrawal takes back
    told_begin: bool = False
    run: int = 0


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The work of one attempt; its instances are `live` until their ends are told."""

    job: str
    attempt: int
    begin_ms: int
    live: dict[int, Process] = field(default_factory=dict)
    notice_ms: int | None = None  # the first that stands


@dataclass(frozen=True, slots=True, kw_only=True)
class Misdelivery:
    """What happens to the next `InstanceEnded` of a job: it is lost once, or comes a second time later."""

    job: str
    is_lost: bool
    again_after_ms: int = 0


class SimulatedEngine:
    """`advance` moves it to the clock's time; `next_ms` says when something happens next.

    `line`: after how many milliseconds a message arrives, once for each copy of it; none: it is lost.
    """

    def __init__(
        self,
        clock: Clock,
        behaviours: Mapping[str, Behaviour],
        *,
        node_timeout_ms: int = 60_000,
        line: Callable[[Event], Sequence[int]] = lambda event: (0,),
    ) -> None:
        self._clock, self._behaviours, self._node_timeout_ms = clock, behaviours, node_timeout_ms
        self._line = line
        self._inbox: Inbox | None = None
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._failed: dict[
            tuple[str, int], Process
        ] = {}  # the latest of each instance; it may start again in its place
        self._released: dict[str, int] = {}  # newest attempt of a job that is over
        self._saved_ms: dict[str, int] = {}  # work that checkpoints keep
        self._agenda: list[tuple[int, int, str, object]] = []
        self._order = 0
        self._silent_since: dict[str, int] = {}
        self._lost: dict[str, int] = {}  # and how long it takes to end what still runs there
        self._fencing: dict[str, int] = {}  # back, and when all that still runs there will have been ended
        self._closed: set[str] = set()  # drained, or quarantined: node_up opens it again
        self._letters: dict[str, list[Effect]] = {}  # commands to a silent node
        self._held: dict[str, list[Process]] = {}  # what ended on a silent node
        self._unheard: dict[tuple[str, ...], tuple[Event, str]] = {}  # and the node that tells it, if one does
        self._misdeliveries: list[Misdelivery] = []
        self._retell_ms = max(1, node_timeout_ms // RETELL)

    # ---- the port

    def connect(self, inbox: Inbox) -> None:
        """What was told and not acknowledged is told again."""
        self._inbox = inbox
        for event, node in self._unheard.values():
            if node not in self._silent_since:
                inbox.put(event)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case StartGang():
                self._start(effect)
            case RestartInstance():
                self._restart(effect)
            case GiveNotice() | WithdrawNotice() | StopInstances():
                self._command(effect)
            case MarkNode(state=NodeState.QUARANTINED):
                self._forget_node(effect.node)
                self._closed.add(effect.node)
            case _:
                pass

    def acknowledge(self, event: Event) -> None:
        self._unheard.pop(_key(event), None)
        if isinstance(event, NodeLost):
            self._forget_node(event.node)

    def close(self) -> None:
        """Nothing is held."""

    # ---- what the world does to it

    def next_ms(self) -> int | None:
        return self._agenda[0][0] if self._agenda else None

    def advance(self) -> None:
        """All that is due by now happens."""
        while self._agenda and self._agenda[0][0] <= self._clock.now_ms():
            _, _, kind, subject = heappop(self._agenda)
            getattr(self, f"_on_{kind}")(subject)

    def finish(self, job: str, exit_code: int, instance: int | None) -> None:
        """The program of the present attempt ends by itself."""
        for attempt in [one for one in self._attempts.values() if one.job == job]:
            for process in list(attempt.live.values()):
                if instance in (None, process.ref.instance) and process.begin_ms <= self._clock.now_ms():
                    self._gone(process, exit_code, finished=exit_code == 0)

    def misdeliver(self, misdelivery: Misdelivery) -> None:
        self._misdeliveries.append(misdelivery)

    def node_down(self, node: str) -> None:
        self._fencing.pop(node, None)
        if node not in self._silent_since and node not in self._lost:
            self._silent_since[node] = self._clock.now_ms()
            self._plan(self._clock.now_ms() + self._node_timeout_ms, "silence", (node, self._clock.now_ms()))

    def node_up(self, node: str) -> None:
        """Back in time: all goes on. Back too late: what still runs there is ended first."""
        was_closed = node in self._closed
        self._closed.discard(node)
        if node in self._lost:
            if node not in self._fencing:
                self._fence(node, self._lost[node])
            return
        self._silent_since.pop(node, None)
        for attempt in self._attempts.values():
            self._tell_begins(attempt)
        while held := self._held.get(node):
            self._tell_end(held.pop(0))
        for letter in self._letters.pop(node, []):
            self.carry_out(letter)
        if was_closed:
            self._tell_return(node)

    def drained(self, node: str) -> None:
        """So that node_up opens it again."""
        self._closed.add(node)

    def running(self) -> Iterable[tuple[str, int, str, int]]:
        """Job, attempt, node and GPUs of every process on a node that is not lost, as the machines see it."""
        for attempt in self._attempts.values():
            for process in attempt.live.values():
                if process.node not in self._lost:
                    yield attempt.job, attempt.attempt, process.node, process.gpus

    # ---- commands

    def _start(self, effect: StartGang) -> None:
        key = (effect.job, effect.attempt)
        if key in self._attempts or effect.attempt <= self._released.get(effect.job, -1):
            return
        now = self._clock.now_ms()
        attempt = Attempt(job=effect.job, attempt=effect.attempt, begin_ms=now)
        attempt.begin_ms += 0 if effect.attempt == 0 else self._behaviour(effect.job).start_takes_ms
        self._attempts[key] = attempt
        for instance in effect.instances:
            ref = InstanceRef(job=effect.job, attempt=effect.attempt, instance=instance)
            node = effect.lease.nodes[instance]
            attempt.live[instance] = Process(
                ref=ref, node=node, gpus=effect.lease.gpus[instance], begin_ms=attempt.begin_ms
            )
        self._plan(attempt.begin_ms, "begin", attempt)
        work = self._behaviour(effect.job).work_ms
        if work is not None:
            self._plan(attempt.begin_ms + max(0, work - self._saved_ms.get(effect.job, 0)), "done", attempt)

    def _restart(self, effect: RestartInstance) -> None:
        """In its place on its node, once for each run."""
        last = self._failed.get((effect.job, effect.instance))
        if last is None or last.ref.attempt != effect.attempt or last.run >= effect.run:
            return
        if last.node in self._silent_since:
            self._letters.setdefault(last.node, []).append(effect)
            return
        del self._failed[effect.job, effect.instance]
        begin_ms = max(self._clock.now_ms(), effect.not_before_ms) + self._behaviour(effect.job).start_takes_ms
        key = (effect.job, effect.attempt)
        is_over = key not in self._attempts
        attempt = self._attempts.setdefault(key, Attempt(job=effect.job, attempt=effect.attempt, begin_ms=begin_ms))
        attempt.live[effect.instance] = Process(
            ref=last.ref, node=last.node, gpus=last.gpus, begin_ms=begin_ms, run=effect.run
        )
        self._plan(begin_ms, "begin", attempt)
        work = self._behaviour(effect.job).work_ms
        if is_over and work is not None:
            self._plan(begin_ms + max(0, work - self._saved_ms.get(effect.job, 0)), "done", attempt)

    def _command(self, effect: GiveNotice | WithdrawNotice | StopInstances) -> None:
        attempt = self._attempts.get((effect.job, effect.attempt))
        if attempt is None:
            return
        for instance in effect.instances:
            process = attempt.live.get(instance)
            if process is None:
                continue
            if process.node in self._silent_since:
                self._letters.setdefault(process.node, []).append(_for_one(effect, instance))
            elif isinstance(effect, GiveNotice):
                self._notice(attempt, process, effect.deadline_ms)
            elif isinstance(effect, WithdrawNotice):
                self._withdraw(attempt, process)
            else:
                process.is_stopped = True
                self._leave(process, self._after(self._stop_takes(effect.job)), KILLED)

    def _notice(self, attempt: Attempt, process: Process, deadline_ms: int) -> None:
        """It leaves by itself, or is told to end at the deadline; one that has not begun is ended at once."""
        now, behaviour = self._clock.now_ms(), self._behaviour(attempt.job)
        if process.noticed_ms is not None:
            return
        process.noticed_ms = now
        attempt.notice_ms = now if attempt.notice_ms is None else attempt.notice_ms
        if now < process.begin_ms:
            self._leave(process, self._after(behaviour.stop_takes_ms), KILLED)
            return
        killed = None if behaviour.stop_takes_ms is None else deadline_ms + behaviour.stop_takes_ms
        left = None if behaviour.leaves_after_ms is None else now + behaviour.leaves_after_ms
        if left is not None and (killed is None or left <= killed):
            self._leave(process, left, behaviour.leaves_with)
        else:
            self._leave(process, killed, KILLED)

    def _withdraw(self, attempt: Attempt, process: Process) -> None:
        if process.is_stopped:
            return
        process.noticed_ms = process.gone_ms = None
        if not any(one.noticed_ms is not None for one in attempt.live.values()):
            attempt.notice_ms = None

    def _leave(self, process: Process, at_ms: int | None, exit_code: int) -> None:
        if at_ms is None or (process.gone_ms is not None and process.gone_ms <= at_ms):
            return
        process.gone_ms, process.exit_code = at_ms, exit_code
        self._plan(at_ms, "gone", process)

    # ---- what happens

    def _on_begin(self, attempt: Attempt) -> None:
        self._tell_begins(attempt)

    def _tell_begins(self, attempt: Attempt) -> None:
        """Of those that began and could not tell it yet."""
        for process in attempt.live.values():
            is_silent = process.node in self._silent_since or process.node in self._lost
            if process.begin_ms <= self._clock.now_ms() and not process.told_begin and not is_silent:
                process.told_begin = True
                self._tell(
                    InstanceBegan(
                        at_ms=self._clock.now_ms(),
                        job=attempt.job,
                        attempt=attempt.attempt,
                        instance=process.ref.instance,
                        run=process.run,
                    ),
                    process.node,
                )

    def _on_done(self, attempt: Attempt) -> None:
        for process in list(attempt.live.values()):
            self._gone(process, 0, finished=True)

    def _on_gone(self, process: Process) -> None:
        if process.gone_ms == self._clock.now_ms():
            self._gone(process, process.exit_code, finished=False)

    def _on_silence(self, subject: tuple[str, int]) -> None:
        node, since = subject
        if self._silent_since.get(node) == since:
            del self._silent_since[node]
            self._lost[node] = max((self._stop_takes(one.ref.job) or 0 for one in self._processes_on(node)), default=0)
            lost = NodeLost(at_ms=self._clock.now_ms(), node=node)
            self._unheard.pop(("NodeReturned", *_key(lost)[1:]), None)  # who never heard that it was back need not now
            self._tell(lost)
            self._held.pop(node, None)
            self._letters.pop(node, None)

    def _fence(self, node: str, takes_ms: int) -> None:
        self._fencing[node] = self._clock.now_ms() + takes_ms
        self._plan(self._fencing[node], "fenced", node)

    def _on_fenced(self, node: str) -> None:
        """It is said to be back only to who has heard that it was lost."""
        if self._fencing.get(node) != self._clock.now_ms():
            return
        if _key(NodeLost(at_ms=0, node=node)) in self._unheard:
            self._fence(node, self._retell_ms)
            return
        del self._lost[node], self._fencing[node]
        self._forget_node(node)
        self._tell_return(node)

    def _tell_return(self, node: str) -> None:
        """To be used, unless it was drained again meanwhile."""
        self._tell(NodeReturned(at_ms=self._clock.now_ms(), node=node, is_open=node not in self._closed))

    def _on_again(self, event: Event) -> None:
        told, node = self._unheard.get(_key(event), (None, ""))
        if told is event:
            self._send(event, node)

    def _on_copy(self, event: Event) -> None:
        self._put(event)

    def _gone(self, process: Process, exit_code: int, *, finished: bool) -> None:
        """Its processes are gone; that is known when its node can tell it."""
        attempt = self._attempts.get((process.ref.job, process.ref.attempt))
        if attempt is None or attempt.live.get(process.ref.instance) is not process:
            return
        process.exit_code, process.gone_ms = exit_code, -1 if finished else self._clock.now_ms()
        if process.node in self._silent_since:
            del attempt.live[process.ref.instance]
            self._held.setdefault(process.node, []).append(process)
            return
        self._tell_end(process)

    def _tell_end(self, process: Process) -> None:
        ref, now = process.ref, self._clock.now_ms()
        attempt = self._attempts[ref.job, ref.attempt]
        attempt.live.pop(ref.instance, None)
        finished = process.gone_ms == -1
        if not finished:
            self._keep_work(attempt, process)
            self._failed[ref.job, ref.instance] = process
        ended = InstanceEnded(
            at_ms=now,
            job=ref.job,
            attempt=ref.attempt,
            instance=ref.instance,
            exit_code=process.exit_code,
            finished=finished,
            run=process.run,
        )
        self._tell(ended, process.node)
        self._close_if_over(attempt)

    # ---- work that is kept

    def _keep_work(self, attempt: Attempt, process: Process) -> None:
        """A new checkpoint of this attempt is told once, before the end that shows it."""
        if self._kept_ms(attempt) > 0 and attempt.notice_ms is None and process.exit_code != KILLED:
            saved = CheckpointSaved(at_ms=self._clock.now_ms(), job=attempt.job, attempt=attempt.attempt)
            self._tell(saved, process.node)

    def _kept_ms(self, attempt: Attempt) -> int:
        """Running time of this attempt that its newest checkpoint holds."""
        behaviour, now = self._behaviour(attempt.job), self._clock.now_ms()
        ran = max(0, now - attempt.begin_ms)
        every, on_notice = behaviour.checkpoint_every_ms, behaviour.checkpoint_on_notice_ms
        kept = ran - ran % every if every else 0
        if on_notice is not None and attempt.notice_ms is not None and now - attempt.notice_ms >= on_notice:
            kept = max(kept, attempt.notice_ms - attempt.begin_ms)
        return kept

    def _close_if_over(self, attempt: Attempt) -> None:
        """When nothing of it runs, and no end of it waits on a silent node to be told."""
        held = [process.ref for processes in self._held.values() for process in processes]
        if not attempt.live and not any((ref.job, ref.attempt) == (attempt.job, attempt.attempt) for ref in held):
            self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        behaviour = self._behaviour(attempt.job)
        del self._attempts[attempt.job, attempt.attempt]
        self._released[attempt.job] = attempt.attempt
        if behaviour.checkpoint_every_ms is None and behaviour.checkpoint_on_notice_ms is None:
            self._saved_ms[attempt.job] = 0
        else:
            self._saved_ms[attempt.job] = self._saved_ms.get(attempt.job, 0) + self._kept_ms(attempt)

    def _forget_node(self, node: str) -> None:
        """The scheduler has written off what ran there; it is gone, or ended before the node is used again."""
        for attempt in list(self._attempts.values()):
            for instance, process in list(attempt.live.items()):
                if process.node == node:
                    del attempt.live[instance]
            self._close_if_over(attempt)

    # ---- small things

    def _behaviour(self, job: str) -> Behaviour:
        return self._behaviours[job]

    def _stop_takes(self, job: str) -> int | None:
        return self._behaviours[job].stop_takes_ms

    def _after(self, takes_ms: int | None) -> int | None:
        return None if takes_ms is None else self._clock.now_ms() + takes_ms

    def _processes_on(self, node: str) -> Iterable[Process]:
        return [p for attempt in self._attempts.values() for p in attempt.live.values() if p.node == node]

    def _plan(self, at_ms: int, kind: str, subject: object) -> None:
        self._order += 1
        heappush(self._agenda, (at_ms, self._order, kind, subject))

    def _tell(self, event: Event, node: str = "") -> None:
        """Now, again and again, and after a crash of the server, until it is acknowledged."""
        self._unheard[_key(event)] = (event, node)
        self._send(event, node)

    def _send(self, event: Event, node: str) -> None:
        now = self._clock.now_ms()
        self._plan(now + self._retell_ms, "again", event)
        if node in self._silent_since:
            return
        for delay_ms in self._misdelivered(event) if isinstance(event, InstanceEnded) else self._line(event):
            if delay_ms:
                self._plan(now + delay_ms, "copy", event)
            else:
                self._put(event)

    def _misdelivered(self, ended: InstanceEnded) -> Sequence[int]:
        for misdelivery in self._misdeliveries:
            if misdelivery.job == ended.job:
                self._misdeliveries.remove(misdelivery)
                return () if misdelivery.is_lost else (0, misdelivery.again_after_ms)
        return self._line(ended)

    def _put(self, event: Event) -> None:
        assert self._inbox is not None
        self._inbox.put(event)


def _key(event: Event) -> tuple[str, ...]:
    """What the event is about: a later one about the same takes its place."""
    names = ("job", "attempt", "instance", "node", "run")
    return (type(event).__name__, *(str(getattr(event, name, "")) for name in names))


def _for_one(effect: GiveNotice | WithdrawNotice | StopInstances, instance: int) -> Effect:
    return replace(effect, instances=(instance,))
