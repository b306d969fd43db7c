"""Compiled loops in the threads that torch computes in.

Those of a second pool would share the cores with torch's, which stay awake for some milliseconds after an operation:
it is what remains where torch brings no libgomp.
"""

from __future__ import annotations

import ctypes
from _thread import start_new_thread
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

import numpy as np
import torch

CHUNKS = 4  # of a thread, as one may be slowed down
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The library that torch's wheels for Linux run threads with."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None


def in_threads(run: Callable[[int, int, int], None], costs: np.ndarray, cost_of_thread: int) -> None:
    """run(chunk, first, last) for chunks of items, in order, the costly ones first.

    There are at most CHUNKS chunks for each of torch's threads; ``run`` should leave the GIL.

    Args:
        costs: of every item.
        cost_of_thread: what is worth the start of a thread.
    """
    threads = min(torch.get_num_threads(), int(costs.sum()) // cost_of_thread)
    if threads < 2:
        run(0, 0, len(costs))
        return
    # shares n, n - 1, ..., 1 of all costs: the last chunks are small, so that the threads end together
    ends, num_chunks = costs.cumsum(), CHUNKS * threads
    shares = np.arange(num_chunks, 0, -1)
    cuts = np.searchsorted(ends, ends[-1] * shares.cumsum()[:-1] / shares.sum(), side="right").tolist()
    chunks = iter([c for c in zip(range(num_chunks), [0, *cuts], [*cuts, len(costs)], strict=True) if c[1] < c[2]])
    errors: list[BaseException] = []

    def work() -> None:
        for chunk in chunks:  # each goes to a thread that is free
            run(*chunk)

    def work_for_others(_: int | None) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    gomp = _libgomp()
    if gomp is None:
        ended: SimpleQueue[None] = SimpleQueue()

        def work_and_end() -> None:
            work_for_others(None)
            ended.put(None)

        for _ in range(threads - 1):  # a Thread or a pool that a signal interrupts may wait for ever
            start_new_thread(work_and_end, ())
        work()
        for _ in range(threads - 1):
            ended.get()
    else:
        start, end, body = gomp.GOMP_parallel_start, gomp.GOMP_parallel_end, _WORK(work_for_others)
        # This thread's share is not done in ``body``: handlers of signals run in the main thread, and libgomp, which
        # calls it, would lose what they raise. Python looks for signals after a call, so never before start or end.
        try:
            start(body, None, threads)
            work()
        finally:
            end()
    if errors:
        raise errors[0]
