"""The agent's end of the connection: in which order it says things."""

import os
import socket

from sublet.checkpoint import wire
from sublet.checkpoint.agent import Agent, hear_trainer, reserve
from sublet.checkpoint.slots import close_slot


def test_a_reply_never_speaks_of_a_slot_of_which_the_trainer_has_not_heard() -> None:
    """Memory is made in a thread while the trainer asks for a place to write to."""
    trainer, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    woken, waker = os.pipe2(os.O_NONBLOCK)
    agent = Agent(server=ours, trainer=ours, waker=waker, woken=woken)
    reserve(agent, 4096)
    wire.send(trainer, {"ask": "begin", "bytes": 4096})
    hear_trainer(agent)
    heard: set[int] = set()
    while True:
        got = wire.receive(trainer, socket.MSG_DONTWAIT)
        assert got is not None
        message, fds = got
        for fd in fds:
            os.close(fd)
        if "reply" in message:
            break
        heard |= {slot["slot"] for slot in message["facts"]["slots"]}
    assert message["reply"]["slot"] in heard
    for slot in agent.slots:
        close_slot(slot)
    for each in (trainer, ours):
        each.close()
    os.close(woken)
    os.close(waker)
