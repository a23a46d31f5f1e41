"""The tutorial's commands, typed one after the other as they stand there, against a real server."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.server import PATIENCE_S, environment, sublet, until

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial" / "first-ten-minutes.md"


def commands() -> list[tuple[str, str]]:
    """Each command with what the page says that it prints."""
    blocks = re.findall(r"(?ms)^```\n(\$ .*?)^```", PAGE.read_text("utf-8"))
    parts = [part for block in blocks for part in re.split(r"(?m)^\$ ", block)[1:]]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


@contextmanager
def served(data: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The servers that were started; the last one is ended, its jobs before it."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
        for job in json.loads(sublet("ls", "-o", "json", data=data).out)["items"]:
            sublet("stop", job["id"], data=data)
        until(lambda: not json.loads(sublet("ls", "-o", "json", data=data).out)["items"], "the end of all jobs")
    finally:
        for process in started:
            process.terminate()
            process.wait(PATIENCE_S)


def up(data: Path) -> subprocess.Popen[bytes]:
    """`sublet up`, where the page lets it have the port that it likes."""
    note = data / "server.json"
    old = note.read_bytes() if note.exists() else b""
    words = ["sublet", "up", "--port", "0"]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment(data) | {"STEPS": "200"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until(lambda: note.exists() and note.read_bytes() != old, "the server")
    return process


@pytest.mark.timeout(200)
def test_the_tutorial_can_be_typed(tmp_path: Path) -> None:
    typed = commands()
    assert [line for line, _ in typed].count("sublet up") == 2 and len(typed) >= 15
    with served(tmp_path) as servers:
        for line, _ in typed:
            if line.startswith(". "):
                continue
            if line == "sublet up":
                servers.append(up(tmp_path))
                continue
            if "--name urgent" in line:
                until(lambda: "step 50" in sublet("logs", "train", data=tmp_path).out, "the training's first steps")
            done = subprocess.run(
                ["sh", "-c", line.replace("sleep 15", "sleep 3").replace("~/.local/share/sublet", str(tmp_path))],
                cwd=ROOT,
                env=environment(tmp_path) | {"SUBLET_USER": ""},
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if line == "sublet show train":
                was_preempted_once(done.stdout)
            if line == "sublet logs -f train":
                assert "resumed from step" in done.stdout and "done at step 200" in done.stdout


def was_preempted_once(shown: str) -> None:
    assert "restarts        0 of 3" in shown and "preempted       1 time" in shown
    assert [words for words in ("Resource Preempted", "Succeeded") if words in shown.partition("ATTEMPT")[2]] == [
        "Resource Preempted",
        "Succeeded",
    ]


def test_what_the_page_shows_is_what_is_printed() -> None:
    """The heads of its tables are those of the commands."""
    from sublet.cli.job import HEAD

    heads = [line.split("  ") for _, text in commands() for line in text.splitlines() if line.startswith("ID ")]
    assert heads and all([word.strip() for word in head if word] == list(HEAD) for head in heads)
