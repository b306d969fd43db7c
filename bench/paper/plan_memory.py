"""What a rank holds under a plan: counted, and predicted by the planner's memory model.

    python -m bench.paper.plan_memory sequence     # bias and activations of 1, 2 and 4 ranks that share a sequence
    python -m bench.paper.plan_memory ablation     # 32 layers of 32 heads: recomputation, pp, cp, sharding, 16 bits
    python -m bench.paper.plan_memory longest      # how long sequences get below a cap, beside eager ANS-GT

Every rank is a process (gloo) that makes steps of one training. Counted are the peak of the bytes of all tensors alive
over two steps, but for temporaries inside an operator, and in a third one by how much they have grown when the forward
pass is over, which is what waits for the backward pass. The planner's model is fitted to rows of memory that one
process measures (torch's MemTracker) at small sizes, as `megagraph profile` does, before any plan is built; it predicts
tensors, without what an allocator keeps. The most loaded rank counts.

Sequence: 4 sequences of 1,024 regular and 64 super nodes (a global token among them) of a generated graph, 2 layers,
d = FFN = 128, 8 heads, dropout 0.1, buckets or 4 channels, fp32.

Ablation: ego sequences of 145 nodes (the target, 142 sampled, a super node, a global token) of a generated graph of
Computers' size, 4 channels, d = FFN = 128, 32 layers, 32 heads, dropout 0.1; pipelines take 4 micro-batches by GPipe.
Bytes grow in proportion to the sequences, beside what does not depend on them: SIZES of them are counted, and a line
through both gives those of a batch of 256; of the first plan it is compared with a count of 128. Eager ANS-GT, which
keeps its scores, stands beside them.

Longest: the same graph, 4 ego sequences, each a target, sampled nodes, a super node and a global token, 4 channels, 16
layers, 8 heads, d = FFN = 64, dropout 0.1 (the paper's model of its figures on memory); LENGTHS, of which each is 1.41
times the one before, until the most loaded rank has more than CAP, which stands for a device's memory.
"""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from bench.paper.epoch_time import Contender, EagerANSGT
from bench.paper.live_bytes import MIB, TRACKED_STEPS, LiveBytes, Rank
from bench.provenance import PACKAGE, RESULTS, sized, write_rows
from bench.tables import draw, save
from megagraph.attention.dropout import dropout_keys
from megagraph.config import TrainConfig
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Graph
from megagraph.models.config import ModelConfig
from megagraph.objective import loss_sum
from megagraph.planner import CostModel
from megagraph.planner.fitting import fit_memory
from megagraph.planner.measure.design import design, of_every_width
from megagraph.planner.measure.memory import memory_rows
from megagraph.planner.memory import dense_bytes, kept_bytes
from megagraph.planner.plan import Plan
from megagraph.planner.workload import RankWork

CPU = torch.device("cpu")
_COMMON: dict[str, Any] = dict(
    dim=128, ffn_dim=128, dropout=0.1, input_dropout=0.1, attention_dropout=0.1, channels=4, seed=0, device="cpu"
)
SEQUENCE = TrainConfig(
    batching="cluster",
    layers=2,
    heads=8,
    batch_size=4,
    sequence_nodes=sized(1024, quick=256),
    super_nodes=64,
    **_COMMON,
)
RANKS, WAYS = sized(((1, 2, 4), ("ring", "allgather", "ulysses")), quick=((1, 2), ("ring", "ulysses")))
ABLATION = TrainConfig(
    layers=sized(32, quick=4), heads=32, sample_nodes=sized(142, quick=14), samples=1, super_nodes=2, **_COMMON
)
SIZES, EAGER_SIZES, CHECKED, BATCH = sized(((8, 16), (2, 4), 128, 256), quick=((8, 16), (2, 4), 32, 256))
_PIPELINE = {"num_microbatches": 4}
ABLATIONS: dict[str, tuple[Plan, str]] = {
    "none": (Plan(), "fp32"),
    "recomputation": (Plan(checkpoint=True), "fp32"),
    "16 bits": (Plan(), "bf16"),
    "pp 2": (Plan(pp=2, **_PIPELINE), "fp32"),
    "pp 4": (Plan(pp=4, **_PIPELINE), "fp32"),
    "cp 2": (Plan(cp=2), "fp32"),
    "dp 2": (Plan(dp=2), "fp32"),
    "dp 2, sharded": (Plan(dp=2, shard=True), "fp32"),
    "all": (Plan(pp=2, cp=2, dp=2, checkpoint=True, shard=True, **_PIPELINE), "bf16"),
}
ABLATIONS = sized(ABLATIONS, quick={name: ABLATIONS[name] for name in ("none", "recomputation", "dp 2, sharded")})
LONGEST = TrainConfig(
    layers=16, heads=8, batch_size=4, samples=1, super_nodes=2, **(_COMMON | dict(dim=64, ffn_dim=64))
)
CAP = sized(512, quick=16) * MIB
LENGTHS = (128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096)
EAGER = "eager ANS-GT"
CONTENDERS = {EAGER: 1, "ours": 1, "ours, 2 ranks": 2, "ours, 4 ranks": 4}
FOLDER = RESULTS / "cpu" / "plan_memory"


