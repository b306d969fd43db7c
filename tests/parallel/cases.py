"""Training in every layout: what runs in every process of tests/ranks.py, and its one-process counterpart."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock, patch

import numpy as np
import scipy.sparse as sp
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import megagraph as mg
from megagraph.ablation import bias_effect
from megagraph.attention.dropout import dropout_keys
from megagraph.data import options as options_module
from megagraph.data import pairs
from megagraph.data.batch import Batch, Share
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Graph
from megagraph.data.prepare import prepare
from megagraph.data.store import open_store, write_store
from megagraph.evaluate import class_probabilities, make_loader, make_model, same_batches, same_graph
from megagraph.objective import loss_sum, predicted
from megagraph.parallel.delivery import NodeLoader, builds, stages_of_node
from megagraph.parallel.mesh import check_equal, check_same_run, make_mesh, on_every_rank, on_rank_zero
from megagraph.parallel.replicate import gather_tensors
from megagraph.planner.profile import profile
from megagraph.train_step import make_optimizers, make_pipeline, own_share, train_step

LAYOUTS = [(1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 3, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)]
BATCHINGS = ("ego", "cluster")
DTYPES = ("fp32", "fp64")
# fully_shard over dp x cp instead of DDP: pairwise
SHARDED = [
    ((1, 2, 1), "cluster", "fp64"),
    ((1, 1, 2), "ego", "fp32"),
    ((1, 3, 1), "ego", "fp64"),
    ((2, 2, 1), "cluster", "fp32"),
    ((1, 2, 2), "ego", "fp64"),
    ((2, 1, 2), "cluster", "fp64"),
    ((2, 2, 2), "ego", "fp64"),
]
# fp32 where two ranks share, and where all ways meet
CASES = [
    (*case, False) for case in product(LAYOUTS, BATCHINGS, DTYPES) if case[2] == "fp64" or np.prod(case[0]) in (2, 8)
]
CASES += [(*case, True) for case in SHARDED]
# ego batches, too, but through another model or embedding
GRAPHORMER = [((2, 1, 1), False), ((1, 2, 1), False), ((1, 1, 2), False), ((1, 2, 2), True), ((2, 2, 1), False)]
LEARNED = [((2, 1, 1), False), ((1, 2, 1), False), ((1, 1, 2), True), ((1, 3, 1), False), ((2, 1, 2), False)]
CASES += [(layout, "graphormer", "fp64", shard) for layout, shard in GRAPHORMER]
CASES += [(layout, "learned", "fp64", shard) for layout, shard in LEARNED]
NUM_LAYERS = 3
# schedules, several stages per rank, uneven layers, checkpointing: pairwise, over DDP, fully_shard and the ring
SCHEDULES = {
    "1f1b": (mg.Plan(pp=2, layers=(1, 2), num_microbatches=4, schedule="1f1b"), "ego", "fp64"),
    "1f1b-3": (
        mg.Plan(pp=3, layers=(1, 3, 1), num_microbatches=4, schedule="1f1b", checkpoint=True), "cluster", "fp64"
    ),
    "1f1b-cp": (
        mg.Plan(pp=2, cp=2, layers=(2, 1), num_microbatches=2, schedule="1f1b", checkpoint=True), "cluster", "fp64"
    ),
    "interleaved": (
        mg.Plan(pp=2, layers=(1, 2, 1, 1), stages_per_rank=2, num_microbatches=2, schedule="interleaved"),
        "cluster", "fp32",
    ),
    "interleaved-cp": (
        mg.Plan(pp=2, cp=2, layers=(1, 1, 2, 1), stages_per_rank=2, num_microbatches=4, schedule="interleaved",
                checkpoint=True, shard=True),
        "ego", "fp64",
    ),
    "interleaved-dp": (
        mg.Plan(pp=2, dp=2, layers=(1, 1, 1, 1), stages_per_rank=2, num_microbatches=2, schedule="interleaved",
                checkpoint=True),
        "learned", "fp64",
    ),
    "interleaved-3": (
        mg.Plan(pp=2, dp=2, layers=(1, 1, 1, 2, 1, 1), stages_per_rank=3, num_microbatches=2, schedule="interleaved",
                across="dp", shard=True),
        "cluster", "fp64",
    ),
    "zero_bubble": (
        mg.Plan(pp=2, layers=(1, 1, 2, 1), stages_per_rank=2, num_microbatches=4, schedule="zero_bubble"),
        "learned", "fp64",
    ),
    "zero_bubble-cp": (
        mg.Plan(pp=2, cp=2, layers=(1, 2), num_microbatches=2, schedule="zero_bubble", shard=True), "cluster", "fp64"
    ),
    "zero_bubble-dp": (
        mg.Plan(pp=2, dp=2, layers=(1, 1, 2, 1), stages_per_rank=2, num_microbatches=2, schedule="zero_bubble",
                shard=True),
        "ego", "fp64",
    ),
    "accumulated-dp": (mg.Plan(dp=2, num_microbatches=2), "learned", "fp64"),
    "replicas-across": (mg.Plan(pp=2, dp=2, layers=(1, 2), num_microbatches=2, across="dp"), "cluster", "fp64"),
    "replicas-across-sharded": (
        mg.Plan(pp=2, dp=2, layers=(2, 1), num_microbatches=2, across="dp", shard=True), "learned", "fp64"
    ),
    "accumulated-cp": (mg.Plan(cp=2, num_microbatches=4, checkpoint=True, shard=True), "cluster", "fp64"),
    "uneven-dp": (mg.Plan(dp=2, shares=(11, 5)), "ego", "fp64"),
    "uneven-dp-3": (mg.Plan(dp=3, shares=(1, 2, 1), shard=True), "cluster", "fp64"),
    "uneven-cp": (mg.Plan(cp=2, dp=2, shares=(1, 3)), "cluster", "fp64"),
    "uneven-accumulated": (mg.Plan(dp=2, shares=(3, 1), num_microbatches=3, checkpoint=True), "learned", "fp64"),
    "uneven-pp": (
        mg.Plan(pp=2, dp=2, shares=(5, 11), layers=(1, 2), num_microbatches=3, schedule="1f1b"), "ego", "fp64"
    ),
    "odd-dp": (mg.Plan(dp=3), "ego", "fp64"),
    "checkpoint-dp": (mg.Plan(cp=2, dp=2, checkpoint=True), "graphormer", "fp64"),
    "gpipe-4": (mg.Plan(pp=4, layers=(1, 2, 1, 1), num_microbatches=4, checkpoint=True), "cluster", "fp32"),
    # several labels a node, some of them not known, in cluster batches
    "labels-pp": (mg.Plan(pp=2, layers=(1, 2), num_microbatches=2, schedule="1f1b"), "labels", "fp64"),
    "labels-dp-3": (mg.Plan(dp=3, shares=(1, 2, 1), num_microbatches=2), "labels", "fp64"),
    "labels-cp": (mg.Plan(cp=2, dp=2, shares=(1, 3), shard=True), "labels", "fp64"),
    "full-halo": (mg.Plan(cp=2, comm="halo"), "full", "fp64"),
    "convolved-allgather-3": (mg.Plan(cp=3, comm="allgather"), "convolved", "fp64"),
    "convolved-halo-4": (mg.Plan(cp=4, comm="halo", checkpoint=True, shard=True), "convolved", "fp64"),
    "full-ring-pp": (mg.Plan(pp=2, cp=2, comm="ring", layers=(1, 2)), "full", "fp64"),
    "convolved-ring-pp": (mg.Plan(pp=2, cp=2, comm="ring", layers=(2, 1)), "convolved", "fp64"),
    "ulysses": (mg.Plan(cp=2, comm="ulysses"), "cluster", "fp64"),
    "ulysses-ego": (mg.Plan(cp=2, comm="ulysses", num_microbatches=2, checkpoint=True, shard=True), "ego", "fp64"),
    "ulysses-graphormer": (mg.Plan(cp=2, comm="ulysses"), "graphormer", "fp32"),
    "ulysses-full": (mg.Plan(cp=2, comm="ulysses"), "full", "fp64"),
    "ulysses-4": (mg.Plan(cp=4, comm="ulysses", shard=True), "cluster", "fp64"),
    "ulysses-convolved-4": (mg.Plan(cp=4, comm="ulysses", checkpoint=True), "convolved", "fp64"),
    "ulysses-pp": (
        mg.Plan(pp=2, cp=2, comm="ulysses", layers=(1, 2), num_microbatches=2, schedule="1f1b"), "ego", "fp64"
    ),
}  # fmt: skip
GLOBAL_TOKENS = {"ego": 2, "cluster": 0, "graphormer": 1, "learned": 2, "labels": 0, "full": 1, "convolved": 1}
OF_CLUSTERS, OF_ALL = ("cluster", "labels"), ("full", "convolved")
MIXED_PRECISION = [(layout, BATCHINGS[i % 2]) for i, layout in enumerate(LAYOUTS)]
MIXED_PRECISION += [((2, 1, 1), "learned"), ((1, 1, 2), "graphormer")]
CLIP_NORM = 0.1
STEPS = 4
EVALUATED = 17  # nodes: two full batches of the ego loader and a ragged one


def plan_of(layout: tuple[int, int, int], *, shard: bool = False) -> mg.Plan:
    pp, cp, dp = layout
    layers = (1, NUM_LAYERS - 1) if pp == 2 else ()
    comm: Literal["ring", "allgather"] = "allgather" if shard == (cp == 2) else "ring"  # pairwise, too
    return mg.Plan(pp=pp, cp=cp, comm=comm, dp=dp, layers=layers, num_microbatches=pp, shard=shard)


def config_of(batching: str, dtype: str, dropout: float = 0.2, layers: int = NUM_LAYERS) -> mg.TrainConfig:
    kind = "cluster" if batching in OF_CLUSTERS else "full" if batching in OF_ALL else "ego"
    return mg.TrainConfig(
        model="graphormer" if batching == "graphormer" else "hierarchical",
        embedding="learned" if batching == "learned" else "features",
        bias="bucket" if batching == "learned" else "auto",
        batching=kind, top=4, convolution=batching == "convolved", dtype=dtype, layers=layers, dim=16,
        ffn_dim=24, heads=4, channels=3, global_tokens=GLOBAL_TOKENS[batching], max_distance=3,
        dropout=dropout, input_dropout=dropout, attention_dropout=dropout,
        batch_size=4 if kind == "cluster" else 8, samples=2, sample_nodes=10, device="cpu",
        learning_rate=1e-3,
    )  # fmt: skip


@cache
def graph_of(batching: str) -> Graph:
    """A third of the nodes has no label, so that ranks count different numbers of targets."""
    graph = synthetic_graph(
        num_nodes=880 if batching in OF_CLUSTERS else 89, num_classes=3, in_features=8, average_degree=4, seed=1
    )
    unlabelled = np.random.default_rng(0).random(graph.num_nodes) < 0.33
    if batching == "labels":
        known = np.random.default_rng(1).integers(-1, 2, (graph.num_nodes, 5), np.int8)
        return replace(graph, labels=np.where(unlabelled[:, None], np.int8(-1), known), num_classes=5)
    return replace(graph, labels=np.where(unlabelled, -1, graph.labels))


@cache
def builder_of(batching: str):
    """N' is 11 (ego) or 47 (cluster): no number of ranks divides it; the last batch of an epoch is ragged."""
    with patch.object(options_module, "SEQUENCE_ALIGNMENT", 1):
        options = replace(config_of(batching, "fp32").batch_options, sequence_nodes=47, super_nodes=7)
        return prepare(graph_of(batching), options, cluster_size=20)


