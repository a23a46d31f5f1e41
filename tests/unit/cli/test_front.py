"""The edge: every error has its words and its exit code, and a traceback is never the answer."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from sublet.cli import front
from sublet.domain.errors import Broken, Refused, Unavailable
from tests.unit.faces.listening import listening
from tests.unit.service.world import World, two_teams

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return two_teams(tmp_path)


@pytest.fixture
def run(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    with listening(world) as url:
        monkeypatch.setenv("SUBLET_SERVER", url)

        def act(*arguments: str) -> tuple[int, str, str]:
            code = front.call(["--user", "mei", *arguments])
            said = capsys.readouterr()
            return code, said.out, said.err

        yield act


def test_a_refused_file_as_the_manual_shows_it(run: Run, tmp_path: Path, world: World) -> None:
    text = "name: big\nquota: team-a\nspec: demo\ncommand: x\n\nresources:\n  gpu: 4\n"
    (tmp_path / "job.yaml").write_text(text)
    assert run("submit", "job.yaml") == (
        2,
        "",
        "Refused: resources.gpu is 4, but no node of spec demo has more than 2.   (job.yaml:7)\n"
        "Ask for instances: 2 with gpu: 2, or choose another spec: sublet node ls.\n",
    )
    assert world.feed.jobs() == []


def test_submit_a_file_from_anywhere(run: Run, tmp_path: Path, world: World) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "train.yaml").write_text("quota: team-a\ngpu: 2\ncommand: x\n")
    code, out, err = run("submit", "there/train.yaml", "--name", "own", "--env", "A=b=c", "--priority", "7")
    assert (code, err) == (0, "")
    assert out == (
        "job_1  own submitted to team-a: 1 x 2 GPU demo, idle: never\nStarting, In Quota\nNext: sublet logs -f job_1\n"
    )
    request = world.desk.record("own").request
    assert (request.program.workdir, request.priority, request.user) == (str(folder), 7, "mei")
    assert request.program.environment == {"A": "b=c"}


def test_submit_a_command(run: Run, tmp_path: Path, world: World) -> None:
    assert run("submit", "--quota", "team-a", "--gpu", "1", "-o", "name", "--", "python", "-c", "print(1)")[:2] == (
        0,
        "job_1\n",
    )
    assert run("submit", "--quota", "team-a", "--gpu", "1", "--", "a && b")[0] == 0
    first, second = (world.desk.record(job).request.program for job in ("job_1", "job_2"))
    assert (first.command, first.workdir) == (("python", "-c", "print(1)"), str(tmp_path))
    assert second.command == ("a && b",)


def test_a_waiting_job_says_why_at_once(run: Run) -> None:
    for _ in range(2):
        code, out, _ = run("submit", "--quota", "team-a", "--gpu", "2", "--", "x")
    assert code == 0
    assert "Waiting: team-a: 2 promised, 2 in use by its own jobs, needs 2\nNext: sublet why job_2\n" in out


def test_a_log_with_nothing_in_it_says_so(run: Run) -> None:
    run("submit", "--quota", "team-a", "--gpu", "1", "--", "x")
    assert run("logs", "job_1") == (0, "", "There is no output yet. Why: sublet why job_1\n")


def test_lists_are_filtered_by_what_is_shown(run: Run) -> None:
    for _ in range(2):
        run("submit", "--quota", "team-a", "--gpu", "2", "--", "x")
    assert run("ls", "--state", "Waiting", "-o", "name")[:2] == (0, "job_2\n")
    assert run("ls", "--state", "starting", "-o", "name")[:2] == (0, "job_1\n")
    code, _, err = run("ls", "--state", "sleeping")
    assert code == 2 and "'sleeping'" in err and "'waiting', 'starting'" in err


def test_stop_several(run: Run) -> None:
    for _ in range(2):
        run("submit", "--quota", "team-a", "--gpu", "1", "--name", "own", "--", "x")
    assert run("stop", "job_1", "job_2") == (0, "job_1  own is stopping\njob_2  own is stopping\n", "")


def test_quotas_and_nodes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "q.yaml").write_text("quotas: {team-c: {nominal: {demo: 1}}}\n")
    assert run("quota", "apply", "q.yaml") == (0, "Set: team-c\n", "")
    assert run("quota", "apply", "q.yaml") == (0, "Nothing to change.\n", "")
    assert run("node", "drain", "n1") == (0, "n1 is draining\n", "")
    assert run("node", "resume", "n1") == (0, "n1 is up\n", "")


REFUSED = [
    (["submit", "missing.yaml"], "Refused: missing.yaml cannot be read. The system says: No such file or directory.\n"),
    (["submit", "."], "Refused: . cannot be read. The system says: Is a directory.\n"),
    (["submit", "--quota", "q", "--gpu", "1", "--", "x"], "Refused: There is no quota q."),
    (["submit", "--quota", "team-a", "--gpu", "0", "--", "x"], "Refused: gpu is 0. It must be 1 to 1,024.\n"),
    (["submit", "--quota", "team-a", "--gpu", "-1", "--", "x"], "Refused: gpu is -1. It must be 1 to 1,024.\n"),
    (["submit", "--quota", "team-a", "--gpu", "1", "--", ""], "Refused: command is empty. There is nothing to run."),
    (["submit"], "Error: Give a FILE, or a command after --, and not both.\n"),
    (["submit", "a.yaml", "--", "x"], "Error: Give a FILE, or a command after --, and not both.\n"),
    (["submit", "--env", "A", "--gpu", "1", "--", "x"], "Error: --env A is no KEY=VALUE.\n"),
    (["submit", "--gpu", "one", "--", "x"], "Error: Invalid value for '--gpu': 'one' is not a valid integer.\n"),
    (["show", "nobody"], "Refused: There is no job nobody.\nSee the jobs with sublet ls --all-states.\n"),
    (["why", "nobody"], "Refused: There is no job nobody.\n"),
    (["logs", "nobody"], "Refused: There is no job nobody.\n"),
    (["stop", "nobody"], "Refused: There is no job nobody.\n"),
    (["node", "drain", "n9"], "Refused: There is no node n9."),
    (["quota", "apply", "missing.yaml"], "Refused: missing.yaml cannot be read."),
    (["events", "--job", "nobody"], "Refused: There is no job nobody.\n"),
    (["nonsense"], "Error: No such command 'nonsense'"),
    (["--server", "ftp://x", "ls"], "Refused: ftp://x is no URL of a server."),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=range(len(REFUSED)))
def test_refused(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err


def test_no_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SUBLET_SERVER", raising=False)
    monkeypatch.setenv("SUBLET_DATA", str(tmp_path))
    assert front.call(["ls"]) == 75
    assert capsys.readouterr().err.startswith("Unavailable: No server is known. There is no note of one in")
    assert front.call(["--server", "http://127.0.0.1:1", "ls"]) == 75
    assert "cannot be reached" in capsys.readouterr().err
    assert front.call(["version"]) == 0
    assert "server  none: No server is known." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Refused(what="No.", hint="Ask."), 2, "Refused: No.\nAsk.\n"),
        (Unavailable(what="Gone.", why="Off."), 75, "Unavailable: Gone. Off.\n"),
        (Broken(what="Odd."), 70, "Broken: Odd.\n"),
        (ZeroDivisionError("division by zero"), 70, "Broken: ZeroDivisionError: division by zero. This is a fault"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
        (click.UsageError("Wrong."), 2, "Error: Wrong.\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.delenv("SUBLET_DEBUG", raising=False)
    monkeypatch.setattr(front.command, "main", fail)
    assert front.call(["ls"]) == code
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("name", front.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.call([name, "--help"]) == 0
    assert f"Usage: sublet {name}" in capsys.readouterr().out
    assert front.call(["--help"]) == 0
    assert f"  {name} " in capsys.readouterr().out


def test_listing_brings_nothing_heavy(run: Run, world: World) -> None:
    import os

    program = "import sys; from sublet.cli.front import call; call(['ls']); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    heavy = ("pydantic", "fastapi", "sqlalchemy", "ruamel.yaml", "rich", "asyncio", "sublet.core", "sublet.service")
    assert "No jobs" in done.stderr
    assert not [name for name in heavy if f"'{name}'" in done.stderr]
