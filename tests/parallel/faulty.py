"""``python faulty.py KIND PHASE RANK LOG train ...``: the command line, with a fault on one rank in one phase.

KIND is kill (SIGKILL), stop (SIGSTOP), hang (the main thread sleeps) or raise. A phase is one that ranks report, or
"forward" and "backward", which strike in the middle of a stage of the second training step. Every rank writes its
process id to LOG-RANK, the faulty one when the fault struck to LOG-fault, in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from megagraph import cli
from megagraph.models.transformer import GraphTransformer
from megagraph.parallel.failure import Watch

KIND, PHASE, RANK, LOG = sys.argv[1:5]
FAULTY = os.environ["RANK"] == RANK
entered: dict[str, int] = {}
Path(f"{LOG}-{os.environ['RANK']}").write_text(str(os.getpid()))


def strike() -> None:
    Path(f"{LOG}-fault").write_text(str(time.monotonic()))
    if KIND in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if KIND == "kill" else signal.SIGSTOP)
    elif KIND == "hang":
        time.sleep(1000)
    raise RuntimeError("injected")


def enter(self, name, step=None):
    original_enter(self, name, step)
    entered[name] = entered.get(name, 0) + 1
    if FAULTY:
        self.store.wait([f"phase/{rank}" for rank in range(self.world_size)])  # who has not begun cannot speak
    if FAULTY and name == PHASE and entered[name] == (2 if step is not None or name == "optimizer" else 1):
        strike()


def transform(self, x, *arguments):
    second = FAULTY and torch.is_grad_enabled() and entered.get("forward and backward", 0) == 2
    if second and PHASE == "forward":
        strike()
    x = original_transform(self, x, *arguments)
    if second and PHASE == "backward":
        x.register_hook(lambda _: strike())
    return x


original_enter, Watch.enter = Watch.enter, enter
original_transform, GraphTransformer.transform = GraphTransformer.transform, transform
sys.argv[1:] = sys.argv[5:]
cli.main()
