"""What people see: the numbers add up, the words are those of people, and borrowed places stay hidden."""

from pathlib import Path

import pytest

from sublet.domain.errors import Refused
from sublet.engines.simulated import Behaviour
from sublet.service import commands, logs, queries
from sublet.service.queries import JobFilter
from tests.unit.service.world import World, two_teams

OWN = "quota: team-a\ngpu: 2\ncommand: x\nname: own\n"
BORROWS = "quota: team-b\ngpu: 2\nidle: only\ncommand: x\nname: borrows\n"


def kinds(world: World, job: str = "") -> list[str]:
    return [view.type for view in queries.events(world.desk, 0, 1000, job).items]


def reclaimed() -> tuple[World, str, str]:
    """ben borrows all, ana takes her share back, and it is over."""
    world = two_teams()
    first, second = (world.submit(BORROWS, "ben").request.id for _ in range(2))
    world.behaviours[second] = world.behaviours[first] = Behaviour(leaves_after_ms=3_100)
    world.pass_ms(1_000)
    world.submit(OWN, "ana")
    world.pass_ms(60_000)
    return world, first, second


def test_the_row_of_a_job_in_its_quota() -> None:
    world = two_teams()
    world.submit(OWN)
    world.pass_ms(90_000)
    (row,) = queries.jobs(world.desk, JobFilter(), 10, None).items
    shown = (row.state, row.idle_resources, row.since_seconds, row.restarts, row.max_restarts, row.preemptions)
    assert shown == ("running", "in_quota", 90, 0, 3, 0)
    assert row.nodes in (("n1",), ("n2",))


def test_a_borrower_does_not_show_where_it_stands() -> None:
    world = two_teams()
    job = world.submit(BORROWS).request.id
    (row,) = queries.jobs(world.desk, JobFilter(), 10, None).items
    assert (row.idle_resources, row.nodes) == ("not_in_quota", None)
    assert queries.detail(world.desk, job).attempts[-1].nodes is None
    assert all(not view.jobs for view in queries.nodes(world.desk).items)
    assert sum(view.lent for view in queries.nodes(world.desk).items) == 2
    text = " ".join(view.text for view in queries.events(world.desk, 0, 1000, job).items)
    assert "Not in Quota" in text and "n1" not in text and "n2" not in text


def test_a_waiting_job_says_why_in_its_row_and_at_length() -> None:
    world = two_teams()
    for _ in range(2):
        world.submit(OWN)
    late = world.submit(OWN).request.id
    (row,) = queries.jobs(world.desk, JobFilter(states=["waiting"]), 1, None).items
    assert "team-a: 2 promised, 2 in use by its own jobs, needs 2" in row.note
    answer = queries.why(world.desk, late)
    assert answer.kind == "waiting"
    assert answer.headline == "own (team-a, 1 x 2 GPU demo, idle: never) waits since 0s."
    assert answer.reasons[0].code == "own_quota_full"
    assert answer.order.startswith("1 job ahead in team-a: job_2 own (mei) 2 GPUs")


def test_why_of_jobs_that_do_not_wait() -> None:
    world = two_teams()
    job = world.submit(BORROWS).request.id
    world.pass_ms(5_000)
    running = queries.why(world.desk, job)
    assert running.headline == "borrows (team-b, 1 x 2 GPU demo, idle: only) is running, Not in Quota, since 5s."
    assert "could take it back" in running.mirror
    commands.stop(world.desk, job, "ben")
    world.pass_ms(60_000)
    assert queries.why(world.desk, job).kind == "ended"


def test_the_quota_lines_add_up() -> None:
    world = two_teams()
    world.submit(OWN)
    world.submit(BORROWS)
    world.submit(OWN)
    lines = queries.quotas(world.desk).items
    assert [line.name for line in lines] == ["team-a", "team-b"]
    for line in lines:
        assert line.guaranteed == line.own + line.lent + line.free
    assert (lines[0].own, lines[0].waiting_jobs, lines[0].waiting_gpus, lines[0].owner) == (2, 1, 2, "ana")


def test_a_preemption_is_told_as_one() -> None:
    world, first, second = reclaimed()
    told = {view.type: view for view in queries.events(world.desk, 0, 1000).items}
    victim = world.desk.record(told["preempted"].job)
    assert victim.request.id in (first, second)
    assert "Resource Preempted for job_3 own (ana) · left 3.1s after the notice · lost" in told["preempted"].text
    assert "for job_3 own (ana)" in told["notice"].text
    row = queries.job(world.desk, victim)
    assert (row.state, row.preemptions, row.restarts) == ("waiting", 1, 0)
    (attempt,) = queries.detail(world.desk, victim.request.id).attempts
    assert (attempt.outcome, attempt.claimant, attempt.notice_used_ms) == ("preempted", "job_3", 3_100)


