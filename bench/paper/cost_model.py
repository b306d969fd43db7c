"""The paper's 216 configurations: is the cost model right about what it has not seen?

    python -m bench.paper.cost_model memory      # counts bytes: other work on the machine does no harm
    python -m bench.paper.cost_model time        # wants the machine for itself; both resume where they stopped
    python -m bench.paper.cost_model judge       # three holdouts, from the rows alone

A configuration is b sequences of N = 256 nodes through l layers with h heads of a width d. A row of time is a forward
and backward pass of HierarchicalGT, the mean of 5 runs but the slowest; all configurations run once before any runs
again. A row of memory is what torch's MemTracker saw of a training step on real tensors (on a GPU the allocator's
peak). Three large configurations also report by how much the unique set of a process of their own grows, and five of a
third of that size or less, from which the model learns how much more than its tensors a process takes.

Holdouts, fixed before the rows: a random third (seed 0), all of l >= 24, all of d = 128.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from scipy.optimize import nnls
from tqdm import tqdm

from bench.provenance import RESULTS, device_folder, write_judgement, write_rows
from bench.resume import resumable
from megagraph.models.config import ModelConfig
from megagraph.planner.fitting import (
    fit,
    fit_memory,
    fit_process,
    fit_seconds,
    held_out_third,
    mape,
    predict_peak,
    r_squared,
    time_errors,
)
from megagraph.planner.measure.clock import Clock, average
from megagraph.planner.measure.design import Point, random_inputs
from megagraph.planner.measure.memory import observe_memory, observe_process

SEQUENCES, LAYERS, HEADS, WIDTHS = (1, 2, 4, 8), (2, 4, 8, 16, 24, 32), (4, 8, 16), (32, 64, 128)
NODES, IN_FEATURES, CLASSES, BUCKETS, ROUNDS, THREADS = 256, 64, 16, 8, 5, 1
WRITE_EVERY = 5.0  # seconds
LARGE = ((8, 32, 16, 128), (8, 24, 8, 128), (4, 32, 8, 128))
MEDIUM = ((4, 16, 8, 64), (8, 8, 8, 64), (4, 16, 8, 128), (8, 8, 4, 128), (2, 32, 8, 128))
TARGETS = {
    "random third: time MAPE": ("<=", 0.10),
    "random third: R^2 of log time": (">=", 0.96),
    "l >= 24: time MAPE": ("<=", 0.15),
    "d = 128: time MAPE": ("<=", 0.20),
    "random third: memory MAPE": ("<=", 0.0337),
    "random third: memory R^2": (">=", 0.994),
    "process USS: MAPE": ("<=", 0.15),
}


def point(sequences: int, layers: int, heads: int, dim: int) -> Point:
    config = ModelConfig(
        in_features=IN_FEATURES,
        num_classes=CLASSES,
        layers=layers,
        dim=dim,
        ffn_dim=dim,
        heads=heads,
        bias="bucket",
        bias_size=BUCKETS,
        dropout=0.1,
        input_dropout=0.1,
        attention_dropout=0.1,
    )
    return Point(sequences=sequences, nodes=NODES, config=config, targets=NODES - 1, feature_rows=sequences * NODES)


def fields(p: Point) -> dict[str, Any]:
    return p.fields() | {"layers": p.config.layers, "targets": p.targets}


def training_pass(p: Point, device: torch.device) -> Callable[[], float]:
    """Seconds of one forward and backward pass."""
    model, inputs = p.make_model(device), random_inputs(p, device)

    def run() -> float:
        model.zero_grad()
        clock = Clock(device)
        clock.mark("start")
        model(**inputs).square().mean().backward()
        clock.mark("end")
        return clock.between("start", "end")

    return run


def send_process(p: Point, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(observe_process(p, torch.device("cpu")))


def _folder(subset: bool) -> Path:
    return RESULTS / device_folder() / ("cost_model_subset" if subset else "cost_model")


def measure(part: str, subset: bool, again: bool = False) -> None:
    """Measure what is missing of memory or time in bench/results/DEVICE/cost_model/{memory,time}.json, or all again."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(THREADS)
    sizes = list(product((1, 2), (2, 4), (4,), (32, 64)) if subset else product(SEQUENCES, LAYERS, HEADS, WIDTHS))
    folder = _folder(subset)
    path = folder / f"{part}.json"
    found = json.loads(path.read_text()) if path.exists() else []
    rows: dict[tuple[Any, ...], dict[str, Any]] = {(row["kind"], *_size(row)): row for row in found}

    def done(*key: Any) -> dict[str, Any]:
        """What these sources have measured of it, here."""
        return rows[key] if key in added or (key in rows and not again and resumable(rows[key])) else {}

    added: set[tuple[Any, ...]] = set()
    written = 0.0

    def add(row: dict[str, Any]) -> None:
        nonlocal written
        key = row["kind"], *_size(row)
        rows[key] = row
        added.add(key)
        if time.monotonic() - written > WRITE_EVERY:  # a GPU takes less for a row than the file does
            write_rows(part, rows.values(), folder=folder.relative_to(RESULTS).as_posix())
            written = time.monotonic()

    for size in tqdm(sizes if part == "memory" else (), desc="memory"):
        if not done("memory", *size):
            add(observe_memory(point(*size), device) | {"unit": "bytes"})
    for size in () if device.type == "cuda" or part != "memory" else LARGE[:1] if subset else (*MEDIUM, *LARGE):
        if not done("process", *size):
            spawn = multiprocessing.get_context("spawn")
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=send_process, args=(point(*size), theirs))
            process.start()
            add(ours.recv() | {"unit": "bytes"})
            process.join()
    passes: dict[tuple[int, ...], Callable[[], float]] = {}
    for run in range(ROUNDS if part == "time" else 0):
        for size in tqdm(sizes, desc=f"time {run + 1}/{ROUNDS}"):
            samples = done("model", *size).get("all_seconds", [])
            if len(samples) > run:
                continue
            if size not in passes:
                passes[size] = training_pass(point(*size), device)
                passes[size]()  # warm-up
            samples = [*samples, passes[size]()]
            row = fields(point(*size)) | {"kind": "model", "direction": "forward_backward", "unit": "s"}
            add(row | {"all_seconds": samples} | average(samples))
    write_rows(part, rows.values(), folder=folder.relative_to(RESULTS).as_posix())
    print(path)


