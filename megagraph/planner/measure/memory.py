"""Bytes that a training step takes, as observers see it that know nothing of terms."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from megagraph.attention.bias import BorderedData
from megagraph.attention.neighbours import Neighbours
from megagraph.planner.measure.design import Point, random_inputs


def memory_rows(points: list[Point], device: torch.device) -> list[dict[str, Any]]:
    """Bytes kept for backward and the peak of a training step, for one to four layers of each size."""
    rows = []
    for point in points:
        for layers in (1, 2, 4):
            rows.append(observe_memory(replace(point, config=replace(point.config, layers=layers)), device))
    return rows


def observe_memory(point: Point, device: torch.device) -> dict[str, Any]:
    """A step as an observer sees it that knows nothing of terms: CUDA's allocator, on a CPU torch's MemTracker."""
    model = point.make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = random_inputs(point, device)

    def step(after_forward: Callable[[], None]) -> None:
        optimizer.zero_grad()
        loss = point.loss(point.forward(model, inputs))
        after_forward()
        loss.backward()
        optimizer.step()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    kept = [0, 0]
    if device.type == "cuda":
        torch.cuda.synchronize()
        outside = torch.cuda.memory_allocated() - _bytes(model, optimizer, inputs)
        torch.cuda.reset_peak_memory_stats()
        kept[0] = torch.cuda.memory_allocated()
        step(lambda: kept.__setitem__(1, torch.cuda.memory_allocated()))
        peak = torch.cuda.max_memory_allocated() - outside
    else:
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(model, optimizer, *_tensors(inputs))

        def current(kind: str = "current") -> int:
            return sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot(kind).values())

        with tracker:
            kept[0] = current()
            step(lambda: kept.__setitem__(1, current()))
        peak = current("peak")
    return point.fields() | {
        "kind": "memory",
        "layers": point.config.layers,
        "targets": point.targets,
        "kept_bytes": kept[1] - kept[0],
        "peak_bytes": peak,
    }


def observe_process(point: Point, device: torch.device) -> dict[str, Any]:
    """By how many bytes this process grows in two training steps: its unique set, on a GPU what CUDA's allocator holds.

    More than all tensors take, as an allocator keeps some of what is freed. What was free before is not counted.
    """
    small = replace(point, sequences=1, feature_rows=1, config=replace(point.config, layers=1))
    _train(small, device)  # loads what every run needs
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        _train(point, device)
        grown = torch.cuda.max_memory_reserved() - before
    else:
        process, done = psutil.Process(), threading.Event()
        sizes = [process.memory_full_info().uss]

        def watch() -> None:
            while not done.wait(0.005):
                sizes.append(process.memory_full_info().uss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            _train(point, device)
        finally:  # or the process would never end
            done.set()
            watcher.join()
        grown = max(sizes) - sizes[0]
    return point.fields() | {
        "kind": "process",
        "layers": point.config.layers,
        "targets": point.targets,
        "process_bytes": grown,
    }


def _train(point: Point, device: torch.device) -> None:
    """Two steps of a model that is dropped afterwards."""
    model, inputs = point.make_model(device), random_inputs(point, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        point.loss(point.forward(model, inputs)).backward()
        optimizer.step()


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> int:
    state = (x for values in optimizer.state.values() for x in values.values())
    return sum(x.nbytes for x in (*model.parameters(), *state, *_tensors(inputs)) if isinstance(x, Tensor))


def _tensors(inputs: dict[str, Any]) -> list[Tensor]:
    found = [x for x in inputs.values() if isinstance(x, Tensor)]
    for x in inputs.values():
        if isinstance(x, BorderedData | Neighbours):
            found += x.tensors
    return found
