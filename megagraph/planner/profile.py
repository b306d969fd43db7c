"""Rows about this machine: what a layer, the embedding, the read-out, a ring and a message take.

Hooks on nn.Module time one layer forward and backward inside a model that runs; nothing is timed alone that runs
among others in training. Sizes take turns in every round, so that a slow minute of the machine hits all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from megagraph.attention.bias import BucketBias, ProjectedBias
from megagraph.attention.dropout import dropout_keys
from megagraph.attention.ring import loopback_attention
from megagraph.models.config import ModelConfig
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.planner.fitting import Row, load_rows, save_rows
from megagraph.planner.workload import Workload
from megagraph.provenance import provenance

MAX_TOKENS = 1 << 14  # rows of a micro-batch on a CPU; time grows with them in proportion long before
ROUNDS = 3
_ONCE = ("transfer", "all_reduce", "memory")  # kinds of rows that are the same on every rank


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size to measure: sequences of N nodes through a model."""

    sequences: int
    nodes: int
    config: ModelConfig
    targets: int
    feature_rows: int  # in all

    def fields(self) -> dict[str, Any]:
        config = self.config
        return {
            "sequences": self.sequences, "rows": self.nodes, "columns": self.nodes,
            "dim": config.dim, "ffn_dim": config.ffn_dim, "heads": config.heads,
            "bias": config.bias, "bias_size": config.bias_size,
            "in_features": config.in_features, "num_classes": config.num_classes,
            "feature_rows": self.feature_rows, "global_tokens": config.global_tokens,
        }  # fmt: skip