def judge(subset: bool) -> None:
    """Fit to the rest, predict the held-out rows, print, and write judgement.json and costmodel.png."""
    from megagraph.planner import plots

    folder = _folder(subset)
    parts = [folder / f"{part}.json" for part in ("memory", "time")]
    rows = [row for part in parts for row in json.loads(part.read_text())]
    times = [row for row in rows if row["kind"] == "model"]
    assert times, "measure the time first"
    memory = [row for row in rows if row["kind"] == "memory"]
    found: dict[str, float] = {}
    holdouts = {
        "random third": held_out_third(times),
        "l >= 24": _by(times, lambda row: row["layers"] >= 24),
        "d = 128": _by(times, lambda row: row["dim"] == 128),
    }
    for name, (seen, unseen) in holdouts.items():
        if seen and unseen:
            errors = time_errors(fit_seconds(seen), unseen)
            found[f"{name}: time MAPE"] = errors["time_mape"]
            found[f"{name}: R^2 of log time"] = errors["time_r2_log"]
    seen, unseen = held_out_third(memory)
    fitted = fit_memory(seen)
    predicted, measured = [predict_peak(fitted, row) for row in unseen], [row["peak_bytes"] for row in unseen]
    found["random third: memory MAPE"] = mape(predicted, measured)
    found["random third: memory R^2"] = r_squared(predicted, measured)
    medium, large = _by([row for row in rows if row["kind"] == "process"], lambda row: _size(row) in LARGE)
    if large:
        fitted |= fit_process(fitted, medium)
        predicted = [fitted.get("process.byte", 1.0) * predict_peak(fitted, row) for row in large]
        found["process USS: MAPE"] = mape(predicted, [row["process_bytes"] for row in large])
    cost = fit([*times, *memory, *medium])
    found |= {f"the paper's form, {name}": value for name, value in papers_form(memory).items()}
    for name, value in found.items():
        sign, bound = TARGETS.get(name, ("", 0.0))
        verdict = "" if not sign else "  holds" if (value <= bound if sign == "<=" else value >= bound) else "  FAILS"
        print(f"{name:<36} {value:>8.4f}  {f'{sign} {bound}' if sign else '':<10}{verdict}")
    spread = float(np.median([row["spread"] for row in times]))
    print(f"median spread of the {len(times)} times: {spread:.1%}")
    write_judgement(folder / "judgement.json", found | {"spread": spread}, *parts)
    plots.costmodel(cost, [*times, *memory], folder / "costmodel.png")


def papers_form(rows: list[Any]) -> dict[str, float]:
    """Held-out error of the paper's own memory form, fitted to the same rows: c_fp, c_mlp, c_attn, c_bias, c_feat.

    M = c_fp * parameters + l b S (c_mlp d + c_attn h N) + b S (c_bias l N + c_feat d_in), nothing on top.
    """
    seen, unseen = held_out_third(rows)
    if not seen or not unseen:
        return {}

    def terms(row: Any) -> list[float]:
        tokens, d, ffn = row["sequences"] * row["rows"], row["dim"], row["ffn_dim"]
        parameters = row["layers"] * (4 * d * d + 2 * d * ffn) + d * (row["in_features"] + row["num_classes"])
        in_layers = row["layers"] * tokens
        pairs = in_layers * row["columns"]
        return [parameters, in_layers * d, pairs * row["heads"], pairs, tokens * row["in_features"]]

    measured = np.array([row["peak_bytes"] for row in seen], float)
    weighed = np.array([terms(row) for row in seen], float) / measured[:, None]  # of least relative error
    scale = np.linalg.norm(weighed, axis=0)
    coefficients = nnls(weighed / scale, np.ones(len(seen)))[0] / scale
    predicted = [float(coefficients @ terms(row)) for row in unseen]
    measured = [row["peak_bytes"] for row in unseen]
    return {"memory_mape": mape(predicted, measured), "memory_r2": r_squared(predicted, measured)}


def _size(row: Any) -> tuple[int, ...]:
    return tuple(row[name] for name in ("sequences", "layers", "heads", "dim"))


def _by(rows: list[Any], held_out: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    return [row for row in rows if not held_out(row)], [row for row in rows if held_out(row)]


def main(
    what: tyro.conf.Positional[Literal["memory", "time", "judge"]], subset: bool = False, again: bool = False
) -> None:
    """Measure a part of the grid, or judge the model by its rows.

    Args:
        subset: eight small configurations, into another folder: does everything run?
        again: what has rows of these sources, too.
    """
    if what == "judge":
        judge(subset)
    else:
        measure(what, subset, again)


if __name__ == "__main__":
    tyro.cli(main)
