"""The engine of one machine: real processes, each under a supervisor, on nodes that are pretended or real.

Rule: it owns nothing that is not on disk. Whoever opens it on the same directory finds all that runs and all that
ended, and tells each end until it is acknowledged.
"""

import contextlib
import fcntl
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublet.domain.effects import Effect, GiveNotice, RestartInstance, StartGang, StopInstances, WithdrawNotice
from sublet.domain.errors import Unavailable
from sublet.domain.events import CheckpointSaved, Diagnosed, Event, InstanceBegan, InstanceEnded, NodeJoined
from sublet.domain.ids import InstanceRef
from sublet.domain.nodes import Node
from sublet.engines.environment import DLC_PORT, Meeting, environment_of, program_argv, settings_of
from sublet.engines.gangs import Gang, gang_of, look
from sublet.ports import Inbox
from sublet.supervisor import files, logs, processes, report

KILL_AFTER_MS = 30_000  # from the SIGTERM at the end of the grace to the SIGKILL
RETELL_MS = 5_000
SUPERVISOR = str(Path(files.__file__).with_name("__main__.py"))
LOWEST_PORT, USUAL_FIRST_GIVEN_PORT = 20_000, 32_768
SUPERVISORS_AT_MOST = 5  # for one instance, before it is given up


@dataclass(slots=True, kw_only=True)
class Watched:
    """One instance that has not been acknowledged as ended."""

    ref: InstanceRef
    run: int
    directory: Path
    node: str
    devices: tuple[int, ...]
    supervisor: subprocess.Popen[bytes] | None = None
    descriptor: int = -1  # readable when its supervisor is gone
    starts: int = 0
    told_begin: bool = False
    report_end: int = 0
    told_end_ms: int | None = None


