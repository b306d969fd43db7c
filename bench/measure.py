"""One contender on one case: values first, then memory, then time; one row."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.floors import device_rates, floor
from bench.peers import CONTENDERS, Contender, Launch
from bench.shapes import DEVICE, Case, Inputs, input_sets, make_bias
from megagraph.attention import reference

NAMES = ("out", "dq", "dk", "dv", "d_learned", "d_learned_2")
_SAMPLE_SECONDS, _TOTAL_SECONDS = 2e-3, 0.1  # device time of a sample and of all
_CHUNK_ELEMENTS = 1 << 26  # fp64 scores of the reference at a time
_PEER_SLACK = 4.0  # a peer may round more often than eager does; what is wrong is wrong by far more
_CLOCK_HZ = 2e9  # an upper bound: holding the stream for longer does no harm

Pedantic = Callable[[Launch], list[float]]


class WrongValues(Exception):
    """An implementation computes something else."""


class Problem:
    """The inputs of a case, their fp64 results, and how far from them a result may be."""

    def __init__(self, case: Case) -> None:
        self.sets = input_sets(case)
        self.want = _fp64(case, self.sets[0])
        plain = run("eager", case, "forward_backward", self.sets[:1])
        eps = torch.finfo(case.dtype).eps
        self.budgets = [
            2 * (_error(x, want) + eps * want.abs().max().item()) for x, want in zip(plain, self.want, strict=True)
        ]
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # what the reference took is there for other frameworks

    def check(self, results: list[Tensor], slack: float = 1.0) -> None:
        """Raise WrongValues for an error over twice (that of eager in the same dtype + rounding), times ``slack``."""
        for name, got, want, budget in zip(NAMES, results, self.want, self.budgets, strict=False):
            error, budget = _error(got, want), slack * budget
            if not error <= budget:  # NaN is an error too
                raise WrongValues(f"wrong values: {name} is {error:.1e} off, allowed are {budget:.1e}")


@lru_cache(maxsize=1)
def problem(case: Case) -> Problem:
    """The last case is kept for the next contender."""
    return Problem(case)


def run(name: str, case: Case, direction: str, sets: list[Inputs]) -> list[Tensor]:
    """The results of one contender on the first set."""
    contender = CONTENDERS[name]
    return contender.read(contender.prepare(case, direction, sets)[0]())


def measure(name: str, case: Case, direction: str, pedantic: Pedantic) -> dict[str, Any]:
    """The row of a contender; one that refuses the case or computes it wrongly has no time but says why.

    ``pedantic`` times a launch on the host's clock and returns the samples.
    """
    contender = CONTENDERS[name]
    row = {"contender": name, **case.fields(), "direction": direction, "unit": "s", "refusal": None}
    least = floor(case, direction, device_rates())
    row |= {"floor": least and least.seconds, "floor_unit": least and least.unit}
    given = problem(case)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            launches = contender.prepare(case, direction, given.sets)
            given.check(contender.read(launches[0]()), 1.0 if contender.ours else _PEER_SLACK)
    except Exception as error:
        if contender.ours and not isinstance(error, NotImplementedError | WrongValues):
            raise
        return row | {"refusal": _reason(error, [str(warning.message) for warning in caught])}
    row |= memory(contender, launches[0], given.sets[0])
    return row | times(launches, pedantic, blocking=contender.blocking)


def times(launches: list[Launch], pedantic: Pedantic, *, calls: int = 1, blocking: bool = False) -> dict[str, Any]:
    """median, min, max and spread (quartiles, of the median) in seconds, each launch being ``calls`` calls.

    On a GPU by its own events, and host_median is one call from an idle device, waited for; elsewhere both agree.
    """

    def launch_and_wait() -> None:
        launches[0]()
        synchronize()

    host = np.array(pedantic(launch_and_wait)) / calls
    samples = np.array(_device_samples(launches)) / calls if DEVICE == "cuda" and not blocking else host
    low, median, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return {
        "median": median,
        "min": samples.min().item(),
        "max": samples.max().item(),
        "spread": (high - low) / median,
        "samples": len(samples),
        "host_median": float(np.median(host)),
    }


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _device_samples(launches: list[Launch]) -> list[float]:
    """Device seconds per launch.

    The stream is held while the host enqueues a sample, so the host's pace does not count and no graph has to be
    captured; the inputs take turns, so that they come from memory.
    """
    turns = itertools.cycle(launches)

    def sample(count: int, hold_seconds: float) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(hold_seconds * _CLOCK_HZ))
        start.record()
        began = time.perf_counter()
        for _ in range(count):
            next(turns)()
        host_seconds = time.perf_counter() - began
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count, host_seconds

    for launch in launches:
        launch()
    synchronize()
    seconds, _ = sample(1, 0.0)
    count = min(max(math.ceil(_SAMPLE_SECONDS / seconds), 1), 16)  # far fewer kernels than the launch queue holds
    seconds, host_seconds = sample(count, 0.0)
    samples = min(max(int(_TOTAL_SECONDS / (count * seconds)), 3), 50)
    return [sample(count, 1.5 * host_seconds)[0] for _ in range(samples)]


def memory(contender: Contender, launch: Launch, inputs: Inputs) -> dict[str, int | None]:
    """saved_bytes: kept for backward beyond the inputs; peak_bytes: allocated during a call, results included."""
    if contender.blocking:  # another framework's allocator
        return {"saved_bytes": None, "peak_bytes": None}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        launch()
    given = {x.untyped_storage().data_ptr() for x in (*inputs.leaves, inputs.data) if x is not None}
    peak = None
    if DEVICE == "cuda":
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        launch()
        peak = torch.cuda.max_memory_allocated() - before
    return {"saved_bytes": sum(size for place, size in saved.items() if place not in given), "peak_bytes": peak}


def _fp64(case: Case, inputs: Inputs) -> list[Tensor]:
    """out and the gradient of every leaf by the reference, a few sequences of one head at a time."""
    leaves = [x.detach().double().requires_grad_() for x in inputs.leaves]
    data = inputs.data.double() if case.form == "projected" else inputs.data
    out = torch.empty_like(leaves[0], requires_grad=False)
    for batch, head in itertools.product(_chunks(case), range(case.H)):
        heads = slice(head, head + 1)
        q, k, v = (x[batch, heads] for x in leaves[:3])
        compact = case.form in ("bucket", "projected")  # a table or weight has no batch axis
        learned = tuple(x[heads] if compact else x[batch, heads] for x in leaves[3:])
        bias = make_bias(case.form, None if data is None else data[batch], learned)
        part, _ = reference.biased_attention(q, k, v, bias, None, case.D**-0.5, 0.0, None)
        part.backward(inputs.d_out[batch, heads].double())
        out[batch, heads] = part.detach()
    return [out, *(x.grad for x in leaves)]


def _chunks(case: Case) -> Iterator[slice]:
    size = max(_CHUNK_ELEMENTS // (case.M * case.N), 1)
    return (slice(start, start + size) for start in range(0, case.B, size))


def _error(got: Tensor, want: Tensor) -> float:
    return (got - want).abs().max().item()  # in fp64, as want is


def _reason(error: BaseException, warned: list[str]) -> str:
    """What went wrong first, in one line; SDPA says only in warnings why a kernel does not take the inputs."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("No available kernel"):
        reasons = [line.partition(" (Triggered")[0].strip() for line in warned]
        return " ".join(line for line in reasons if not line.endswith("because:"))[:300] or lines[0]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:300]
