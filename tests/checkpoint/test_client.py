"""The trainer's end of the connection to its agent."""

import socket

import pytest

from sublet.checkpoint import wire
from sublet.checkpoint.client import AgentLost, Link, ask, hear


def link_and_agent() -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(address="", greeting={}, connection=ours, process=None), theirs


def test_an_agent_that_dies_with_something_of_ours_unread_is_lost_and_nothing_worse() -> None:
    """The kernel then says "connection reset" instead of "end of file"."""
    link, agent = link_and_agent()
    wire.send(link.connection, {"tell": "something"})
    agent.close()
    with pytest.raises(AgentLost):
        hear(link)


def test_an_agent_that_just_ends_is_lost_too() -> None:
    link, agent = link_and_agent()
    agent.close()
    with pytest.raises(AgentLost):
        hear(link)
    with pytest.raises(AgentLost):
        ask(link, {"ask": "begin"})