@cache
def batches_of(batching: str, share: Share) -> list[Batch]:
    builder = builder_of(batching)
    nodes = np.arange(builder.graph.num_nodes)
    return list(make_loader(config_of(batching, "fp32"), builder, nodes, shuffle=True, share=share).epoch(0))


@cache
def mesh_of(pp: int, cp: int, dp: int, across: Literal["pp", "dp"] = "pp") -> DeviceMesh | None:
    """Process groups are few and take time to make."""
    return make_mesh(mg.Plan(pp=pp, cp=cp, dp=dp, across=across), torch.device("cpu"))


def train(
    plan: mg.Plan, batching: str, dtype: str, optimizer: str, dropout: float = 0.2, layers: int = NUM_LAYERS
) -> dict[str, Any]:
    """Some steps on a fixed seed: losses, norms, and on rank 0 the first step's gradients and the last parameters."""
    config, builder = config_of(batching, dtype, dropout, layers), builder_of(batching)
    device = torch.device("cpu")
    mesh = mesh_of(plan.pp, plan.cp, plan.dp, plan.across)
    torch.manual_seed(0)
    in_features = builder.num_rows if batching == "learned" else 8
    bias_size = builder.structure.size
    unit, start = (tuple(np.linspace(*ends, bias_size).tolist()) for ends in ((0.5, 2), (-1, 1)))
    graph = builder.graph
    model_config = config.model_config(
        in_features=in_features, num_classes=graph.num_classes, multi_label=graph.multi_label, bias_size=bias_size,
        bias_unit=unit, bias_start=start,
    )  # fmt: skip
    model = make_model(config, model_config, None if mesh is None else mesh["cp"])
    with torch.no_grad():  # the initial weights are small; larger ones make every term count
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    pipeline = make_pipeline(model, plan, mesh, device, config)
    made = Mock(wraps=pipeline._make_schedule)
    pipeline._make_schedule = made
    pipeline.train()
    updates = make_optimizers(pipeline, config)
    if optimizer == "sgd":
        updates[0] = torch.optim.SGD(pipeline.parameters(), lr=0.05)
    if pipeline.table is not None:
        pipeline.table.weight.data.mul_(10)
        updates[1].param_groups[0]["lr"] = 0.01
    batches = batches_of(batching, own_share(plan, mesh))
    first_keys = dropout_keys(7, 0, batches[0].sequence_ids)
    pipeline.backward(batches[0], first_keys, loss_sum)
    gradients = {name: p.grad.clone() for name, p in pipeline.named_parameters().items()}
    if pipeline.table is not None:
        gradients["node_table"] = whole = pipeline.table.whole(pipeline.table.weight.grad.to_dense())
        assert whole.stride() == torch.empty(whole.shape).stride()
    result: dict[str, Any] = {"losses": [], "norms": [], "targets": [], "gradients": gather_tensors(gradients, mesh)}
    for step, batch in enumerate([*batches[: STEPS - 1], batches[-1]]):
        keys = dropout_keys(7, step, batch.sequence_ids)
        loss, norm = train_step(pipeline, updates, batch, keys, CLIP_NORM)
        result["losses"].append(loss)
        result["norms"].append(norm)
        result["targets"].append(int((batch.labels >= 0).sum()))
    result["parameters"] = gather_tensors(pipeline.state_dict(), mesh)
    if dtype == "bf16":
        pipeline.train(False)
        scores = pipeline.logits(batches[0])
        result["scores"] = None if scores is None else scores.dtype
    if optimizer == "sgd" and dtype == "fp64":
        nodes = np.arange(EVALUATED if config.batching == "ego" else graph.num_nodes)
        loader = make_loader(config, builder, nodes, share=own_share(plan, mesh))
        result["probabilities"] = class_probabilities(pipeline, loader)
        before = {name: x.clone() for name, x in result["parameters"].items()}
        classes = predicted(result["probabilities"], multi_label=graph.multi_label)
        result["bias effect"] = list(asdict(bias_effect(pipeline, loader, nodes, classes)).values())
        after = gather_tensors(pipeline.state_dict(), mesh)
        assert all(torch.equal(x, before[name]) for name, x in after.items())
    result["schedules_made"] = made.call_count
    return result