@cache
def graph_of(batching: str) -> Graph:
    if batching == "cluster":
        return synthetic_graph(num_nodes=4400, num_classes=8, in_features=64, average_degree=10, seed=0)
    nodes = sized(13_752, quick=1000)
    return synthetic_graph(num_nodes=nodes, num_classes=10, in_features=767, average_degree=36, seed=0)


# ---- counted


def count(config: TrainConfig, *, kept: bool) -> dict[str, Any]:
    """Bytes of this rank: of its peak, of the data of its bias, and of what waits for the backward pass."""
    rank = Rank(config, graph_of(config.batching))
    found = {"peak_bytes": rank.peak_bytes(), "bias_bytes": rank.batch.structure.untyped_storage().nbytes()}
    if kept:
        for optimizer in rank.optimizers:
            optimizer.zero_grad()
        with LiveBytes(*rank.given(), *rank.pipeline.parameters()) as counted:
            before, after = counted.live, list[int]()

            def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                after.append(counted.live)
                return loss_sum(scores, labels)

            rank.pipeline.backward(rank.batch, dropout_keys(0, 0, rank.batch.sequence_ids), loss)
        found["kept_bytes"] = after[0] - before
    return found | {"loss": rank.losses[0]}


def _worker(number: int, folder: str, world_size: int, configs: list[TrainConfig], kept: bool) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        timeout, rendezvous = timedelta(hours=1), f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=number, world_size=world_size, timeout=timeout)
    found = []
    for config in configs:
        found.append(count(config, kept=kept))
        gc.collect()
    torch.save(found, Path(folder) / f"{number}.pt")
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def counted(world_size: int, configs: list[TrainConfig], *, kept: bool = False) -> list[list[dict[str, int]]]:
    """What each rank counted of every configuration."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(folder, world_size, configs, kept), nprocs=world_size)
        ranks = [torch.load(Path(folder) / f"{number}.pt") for number in range(world_size)]
    return [list(of) for of in zip(*ranks, strict=True)]


def most(ranks: list[dict[str, int]], name: str) -> int:
    return max(rank[name] for rank in ranks)


# ---- predicted


class Predicted:
    """The planner's bytes of a configuration, from memory rows of its model at small sizes."""

    def __init__(self, config: TrainConfig) -> None:
        graph, rank = graph_of(config.batching), Rank(replace(config, batch_size=4), graph_of(config.batching))
        self.model: ModelConfig = rank.pipeline.stages[0].model.config
        self.workload = rank.workload()
        assert self.model.in_features == graph.in_features
        points = of_every_width(design(self.model, self.workload, CPU))
        self.rates = fit_memory(memory_rows(points, CPU))
        nothing: dict[str, Any] = dict(origin={}, seconds={}, links={}, stall_seconds=0.0, ranges={}, held_out={})
        self.cost = CostModel(memory=self.rates, **nothing)

    def peak(self, plan: Plan, sequences: int) -> list[float]:
        return self.cost.memory_bytes(self.model, plan, replace(self.workload, batch_sequences=sequences))

    def kept(self, plan: Plan) -> float:
        found = kept_bytes(self.rates, self._work(plan))
        return found.embedding + (self.model.layers - 1) * found.layer + found.last_layer + found.head

    def bias(self, plan: Plan) -> float:
        work = self._work(plan)
        rows = work.all_rows if work.by_heads else work.rows
        return work.batch_sequences * dense_bytes(rows, work.columns, self.model, self.workload.dtype)

    def _work(self, plan: Plan) -> RankWork:
        return RankWork.of(self.model, plan, self.workload)


