"""Compile everything the benches will run, in parallel, into the caches on disk: python -m bench.warm"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
import tyro

from bench.peers import CONTENDERS
from bench.shapes import Case, make_inputs
from bench.test_attention import measurements
from bench.test_ring import one_call, ring_cases, ring_steps

WORKERS = 16  # each has one case on the GPU, up to 8 GB


def attention(case: Case, direction: str, contender: str) -> None:
    CONTENDERS[contender].prepare(case, direction, [make_inputs(case)])[0]()


def ring(case: Case, num_super: int) -> None:
    inputs = make_inputs(case)
    for launch in (ring_steps, one_call):
        launch(case, inputs, num_super, "forward_backward")()


def attempt(task: Callable[[], None]) -> str | None:
    """An error is only noted: the bench reports it."""
    try:
        task()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:
        return f"{type(error).__name__}: {task}"
    return None


def main() -> None:
    """Compile all, and print what could not be."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the processes are parallel enough
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"  # gives memory back
    began = time.monotonic()
    tasks = [partial(ring, *case) for case in ring_cases(smoke=False)]  # the longest first
    for _, case, direction, contender in measurements(smoke=False):
        if CONTENDERS[contender].compiles:
            tasks.append(partial(attention, case, direction, contender))
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = [error for error in pool.map(attempt, tasks) if error]
    print(*errors, f"{len(tasks)} cases in {time.monotonic() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