def optimizers(batching: str, dtype: str, shard: bool) -> tuple[str, ...]:
    """AdamW, whose moments hide what rounds, in some of fp64, where its parameters are compared, too."""
    return ("adamw", "sgd") if dtype == "fp64" and (batching == "cluster" or shard) else ("sgd",)


def case_name(layout, batching: str, dtype: str, shard: bool = False, optimizer: str = "") -> str:
    words = ["x".join(map(str, layout)), batching, dtype, "fully_shard" * shard, optimizer]
    return "-".join(word for word in words if word)


def layout_cases(world_size: int) -> dict[str, Callable]:
    cases = {}
    for layout, batching, dtype, shard in CASES:
        if np.prod(layout) == world_size:
            plan = plan_of(layout, shard=shard)
            for optimizer in optimizers(batching, dtype, shard):
                name = case_name(layout, batching, dtype, shard, optimizer)
                cases[name] = partial(train, plan, batching, dtype, optimizer)
    for layout, batching in MIXED_PRECISION:
        if np.prod(layout) == world_size:
            cases[case_name(layout, batching, "bf16")] = partial(train, plan_of(layout), batching, "bf16", "adamw")
    for name, (plan, batching, dtype) in SCHEDULES.items():
        if plan.world_size == world_size:
            cases[name] = partial(train, plan, batching, dtype, "sgd", layers=sum(plan.layers) or NUM_LAYERS)
    return cases


