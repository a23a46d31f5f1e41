"""What the commands print, word by word, against texts that are kept beside this file.

`pytest --write-golden` is not there on purpose: delete a file and run once to write it anew, then read it.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.cli.front import call
from sublet.engines.simulated import Behaviour
from tests.unit.faces.listening import listening
from tests.unit.service.world import World, two_teams

GOLDEN = Path(__file__).parent / "golden"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, World]]:
    """ben's two jobs borrow all; ana takes hers back from one of them; lin waits; omar's job has failed."""
    logs = tmp_path_factory.mktemp("logs")
    world = two_teams(logs)
    world.behaviours["job_4"] = Behaviour(work_ms=None)
    for name in ("sft-70b", "vit-sweep"):
        job = world.submit(f"name: {name}\nquota: team-b\ngpu: 2\nidle: only\ncommand: x\n", "ben").request.id
        world.behaviours[job] = Behaviour(leaves_after_ms=3_100)
    world.pass_ms(124 * 60_000)
    world.submit("name: eval\nquota: team-a\ngpu: 2\ncommand: python eval.py\nmax_time: 2h\n", "ana")
    world.pass_ms(12_000)
    world.submit("name: det-pre\nquota: team-a\ngpu: 2\ncommand: x\n", "lin")
    crash = "name: crash\nquota: team-b\ngpu: 1\ncommand: x\nidle: only\nfault_tolerance: {max_restarts: 0}\n"
    world.submit(crash, "omar")
    world.pass_ms(6 * 60_000)
    (logs / "job_3.1.0").write_text("loss 1.5\nloss 1.2\n")
    with listening(world) as url:
        yield url, world


@pytest.fixture
def run(scene: tuple[str, World], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("SUBLET_SERVER", scene[0])
    monkeypatch.setenv("TZ", "UTC")

    def act(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = call(["--user", "mei", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return act


SHOWN = {
    "ls": ["ls"],
    "ls-all-states": ["ls", "-a", "--all-states"],
    "ls-not-in": ["ls", "--idle", "not-in"],
    "ls-name": ["ls", "-o", "name"],
    "ls-json": ["ls", "--user", "ana", "-o", "json"],
    "show-own": ["show", "eval"],
    "show-borrower": ["show", "job_2"],
    "show-victim": ["show", "job_1"],
    "why-waits": ["why", "det-pre"],
    "why-behind": ["why", "job_1"],
    "why-borrows": ["why", "job_2"],
    "why-json": ["why", "det-pre", "-o", "json"],
    "quota-ls": ["quota", "ls"],
    "quota-ls-json": ["quota", "ls", "-o", "json"],
    "node-ls": ["node", "ls"],
    "events": ["events"],
    "events-of-a-job": ["events", "--job", "job_1"],
    "events-preempted": ["events", "--type", "preempted", "-o", "json"],
    "logs": ["logs", "eval"],
    "submit-help": ["submit", "--help"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_printed_word_by_word(run: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run(*SHOWN[name])
    out = re.sub(r'(As of event |seq |"sequence": )[0-9,]+', r"\1N", out)  # how many turns it took is not the matter
    file = GOLDEN / f"{name}.txt"
    if not file.exists():
        file.write_text(out)
        pytest.fail(f"{file} was not there and is written now: read it")
    assert (code, out, err) == (0, file.read_text(), "")
