"""How trainer and agent speak: JSON messages with file descriptors over a local socket that has no name on disk.

The address is in Linux's abstract space: it vanishes with its holder, so it is never stale, and two agents cannot both
hold it. Rule: the peer must be of our own user, on both sides.
"""

import hashlib
import json
import os
import socket
import struct
from array import array
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 64 << 10
MAX_FDS = 16
RIGHTS_BYTES = socket.CMSG_LEN(MAX_FDS * array("i").itemsize)


def address(directory: Path, rank: int) -> str:
    """The agent's address for a directory and a rank; the same for every path that leads to the same directory."""
    stat = directory.stat()
    key = f"{stat.st_dev}:{stat.st_ino}:{os.getuid()}:{rank}"
    return f"\0sublet-checkpoint-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def listen(name: str) -> socket.socket | None:
    """A listening socket, or None if another agent has the address."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.bind(name)
    except OSError:
        server.close()
        return None
    server.listen(4)
    return server


def connect(name: str) -> socket.socket | None:
    """A connection, or None if nobody listens. PermissionError if another user does."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        client.connect(name)
    except (ConnectionRefusedError, FileNotFoundError):
        client.close()
        return None
    if peer(client)[1] not in (os.getuid(), 0):
        client.close()
        raise PermissionError("the agent's address is held by another user")
    return client


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def pack(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; at most {MESSAGE_BYTES} go through")
    return data


def send(connection: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = (), flags: int = 0) -> None:
    """The whole message or nothing; BlockingIOError if it does not go through and flags say not to wait."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    connection.sendmsg([pack(message)], rights, flags)


def receive(connection: socket.socket, flags: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors; None at the end.

    BlockingIOError if there is none and flags say not to wait.
    """
    try:
        data, rights, _, _ = connection.recvmsg(MESSAGE_BYTES, RIGHTS_BYTES, flags | socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    if not data:
        return None
    fds = array("i")
    for level, kind, raw in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return dict(json.loads(data)), list(fds)