DELIVERED = {(2, 1, 1): [2], (3, 1, 1): [1, 2], (2, 1, 2): [4], (2, 2, 1): [4]}  # layouts, and processes of the nodes


def nodes_of(sizes: list[int]) -> Any:
    """The environment that torchrun gives to nodes of so many processes."""
    node = int(np.searchsorted(np.cumsum(sizes), dist.get_rank(), side="right"))
    return patch.dict(os.environ, GROUP_RANK=str(node), LOCAL_WORLD_SIZE=str(sizes[node]))


def delivered(layout: tuple[int, int, int], batching: str) -> dict[str, Any]:
    """Batches of a whole epoch, and of one that is left early and gone on with, beside those that are built here."""
    plan = plan_of(layout)
    mesh, builder = mesh_of(plan.pp, plan.cp, plan.dp), builder_of(batching)
    with nodes_of(DELIVERED[layout]):
        group = stages_of_node(mesh)
    if group is None:
        return {"ranks": [dist.get_rank()]}
    nodes, share = np.arange(builder.graph.num_nodes), own_share(plan, mesh)
    loader = make_loader(config_of(batching, "fp32"), builder, nodes, shuffle=True, share=share)
    here = [list(loader.epoch(epoch)) for epoch in (0, 1)]
    given = NodeLoader(loader, group)
    refused = patch.object(builder, "build", side_effect=AssertionError("built here"))
    with nullcontext() if builds(group) else refused:
        whole, early = list(given.epoch(0)), list(islice(given.epoch(1), 2))
        rest = list(given.epoch(1, start=2))
    return {
        "ranks": dist.get_process_group_ranks(group),
        "builds": builds(group),
        "lengths": (len(given.epoch(0)), len(here[0])),
        "equal": [equal_batches(*pair) for pair in zip([*whole, *early, *rest], here[0] + here[1], strict=True)],
    }


