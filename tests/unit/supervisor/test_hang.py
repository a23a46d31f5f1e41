"""When a gang hangs, does not end, or is held up: judged from what can be seen from outside."""

from dataclasses import replace

import pytest

from sublet.domain.faults import Trouble
from sublet.supervisor.hang import Limits, Seen, is_still_slow, judge, limit_ms, limits_of
from sublet.supervisor.report import Rank

MINUTE = 60_000
LIMITS = Limits(action="restart", after_ms=30 * MINUTE, start_ms=30 * MINUTE, save_ms=40 * MINUTE)


def rank(step: int | None = 100, **more: object) -> Rank:
    usual = Rank(
        pid=1, rank="0", step=step, total=1_000, at_ms=0, steps=100, longest_ms=2_000, step_ms=1_000, busy_ms=None,
        phase="", phase_since_ms=0,
    )  # fmt: skip
    return replace(usual, **more)  # type: ignore[arg-type]


def seen(instance: int = 0, *ranks: Rank, **more: object) -> Seen:
    return replace(Seen(instance=instance, begun_ms=0, ranks=ranks), **more)  # type: ignore[arg-type]


def troubles(gang: list[Seen], now_ms: int, limits: Limits = LIMITS, *, is_async: bool = False) -> list[Trouble]:
    return [one.trouble for one in judge(gang, limits, now_ms, is_async=is_async)]


def test_silence_of_all_for_longer_than_the_limit_is_a_hang() -> None:
    gang = [seen(0, output_ms=MINUTE), seen(1, output_ms=5 * MINUTE)]
    assert troubles(gang, 35 * MINUTE) == []
    assert troubles(gang, 35 * MINUTE + 1) == [Trouble.HANG]


def test_one_that_gets_on_speaks_for_all_but_not_in_an_asynchronous_gang() -> None:
    gang = [seen(0, output_ms=MINUTE), seen(1, output_ms=40 * MINUTE)]
    assert troubles(gang, 41 * MINUTE) == []
    (one,) = judge(gang, LIMITS, 41 * MINUTE, is_async=True)
    assert (one.trouble, one.instance) == (Trouble.HANG, 0)


def test_what_counts_as_progress_is_the_jobs_choice() -> None:
    gang = [seen(0, rank(at_ms=MINUTE, steps=3), output_ms=40 * MINUTE)]
    assert troubles(gang, 41 * MINUTE) == []
    assert troubles(gang, 41 * MINUTE, replace(LIMITS, watch=("step",))) == [Trouble.HANG]


@pytest.mark.parametrize("action", ["off", "report", "restart"])
def test_off_finds_nothing(action: str) -> None:
    found = troubles([seen(0)], 99 * MINUTE, replace(LIMITS, action=action))
    assert found == ([] if action == "off" else [Trouble.HANG])


def test_nobody_is_judged_who_is_told_to_go_or_has_not_begun() -> None:
    assert troubles([seen(0), seen(1, is_told_to_go=True)], 99 * MINUTE) == []
    assert troubles([seen(0), seen(1, begun_ms=None)], 99 * MINUTE) == []


def test_a_limit_is_learned_from_steps_and_never_longer_than_the_given_one() -> None:
    assert limit_ms([seen(0, rank(longest_ms=10_000))], LIMITS) == (200_000, "step", True)
    assert limit_ms([seen(0, rank(longest_ms=50))], LIMITS) == (MINUTE, "step", True)
    assert limit_ms([seen(0, rank(longest_ms=900_000))], LIMITS) == (30 * MINUTE, "step", False)
    assert limit_ms([seen(0, rank(steps=3))], LIMITS) == (30 * MINUTE, "step", False)


def test_a_learned_limit_spares_one_that_works() -> None:
    gang = [seen(0, rank(), is_idle=False), seen(1, rank())]
    assert troubles(gang, 2 * MINUTE) == [] and troubles(gang, 31 * MINUTE) == [Trouble.HANG]
    assert troubles([seen(0, rank()), seen(1, rank())], 2 * MINUTE) == [Trouble.HANG]