@dataclass(slots=True, kw_only=True)
class LocalEngine:
    """`directory` holds one directory an instance; `nodes` share this machine and differ in their devices."""

    directory: Path
    nodes: Sequence[Node]
    kill_after_ms: int = KILL_AFTER_MS
    keep_log_bytes: tuple[int, int] = (logs.KEEP_FIRST_BYTES, logs.KEEP_LAST_BYTES)  # of each instance: first, last
    verdicts: Sequence[Mapping[str, Any]] = ()  # signs for all jobs, behind a job's own; see supervisor/diagnose.py
    _watched: dict[InstanceRef, Watched] = field(default_factory=dict, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)
    _inbox: Inbox | None = field(default=None, init=False)
    _socket: socket.socket | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _is_closing: bool = field(default=False, init=False)
    _by_descriptor: dict[int, Watched] = field(default_factory=dict, init=False)
    _poll: select.poll = field(default_factory=select.poll, init=False)
    _gangs: dict[tuple[str, int], tuple[int, Gang]] = field(default_factory=dict, init=False)  # and when to look
    _untold: dict[tuple[str, int, str, int | None], Diagnosed] = field(default_factory=dict, init=False)
    _look_all_ms: int = field(default=0, init=False)

    # ---- the port

    def connect(self, inbox: Inbox) -> None:
        """Find again what runs from before, then tell of nodes, of what runs, and of what ended meanwhile."""
        self._inbox = inbox
        self.directory.mkdir(parents=True, exist_ok=True)
        self._socket = _listen(self.directory)
        self._poll.register(self._socket, select.POLLIN)
        for node in self.nodes:
            inbox.put(NodeJoined(at_ms=files.now_ms(), node=node))
        with self._lock:
            for directory in _unacknowledged(self.directory):
                self._watch(directory)
        self._thread = threading.Thread(target=self._listen_and_tell, name="local-engine", daemon=True)
        self._thread.start()

    def carry_out(self, effect: Effect) -> None:
        """Unavailable when the disk refuses; the same effect may be carried out later."""
        try:
            self._carry_out(effect)
        except OSError as problem:
            raise Unavailable(
                what=f"The instance directories in {self.directory} cannot be written.",
                why=f"The system says: {problem}.",
                hint="Free space there, or mend the disk; it is tried again every second.",
                code="engine_unavailable",
            ) from problem

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartGang():
                self._start(effect)
            case RestartInstance():
                self._restart(effect)
            case GiveNotice():
                notice = {
                    "deadline_ms": effect.deadline_ms,
                    "reason": effect.reason,
                    "claimant": effect.claimant,
                    "given_ms": files.now_ms(),
                }
                for directory in self._directories(effect):
                    _order(directory, files.NOTICE, notice)
            case WithdrawNotice():
                for directory in self._directories(effect):
                    files.remove(directory, files.NOTICE)
                    files.wake(directory)
            case StopInstances():
                for directory in self._directories(effect):
                    _order(directory, files.STOP, {"reason": effect.reason, "at_ms": files.now_ms()})
            case _:
                pass

    def acknowledge(self, event: Event) -> None:
        """Nothing more is owed of this instance; its log stays."""
        if isinstance(event, Diagnosed):
            key = (event.job, event.attempt, event.trouble, event.instance)
            with self._lock:
                if self._untold.get(key) is not None and self._untold[key].is_over == event.is_over:
                    del self._untold[key]
        if not isinstance(event, InstanceEnded):
            return
        ref = InstanceRef(job=event.job, attempt=event.attempt, instance=event.instance)
        with self._lock:
            watched = self._watched.get(ref)
            if watched is None or watched.run != event.run:
                return
            self._drop(watched)

    def _drop(self, watched: Watched) -> None:
        del self._watched[watched.ref]
        self._forget(watched)
        files.write(str(watched.directory), files.ACKNOWLEDGED, {})

    def close(self) -> None:
        """Let go; what runs goes on running."""
        self._is_closing = True
        if self._socket is not None:
            _poke(self.directory)
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()

    def log_path(self, job: str, attempt: int, instance: int) -> Path | None:
        path = self._directory(InstanceRef(job=job, attempt=attempt, instance=instance)) / files.LOG
        return path if path.exists() else None

    # ---- starting

    def _start(self, effect: StartGang) -> None:
        with self._lock:
            meeting = self._meeting(effect)
            new, taken = [], list[tuple[str, int]]()
            for position, instance in enumerate(effect.instances):
                ref = InstanceRef(job=effect.job, attempt=effect.attempt, instance=instance)
                directory = self._directory(ref)
                if ref in self._watched or files.exists(str(directory), files.ACKNOWLEDGED):
                    continue
                new.append(directory)
                if not files.exists(str(directory), files.START):
                    place = instance if len(effect.lease.nodes) > len(effect.instances) else position
                    self._prepare(effect, ref, place, meeting, taken)
            if taken:
                attempt = self.directory / effect.job / str(effect.attempt)
                for parent in (attempt, attempt.parent, self.directory):
                    files.sync_directory(str(parent))
            for directory in new:
                self._watch(directory)

    def _restart(self, effect: RestartInstance) -> None:
        """The same again in a directory of its own; the log goes on where it was."""
        ref = InstanceRef(job=effect.job, attempt=effect.attempt, instance=effect.instance)
        directory = self._directory(ref, effect.run)
        with self._lock:
            watched = self._watched.get(ref)
            if (watched is not None and watched.run >= effect.run) or files.exists(str(directory), files.ACKNOWLEDGED):
                return
            if not files.exists(str(directory), files.START):
                self._prepare_again(effect, ref, directory)
            if watched is not None:  # its end is what the restart follows from: it is known
                self._drop(watched)
            self._watch(directory)
            self._gangs.pop((ref.job, ref.attempt), None)

    def _prepare_again(self, effect: RestartInstance, ref: InstanceRef, directory: Path) -> None:
        before: dict[str, Any] = files.read(str(self._directory(ref, effect.run - 1)), files.START)
        directory.mkdir(parents=True, exist_ok=True)
        own = directory.stat().st_ino
        mark = f"{ref}@{own}"
        name = f"{ref.job}-{ref.attempt}-{ref.instance}-{own}"
        old, new = str(self._directory(ref, effect.run - 1)), str(directory)
        environment = {key: value.replace(old + "/", new + "/") for key, value in before["environment"].items()}
        environment[processes.MARK] = mark
        with Path(before["log"]).open("ab") as log:
            log.write(f"--- instance {ref.instance} starts again, run {effect.run} ---\n".encode())
        start = {
            **before,
            "run": effect.run,
            "not_before_ms": effect.not_before_ms,
            "mark": mark,
            "environment": environment,
            "cgroup": processes.make_cgroup(name),
        }
        start["memory_group"] = self._memory_group(start["cgroup"], name, before["memory_bytes"])
        files.write(new, files.START, start)
        files.sync_directory(str(directory.parent))

    def _memory_group(self, cgroup: str, name: str, most: int) -> str:
        return processes.limit_memory(cgroup, name, most) if most else ""

    def _prepare(
        self, effect: StartGang, ref: InstanceRef, position: int, meeting: Meeting, taken: list[tuple[str, int]]
    ) -> None:
        """From here on the instance exists, whatever ends this process. `taken`: node and device, by others of the
        gang; what this one takes is put to them."""
        directory = self._directory(ref)
        directory.mkdir(parents=True, exist_ok=True)
        node, gpus = effect.lease.nodes[position], effect.lease.gpus[position]
        devices = self._free_devices(node, gpus, taken)
        taken += [(node, device) for device in devices]
        # Two servers on one machine may use the same job ids: the directory's own number keeps their processes apart.
        own = directory.stat().st_ino
        mark = f"{ref}@{own}"
        name = f"{ref.job}-{ref.attempt}-{ref.instance}-{own}"
        cgroup = processes.make_cgroup(name)
        environment = environment_of(effect, ref, str(directory), devices, meeting, self._addresses(effect))
        environment[processes.MARK] = mark
        start = {
            "job": ref.job,
            "attempt": ref.attempt,
            "instance": ref.instance,
            "instances": len(effect.lease.nodes),
            "run": 0,
            "not_before_ms": 0,
            "mode": effect.request.fault_tolerance.mode,
            "node": node,
            "devices": devices,
            "mark": mark,
            "argv": program_argv(effect.request.program),
            "workdir": effect.request.program.workdir,
            "environment": environment,
            "cgroup": cgroup,
            "memory_bytes": effect.request.memory_bytes,
            "memory_group": self._memory_group(cgroup, name, effect.request.memory_bytes),
            "log": str(directory / files.LOG),
            "keep_log_bytes": self.keep_log_bytes,
            "settings": self._settings(effect),
            "port": meeting.port,
            "secret": meeting.secret,
            "kill_after_ms": self.kill_after_ms,
        }
        if not effect.request.program.checkpoint_dir:
            Path(environment["SUBLET_CHECKPOINT_DIR"]).mkdir(parents=True, exist_ok=True)
        files.write(str(directory), files.START, start)

    def _settings(self, effect: StartGang) -> dict[str, Any]:
        """What the job says to its supervisors; the cluster's own signs come behind the job's."""
        wishes = settings_of(effect.request.program)
        return {**wishes, "verdicts": [*wishes.get("verdicts", ()), *self.verdicts]}

    def _meeting(self, effect: StartGang) -> Meeting:
        """As before when it was chosen before, else a free port: the one that PAI's clients expect, if they do."""
        for instance in effect.instances:
            ref = InstanceRef(job=effect.job, attempt=effect.attempt, instance=instance)
            known = files.read(str(self._directory(ref)), files.START)
            if known is not None:
                return Meeting(port=int(known["port"]), secret=known["secret"])
        wanted = DLC_PORT if settings_of(effect.request.program).get("compat") == "dlc" else 0
        return Meeting(port=_free_port(wanted), secret=secrets.token_hex(16))

    def _free_devices(self, node: str, count: int, given: Sequence[tuple[str, int]]) -> list[int]:
        total = next((one.gpu for one in self.nodes if one.name == node), 0)
        running = [one for one in self._watched.values() if one.node == node and one.told_end_ms is None]
        taken = {device for one in running for device in one.devices}
        taken |= {device for name, device in given if name == node}
        free = [device for device in range(total) if device not in taken]
        if len(free) < count:
            raise AssertionError(f"node {node} has {len(free)} free devices, {count} were granted")
        return free[:count]

    def _addresses(self, effect: StartGang) -> list[str]:
        known = {node.name: node.address or "127.0.0.1" for node in self.nodes}
        return [known.get(name, "127.0.0.1") for name in effect.lease.nodes]

    # ---- watching

    def _watch(self, directory: Path) -> None:
        start = files.read(str(directory), files.START)
        if start is None:  # the server was killed before the instance existed
            shutil.rmtree(directory)
            return
        ref = InstanceRef(job=start["job"], attempt=start["attempt"], instance=start["instance"])
        devices = tuple(start["devices"])
        watched = Watched(ref=ref, run=start["run"], directory=directory, node=start["node"], devices=devices)
        self._watched[ref] = watched
        if not files.exists(str(directory), files.END):
            self._supervise(watched)
        self._look(watched)

    def _supervise(self, watched: Watched) -> None:
        """The supervisor that is at work, or a new one, which takes over what an earlier one left."""
        at_work = _supervisor_at_work(watched.directory)
        if at_work is not None:
            self._listen_to(watched, at_work)
            return
        watched.starts += 1
        watched.supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", SUPERVISOR, str(watched.directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._listen_to(watched, os.pidfd_open(watched.supervisor.pid))

    def _listen_to(self, watched: Watched, descriptor: int) -> None:
        watched.descriptor = descriptor
        self._by_descriptor[watched.descriptor] = watched
        self._poll.register(watched.descriptor, select.POLLIN)
        _poke(self.directory)  # the thread polls with the new descriptor

    def _forget(self, watched: Watched) -> None:
        if watched.descriptor >= 0:
            self._poll.unregister(watched.descriptor)
            del self._by_descriptor[watched.descriptor]
            os.close(watched.descriptor)
            watched.descriptor = -1
        if watched.supervisor is not None:
            watched.supervisor.wait()
            watched.supervisor = None

    def _listen_and_tell(self) -> None:
        assert self._socket is not None
        while not self._is_closing:
            ready = [descriptor for descriptor, _ in self._poll.poll(self._patience_ms())]
            for name in self._heard() if self._socket.fileno() in ready else ():
                with self._lock:
                    watched = self._watched.get(name)
                    if watched is not None:
                        self._look(watched)
            with self._lock:
                for descriptor in ready:
                    gone = self._by_descriptor.get(descriptor)
                    if gone is not None and _is_readable(descriptor):  # its number may be another's since
                        self._supervisor_gone(gone)
                self._look_at_all(files.now_ms())

    def _patience_ms(self) -> int:
        """Until something is to be looked at though nobody has sent word."""
        with self._lock:
            due = min([self._look_all_ms, *(at_ms for at_ms, _ in self._gangs.values())])
        return max(10, min(RETELL_MS, due - files.now_ms()))

    def _look_at_all(self, now_ms: int) -> None:
        if now_ms >= self._look_all_ms:
            self._look_all_ms = now_ms + RETELL_MS
            for watched in list(self._watched.values()):
                self._look(watched)
            for event in self._untold.values():
                self._tell(event)
            self._know_gangs(now_ms)
        for key, (at_ms, gang) in list(self._gangs.items()):
            if now_ms >= at_ms:
                self._gangs[key] = (now_ms + gang.look_every_ms(), gang)
                look(gang, now_ms, self._tell_trouble)

    def _know_gangs(self, now_ms: int) -> None:
        """Those of which an instance lives. Each instance of a gang is on this machine."""
        live = {(ref.job, ref.attempt) for ref, one in self._watched.items() if one.told_end_ms is None}
        for key in self._gangs.keys() - live:
            del self._gangs[key]
        for job, attempt in sorted(live - self._gangs.keys()):
            paths = sorted(path for path in (self.directory / job / str(attempt)).iterdir() if path.is_dir())
            gang = gang_of(job, attempt, paths)
            if gang is not None:
                self._gangs[job, attempt] = (now_ms + gang.look_every_ms(), gang)

    def _tell_trouble(self, event: Diagnosed) -> None:
        self._untold[event.job, event.attempt, event.trouble, event.instance] = event
        self._tell(event)

    def _heard(self) -> Iterator[InstanceRef]:
        assert self._socket is not None
        while True:
            try:
                word = self._socket.recv(512).decode("utf-8", "replace").split("/")
            except BlockingIOError:
                return
            instance = word[-1].partition(".")[0]
            if len(word) == 3 and word[1].isdigit() and instance.isdigit():
                yield InstanceRef(job=word[0], attempt=int(word[1]), instance=int(instance))

    def _supervisor_gone(self, watched: Watched) -> None:
        """It wrote the end, or it was killed: then the next one takes over."""
        self._forget(watched)
        if not files.exists(str(watched.directory), files.END):
            if watched.starts >= SUPERVISORS_AT_MOST:
                self._give_up(watched)
            else:
                self._supervise(watched)
        self._look(watched)

    def _give_up(self, watched: Watched) -> None:
        """No supervisor lives long enough: end what is left and say so."""
        start = files.read(str(watched.directory), files.START)
        keeper = files.read(str(watched.directory), files.KEEPER) or {"pid": None}
        while processes.members(keeper["pid"], start["mark"], start["cgroup"]):
            processes.kill_all(keeper["pid"], start["mark"], start["cgroup"])
        end = {"exit_code": None, "finished": False, "ended_ms": files.now_ms(), "verdict": "infrastructure"}
        why = {"evidence": "its supervisor ended again and again", "error": "supervisor", "phase": ""}
        files.write(str(watched.directory), files.END, {**end, **why})

    # ---- telling

    def _look(self, watched: Watched) -> None:
        """Tell what is new in its directory."""
        directory = str(watched.directory)
        if not watched.told_begin and files.exists(directory, files.KEEPER):
            watched.told_begin = True
            self._tell(InstanceBegan(at_ms=files.now_ms(), run=watched.run, **_names(watched.ref)))
            self._look_all_ms = 0  # its gang may be whole now
        said, watched.report_end = report.lines(directory, watched.report_end)
        steps = [line["checkpoint"] for line in said if isinstance(line.get("checkpoint"), int)]
        if steps:
            ref = watched.ref
            self._tell(CheckpointSaved(at_ms=files.now_ms(), job=ref.job, attempt=ref.attempt, step=max(steps)))
        end = files.read(directory, files.END)
        is_due = watched.told_end_ms is None or files.now_ms() - watched.told_end_ms >= RETELL_MS
        if end is not None and is_due:
            watched.told_end_ms = files.now_ms()
            self._tell(
                InstanceEnded(
                    at_ms=files.now_ms(),
                    exit_code=end["exit_code"],
                    finished=end["finished"],
                    verdict=end["verdict"],
                    evidence=end["evidence"],
                    error=end["error"],
                    phase=end["phase"],
                    run=watched.run,
                    **_names(watched.ref),
                )
            )

    def _tell(self, event: Event) -> None:
        assert self._inbox is not None
        self._inbox.put(event)

    # ---- small things

    def _directory(self, ref: InstanceRef, run: int = 0) -> Path:
        name = f"{ref.instance}.{run}" if run else str(ref.instance)
        return self.directory / ref.job / str(ref.attempt) / name

    def _directories(self, effect: GiveNotice | WithdrawNotice | StopInstances) -> list[str]:
        """Of the instances that are here and have not ended."""
        refs = [InstanceRef(job=effect.job, attempt=effect.attempt, instance=one) for one in effect.instances]
        with self._lock:
            return [str(self._watched[ref].directory) for ref in refs if ref in self._watched]