def equal_batches(a: Batch, b: Batch) -> bool:
    """To the bit, and structure with as much memory between its rows."""
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(Batch)]
    same = all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)
    return same and a.structure.stride() == b.structure.stride()


def delivery_cases(world_size: int) -> dict[str, Callable]:
    layouts = [layout for layout in DELIVERED if np.prod(layout) == world_size]
    return {
        case_name(layout, batching, "delivered"): partial(delivered, layout, batching)
        for layout, batching in product(layouts, BATCHINGS)
    }


def message_of(function: Callable) -> str:
    """The error that ``function`` raises on this rank."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def small_profile() -> None:
    config = mg.ModelConfig(in_features=8, num_classes=3, layers=2, dim=16, ffn_dim=32, heads=4, bias_size=3)
    workload = mg.planner.Workload(batch_sequences=4, num_nodes=24, num_super=2, num_targets=1)
    on_every_rank(lambda: profile(config, workload, device=torch.device("cpu"), budget_seconds=1.0))


def profile_of_uneven_nodes() -> None:
    with nodes_of([2, 1]):
        small_profile()


def profile_without_room(rank: int) -> None:
    with patch("megagraph.planner.profile._measure", lambda *_: fail_on({rank}, MemoryError) and []):
        small_profile()


def with_sparse_features(scale: float) -> None:
    graph = graph_of("ego")
    same_graph(replace(graph, features=sp.csr_array(scale * graph.features)), mg.TrainConfig())


def with_other_sources(digest: int) -> None:
    with patch("megagraph.parallel.mesh.provenance", lambda on: {"tree": digest, "torch": ""}):
        check_same_run(mg.TrainConfig())


def fail_on(ranks: set[int], kind: type[Exception] = OSError) -> str:
    if dist.get_rank() in ranks:
        raise kind("the disk is full")
    return f"done on rank {dist.get_rank()}"


BAD_PLANS = {
    "too many": (dict(plan="1,3,1"), r"pp \* cp \* dp must equal the number of processes: 1 \* 3 \* 1 = 3, got 2"),
    "too few": (dict(plan="1,1,1"), r"1 \* 1 \* 1 = 1, got 2; start them with torchrun --nproc-per-node 1"),
    "layers": (
        dict(plan="2,1,1", stage_layers="1,3"),
        r"layers of the stages must sum to the model's 3, got 1 \+ 3 = 4",
    ),
    "stages": (
        dict(plan="2,1,1", layers=1),
        r"pp \* stages_per_rank must be at most the number of layers, 1, got 2 \* 1",
    ),
    "batch": (
        dict(plan="2,1,1", microbatches=17),
        "every replica must have a sequence for each of num_microbatches = 17, got 16 of the 16 of a global batch",
    ),
    "shares": (
        dict(plan="1,1,2", shares="15,1", microbatches=2),
        "every replica must have a sequence for each of num_microbatches = 2, got 1 of the 16 of a global batch on one",
    ),
    "heads": (
        dict(plan="1,2,1", comm="ulysses", dim=15, heads=3),
        "heads must be a multiple of the 2 ranks that comm 'ulysses' deals them out to, got 3; take 'ring'",
    ),
    "data set": (dict(plan="1,2,1", dataset="nosuch.npz"), "nosuch.npz"),
    "batches": (
        dict(plan="1,1,2", power_scope="graph", power_gib=1e-9),
        "expected powers of the adjacency that fit into",
    ),
}


def bad_plan(folder: str, **changes) -> str:
    config = replace(config_of("ego", "fp32"), **changes)
    return message_of(lambda: mg.Trainer(replace(config, out=Path(folder) / "run")).fit())


def different_plans(folder: str) -> str:
    """A plan that each rank finds for itself could differ, with the same flags."""
    plan = mg.Plan(pp=2, layers=((1, 2), (2, 1))[dist.get_rank()])
    with patch.object(mg.TrainConfig, "parallel_plan", lambda self: plan):
        return bad_plan(folder, plan="2,1,1")


def pairs_of_a_store(store: Path) -> tuple[int, list[int]]:
    """How often a rank made the pairs of a graph, and the columns it has."""
    on_rank_zero(lambda: write_store(synthetic_graph(num_nodes=60), store))
    make, made = pairs._pairs, []
    config = mg.TrainConfig(dataset=str(store), batching="full", super_nodes=4)
    with patch.object(pairs, "_pairs", lambda *given: made.append(given) or make(*given)):
        structure = same_batches(config, open_store(store)).structure
    return len(made), structure.relation.columns.tolist()


def agreement_cases(world_size: int, folder: str) -> dict[str, Callable]:
    """Errors that concern one rank, seen from all of them."""
    rank = dist.get_rank()
    return (
        {
            "equal": lambda: message_of(lambda: check_equal("the configuration", {"seed": 0, "layers": 4})),
            "different": lambda: message_of(
                lambda: check_equal("the configuration", {"seed": 0, "layers": min(rank, 1)})
            ),
            "other fields": lambda: message_of(
                lambda: check_equal("the graph", {"features": 2} | ({} if rank == 0 else {"labels": 1}))
            ),
            "sparse features": lambda: message_of(partial(with_sparse_features, 1.0 + min(rank, 1))),
            "other program": lambda: message_of(partial(with_other_sources, min(rank, 1))),
            "uneven nodes": lambda: message_of(profile_of_uneven_nodes) if world_size == 3 else "",
            "no room on a GPU": lambda: message_of(
                lambda: on_every_rank(lambda: fail_on({world_size - 1}, torch.OutOfMemoryError))
            ),
            "no room to measure": lambda: message_of(partial(profile_without_room, world_size - 1)),
            "pairs of a store": partial(pairs_of_a_store, Path(folder) / "store"),
            "fails nowhere": lambda: on_every_rank(lambda: fail_on(set())),
            "fails on the last": lambda: message_of(lambda: on_every_rank(lambda: fail_on({world_size - 1}))),
            "fails everywhere": lambda: message_of(lambda: on_every_rank(lambda: fail_on(set(range(world_size))))),
            "a plan fails": lambda: message_of(lambda: on_rank_zero(lambda: fail_on({0}, mg.planner.NoFeasiblePlan))),
            "a queue fails": lambda: message_of(lambda: on_rank_zero(lambda: fail_on({0}, queue.Full))),
            "rank zero": lambda: on_rank_zero(lambda: fail_on(set())),
            "rank zero fails": lambda: message_of(lambda: on_rank_zero(lambda: fail_on({0}))),
        }
        | {name: partial(bad_plan, folder, **changes) for name, (changes, _) in BAD_PLANS.items() if world_size == 2}
        | ({"different plans": lambda: different_plans(folder)} if world_size == 2 else {})
    )
