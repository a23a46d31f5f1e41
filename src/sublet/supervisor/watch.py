"""The supervisor's life: take the instance over, wait, act on orders, and tell the end once nothing is left.

Rule: it sleeps until its keeper ends, the pipe wakes it or a time comes; all it does by the clock is one look a second
at the size of the log. And the program waits for nothing that the supervisor needs later: it loads little of Python
before the start (no dataclasses, no typing, no subprocess, which take 20 ms) and the rest a second later.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal

from sublet.supervisor import child, files, logs, notice, processes
from sublet.supervisor.child import Keeper
from sublet.supervisor.notice import LEAVES_BY_ITSELF_MS, Orders, orders

TYPE_CHECKING = False  # as in `typing`
if TYPE_CHECKING:
    from typing import Any

    from sublet.supervisor.diagnose import Verdict

LOOK_AGAIN_MS = 50  # while killed processes are on their way out
LOOK_AT_LOG_MS = 1_000
LOOK_IF_SAFE_MS = 100  # while a notice stands: an owner waits
KILLED = 137
NOT_STARTED = 143  # told to go before it began
CANNOT_START = 126


def watch(directory: str) -> None:
    """Returns when the end is written. While another supervisor is at work it waits, to take over when that is gone."""
    lock = os.open(os.path.join(directory, files.LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    if not files.exists(directory, files.END):
        _Watch(directory).live()
    _tell_engine(directory)


def _tell_engine(directory: str) -> None:
    from sublet.supervisor import report

    report.tell_engine(directory)


class _Watch:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._settings: dict[str, Any] = files.read(directory, files.START)
        self._mark: str = self._settings["mark"]
        self._orders = Orders()
        self._terminated_ms: int | None = None  # the time of the order that was carried out
        self._told: list[int] = []  # who got its SIGTERM
        self._left_ms: int | None = None  # when all of those were seen to be gone
        self._was_noticed = False
        self._is_signalled = False  # the program was told of its notice by a signal, as it asked for
        self._report_end = 0
        self._can_bound = True
        self._wake = _open_pipe(os.path.join(directory, files.WAKE))

    def live(self) -> None:
        self._read_orders()
        keeper = child.adopt(self._directory, self._mark)
        if keeper is None:
            self._wait_to_start()
            if self._orders.is_told_to_go:
                return self._end(NOT_STARTED, finished=False)
            try:
                keeper = child.start(self._directory, self._settings)
            except OSError as problem:
                return self._fail_to_start(problem)
        _tell_engine(self._directory)
        self._wait(keeper)
        self._bury(keeper)
        self._read_orders()
        code = child.exit_code(self._directory, keeper)
        if code is None and self._orders.is_told_to_go:
            code = KILLED  # the keeper was killed with the program
        from sublet.supervisor import report

        finished = report.is_finished(self._directory, code, was_noticed=self._was_noticed)
        return self._end(code, finished=finished, verdict=None if finished else self._verdict(code))

    def _wait_to_start(self) -> None:
        """A pause before a restart ends early only when it is told to go."""
        while (left := self._settings["not_before_ms"] - files.now_ms()) > 0 and not self._orders.is_told_to_go:
            if select.select([self._wake], [], [], left / 1000)[0]:
                os.read(self._wake, 4096)
                self._read_orders()

    def _wait(self, keeper: Keeper) -> None:
        """Until the keeper is gone; on the way orders are carried out and word is passed on."""
        if keeper.descriptor is None:
            return
        poll = select.poll()
        poll.register(keeper.descriptor, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        look_ms = files.now_ms() + LOOK_AT_LOG_MS
        while True:
            due = min(self._carry_out(keeper), max(1, look_ms - files.now_ms()))
            ready = {descriptor for descriptor, _ in poll.poll(due)}
            if keeper.descriptor in ready:
                os.close(keeper.descriptor)
                return
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._read_orders()
                self._pass_on()
            if files.now_ms() >= look_ms:  # however often it is woken
                look_ms = files.now_ms() + LOOK_AT_LOG_MS
                self._bound_log()
                from sublet.supervisor import diagnose, report  # noqa: F401 (for the end, which is not to wait for it)

    def _carry_out(self, keeper: Keeper) -> int:
        """What is due is done; milliseconds to the next that will be."""
        now, due = files.now_ms(), self._orders
        if due.is_noticed and not self._is_signalled:
            self._is_signalled = self._signal_notice(keeper)
        if due.is_noticed and not due.is_safe and self._terminated_ms is None:
            self._read_orders()
            due = self._orders
        if due.terminate_ms is None or due.kill_ms is None:
            return LOOK_AT_LOG_MS
        if now >= due.kill_ms:
            processes.kill_all(keeper.pid, self._mark, self._settings["cgroup"])
            return LOOK_AGAIN_MS
        if now >= due.terminate_ms and self._terminated_ms != due.terminate_ms:
            self._told = child.terminate_leader(keeper)
            if not self._told:
                return LOOK_AGAIN_MS
            self._terminated_ms, self._left_ms = due.terminate_ms, None
        if now >= due.terminate_ms:
            return max(1, min(due.kill_ms - now, self._press_on(keeper, now)))
        return max(1, min(due.terminate_ms - now, LOOK_IF_SAFE_MS if due.is_noticed else LOOK_AT_LOG_MS))

    def _press_on(self, keeper: Keeper, now: int) -> int:
        """A shell may go on with its next command when the one that was told is gone: it has some time to tidy up."""
        if self._left_ms is None and not any(processes.start_ticks(pid) for pid in self._told):
            self._left_ms = now
        if self._left_ms is not None and now - self._left_ms >= LEAVES_BY_ITSELF_MS:
            child.terminate_shell(keeper)
            self._left_ms = now
        return LOOK_IF_SAFE_MS

    def _signal_notice(self, keeper: Keeper) -> bool:
        """Of a job that asked for a signal beside the file. False: nobody is there to hear it yet."""
        wish = self._settings["settings"].get("notice_signal", "none")
        if wish == "none":
            return True
        number = getattr(signal, wish)
        leaders = processes.leaders_of(keeper.pid, number)
        if not leaders:
            return False
        to_all = self._settings["settings"].get("notice_to") == "all"
        everybody = processes.members(keeper.pid, self._mark, self._settings["cgroup"]) if to_all else leaders
        for pid in everybody:
            if pid != keeper.pid:
                processes.send(pid, number)
        return True

    def _bury(self, keeper: Keeper) -> None:
        """What the program has left behind is killed, and seen to be gone."""
        session = keeper.pid or None
        while processes.members(session, self._mark, self._settings["cgroup"]):
            processes.kill_all(session, self._mark, self._settings["cgroup"])
            select.select([], [], [], LOOK_AGAIN_MS / 1000 / 10)

    def _read_orders(self) -> None:
        given, stop = files.read(self._directory, files.NOTICE), files.read(self._directory, files.STOP)
        safe_ms = None if given is None else notice.safe_ms(self._directory, given["given_ms"])
        self._orders = orders(given, stop, self._settings["kill_after_ms"], safe_ms)
        self._was_noticed = self._orders.is_noticed
        self._is_signalled = self._is_signalled and self._was_noticed

    def _pass_on(self) -> None:
        from sublet.supervisor import report

        said, self._report_end = report.lines(self._directory, self._report_end)
        if any("checkpoint" in line for line in said):
            report.tell_engine(self._directory)

    def _bound_log(self) -> None:
        first, last = self._settings["keep_log_bytes"]
        if self._can_bound:
            self._can_bound = logs.bound(os.path.dirname(self._settings["log"]), self._settings["log"], first, last)

    def _verdict(self, code: int | None) -> Verdict | None:
        """None for a program that was told to go, and went."""
        if self._terminated_ms is not None and not self._orders.is_hang:
            return None
        from sublet.supervisor import diagnose  # a table of patterns

        wishes = self._settings["settings"]
        if self._orders.is_hang:
            return diagnose.ended_in_a_hang()
        saved = wishes.get("checkpoint_exit_code", diagnose.SAVED)
        if self._was_noticed and code in (0, saved):
            return None
        if code == saved:
            return diagnose.saved_and_left(saved)
        oom_kills = processes.oom_kills(self._settings["memory_group"]) if self._settings["memory_group"] else 0
        tail = logs.tail(self._settings["log"], diagnose.TAIL_BYTES)
        return diagnose.diagnose(code, tail, wishes=wishes, oom_kills=oom_kills)

    def _fail_to_start(self, problem: OSError) -> None:
        from sublet.supervisor import diagnose

        with open(self._settings["log"], "ab") as log:
            log.write(f"sublet: the program cannot be started: {problem}\n".encode())
        self._end(CANNOT_START, finished=False, verdict=diagnose.diagnose(CANNOT_START, f"sublet: {problem}"))

    def _end(self, code: int | None, *, finished: bool, verdict: Verdict | None = None) -> None:
        for group in {self._settings["cgroup"], self._settings["memory_group"]}:
            processes.remove_cgroup(group)
        end: dict[str, Any] = {"exit_code": code, "finished": finished, "ended_ms": files.now_ms()}
        end |= {"verdict": "", "evidence": "", "error": ""} if verdict is None else verdict.told()
        from sublet.supervisor import report

        files.write(self._directory, files.END, {**end, "phase": report.phase_of(self._directory)})


def _open_pipe(path: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
