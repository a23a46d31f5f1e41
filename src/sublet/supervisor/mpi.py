"""`launcher: mpi`: one mpirun in instance 0, whose daemons start in the other instances without ssh.

Rule: a rank runs inside its own instance, with that instance's GPUs and limits; whoever does not know the gang's secret
is not answered. Instance 0 listens at the gang's rendezvous address; the others call it and wait for a command.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

SECRET = "SUBLET_GANG_SECRET"
NO_ANSWER = 1
MOST_BYTES = 1 << 20  # of a message
CALL_EVERY_S = 0.1
HELLO_WITHIN_S = 5
CALL_FOR_S = 600  # until instance 0 listens


def main(words: Sequence[str]) -> int:
    """The program of an instance. `words`: a line for the shell when it is one, else a program and its arguments."""
    if os.environ["SUBLET_INSTANCE"] == "0":
        return _lead(words)
    return _follow()


# ---- messages: one JSON object a line


class Line:
    """A connection that speaks in lines. None where the other side is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def say(self, **message: Any) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        try:
            line = self._file.readline(MOST_BYTES)
            return json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        self._file.close()
        self._connection.close()


def _call(environment: Mapping[str, str]) -> Line:
    """Instance 0 may begin later than the others."""
    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_late = threading.Event()
    timer = threading.Timer(CALL_FOR_S, is_late.set)
    timer.daemon = True
    timer.start()
    while True:
        try:
            line = Line(socket.create_connection(address))
            break
        except ConnectionRefusedError:
            if is_late.wait(CALL_EVERY_S):
                raise
    timer.cancel()
    line.say(secret=environment[SECRET], instance=environment["SUBLET_INSTANCE"], slots=environment["SUBLET_GPUS"])
    return line


# ---- instance 0


def _lead(words: Sequence[str]) -> int:
    count, secret = int(os.environ["SUBLET_INSTANCES"]), os.environ[SECRET]
    with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as listener:
        slots, workers = {0: int(os.environ["SUBLET_GPUS"])}, dict[int, Line]()
        while len(workers) < count - 1:
            hello, line = _accept(listener, secret)
            workers[int(hello["instance"])], slots[int(hello["instance"])] = line, int(hello["slots"])
        threading.Thread(target=_relay, args=(listener, secret, workers), daemon=True).start()
        code = _mpirun(words, slots)
        for line in workers.values():
            line.say(end=code)
    return code


def _accept(listener: socket.socket, secret: str) -> tuple[dict[str, Any], Line]:
    """The next that knows the secret."""
    while True:
        connection = listener.accept()[0]
        connection.settimeout(HELLO_WITHIN_S)
        line = Line(connection)
        hello = line.hear()
        connection.settimeout(None)
        if hello is not None and hello.get("secret") == secret:
            return hello, line
        line.close()


def _relay(listener: socket.socket, secret: str, workers: Mapping[int, Line]) -> None:
    """What mpirun's agents want to be run is run by the worker that it is for; agents wait for its end."""
    while True:
        try:
            hello, agent = _accept(listener, secret)
        except OSError:  # closed: mpirun is done
            return
        threading.Thread(
            target=_pass_on, args=(agent, workers[int(hello["run_on"])], hello["run"]), daemon=True
        ).start()


def _pass_on(agent: Line, worker: Line, command: str) -> None:
    worker.say(run=command)
    answer = worker.hear()
    agent.say(code=NO_ANSWER if answer is None else answer["code"])


def _mpirun(words: Sequence[str], slots: Mapping[int, int]) -> int:
    command = ["/bin/sh", "-c", words[0]] if len(words) == 1 else list(words)
    with tempfile.TemporaryDirectory(prefix="sublet-mpi-") as directory:
        hosts = os.path.join(directory, "hosts")
        with open(hosts, "w") as file:
            file.writelines(f"{_host(i)} slots={count}\n" for i, count in sorted(slots.items()))
        agent = shlex.join([sys.executable, "-I", "-m", "sublet.supervisor", "--mpi-agent"])
        options = ["--hostfile", hosts, "--mca", "plm_rsh_agent", agent, "-np", str(sum(slots.values()))]
        may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
        return _run(["mpirun", *options, *command], {**os.environ, **may})


def _host(instance: int) -> str:
    return f"instance-{instance}" if instance else "localhost"


def _run(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Its exit code; what ends us ends it first."""
    try:
        child = subprocess.Popen(argv, env=environment)
    except OSError as problem:
        sys.stderr.write(f"sublet: {argv[0]} cannot be started: {problem}\n")
        return 127
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


# ---- the agent: what mpirun starts in place of ssh


def agent(arguments: Sequence[str]) -> int:
    """`instance-3 orted …`: run that in instance 3."""
    host, command = arguments[0], " ".join(arguments[1:])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    line = Line(socket.create_connection(address))
    line.say(secret=os.environ[SECRET], run_on=host.rpartition("-")[2], run=command)
    answer = line.hear()
    return NO_ANSWER if answer is None else int(answer["code"])


# ---- the other instances


def _follow() -> int:
    line = _call(os.environ)
    daemons: list[subprocess.Popen[bytes]] = []

    def end_daemons(number: int, _: object) -> None:
        for one in daemons:
            one.send_signal(number)

    signal.signal(signal.SIGTERM, end_daemons)
    while (message := line.hear()) is not None:
        if "end" in message:
            return int(message["end"])
        daemons.append(subprocess.Popen(["/bin/sh", "-c", message["run"]]))
        threading.Thread(target=_tell_end, args=(daemons[-1], line), daemon=True).start()
    sys.stderr.write("sublet: instance 0 is gone\n")
    return NO_ANSWER


def _tell_end(daemon: "subprocess.Popen[bytes]", line: Line) -> None:
    line.say(code=daemon.wait())
