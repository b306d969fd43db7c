"""Compile everything the attention bench will run, in parallel, into the caches on disk.

python -m bench.warm
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import torch

WORKERS = 16  # each has one case on the GPU, up to 8 GB


def launch_once(case, direction: str, contender: str) -> str | None:
    """What the bench will launch; an error is only noted, the bench reports it."""
    from bench.peers import CONTENDERS
    from bench.shapes import make_inputs

    try:
        CONTENDERS[contender].prepare(case, direction, [make_inputs(case)])[0]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:
        return f"{contender} {case} {direction}: {type(error).__name__}"
    return None


def main() -> None:
    from bench.peers import CONTENDERS
    from bench.test_attention import measurements

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the processes are parallel enough
    began = time.monotonic()
    todo = [
        (case, direction, name) for _, case, direction, name in measurements(smoke=False) if CONTENDERS[name].compiles
    ]
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = [error for error in pool.map(launch_once, *zip(*todo, strict=True)) if error]
    print(*errors, f"{len(todo)} launches compiled in {time.monotonic() - began:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