def test_the_story_of_a_job_speaks_of_nobody_else() -> None:
    world, first, second = reclaimed()
    victim = next(job for job in (first, second) if world.desk.record(job).preemptions)
    assert [kind for kind in kinds(world, victim) if kind != "waits"] == [
        "queued", "granted", "began", "notice", "ended", "preempted", "requeued",
    ]  # fmt: skip
    about = {view.job for view in queries.events(world.desk, 0, 1000, "own").items}
    assert about == {"job_3", victim}


def test_a_job_that_leaves_says_for_whom_and_how_long() -> None:
    world = two_teams()
    jobs = [world.submit(BORROWS, "ben").request.id for _ in range(2)]
    for job in jobs:
        world.behaviours[job] = Behaviour(leaves_after_ms=None)
    world.pass_ms(1_000)
    world.submit(OWN, "ana")
    world.pass_ms(10_000)
    (row,) = queries.jobs(world.desk, JobFilter(states=["leaving"]), 10, None).items
    assert row.note == "has 20s left, for job_3 own (ana)"


def test_filters_and_pages() -> None:
    world = two_teams()
    jobs = [world.submit(OWN, user).request.id for user in ("mei", "lin", "mei")]
    commands.stop(world.desk, jobs[2], "mei")

    def ids(wanted: JobFilter, limit: int = 10, cursor: str | None = None) -> list[str]:
        return [view.id for view in queries.jobs(world.desk, wanted, limit, cursor).items]

    assert ids(JobFilter()) == [jobs[1], jobs[0]]
    assert ids(JobFilter(all_states=True)) == jobs[::-1]
    assert ids(JobFilter(user="mei", all_states=True)) == [jobs[2], jobs[0]]
    assert ids(JobFilter(states=["stopped"])) == [jobs[2]]
    assert ids(JobFilter(idle_resources="in_quota")) == [jobs[0]]
    assert ids(JobFilter(quota="team-b")) == []
    page = queries.jobs(world.desk, JobFilter(all_states=True), 2, None)
    assert page.next == jobs[1] and ids(JobFilter(all_states=True), 2, page.next) == [jobs[0]]


def test_events_come_in_pages() -> None:
    world = two_teams()
    whole = queries.events(world.desk, 0, 1000).items
    page = queries.events(world.desk, 0, 2)
    rest = queries.events(world.desk, int(page.next or 0), 1000)
    assert (*page.items, *rest.items) == whole and rest.next is None


def read_all(world: World, place: logs.Place | None) -> tuple[str, logs.Place | None]:
    text = b""
    while place is not None:
        piece, behind = logs.read(world.desk, place)
        text += piece
        if behind == place:
            break
        place = behind
    return text.decode(), place


def test_a_log_goes_on_over_attempts_and_ends_with_the_job(tmp_path: Path) -> None:
    world = two_teams(tmp_path)
    job = world.submit(OWN).request.id
    place: logs.Place | None = logs.begin(world.desk, job, None, 0)
    assert read_all(world, place) == ("", place)
    (tmp_path / f"{job}.1.0").write_text("one\n")
    text, place = read_all(world, place)
    assert text == "one\n" and place is not None
    world.engine.finish(job, 1, None)
    world.controller.turn()
    world.pass_ms(600_000)
    assert world.desk.record(job).attempt == 2
    (tmp_path / f"{job}.1.0").write_text("one\nlate\n")
    (tmp_path / f"{job}.2.0").write_text("two\n")
    text, place = read_all(world, place)
    assert text.startswith("late\n--- attempt 2 · In Quota · ") and text.endswith("---\ntwo\n")
    commands.stop(world.desk, job, "mei")
    world.pass_ms(60_000)
    assert read_all(world, place) == ("", None)
    whole, _ = read_all(world, logs.begin(world.desk, job, None, 0))
    assert whole.startswith("--- attempt 1 · In Quota · ") and whole.count("---") == 4
    assert read_all(world, logs.begin(world.desk, job, 1, 0)) == ("one\nlate\n", None)


def test_a_log_that_cannot_be_is_refused() -> None:
    world = two_teams()
    job = world.submit(OWN).request.id
    with pytest.raises(Refused, match=r"has no instance 1. It has 1, numbered from 0"):
        logs.begin(world.desk, job, None, 1)
    with pytest.raises(Refused, match=r"has no attempt 2. It had 1 so far"):
        logs.begin(world.desk, job, 2, 0)