def profile(
    config: ModelConfig,
    workload: Workload,
    *,
    device: torch.device,
    batches: Iterable[Any] = (),
    budget_seconds: float = 60.0,
    cache: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure this machine for a model and a workload; about ``budget_seconds``, less where it is cached.

    On several processes all measure at once, and every one returns the rows of all; transfers and all-reduces are
    measured between them. One process measures no communication.

    Args:
        batches: what the loader gives; the wait for each of the first eight is the loader stall.
        cache: folder of profiles by device, versions, model and workload; ``None``: none is kept.
    """
    origin = provenance() | {"unit": "s", "device_type": device.type, "workload": asdict(workload)}
    origin["impl"] = "triton" if device.type == "cuda" else "blocked"
    origin["ranks_per_node"] = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    origin["world_size"] = dist.get_world_size() if dist.is_initialized() else 1
    origin["model"] = asdict(config)
    path = None if cache is None else cache / f"{_fingerprint(origin)}.json"
    found = [None if path is None else _kept(path)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if found[0] is not None:
        return found[0]
    started = time.perf_counter()
    points = design(config, workload, device)
    rows = [
        observe_process(_largest(points, config), device),  # first, as others leave freed memory behind
        *_communication(device),
        *stall_rows(batches),
        *memory_rows(_of_every_width(points), device),
    ]
    rest = budget_seconds - (time.perf_counter() - started)
    rows += compute_rows(points, device, 0.7 * rest)
    rest = budget_seconds - (time.perf_counter() - started)
    rows += ring_rows(config, workload, device, rest)
    rows = [row | origin for row in rows]
    if dist.is_initialized():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, rows)
        rows = everyone[0] + [row for part in everyone[1:] for row in part if row["kind"] not in _ONCE]
    if path is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another process may write it, too; it is measured again next time
            save_rows(path, rows)
    return rows


def _kept(path: Path) -> list[dict[str, Any]] | None:
    """The rows of an earlier profile; ``None`` where there are none that are whole."""
    with suppress(OSError, ValueError):
        return load_rows(path)
    return None


def _fingerprint(origin: Row) -> str:
    """Of all that a profile depends on; the date and the place are not among it."""
    depends = {name: value for name, value in origin.items() if name not in ("date", "python", "numpy")}
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


def design(config: ModelConfig, workload: Workload, device: torch.device) -> list[Point]:
    """Sizes around those of the workload, small ones first: micro-batches, nodes, widths and heads."""
    nodes = workload.num_nodes + workload.num_super
    most = workload.batch_sequences
    if device.type == "cpu":
        most = max(1, min(most, MAX_TOKENS // nodes))
    counts = sorted({max(1, most // part) for part in (1, 4, 16)})
    lengths = sorted({max(workload.num_nodes // cp, 1) + workload.num_super for cp in (1, 2, 4)})
    widths = [(config.dim, config.heads)]
    if config.dim % 2 == 0 and config.dim // 2 % config.heads == 0:
        widths.append((config.dim // 2, config.heads))
    if config.heads % 2 == 0:
        widths.append((config.dim, config.heads // 2))
    points = []
    for dim, heads in widths:
        for length in lengths:
            for count in counts:
                if (dim, heads) != widths[0] and (length not in (lengths[0], lengths[-1]) or count != counts[-1]):
                    continue
                ffn_dim = max(1, config.ffn_dim * dim // config.dim)
                shape = replace(config, layers=2, dim=dim, heads=heads, ffn_dim=ffn_dim)
                targets = max(1, min(workload.num_targets, length - workload.num_super))
                per_sequence = length if workload.feature_rows is None else min(workload.feature_rows, length)
                points.append(
                    Point(
                        sequences=count,
                        nodes=length,
                        config=shape,
                        targets=targets,
                        feature_rows=max(1, int(count * per_sequence)),
                    )
                )
    return sorted(points, key=lambda p: p.sequences * p.nodes * p.config.dim * (p.nodes + p.config.dim))


def _of_every_width(points: list[Point]) -> list[Point]:
    """The smallest point of each width and number of heads, and a longer one: bytes grow as the terms say."""
    chosen: dict[tuple[int, ...], Point] = {}
    for point in points:
        chosen.setdefault((point.config.dim, point.config.heads), point)
    longer = [point for point in points if point.nodes > points[0].nodes][:1]
    return [*chosen.values(), *longer]


def _largest(points: list[Point], config: ModelConfig) -> Point:
    """Of the sizes with the model's own width the largest one, with more layers."""
    own = [point for point in points if (point.config.dim, point.config.heads) == (config.dim, config.heads)]
    return replace(own[-1], config=replace(own[-1].config, layers=min(config.layers, 4)))


# ---- computing


class Clock:
    """Seconds between two marks on a device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name] = event
        else:
            self._marks[name] = time.perf_counter()

    def between(self, start: str, end: str) -> float:
        if self.cuda:
            self._marks[end].synchronize()
            return self._marks[start].elapsed_time(self._marks[end]) / 1e3
        return self._marks[end] - self._marks[start]


class Probe:
    """A model with random data of one size, whose parts report when they start and end."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self.point, self.device, self.clock = point, device, Clock(device)
        self.model = HierarchicalGT(point.config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = random_inputs(point, device)
        self.samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        for index, layer in self.model.layers.items():
            self._watch(index, layer)

    def _watch(self, name: str, module: nn.Module) -> None:
        mark = self.clock.mark
        module.register_forward_pre_hook(lambda *_: mark(f"{name} forward"))
        module.register_forward_hook(lambda *_: mark(f"{name} forward end"))
        module.register_full_backward_pre_hook(lambda *_: mark(f"{name} backward"))
        module.register_full_backward_hook(lambda *_: mark(f"{name} backward end"))

    def step(self) -> None:
        """One training step; its parts are added to ``samples``."""
        mark, between = self.clock.mark, self.clock.between
        self.optimizer.zero_grad()
        mark("start")
        loss = self.model(**self.inputs).square().mean()
        mark("forward end")
        loss.backward()
        mark("backward end")
        self.optimizer.step()
        mark("end")
        last = str(self.point.config.layers - 1)
        parts = {
            ("embedding", "forward"): ("start", "0 forward"),
            ("layer", "forward"): ("0 forward", "0 forward end"),
            ("last", "forward"): (f"{last} forward", f"{last} forward end"),
            ("head", "forward"): (f"{last} forward end", "forward end"),
            ("head", "backward"): ("forward end", f"{last} backward"),
            ("last", "backward"): (f"{last} backward", f"{last} backward end"),
            ("layer", "backward"): ("0 backward", "0 backward end"),
            ("embedding", "backward"): ("0 backward end", "backward end"),
            ("optimizer", "forward"): ("backward end", "end"),
        }
        for part, marks in parts.items():
            self.samples[part].append(between(*marks))

    def rows(self) -> Iterator[dict[str, Any]]:
        fields = self.point.fields()
        for (part, direction), samples in self.samples.items():
            row = fields | {"direction": direction, **median(samples)}
            if part == "optimizer":
                count = sum(parameter.numel() for parameter in self.model.parameters())
                yield {"kind": "optimizer", "parameters": count, **median(samples)}
            elif part in ("layer", "last"):
                targets = None if part == "layer" else self.point.targets
                yield row | {"kind": "layers", "layers": 1, "targets": targets}
            else:
                yield row | {"kind": part, "targets": self.point.targets}


def random_inputs(point: Point, device: torch.device) -> dict[str, Any]:
    """What a model reads, of one size, with dropout on."""
    generator = torch.Generator().manual_seed(0)
    config, m, n = point.config, point.sequences, point.nodes
    tokens = min(config.global_tokens, n - 1)
    assert tokens == config.global_tokens, "a sequence holds its global tokens and a node"
    if config.bias == "bucket":
        structure = torch.randint(0, config.bias_size, (m, n, n), dtype=torch.uint8, generator=generator)
    else:
        structure = torch.rand(m, config.bias_size, n, n, generator=generator)
    inputs = {
        "features": torch.rand(point.feature_rows, config.in_features, generator=generator),
        "node_index": torch.randint(0, point.feature_rows, (m, n - tokens), generator=generator),
        "structure": structure,
        "key_padding_mask": torch.zeros(m, n, dtype=torch.bool),
        "dropout_key": dropout_keys(0, 0, torch.arange(m)),
    }
    return {name: x.to(device) for name, x in inputs.items()} | {"num_targets": point.targets}


def median(samples: list[float]) -> dict[str, Any]:
    """seconds, spread (quartiles, of the median) and how often it was measured."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return {"seconds": middle, "spread": (high - low) / middle if middle else 0.0, "samples": len(samples)}


def compute_rows(points: list[Point], device: torch.device, budget_seconds: float) -> list[dict[str, Any]]:
    """Layer, embedding, read-out and optimizer of every size that the budget allows, in interleaved rounds."""
    started = time.perf_counter()
    probes: list[Probe] = []
    expected = 0.0  # of one round
    progress = tqdm(points, desc="profile: warm-up", leave=False, disable=None)
    for point in progress:
        probe = Probe(point, device)
        probe.step()
        began = time.perf_counter()
        probe.step()
        seconds = time.perf_counter() - began
        spent = time.perf_counter() - started
        if probes and spent + ROUNDS * (expected + seconds) > budget_seconds:
            break
        expected += seconds
        probe.samples.clear()
        probes.append(probe)
    rest = budget_seconds - (time.perf_counter() - started)
    rounds = max(ROUNDS, min(int(rest / max(expected, 1e-9)), 15))
    for _ in tqdm(range(rounds), desc="profile: layers", leave=False, disable=None):
        for probe in probes:
            probe.step()
    return [row for probe in probes for row in probe.rows()]


def ring_rows(
    config: ModelConfig, workload: Workload, device: torch.device, budget_seconds: float
) -> list[dict[str, Any]]:
    """All steps of rings of 2 and 4 ranks, in one process, without communication."""
    nodes, supers = workload.num_nodes, workload.num_super
    if nodes < 4:
        return []
    started = time.perf_counter()
    length = nodes + supers
    m = max(1, min(workload.batch_sequences, MAX_TOKENS // length))
    shape = (m, config.heads, length, config.dim // config.heads)
    q, k, v = (torch.rand(shape, device=device).requires_grad_() for _ in range(3))
    learned = torch.rand(config.heads, config.bias_size, device=device, requires_grad=True)
    bias: BucketBias | ProjectedBias
    if config.bias == "bucket":
        index = torch.randint(0, config.bias_size, (m, length, length), dtype=torch.uint8).to(device)
        bias = BucketBias(index, learned)
    else:
        bias = ProjectedBias(torch.rand(m, config.bias_size, length, length, device=device), learned)
    samples: dict[tuple[int, str], list[float]] = defaultdict(list)
    for run in tqdm(range(ROUNDS + 1), desc="profile: rings", leave=False, disable=None):
        if run > 1 and time.perf_counter() - started > budget_seconds:
            break
        for ranks in (2, 4):
            clock = Clock(device)
            clock.mark("start")
            out, _ = loopback_attention(q, k, v, bias, num_super=supers, world_size=ranks)
            clock.mark("forward")
            out.sum().backward()
            clock.mark("backward")
            if run:
                samples[ranks, "forward"].append(clock.between("start", "forward"))
                samples[ranks, "backward"].append(clock.between("forward", "backward"))
    fields = {"kind": "ring", "sequences": m, "num_nodes": nodes, "num_super": supers, "dim": config.dim}
    fields |= {"heads": config.heads, "bias": config.bias, "bias_size": config.bias_size}
    return [
        fields | {"ranks": ranks, "direction": direction, **median(seconds)}
        for (ranks, direction), seconds in samples.items()
    ]


# ---- memory


def memory_rows(points: list[Point], device: torch.device) -> list[dict[str, Any]]:
    """Bytes kept for backward and the peak of a training step, for one to four layers of each size."""
    rows = []
    for point in points:
        for layers in (1, 2, 4):
            rows.append(observe_memory(replace(point, config=replace(point.config, layers=layers)), device))
    return rows


def observe_memory(point: Point, device: torch.device) -> dict[str, Any]:
    """A step as an observer sees it that knows nothing of terms: CUDA's allocator, on a CPU torch's MemTracker."""
    model = HierarchicalGT(point.config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = random_inputs(point, device)

    def step(after_forward: Callable[[], None]) -> None:
        optimizer.zero_grad()
        loss = model(**inputs).square().mean()
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
        tracker.track_external(model, optimizer, *(x for x in inputs.values() if isinstance(x, Tensor)))

        def current(kind: str = "current") -> int:
            return sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot(kind).values())

        with tracker:
            kept[0] = current()
            step(lambda: kept.__setitem__(1, current()))
        peak = current("peak")
    return point.fields() | {
        "kind": "memory", "layers": point.config.layers, "targets": point.targets,
        "kept_bytes": kept[1] - kept[0], "peak_bytes": peak,
    }  # fmt: skip


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
        "kind": "process", "layers": point.config.layers, "targets": point.targets, "process_bytes": grown,
    }  # fmt: skip


def _train(point: Point, device: torch.device) -> None:
    """Two steps of a model that is dropped afterwards."""
    model, inputs = HierarchicalGT(point.config).to(device), random_inputs(point, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs).square().mean().backward()
        optimizer.step()


def _bytes(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> int:
    state = (x for values in optimizer.state.values() for x in values.values())
    return sum(x.nbytes for x in (*model.parameters(), *state, *inputs.values()) if isinstance(x, Tensor))


# ---- loader and links


def stall_rows(batches: Iterable[Any]) -> list[dict[str, Any]]:
    """The wait for a batch; the first one starts the loader and does not count."""
    samples = []
    began = time.perf_counter()
    for _ in islice(batches, 9):
        samples.append(time.perf_counter() - began)
        began = time.perf_counter()
    return [{"kind": "stall", **median(samples[1:])}] if len(samples) > 1 else []


def _communication(device: torch.device) -> list[dict[str, Any]]:
    """Messages between neighbours and all-reduces of all ranks, 1 KiB to 4 MiB; nothing for one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    peers = {"node": 1} if per_node > 1 else {}
    if per_node < ranks:
        peers["across"] = per_node
    rows = []
    for size in (2**10, 2**14, 2**18, 2**20, 2**22):
        message = torch.zeros(size // 4, device=device)
        for link, peer in peers.items():

            def exchange(message: Tensor = message, peer: int = peer) -> None:
                if rank in (0, peer):  # there and back
                    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
                    first(message, peer if rank == 0 else 0)
                    second(message, peer if rank == 0 else 0)

            rows.append({"kind": "transfer", "bytes": size, "link": link, **_timed(exchange, device, 0.5)})
        link = "across" if per_node < ranks else "node"
        reduced = _timed(lambda message=message: dist.all_reduce(message), device, 1.0)  # type: ignore[misc]
        rows.append({"kind": "all_reduce", "bytes": size, "ranks": ranks, "link": link, **reduced})
    return rows


def _timed(function: Callable[[], Any], device: torch.device, share: float) -> dict[str, Any]:
    """Median of the slowest rank's time over ten calls."""
    samples = []
    for _ in range(12):
        dist.barrier()
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append(share * (time.perf_counter() - began))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples[2:])
    return median(np.max(everyone, axis=0).tolist())
