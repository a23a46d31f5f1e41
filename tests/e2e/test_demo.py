"""The demo, as a newcomer runs it, with a shorter training."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(280)
def test_the_demo_holds_what_it_claims() -> None:
    command = [sys.executable, "-m", "sublet", "demo", "--steps", "60", "--owner-steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILS" not in done.stdout
    assert "All of it holds." in done.stdout
    assert "Resource Preempted" in done.stdout
    assert "steps lost: 0" in done.stdout
