"""Every recorded case, through the command that users have, judged from outside by the cases' own judge."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared" / "scenarios"
SUBLET = Path(sys.executable).parent / "sublet"


@pytest.mark.skipif(
    not CASES.exists() and "SUBLET_CI" not in os.environ, reason=f"THE RECORDED CASES ARE NOT THERE: {CASES}"
)
@pytest.mark.timeout(600)
def test_every_recorded_case_passes() -> None:
    run = f"{SUBLET} simulate {{scenario}} --story {{story}}"
    command = [sys.executable, str(CASES / "check.py"), "--all", str(CASES), "--run", run]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip().endswith("95 passed, 0 failed")
