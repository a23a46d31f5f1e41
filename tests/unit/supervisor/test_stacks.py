"""The stacks of a gang, merged: who stands out, and where."""

from sublet.supervisor.stacks import Stack, merged, odd_one, parse_faulthandler, sentence

REDUCE = (("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py", 2810), ("step", "/w/train.py", 37))
LOAD = (("sleep", "/w/data.py", 12), ("load", "/w/data.py", 12), ("step", "/w/train.py", 35))


def stack(frames: tuple[tuple[str, str, int], ...], **more: object) -> Stack:
    return Stack(pid=1, rank="", state="S", step=None, frames=frames) if not more else Stack(
        **{"pid": 1, "rank": "", "state": "S", "step": None, "frames": frames, **more}  # type: ignore[arg-type]
    )  # fmt: skip


def test_who_is_not_where_most_of_the_others_wait() -> None:
    gang = [(0, stack(REDUCE)), (1, stack(REDUCE)), (2, stack(LOAD, rank="2")), (3, stack(REDUCE))]
    assert odd_one(gang) == gang[2]
    assert (
        sentence(gang) == "instance 2 (rank 2) stands in data.py:12 sleep, the others in train.py:37 step → all_reduce"
    )


def test_one_that_is_stopped_stands_out_wherever_it_is() -> None:
    gang = [(0, stack(REDUCE)), (1, stack(REDUCE, state="T"))]
    assert odd_one(gang) == gang[1]
    assert sentence(gang).startswith("instance 1 is stopped in train.py:37")


def test_of_two_the_one_that_waits_for_nobody() -> None:
    gang = [(0, stack(REDUCE)), (1, stack(LOAD))]
    assert odd_one(gang) == gang[1]


def test_of_two_that_wait_the_one_that_is_behind() -> None:
    other = (("broadcast", "/v/site-packages/torch/distributed/distributed_c10d.py", 99), ("sync", "/w/train.py", 50))
    gang = [(0, stack(REDUCE, step=11)), (1, stack(other, step=10))]
    assert odd_one(gang) == gang[1]


def test_nobody_stands_out_when_all_wait_in_one_place() -> None:
    gang = [(i, stack(REDUCE)) for i in range(3)]
    assert odd_one(gang) is None
    assert sentence(gang) == "all 3 processes stand in train.py:37 step → all_reduce"


def test_nothing_is_said_when_nothing_could_be_seen() -> None:
    assert sentence([(0, stack(())), (1, stack(()))]) == "" and sentence([]) == ""


def test_like_stacks_are_shown_once_and_the_odd_one_first() -> None:
    text = merged([(0, stack(REDUCE)), (1, stack(LOAD)), (2, stack(REDUCE))])
    assert text.startswith("instance 1\n    sleep (/w/data.py:12)\n")
    assert text.count("all_reduce") == 1 and "instance 0, instance 2" in text


def test_what_faulthandler_writes_is_read_from_the_thread_that_got_the_signal() -> None:
    text = (
        'Thread 0x00007f11 (most recent call first):\n  File "/v/threading.py", line 3 in wait\n\n'
        'Current thread 0x00007f22 (most recent call first):\n  File "/w/data.py", line 12 in load\n'
        '  File "/w/train.py", line 35 in step\n'
    )
    assert parse_faulthandler(text) == [("load", "/w/data.py", 12), ("step", "/w/train.py", 35)]
