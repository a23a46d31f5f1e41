"""Every recorded case, and our own, through the command that users have, judged by the judge that comes with them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CASES = HERE.parents[2] / "shared" / "scenarios"
SUBLET = Path(sys.executable).parent / "sublet"

pytestmark = pytest.mark.skipif(
    not CASES.exists() and "SUBLET_CI" not in os.environ, reason=f"THE RECORDED CASES ARE NOT THERE: {CASES}"
)


def judged(folder: Path) -> str:
    """The last line of the judge, when all that it looked at holds."""
    run = f"{SUBLET} simulate {{scenario}} --story {{story}}"
    command = [sys.executable, str(CASES / "check.py"), "--all", str(folder), "--run", run]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.timeout(600)
def test_every_recorded_case_passes() -> None:
    assert judged(CASES) == "95 passed, 0 failed"


@pytest.mark.timeout(600)
def test_every_case_of_our_own_passes() -> None:
    assert judged(HERE) == f"{len(list(HERE.glob('*.yaml')))} passed, 0 failed"
