"""The supervisor's life: take the instance over, wait, act on orders, and tell the end once nothing is left.

Rule: it sleeps until its keeper ends, the pipe wakes it or a time comes; it never polls while nothing happens.
"""

import contextlib
import fcntl
import os
import select
from typing import Any

from sublet.supervisor import child, files, processes, report
from sublet.supervisor.child import Keeper
from sublet.supervisor.notice import Orders, orders

LOOK_AGAIN_MS = 50  # while killed processes are on their way out
KILLED = 137
NOT_STARTED = 143  # told to go before it began


def watch(directory: str) -> None:
    """Returns when the end is written. While another supervisor is at work it waits, to take over when that is gone."""
    lock = os.open(os.path.join(directory, files.LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    if not files.exists(directory, files.END):
        _Watch(directory).live()
    report.tell_engine(directory)


class _Watch:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._settings: dict[str, Any] = files.read(directory, files.START)
        self._mark: str = self._settings["mark"]
        self._orders = Orders()
        self._terminated_ms: int | None = None  # the time of the order that was carried out
        self._was_noticed = False
        self._report_end = 0
        self._wake = _open_pipe(os.path.join(directory, files.WAKE))

    def live(self) -> None:
        self._read_orders()
        keeper = child.adopt(self._directory, self._mark)
        if keeper is None:
            if self._orders.is_told_to_go:
                return self._end(NOT_STARTED, finished=False)
            try:
                keeper = child.start(self._directory, self._settings)
            except OSError as problem:
                return self._fail_to_start(problem)
        report.tell_engine(self._directory)
        self._wait(keeper)
        self._bury(keeper)
        self._read_orders()
        code = child.exit_code(self._directory, keeper)
        if code is None and self._orders.is_told_to_go:
            code = KILLED  # the keeper was killed with the program
        said_so = report.says_finished(report.lines(self._directory)[0])
        return self._end(code, finished=said_so or (code == 0 and not self._was_noticed))

    def _wait(self, keeper: Keeper) -> None:
        """Until the keeper is gone; on the way orders are carried out and word is passed on."""
        if keeper.descriptor is None:
            return
        poll = select.poll()
        poll.register(keeper.descriptor, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._carry_out(keeper))}
            if keeper.descriptor in ready:
                os.close(keeper.descriptor)
                return
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._read_orders()
                self._pass_on()

    def _carry_out(self, keeper: Keeper) -> int | None:
        """What is due is done; milliseconds to the next that will be."""
        now, due = files.now_ms(), self._orders
        if due.terminate_ms is None or due.kill_ms is None:
            return None
        if now >= due.kill_ms:
            processes.kill_all(keeper.pid, self._mark, self._settings["cgroup"])
            return LOOK_AGAIN_MS
        if now >= due.terminate_ms and self._terminated_ms != due.terminate_ms:
            if not child.terminate_leader(keeper):
                return LOOK_AGAIN_MS
            self._terminated_ms = due.terminate_ms
        next_ms = due.kill_ms if now >= due.terminate_ms else due.terminate_ms
        return max(1, next_ms - now)

    def _bury(self, keeper: Keeper) -> None:
        """What the program has left behind is killed, and seen to be gone."""
        session = keeper.pid or None
        while processes.members(session, self._mark, self._settings["cgroup"]):
            processes.kill_all(session, self._mark, self._settings["cgroup"])
            select.select([], [], [], LOOK_AGAIN_MS / 1000 / 10)
        processes.remove_cgroup(self._settings["cgroup"])

    def _read_orders(self) -> None:
        notice, stop = files.read(self._directory, files.NOTICE), files.read(self._directory, files.STOP)
        self._orders = orders(notice, stop, self._settings["kill_after_ms"])
        self._was_noticed = self._orders.is_noticed

    def _pass_on(self) -> None:
        said, self._report_end = report.lines(self._directory, self._report_end)
        if any("checkpoint" in line for line in said):
            report.tell_engine(self._directory)

    def _fail_to_start(self, problem: OSError) -> None:
        with open(os.path.join(self._directory, files.LOG), "ab") as log:
            log.write(f"sublet: the program cannot be started: {problem}\n".encode())
        processes.remove_cgroup(self._settings["cgroup"])
        self._end(126, finished=False, evidence=str(problem))

    def _end(self, code: int | None, *, finished: bool, evidence: str = "") -> None:
        end = {"exit_code": code, "finished": finished, "ended_ms": files.now_ms(), "evidence": evidence}
        files.write(self._directory, files.END, {**end, "verdict": "" if code is not None else "infrastructure"})


def _open_pipe(path: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
