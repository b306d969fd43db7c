"""A training step on one device, predicted from a profile of that device and then measured.

    python -m bench.paper.one_device            # two to three minutes on a GPU; wants it for itself
    python -m bench.paper.one_device --judge    # again, from its rows alone

Every workload is profiled as ``megagraph profile`` does (PROFILE_SECONDS, without a loader, as its steps take the same
batch), a cost model is fitted to those rows alone, and seconds and bytes of a step are predicted before the first one.
Then come two steps to warm up, whose memory is counted (CUDA's allocator; on a CPU all tensors alive), and ROUNDS timed
ones, each until the device is done. On a GPU three more are traced: what its kernels take in sum says how much of a
step it waits for the host.

Fixed: a generated graph of Computers' size, seed 0; dropout 0.1, AdamW; the workloads are CASES.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torch.profiler import ProfilerActivity

from bench.paper.live_bytes import MIB, Rank
from bench.paper.real_plans import predict
from bench.provenance import RESULTS, device_folder, sized, write_judgement, write_rows
from bench.shapes import DEVICE
from bench.tables import markdown
from megagraph import auto
from megagraph.config import TrainConfig
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Graph
from megagraph.planner import fit
from megagraph.planner.fitting import mape
from megagraph.planner.plan import Plan

PROFILE_SECONDS, ROUNDS, TRACED = sized((8.0, 15, 3), quick=(4.0, 2, 1))
MAPE, MEMORY_ERROR = 0.15, 0.10  # as of plans of several processes
_RATES: dict[str, Any] = dict(dropout=0.1, input_dropout=0.1, attention_dropout=0.1, seed=0)
_EGO = TrainConfig(layers=4, dim=128, ffn_dim=128, heads=8, sample_nodes=14, samples=8, channels=6, **_RATES)
_DEEP = replace(_EGO, layers=16, dim=64, ffn_dim=64, sample_nodes=142, samples=1, super_nodes=2, channels=4)
_CLUSTERS = TrainConfig(
    batching="cluster", layers=8, dim=128, ffn_dim=128, heads=4, batch_size=16, sequence_nodes=256, **_RATES
)
CASES = {
    "ego": replace(_EGO, batch_size=32),
    "ego, 16 bits": replace(_EGO, batch_size=32, dtype="bf16"),
    "ego, 512 targets, 16 bits": replace(_EGO, batch_size=512, dtype="bf16"),
    "deep ego": replace(_DEEP, batch_size=256),
    "deep ego, 16 bits": replace(_DEEP, batch_size=256, dtype="bf16"),
    "clusters, 16 bits": replace(_CLUSTERS, super_nodes=16, dtype="bf16"),
    "one short cluster": replace(_CLUSTERS, super_nodes=16, batch_size=1),
    "one long cluster, 16 bits": replace(
        _CLUSTERS, layers=4, heads=8, batch_size=1, sequence_nodes=6784, super_nodes=256, dtype="bf16"
    ),
}
CASES = sized(CASES, quick={name: replace(CASES[name], layers=2) for name in ("ego", "one short cluster")})
HERE = torch.device(DEVICE)


@cache
def graph() -> Graph:
    nodes = sized(13_752, quick=1000)
    return synthetic_graph(num_nodes=nodes, num_classes=10, in_features=767, average_degree=36, seed=0)


def run(config: TrainConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of the profile, and a row of the prediction and of the steps."""
    config, before = replace(config, device=DEVICE), 0
    if DEVICE == "cuda":
        torch.mm(torch.ones(8, 8, device=HERE), torch.ones(8, 8, device=HERE))  # makes what cuBLAS works in
        before = torch.cuda.memory_allocated()
    rank = Rank(config, graph(), device=HERE)
    nodes = np.arange(graph().num_nodes)
    profiled = auto.measure(config, graph(), rank.builder, nodes, HERE, seconds=PROFILE_SECONDS, cache=None)
    profiled = [row for row in profiled if row["kind"] != "stall"]
    cost = fit(profiled)
    row = predict(cost, (Plan(),))[0] | {"held_out": cost.held_out}
    row["predicted_bytes"] = max(row["predicted_bytes"])
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        rank.step()
        rank.step()
        row["measured_bytes"] = torch.cuda.max_memory_allocated() - before
    else:
        row["measured_bytes"] = rank.peak_bytes()
    row["measured_seconds"] = [_seconds(rank) for _ in range(ROUNDS)]
    if DEVICE == "cuda":
        row["kernel_seconds"] = _kernels(rank)
    return profiled, row


def _seconds(rank: Rank) -> float:
    began = time.perf_counter()
    rank.step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _kernels(rank: Rank) -> float:
    """What the kernels of a step take in sum."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as traced:
        for _ in range(TRACED):
            rank.step()
        torch.cuda.synchronize()
    kernels = (event for event in traced.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sum(event.self_device_time_total for event in kernels) / 1e6 / TRACED


def folder() -> Path:
    return RESULTS / device_folder() / "one_device"


def judge() -> None:
    """Print the table and the errors, and write judgement.json."""
    rows, body, measured = json.loads((folder() / "steps.json").read_text()), [], []
    for row in rows:
        low, middle, high = np.quantile(row["measured_seconds"], (0, 0.5, 1)) * 1e3
        measured.append(middle / 1e3)
        busy = f"{row['kernel_seconds'] / measured[-1]:.0%}" if "kernel_seconds" in row else "-"
        cells = [row["case"], f"{row['predicted_seconds'] * 1e3:.1f}", f"{middle:.1f} ({low:.1f} to {high:.1f})", busy]
        cells += [f"{row[name] / MIB:.1f}" for name in ("predicted_bytes", "measured_bytes")]
        body.append([*cells, f"{row['held_out'].get('time_mape', float('nan')):.0%}"])
    head = ["workload", "ms, predicted", "measured", "kernels", "MiB, predicted", "measured", "fit off by"]
    print(markdown(head, body))
    found = {
        "seconds: MAPE": mape([row["predicted_seconds"] for row in rows], measured),
        "bytes: MAPE": mape(*([row[f"{name}_bytes"] for row in rows] for name in ("predicted", "measured"))),
    }
    for (name, value), most in zip(found.items(), (MAPE, MEMORY_ERROR), strict=True):
        print(f"{name} {value:.3f}, at most {most}: {'holds' if value <= most else 'FAILS'}")
    write_judgement(folder() / "judgement.json", found, folder() / "steps.json")


def main(judge_only: Annotated[bool, tyro.conf.arg(name="judge")] = False) -> None:
    """Measure and judge, or judge the rows that are there; rows in bench/results/DEVICE/one_device."""
    if not judge_only:
        torch.set_num_threads(1)
        profiles: list[dict[str, Any]] = []
        steps: list[dict[str, Any]] = []
        for name, config in CASES.items():
            began = time.perf_counter()
            profiled, row = run(config)
            profiles += [{"case": name} | of for of in profiled]
            steps.append({"case": name} | row)
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
            write_rows("one_device/profile", profiles)
            write_rows("one_device/steps", steps)
    judge()


if __name__ == "__main__":
    tyro.cli(main)
