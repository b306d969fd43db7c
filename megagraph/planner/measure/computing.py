"""Seconds of a layer, the embedding, the read-out, the optimizer and a ring.

Hooks on nn.Module time one layer forward and backward inside a model that runs; nothing is timed alone that runs
among others in training. Sizes take turns in every round, so that a slow minute of the machine hits all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.attention.bias import Bias, BucketBias, ProjectedBias
from megagraph.attention.context_parallel import loopback_attention
from megagraph.models.config import ModelConfig
from megagraph.planner.measure.clock import Clock, average
from megagraph.planner.measure.design import DTYPES, MAX_TOKENS, PARTS, Point, random_inputs
from megagraph.planner.workload import Workload
from megagraph.progress import Progress

ROUNDS = 3


class Probe:
    """A model with random data of one size, whose parts report when they start and end."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self.point, self.device, self.clock = point, device, Clock(device)
        self.model = point.make_model(device)
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
        loss = self.point.loss(self.point.forward(self.model, self.inputs))
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
            row = fields | {"direction": direction, **average(samples)}
            if part == "optimizer":
                count = sum(parameter.numel() for parameter in self.model.parameters())
                yield {"kind": "optimizer", "parameters": count, **average(samples)}
            elif part in ("layer", "last"):
                targets = None if part == "layer" else self.point.targets
                yield row | {"kind": "layers", "layers": 1, "targets": targets}
            else:
                yield row | {"kind": part, "targets": self.point.targets}


def compute_rows(points: list[Point], device: torch.device, budget_seconds: float) -> list[dict[str, Any]]:
    """Layer, embedding, read-out and optimizer of every size that the budget allows, in interleaved rounds.

    The first step of a size, which compiles, takes nothing of the budget: of a GPU's kernels it is all there would be.
    """
    started = time.perf_counter()
    compiling = 0.0
    probes: list[Probe] = []
    expected = 0.0  # of one round
    progress = Progress(points, "profile: warm-up", len(points), "sizes")
    for point in progress:
        began = time.perf_counter()
        probe = Probe(point, device)
        probe.step()
        compiling += time.perf_counter() - began
        began = time.perf_counter()
        probe.step()
        seconds = time.perf_counter() - began
        spent = time.perf_counter() - started - compiling
        if probes and spent + ROUNDS * (expected + seconds) > budget_seconds:
            break
        expected += seconds
        probe.samples.clear()
        probes.append(probe)
    rest = budget_seconds - (time.perf_counter() - started - compiling)
    rounds = max(ROUNDS, min(int(rest / max(expected, 1e-9)), 15))
    for _ in Progress(range(rounds), "profile: layers", rounds, "rounds"):
        for probe in probes:
            probe.step()
    return [row for probe in probes for row in probe.rows()]


def ring_rows(
    config: ModelConfig, workload: Workload, device: torch.device, budget_seconds: float
) -> list[dict[str, Any]]:
    """All steps of rings of 2 and 4 ranks, in one process, without communication, for micro-batches of some sizes."""
    nodes, supers = workload.num_nodes, workload.num_super
    if nodes < 4 or workload.pairs:  # which layers know
        return []
    most = max(1, min(workload.batch_sequences, MAX_TOKENS // (nodes + supers)))
    counts = sorted({max(1, most // part) for part in PARTS}, reverse=True)
    inputs = {m: _ring_inputs(config, workload, m, device) for m in counts}
    samples: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for run in Progress(range(ROUNDS + 1), "profile: rings", ROUNDS + 1, "rounds"):
        if run == 1:  # the one before has compiled
            started = time.perf_counter()
        elif run and time.perf_counter() - started > budget_seconds:
            break
        for m, (q, k, v, bias) in inputs.items():
            for ranks in (2, 4):
                clock = Clock(device)
                clock.mark("start")
                out, _ = loopback_attention(q, k, v, bias, num_super=supers, world_size=ranks)
                clock.mark("forward")
                out.sum().backward()
                clock.mark("backward")
                if run:
                    samples[m, ranks, "forward"].append(clock.between("start", "forward"))
                    samples[m, ranks, "backward"].append(clock.between("forward", "backward"))
    fields = {"kind": "ring", "num_nodes": nodes, "num_super": supers, "dim": config.dim}
    fields |= {"heads": config.heads, "bias": config.bias, "bias_size": config.bias_size}
    return [
        fields | {"sequences": m, "ranks": ranks, "direction": direction, **average(seconds)}
        for (m, ranks, direction), seconds in samples.items()
    ]


def _ring_inputs(
    config: ModelConfig, workload: Workload, m: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Bias]:
    """q, k and v of m sequences, and a bias, all random."""
    length = workload.num_nodes + workload.num_super
    shape = (m, config.heads, length, config.dim // config.heads)
    numbers = torch.bfloat16 if workload.dtype == "bf16" else DTYPES[workload.dtype]
    q, k, v = (torch.rand(shape, device=device, dtype=numbers).requires_grad_() for _ in range(3))
    learned = torch.rand(config.heads, config.bias_size, device=device, dtype=DTYPES[workload.dtype]).requires_grad_()
    if config.bias == "bucket":
        index = torch.randint(0, config.bias_size, (m, length, length), dtype=torch.uint8).to(device)
        return q, k, v, BucketBias(index, learned)
    channels = torch.bfloat16 if workload.dtype == "bf16" else torch.float32
    given = torch.rand(m, config.bias_size, length, length, device=device, dtype=channels)
    return q, k, v, ProjectedBias(given, learned)