# ---- the two questions


def sequence() -> None:
    """Print, and write bench/results/cpu/plan_memory/sequence.json and .svg."""
    torch.set_num_threads(1)
    forms = ("bucket", "projected")
    predicted = {form: Predicted(replace(SEQUENCE, bias=form)) for form in forms}
    rows = []
    for ranks in RANKS:
        cases = [(form, way) for form in forms for way in (WAYS if ranks > 1 else WAYS[:1])]
        plans = [Plan(cp=ranks, comm=way) for _, way in cases]
        configs = [replace(SEQUENCE, bias=form).with_plan(p) for (form, _), p in zip(cases, plans, strict=True)]
        for (form, way), plan, of in zip(cases, plans, counted(ranks, configs, kept=True), strict=True):
            model = predicted[form]
            row: dict[str, Any] = {"bias": form, "ranks": ranks, "comm": way, "unit": "bytes", "loss": of[0]["loss"]}
            row |= {name: most(of, name) for name in ("bias_bytes", "kept_bytes", "peak_bytes")}
            row |= {"predicted_bias_bytes": model.bias(plan), "predicted_kept_bytes": model.kept(plan)}
            row["predicted_peak_bytes"] = max(model.peak(plan, SEQUENCE.batch_size))
            rows.append(row)
            said = ", ".join(
                f"{name} {row[f'{name}_bytes'] / MIB:.1f} ({row[f'predicted_{name}_bytes'] / MIB:.1f})"
                for name in ("bias", "kept", "peak")
            )
            print(f"{form}, {ranks} ranks, {way}: MiB counted (predicted): {said}", flush=True)
    for form in forms:
        losses = [row["loss"] for row in rows if row["bias"] == form]
        assert max(losses) - min(losses) < 1e-4, "the plans do not compute the same"
    rows = json.loads(write_rows("plan_memory/sequence", rows, folder="cpu", children=PACKAGE).read_text())
    figure, panels = draw(7.5, 3.2, columns=2, sharey=False)
    for axes, form in zip(panels, forms, strict=True):
        for way, colour in zip(WAYS, ("C0", "C1", "C2"), strict=False):
            of = [r for r in rows if r["bias"] == form and (r["comm"] == way or r["ranks"] == 1)]
            for name, line in (("bias", "--"), ("kept", "-")):
                x, y = [r["ranks"] for r in of], [r[f"{name}_bytes"] / MIB for r in of]
                axes.plot(
                    x, y, line, color=colour, marker=".", label=f"{way}, {'activations' if line == '-' else name}"
                )
                axes.plot(x, [r[f"predicted_{name}_bytes"] / MIB for r in of], "x", color=colour)
        axes.set(xlabel="ranks of a sequence", title=form, xscale="log", yscale="log", xticks=RANKS, xticklabels=RANKS)
        axes.minorticks_off()
    panels[0].set_ylabel("MiB of a rank; x: predicted")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    save(figure, rows[0], FOLDER / "sequence.svg")


