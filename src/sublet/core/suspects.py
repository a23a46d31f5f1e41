"""Nodes that several jobs blame: shown, avoided where there is another, and trusted again after a time.

Rule: a suspicion keeps nobody waiting; whoever finds no room elsewhere stands there all the same.
"""

from __future__ import annotations

from sublet.core.state import JobBook, NodeBook, State
from sublet.domain.effects import SuspectNode
from sublet.domain.faults import Fault

OF_MACHINES = (Fault.HARDWARE, Fault.INFRASTRUCTURE)  # faults that may lie in a node
JOBS_TO_SUSPECT = 2
MOST_REMEMBERED = 16  # faults of one node


def note(state: State, job: JobBook) -> None:
    """The job failed, and its lease is not cleared yet: a fault of machines is held against the node."""
    cause = job.fault
    if cause.verdict not in OF_MACHINES or cause.instance is None or not state.rules.suspect_ms:
        return
    node = state.nodes.get(job.nodes[cause.instance])
    if node is None:
        return
    blamed = (*_recent(state, node), (state.now_ms, job.id, cause.verdict))[-MOST_REMEMBERED:]
    jobs = list(dict.fromkeys(one[1] for one in blamed))
    until_ms = state.now_ms + state.rules.suspect_ms
    state.remind(until_ms, "trust", node.name)
    if len(jobs) < JOBS_TO_SUSPECT:
        _set(state, node, blamed, node.suspected_until_ms)
        return
    _set(state, node, blamed, until_ms)
    why = f"{cause.verdict.replace('_', ' ')} faults met {len(jobs)} jobs there: {', '.join(jobs[-4:])}"
    state.emit(SuspectNode(node=node.name, until_ms=until_ms, why=why))


def fall_due(state: State, name: str) -> None:
    """What was held against it is forgotten after its time."""
    node = state.nodes.get(name)
    if node is None:
        return
    is_cleared = 0 < node.suspected_until_ms <= state.now_ms
    _set(state, node, _recent(state, node), 0 if is_cleared else node.suspected_until_ms)
    if is_cleared:
        state.emit(SuspectNode(node=name, until_ms=0, why="nothing more was held against it"))


def restore(state: State, node: NodeBook, blamed: tuple[tuple[int, str, str], ...], until_ms: int) -> None:
    """As it was stored."""
    if blamed or until_ms:
        _set(state, node, blamed, until_ms)
        state.remind(max(until_ms, blamed[-1][0] + state.rules.suspect_ms if blamed else 0), "trust", node.name)


def _recent(state: State, node: NodeBook) -> tuple[tuple[int, str, str], ...]:
    return tuple(one for one in node.blamed if one[0] > state.now_ms - state.rules.suspect_ms)


def _set(state: State, node: NodeBook, blamed: tuple[tuple[int, str, str], ...], until_ms: int) -> None:
    before = node.blamed, node.suspected_until_ms
    state.on_undo(lambda: _set(state, node, *before))
    node.blamed, node.suspected_until_ms = blamed, until_ms
    for books, is_in in ((node.pool.blamed, bool(blamed)), (node.pool.suspects, bool(until_ms))):
        if is_in:
            books[node.name] = node
        else:
            books.pop(node.name, None)
    node.pool.moves += 1
