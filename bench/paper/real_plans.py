"""Plans of two processes on a core each, predicted from a profile and then trained: is the cost model right?

    python -m bench.paper.real_plans            # about ten minutes; wants two cores for itself
    python -m bench.paper.real_plans --judge    # again, from its rows alone

Both processes join one group (gloo). They profile as ``megagraph profile`` does, without a loader as every step below
takes the same batch; rank 0 fits, predicts every plan, and lets the search choose one, all before any plan runs. Then
every plan is built and makes two steps to warm up that count its memory (the bytes of all tensors alive, at their
peak), and ROUNDS timed steps, all plans once before any runs again; a step is timed from barrier to barrier. The
fastest five and the chosen one then run FINAL_ROUNDS rounds more. The losses of all plans must agree.

Fixed: a synthetic graph of 4,400 nodes, 64 features, seed 0; HierarchicalGT of 8 layers, d = 128, 4 heads, FFN 128,
buckets, dropout 0.1; 16 sequences of 256 regular and 16 super nodes; AdamW, fp32. Plans: dp = 2; cp = 2, ring and
allgather; pp = 2 with every split of the layers and 1, 2, 4, 8 micro-batches; and the one that the search chooses.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from scipy.stats import spearmanr
from torch.distributed.device_mesh import DeviceMesh

from bench.paper.live_bytes import LiveBytes
from bench.provenance import RESULTS, sized, write_judgement, write_rows
from bench.tables import draw, save
from megagraph import auto
from megagraph.attention.dropout import dropout_keys
from megagraph.config import TrainConfig
from megagraph.data.build import Builder
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Graph
from megagraph.evaluate import batches, make_loader
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.parallel.mesh import make_mesh
from megagraph.planner import CostModel, fit, search
from megagraph.planner.fitting import mape
from megagraph.planner.plan import Plan
from megagraph.train_step import make_optimizers, make_pipeline, own_share, train_step

RANKS, LAYERS, SEQUENCES = 2, 8, 16
ROUNDS, FINAL_ROUNDS, PROFILE_SECONDS = sized((9, 15, 60.0), quick=(2, 1, 8.0))
CONFIG = TrainConfig(
    batching="cluster",
    layers=LAYERS,
    dim=sized(128, quick=32),
    ffn_dim=sized(128, quick=32),
    heads=4,
    dropout=0.1,
    input_dropout=0.1,
    attention_dropout=0.1,
    batch_size=SEQUENCES,
    sequence_nodes=256,
    super_nodes=16,
    seed=0,
    device="cpu",
)
SPLITS = sized(tuple(range(1, LAYERS)), quick=(LAYERS // 2,))
PLANS = (
    Plan(dp=2, layers=(LAYERS,)),
    Plan(cp=2, layers=(LAYERS,)),
    Plan(cp=2, layers=(LAYERS,), comm="allgather"),
    *(Plan(pp=2, layers=(i, LAYERS - i), num_microbatches=k) for i in SPLITS for k in (1, 2, 4, 8)),
)
MAPE, CORRELATION, SLACK, REGRET, MEMORY_ERROR = 0.15, 0.9, 0.05, 1.05, 0.10
FOLDER = RESULTS / "cpu" / "real_plans"
DEVICE = torch.device("cpu")


class Bench:
    """What the plans of a process share: a generated graph, and cluster batches of it as ``config`` says."""

    def __init__(self, config: TrainConfig = CONFIG) -> None:
        self.config = config
        self.graph: Graph = synthetic_graph(num_nodes=4400, num_classes=8, in_features=64, average_degree=10, seed=0)
        self.builder: Builder = batches(config, self.graph)
        self.nodes = np.arange(self.graph.num_nodes)
        self._meshes: dict[tuple[Any, ...], DeviceMesh | None] = {}

    def profile(self) -> list[dict[str, Any]]:
        """Rows of this machine, without a loader."""
        rows = auto.measure(
            self.config, self.graph, self.builder, self.nodes, DEVICE, seconds=PROFILE_SECONDS, cache=None
        )
        return [row for row in rows if row["kind"] != "stall"]

    def build(self, plan: Plan) -> tuple[Callable[[], tuple[float, float]], Callable[[], tuple[float, int]]]:
        """A step, which gives its loss and seconds, and the first two, which give a loss and the peak of live bytes."""
        config = replace(self.config, checkpoint=plan.checkpoint)
        layout = (plan.pp, plan.dp, plan.cp, plan.across)
        if layout not in self._meshes:
            self._meshes[layout] = make_mesh(plan, DEVICE)
        mesh = self._meshes[layout]
        torch.manual_seed(0)
        model_config = config.model_config(
            in_features=self.graph.in_features,
            num_classes=self.graph.num_classes,
            bias_size=self.builder.structure.size,
        )
        model = HierarchicalGT(model_config, mesh=None if mesh is None else mesh["cp"])
        pipeline = make_pipeline(model, plan, mesh, DEVICE, config)
        pipeline.train()
        optimizers = make_optimizers(pipeline, config)
        loader = make_loader(config, self.builder, self.nodes, shuffle=True, share=own_share(plan, mesh))
        batch = next(iter(loader.epoch(0)))
        fields = (getattr(batch, name) for name in batch.__slots__)
        given = [value for value in fields if isinstance(value, torch.Tensor)] + pipeline.parameters()

        def step() -> tuple[float, float]:
            dist.barrier()
            started = time.perf_counter()
            loss, _ = train_step(pipeline, optimizers, batch, dropout_keys(0, 0, batch.sequence_ids), config.clip_norm)
            dist.barrier()
            return loss, time.perf_counter() - started

        def track() -> tuple[float, int]:
            with LiveBytes(*given) as counted:
                loss, _ = step()  # makes what stays: moments, and buffers of what stages receive
                step()
            return loss, counted.peak

        return step, track


def predict(cost: CostModel, plans: tuple[Plan, ...]) -> list[dict[str, Any]]:
    model, workload = cost.profiled()
    tensors = replace(cost, memory={name: x for name, x in cost.memory.items() if name != "process.byte"})
    return [
        asdict(plan)
        | {
            "name": str(plan),
            "predicted_seconds": cost.step_seconds(model, plan, workload),
            "predicted_bytes": tensors.memory_bytes(model, plan, workload),
            "unit": "s",
        }
        for plan in plans
    ]


def _worker(rank: int, folder: str) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))
    bench = Bench()
    profiled = bench.profile()
    chosen: list[Any] = [None, None]
    if rank == 0:
        cost = fit(json.loads(write_rows("real_plans/profile", profiled, folder="cpu").read_text()))
        best = search(cost, cost.profiled()[0], RANKS, auto.memory_bytes(DEVICE)).best.plan
        plans = PLANS if best in PLANS else (*PLANS, best)
        chosen = [plans, best]
        rows = predict(cost, plans)
        cost.save(FOLDER / "cost.json")
    dist.broadcast_object_list(chosen)
    plans, best = chosen
    steps, losses, peaks = [], [], []
    for plan in plans:
        step, track = bench.build(plan)
        loss, most = track()
        losses.append(loss)
        peak: list[Any] = [None] * RANKS
        dist.all_gather_object(peak, most)
        peaks.append(peak)
        steps.append(step)
        if rank == 0:
            print(f"built {len(steps)} of {len(plans)}: {plan}", flush=True)
    assert np.ptp(losses) < 1e-4, "the plans do not compute the same"
    seconds = [[step()[1] for step in steps] for _ in range(ROUNDS)]
    order: list[Any] = [np.argsort(np.median(seconds, axis=0)).tolist()]
    dist.broadcast_object_list(order)  # the clocks of both ranks differ a little
    final = sorted({*order[0][:5], plans.index(best)})
    again = [[steps[i]()[1] for i in final] for _ in range(FINAL_ROUNDS)]
    if rank == 0:
        for i, row in enumerate(rows):
            samples = [run[i] for run in seconds]
            row |= {"measured_seconds": samples, "measured_bytes": peaks[i], "chosen": plans[i] == best}
            row["final_seconds"] = [run[final.index(i)] for run in again] if i in final else []
        write_rows("real_plans/plans", rows, folder="cpu")
    dist.barrier()
    dist.destroy_process_group()


def judge() -> None:
    """Print whether the prediction holds, write judgement.json and plans.svg."""
    rows = json.loads((FOLDER / "plans.json").read_text())
    samples = np.array([row["measured_seconds"] for row in rows])
    measured, predicted = np.median(samples, axis=1), np.array([row["predicted_seconds"] for row in rows])
    rho = spearmanr(np.median(samples[:, ::2], axis=1), np.median(samples[:, 1::2], axis=1)).statistic
    finals = {row["name"]: float(np.median(row["final_seconds"])) for row in rows if row["final_seconds"]}
    chosen = next(row["name"] for row in rows if row["chosen"])
    memory = np.array([max(row["predicted_bytes"]) / max(row["measured_bytes"]) - 1 for row in rows])
    found = {
        "plans": float(len(rows)),
        "shortest step, seconds": float(measured.min()),
        "Spearman of odd and even rounds": float(rho),
        "Spearman of predicted and measured": float(spearmanr(predicted, measured).statistic),
        "MAPE": mape(predicted, measured),
        "chosen / best of the top five": finals[chosen] / min(finals.values()),
        "largest error of peak memory": float(np.abs(memory).max()),
        "spread, median of (max - min) / median": float(np.median(np.ptp(samples, axis=1) / measured)),
    }
    bounds = {
        "plans": (">=", 25.0),
        "shortest step, seconds": (">=", 0.5),
        "Spearman of predicted and measured": (">=", min(CORRELATION, rho - SLACK)),
        "MAPE": ("<=", MAPE),
        "chosen / best of the top five": ("<=", REGRET),
        "largest error of peak memory": ("<=", MEMORY_ERROR),
    }
    for row, seconds, error in sorted(zip(rows, measured, memory, strict=True), key=lambda entry: entry[1]):
        print(f"{row['predicted_seconds']:.3f} {seconds:.3f} s, memory {error:+.1%}  {row['name']}")
    for name, value in found.items():
        sign, bound = bounds.get(name, ("", 0.0))
        holds = value >= bound if sign == ">=" else value <= bound
        verdict = f"{sign} {bound:.3f}  {'holds' if holds else 'FAILS'}" if sign else ""
        print(f"{name:<40} {value:>8.3f}  {verdict}")
    print(f"chosen: {chosen}; final rounds: {finals}")
    write_judgement(FOLDER / "judgement.json", found | {"chosen": chosen}, FOLDER / "plans.json")
    figure, axes = draw(4.5, 3.6)
    for label, pick in (("pp = 2", lambda row: row["pp"] == 2), ("cp = 2, dp = 2", lambda row: row["pp"] == 1)):
        points = [(s, row["predicted_seconds"]) for row, s in zip(rows, measured, strict=True) if pick(row)]
        axes.plot(*zip(*points, strict=True), ".", label=label)
    ends = [float(measured.min()), float(measured.max())]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.set(xlabel="measured seconds of a step", ylabel="predicted")
    axes.legend(frameon=False)
    save(figure, rows[0], FOLDER / "plans.svg")


def main(judge_only: Annotated[bool, tyro.conf.arg(name="judge")] = False) -> None:
    """Measure and judge, or judge the rows that are there; rows in bench/results/cpu/real_plans."""
    if not judge_only:
        torch.set_num_threads(1)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_worker, args=(folder,), nprocs=RANKS)
    judge()


if __name__ == "__main__":
    tyro.cli(main)