def _free_port(wanted: int) -> int:
    """The wanted one where nobody listens there, else one that the kernel gives to no connection: it is bound only when
    rank 0 is up, seconds later."""
    others = [LOWEST_PORT + secrets.randbelow(max(1, _first_given_port() - LOWEST_PORT)) for _ in range(20)]
    for port in (*([wanted] if wanted else []), *others, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("no port is free")


def _first_given_port() -> int:
    """From here on the kernel gives ports to connections that ask for none."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not shown in this container
        return USUAL_FIRST_GIVEN_PORT


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _names(ref: InstanceRef) -> dict[str, Any]:
    return {"job": ref.job, "attempt": ref.attempt, "instance": ref.instance}


def _order(directory: str, name: str, order: dict[str, Any]) -> None:
    """An order that stands already is not given again: repeating an effect changes nothing."""
    before = files.read(directory, name)
    timeless = ("given_ms", "at_ms")
    if before is not None and all(before[key] == order[key] for key in order if key not in timeless):
        return
    files.write(directory, name, order)
    files.wake(directory)


def _supervisor_at_work(directory: Path) -> int | None:
    """A descriptor that becomes readable when the supervisor that holds the lock is gone; None when none holds it."""
    try:
        lock = os.open(directory / files.LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock, 20, 0).decode("ascii", "replace")
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(int(pid)) if pid.isdigit() else None
    finally:
        os.close(lock)
    return None


def _unacknowledged(directory: Path) -> list[Path]:
    # Beside the attempts, which are numbers, lie the job's checkpoints: they are never touched.
    found = (path for path in directory.glob("*/*/*") if path.parent.name.isdigit() and path.is_dir())
    return sorted(path for path in found if not (path / files.ACKNOWLEDGED).exists())


def _listen(directory: Path) -> socket.socket:
    """Where supervisors send word. A left-over of a server that was killed is taken over."""
    (directory / files.SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.setblocking(False)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{descriptor}/{files.SOCKET}")
    finally:
        os.close(descriptor)
    return listener


def _poke(directory: Path) -> None:
    """Wake our own thread."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b".", f"/proc/self/fd/{descriptor}/{files.SOCKET}")
    except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
        return  # it has more than enough to wake up to, or does not listen yet
    finally:
        os.close(descriptor)
