"""The official SDKs, unmodified, against a real server: they live in a world of their own, as users' scripts do."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving

HERE = Path(__file__).parent
WORLD = HERE.parent.parent / ".venv" / "pai"
NODES = "nodes:\n" + "".join(f"  - {{name: {name}, spec: demo, gpu: 2}}\n" for name in ("n1", "n2"))


@contextmanager
def server(folder: Path, more: str = "", *options: str) -> Iterator[Server]:
    config = folder / "cluster.yaml"
    config.write_text(NODES + more)
    with serving(folder / "data", folder, "--config", str(config), *options) as found:
        yield found


def closed_world(found: Server, key: dict[str, str]) -> dict[str, str]:
    """The SDKs look for credentials in the home folder, in variables and at a machine's metadata service, some of them
    before they look at those that they were given. Here they find those of the test's server and nothing else.
    """
    return {
        "PATH": os.defpath,
        "HOME": str(found.folder),
        "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true",
        "ALIBABA_CLOUD_ACCESS_KEY_ID": key["access_key_id"],
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET": key["access_key_secret"],
        "no_proxy": "*",
    }


def tell(name: str, found: Server, *more: str) -> None:
    """Runs a program with the SDKs; it says `all of it` when it came to its end."""
    if not WORLD.exists() and not os.environ.get("SUBLET_CI"):
        pytest.skip("make setup makes .venv/pai with the SDKs")
    url = json.loads((found.data / "server.json").read_text())["url"]
    key = json.loads((found.data / "pai-key.json").read_text())
    train = f"{sys.executable} {HERE / 'programs' / 'train.py'}"
    arguments = [url.rpartition(":")[2], key["access_key_id"], key["access_key_secret"], train, *more]
    done = subprocess.run(
        [str(WORLD / "bin" / "python"), "-I", str(HERE / "programs" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=closed_world(found, key),
    )
    assert done.returncode == 0 and done.stdout.endswith("all of it\n"), done.stdout[-2_000:] + done.stderr[-4_000:]


def test_the_story_of_lending_with_the_sdks_of_today(tmp_path: Path) -> None:
    with server(tmp_path) as found:
        tell("story.py", found)


def test_the_older_sdks_and_alipai_where_they_are_allowed(tmp_path: Path) -> None:
    with server(tmp_path, "quotas:\n  team: {nominal: {demo: 2}}\n", "--pai-sha1") as found:
        tell("older.py", found, "team", str(WORLD.with_name("pai-old")))
