"""Every example does what its README says, with a real server and real processes."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving, until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRIED = {"01-borrow", "02-notice", "03-resume"}  # the last one in tests/checkpoint/test_example.py


def test_every_example_is_tried_and_says_what_it_is() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert folders == TRIED
    assert all((EXAMPLES / name / "README.md").exists() for name in folders)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Works in a copy of the examples."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    (tmp_path / "data").mkdir()
    with serving(tmp_path / "data", tmp_path) as running:
        yield running


def submit(server: Server, *arguments: str) -> str:
    done = server.run(*arguments[:2], "submit", "-o", "name", *arguments[2:])
    assert done.code == 0, done.err
    return done.out.strip()


def until_it_says(server: Server, job: str, words: str) -> str:
    log: str = until(lambda: re.search(words, text := server.run("logs", job).out) and text, f"{words} in {job}'s log")
    return log


def was_preempted_once(server: Server, job: str) -> None:
    attempts = server.reaches(job, "succeeded")["attempts"]
    assert [(one["outcome"], one["idle_resources"]) for one in attempts] == [
        ("preempted", "not_in_quota"),
        ("succeeded", "not_in_quota"),
    ]
    assert server.job(job)["restarts"] == 0


@pytest.mark.timeout(200)
def test_borrow(server: Server) -> None:
    own = submit(server, "--user", "bea", "--name", "evaluate", "--quota", "team-b", "--gpu", "2", "--", "sleep", "600")
    train = submit(server, "--user", "ben", "--env", "STEPS=200", "examples/01-borrow/job.yaml")
    until_it_says(server, train, r"step 50 ")
    owner = submit(server, "--user", "ana", "--name", "urgent", "--quota", "team-a", "--gpu", "2", "--", "sleep", "1")
    server.reaches(owner, "succeeded")
    was_preempted_once(server, train)
    log = server.run("logs", train).out
    (left,) = re.findall(r"saved at step (\d+), leaving", log)
    assert re.findall(r"resumed from step (\d+)", log) == [left] and "done at step 200" in log
    assert "Resource Preempted" in server.run("events", "--job", "train").out
    assert server.run("stop", own).code == 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("file", "says", "code"),
    [("file.yaml", r"saved at (\d+), leaving", 85), ("signal.yaml", r"told to terminate, saved at (\d+)", 0)],
)
def test_notice(server: Server, file: str, says: str, code: int) -> None:
    """Both nodes are lent, so that whoever comes takes from the borrower."""
    lent = ["--quota", "team-b", "--idle", "only", "--gpu", "2", "--grace", "1s"]
    other = ["--user", "ben", *lent, "--", "sleep", "600"]
    server.reaches(submit(server, *other), "running")
    mine = submit(server, "--user", "ben", "--env", "TO=150", f"examples/02-notice/{file}")
    server.reaches(mine, "running")
    for quota in ("team-a", "team-b"):
        submit(server, "--user", "ana", "--quota", quota, "--gpu", "2", "--", "sleep", "1")
    was_preempted_once(server, mine)
    assert server.job(mine)["attempts"][0]["exit_code"] == code
    log = server.run("logs", mine).out
    (left,) = re.findall(says, log)
    assert f"goes on from {left}\n" in log and log.endswith("done at 150\n")
