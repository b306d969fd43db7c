"""Timelines: what every rank did in a few training steps, as a Chrome trace, and what part of it was spent waiting."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler import schedule as profiler_schedule

from megagraph.planner.plan import Plan

SKIPPED_STEPS, TRACED_STEPS = 2, 3  # the first steps set up schedules and the profiler
STEP = "train step"
STAGE = ("stage forward", "stage backward")
BUBBLE = "bubble"
SPANS = (*STAGE, "ring step", "exchange wait", BUBBLE, "all-reduce", "optimizer", "stall")
_AGAIN = "trace the run again"
_ALIASES = {f"{backend}:all_reduce": "all-reduce" for backend in ("gloo", "nccl")}  # by torch, while it is under way


@dataclass(frozen=True, slots=True)
class Span:
    """Something named that a rank did from ``start`` to ``stop``, in seconds of the machine's clock."""

    rank: int
    name: str
    start: float
    stop: float


def recorder(folder: Path, rank: int, *, ranks: int, run: str | None = None, pipeline: bool = False) -> profile:
    """A profiler, to be told of every step, that traces a few of them into folder/rank-RANK.json.gz.

    With ``pipeline`` the waits of this rank's stages for those of other ranks become spans, too; ``run`` is noted. Of
    ``ranks`` the first removes what more of them have left, before the run went on with fewer.
    """

    def write(profiler: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in _traces(folder) if rank == 0 else ():
            if _rank_of(stale) >= ranks:
                stale.unlink()
        path = folder / f"rank-{rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        trace = _load(path) | {"megagraph_run": run}
        if pipeline:
            name_bubbles(trace)
        path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=6))

    devices = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    window = profiler_schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=TRACED_STEPS, repeat=1)
    return profile(activities=devices, schedule=window, on_trace_ready=write)


def read(folder: Path, run: str | None = None) -> list[Span]:
    """The named spans of all ranks, by start.

    Args:
        run: whose they must be.

    Raises:
        FileNotFoundError: no traces are there.
        ValueError: a trace is damaged, holds no training step, or is that of another run.
    """
    files = _traces(folder)
    if not files:
        raise FileNotFoundError(f"{folder} must hold the traces of a run, rank-0.json.gz, ...; train with --trace")
    spans = []
    for file in files:
        rank = _rank_of(file)
        trace = _load(file)
        if run is not None and trace.get("megagraph_run") != run:
            raise ValueError(f"expected a trace of this run in {file}, got that of another run; {_AGAIN}")
        own = []
        try:
            base = trace.get("baseTimeNanoseconds", 0) * 1e-9
            for event in _named(trace):
                start = base + event["ts"] * 1e-6
                own.append(Span(rank, event["name"], start, start + event["dur"] * 1e-6))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"expected a trace in {file}, got one that is not whole: {error!r}; {_AGAIN}") from error
        if not all(math.isfinite(span.start) and math.isfinite(span.stop) for span in own):
            raise ValueError(f"expected a trace in {file}, got times that are not finite; {_AGAIN}")
        if not any(span.name == STEP for span in own):
            raise ValueError(f"{file} must hold a training step, got none; train for more than {SKIPPED_STEPS} steps")
        spans += own
    return sorted(spans, key=lambda span: span.start)


def name_bubbles(trace: dict[str, Any]) -> None:
    """Add a span to a rank's trace wherever, within a step, its stages wait for the next one to begin."""
    events = sorted(_named(trace), key=lambda event: event["ts"])
    for step in (event for event in events if event["name"] == STEP):
        reached = step["ts"]
        for event in events:
            if event["name"] in STAGE and step["ts"] <= event["ts"] < step["ts"] + step["dur"]:
                if event["ts"] > reached:
                    wait = {"name": BUBBLE, "ts": reached, "dur": event["ts"] - reached, "args": {}}
                    trace["traceEvents"].append(event | wait)
                reached = max(reached, event["ts"] + event["dur"])


def _traces(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("rank-*.json.gz") if path.name[5:-8].isdecimal())


def _rank_of(trace: Path) -> int:
    return int(trace.name[5:-8])


def _load(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError) as error:
        raise ValueError(f"expected a trace in {path}, got a file that cannot be read: {error}; {_AGAIN}") from error
    if not isinstance(trace, dict):
        raise ValueError(f"expected a trace in {path}, got {type(trace).__name__}; {_AGAIN}")
    return trace


def _named(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace that are spans."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # where there is a GPU, the host's spans say when work was asked for, the GPU's when it was done
    on_gpu = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    named = []
    for event in events:
        name = _ALIASES.get(event["name"], event["name"])
        cat = "gpu_user_annotation" if event["name"] in on_gpu else "user_annotation"
        if name in (*SPANS, STEP) and event.get("cat") == cat:
            named.append(event | {"name": name})
    return named


def steps(spans: list[Span]) -> list[tuple[Span, ...]]:
    """Each step, on every rank."""
    ranks = sorted({span.rank for span in spans})
    return list(zip(*([s for s in spans if s.name == STEP and s.rank == rank] for rank in ranks), strict=False))


def step_seconds(spans: list[Span]) -> float:
    """Seconds of a step, from the first rank's start to the last one's stop; median over the traced steps."""
    return median(max(s.stop for s in step) - min(s.start for s in step) for step in steps(spans))


def measured_bubble(spans: list[Span]) -> float:
    """The part of the ranks' time, from the first forward to the last backward of a step, that no stage used.

    Median over the traced steps.
    """
    bubbles = []
    for step in steps(spans):
        stages = [
            [s for s in spans if s.name in STAGE and s.rank == whole.rank and whole.start <= s.start < whole.stop]
            for whole in step
        ]
        used = [s for own in stages for s in own]
        window = max(s.stop for s in used) - min(s.start for s in used)
        bubbles.append(1 - sum(_covered(own) for own in stages) / (window * len(step)))
    return median(bubbles)


def bubble_in_theory(plan: Plan) -> float:
    """Bubble of a step where stages take equally long and messages take no time.

    P ranks wait for P - 1 micro-batches of the K that they work on; with v stages each, for as many parts 1 / v of one.
    Zero bubble fills two thirds of that where gradients of inputs and weights take as long as forward.
    """
    idle = (plan.pp - 1) / plan.stages_per_rank / (3 if plan.schedule == "zero_bubble" else 1)
    return idle / (plan.num_microbatches + idle)


def _covered(spans: list[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, -float("inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(span.stop - max(span.start, reached), 0.0)
        reached = max(reached, span.stop)
    return total
