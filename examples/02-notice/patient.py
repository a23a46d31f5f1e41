"""Counts like count.sh, and knows nothing of Sublet at all: it saves when it is told to terminate, as many programs do.

Sublet tells it at the end of the notice, by SIGTERM to this process alone.
"""

import os
import signal
import sys
import time
from pathlib import Path

TO = int(os.environ.get("TO", "600"))
state = Path("count-of-patient") if len(sys.argv) < 2 else Path(sys.argv[1])
n = int(state.read_text()) if state.exists() else 0


def save_and_leave(_number: int, _frame: object) -> None:
    new = state.with_suffix(".new")
    new.write_text(str(n))
    new.replace(state)
    print(f"told to terminate, saved at {n}", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, save_and_leave)
if n:
    print(f"goes on from {n}", flush=True)
while n < TO:
    time.sleep(0.1)
    n += 1
print(f"done at {n}", flush=True)