@pytest.mark.parametrize(("phase", "limit"), [("save", 40 * MINUTE), ("eval", 30 * MINUTE)])
def test_a_phase_that_the_program_names_has_its_own_limit(phase: str, limit: int) -> None:
    assert limit_ms([seen(0, rank(phase=phase))], LIMITS) == (limit, phase, False)


def test_before_the_first_step_and_the_first_word_it_starts() -> None:
    assert limit_ms([seen(0)], LIMITS)[1] == "start"
    assert limit_ms([seen(0, output_ms=5)], LIMITS)[1] == "step"
    assert limit_ms([seen(0, rank(None), output_ms=5)], LIMITS)[1] == "start"


def test_one_is_done_and_the_others_do_not_end() -> None:
    gang = [seen(0, done_ms=MINUTE, is_gone=True), seen(1, output_ms=11 * MINUTE), seen(2)]
    assert troubles(gang, 11 * MINUTE) == []
    (one,) = judge(gang, LIMITS, 11 * MINUTE + 1)
    assert (one.trouble, one.instance) == (Trouble.EXIT_HANG, 1)
    assert one.text == "instance 0 is done since 600 s, instance 1, 2 does not end"


def test_all_have_made_their_last_step_and_do_not_end() -> None:
    gang = [seen(0, rank(1_000, at_ms=MINUTE))]
    assert troubles(gang, 11 * MINUTE) == [] and troubles(gang, 11 * MINUTE + 1) == [Trouble.EXIT_HANG]


def test_who_works_longest_without_waiting_holds_the_others_up() -> None:
    gang = [seen(i, rank(at_ms=MINUTE, busy_ms=300.0 if i == 2 else 100.0)) for i in range(4)]
    (one,) = judge(gang, LIMITS, MINUTE)
    assert (one.trouble, one.instance) == (Trouble.SLOW, 2)
    assert one.text == "instance 2 needs 300 ms for a step, the others 100 ms"


def test_without_that_the_time_of_a_step_counts() -> None:
    gang = [seen(i, rank(at_ms=MINUTE, step_ms=400.0 if i else 100.0)) for i in range(2)]
    assert [(one.trouble, one.instance) for one in judge(gang, LIMITS, MINUTE)] == [(Trouble.SLOW, 1)]
    assert troubles([seen(i, rank(at_ms=MINUTE)) for i in range(2)], MINUTE) == []


def test_a_few_steps_or_a_few_milliseconds_say_nothing() -> None:
    few = [seen(i, rank(at_ms=MINUTE, step_ms=400.0 if i else 100.0, steps=5)) for i in range(2)]
    short = [seen(i, rank(at_ms=MINUTE, step_ms=4.0 if i else 1.0)) for i in range(2)]
    assert troubles(few, MINUTE) == troubles(short, MINUTE) == []


def test_slow_it_stays_until_it_clearly_is_not() -> None:
    def gang(ms: float) -> list[Seen]:
        return [seen(i, rank(step_ms=ms if i else 100.0)) for i in range(2)]

    assert [is_still_slow(gang(ms), 1) for ms in (160.0, 130.0, 110.0)] == [True, True, False]
    assert not is_still_slow(gang(160.0), 0)


def test_limits_follow_from_the_jobs_settings() -> None:
    assert limits_of({}) == Limits(action="report", after_ms=1_800_000, exit_ms=600_000)
    said = {"hang_action": "restart", "hang_after_ms": 5, "hang_start_ms": 7, "exit_hang_ms": 9, "hang_watch": ["step"]}
    assert limits_of(said) == Limits(
        action="restart", after_ms=5, start_ms=7, save_ms=5, exit_ms=9, watch=("step",)
    )  # fmt: skip
