"""``python -m bench.killer PHASE SECONDS RANK LOG train ...``: the command line, killed once in a phase.

``SECONDS`` after rank ``RANK`` has entered the phase for the second time (``start``, ``exit``: the first) it dies of
SIGKILL. It is killed in its first attempt only, and every attempt of a rank adds a line to ``LOG``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from megagraph import cli
from megagraph.parallel import failure

PHASES = {
    "start": ("start", "data", "build"),
    "step": ("forward and backward", "optimizer"),
    "save": ("save",),
    "evaluation": ("evaluation",),
    "exit": (),
}


def lie_in_wait(phase: str, seconds: float, log: Path, out: Path) -> None:
    entered, before = 0, ""
    wanted = 1 if phase in ("start", "exit") else 2
    while entered < wanted:
        now = failure.current_phase().split(" (")[0]
        if phase == "exit":
            entered += (out / "summary.json").exists()
        elif now != before and now in PHASES[phase]:
            entered += 1
        before = now
        time.sleep(0.0005)
    time.sleep(seconds)
    with log.open("a") as file:
        file.write(f"killed in {failure.current_phase()}\n")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    phase, seconds, victim, log = sys.argv[1:5]
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    sys.argv[1:] = sys.argv[5:]
    with Path(log).open("a") as file:
        file.write(f"attempt {attempt}\n")
    if rank == victim and attempt == "0":
        arguments = (phase, float(seconds), Path(log), Path(sys.argv[sys.argv.index("--out") + 1]))
        threading.Thread(target=lie_in_wait, args=arguments, daemon=True).start()
    cli.main()