def ablation() -> None:
    """Print, and write bench/results/cpu/plan_memory/ablation.json."""
    torch.set_num_threads(1)
    predicted = {
        dtype: Predicted(replace(ABLATION, dtype=dtype)) for dtype in {dtype for _, dtype in ABLATIONS.values()}
    }
    rows = [eager()]
    by_size: dict[int, list[str]] = {}
    for name, (plan, _) in ABLATIONS.items():
        by_size.setdefault(plan.world_size, []).append(name)
    for world_size, names in by_size.items():
        cases = [(name, size) for name in names for size in SIZES] + [("none", CHECKED)] * (world_size == 1)
        configs = [
            replace(ABLATION, batch_size=size, dtype=ABLATIONS[name][1]).with_plan(ABLATIONS[name][0])
            for name, size in cases
        ]
        found = dict(zip(cases, counted(world_size, configs), strict=True))
        for name in names:
            plan, dtype = ABLATIONS[name]
            peaks = [[rank["peak_bytes"] for rank in found[name, size]] for size in SIZES]
            row = {"what": name, "plan": str(plan), "dtype": dtype, "processes": world_size}
            row |= {"sequences": SIZES, "rank_bytes": peaks, "predicted_bytes": predicted[dtype].peak(plan, BATCH)}
            row |= {"batch": BATCH, "batch_bytes": [extended(SIZES, of) for of in zip(*peaks, strict=True)]}
            if (name, CHECKED) in found:
                on_line = extended(SIZES, (peaks[0][0], peaks[1][0]), CHECKED)
                row["checked"] = {"sequences": CHECKED, "bytes": found[name, CHECKED][0]["peak_bytes"], "line": on_line}
            rows.append(row | {"unit": "bytes"})
            write_rows("plan_memory/ablation", rows, folder="cpu", children=PACKAGE)
    for row in rows:
        said = ", ".join(f"{size / 1e9:.2f}" for size in row["batch_bytes"])
        by_model = ", ".join(f"{size / 1e9:.2f}" for size in row.get("predicted_bytes", ()))
        print(f"{row['what']:24} {said} GB of {BATCH} sequences, predicted {by_model or '-'}; {row['plan']}")


def extended(sizes: tuple[int, int], peaks: tuple[int, ...], to: int = BATCH) -> float:
    """The line through the bytes of two sizes, at those of a batch."""
    return peaks[0] + (to - sizes[0]) * (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])


def longest() -> None:
    """Print, and write bench/results/cpu/plan_memory/longest.json and .svg."""
    rows: list[dict[str, Any]] = []
    for name, ranks in CONTENDERS.items():
        for length in LENGTHS:
            config = replace(LONGEST, sample_nodes=length - 3).with_plan(Plan(cp=ranks))
            of_rank = [{"peak_bytes": of_eager(config)}] if name == EAGER else counted(ranks, [config])[0]
            peaks = [rank["peak_bytes"] for rank in of_rank]
            rows.append({"what": name, "processes": ranks, "nodes": length, "rank_bytes": peaks, "unit": "bytes"})
            print(f"{name}: {length} nodes, {max(peaks) / MIB:.0f} MiB", flush=True)
            if max(peaks) > CAP:
                break
    rows = json.loads(write_rows("plan_memory/longest", rows, folder="cpu", children=PACKAGE).read_text())
    figure, axes = draw(5, 3.4)
    for name in CONTENDERS:
        of = [row for row in rows if row["what"] == name]
        axes.plot([row["nodes"] for row in of], [max(row["rank_bytes"]) / MIB for row in of], ".-", label=name)
        print(f"{name}: up to {max((row['nodes'] for row in of if max(row['rank_bytes']) <= CAP), default=0)} nodes")
    axes.axhline(CAP / MIB, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="nodes of a sequence", ylabel="MiB of the most loaded rank")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, rows[0], FOLDER / "longest.svg")


def of_eager(config: TrainConfig) -> int:
    """Peak bytes of eager ANS-GT in one process."""
    rank = Rank(config, graph_of(config.batching))
    other = Contender("eager", EagerANSGT(rank.pipeline.stages[0].model.config))
    with LiveBytes(*rank.given(), *other.model.parameters()) as counted:
        for step in range(TRACKED_STEPS):
            other.train_step(rank.batch, step)
    return counted.peak


def eager() -> dict[str, Any]:
    """The row of eager ANS-GT in one process."""
    peaks = [of_eager(replace(ABLATION, batch_size=size)) for size in EAGER_SIZES]
    row = {"what": EAGER, "plan": "one process", "dtype": "fp32", "processes": 1, "sequences": EAGER_SIZES}
    row |= {"rank_bytes": [[size] for size in peaks], "batch": BATCH, "batch_bytes": [extended(EAGER_SIZES, peaks)]}
    return row | {"unit": "bytes"}


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"sequence": sequence, "ablation": ablation, "longest": longest})
