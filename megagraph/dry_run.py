"""What a run would train, and what a step would take, without training."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from megagraph import auto
from megagraph.config import TrainConfig
from megagraph.data.build import Builder
from megagraph.data.graph import Graph, Split
from megagraph.evaluate import (
    graph_facts,
    make_loader,
    make_model,
    model_config_of,
    num_parameters,
    same_batches,
    same_graph,
)
from megagraph.parallel.mesh import (
    on_one_process_first,
    on_rank_zero,
    own_device,
    process_group,
    world_size,
)
from megagraph.planner.fitting import fit
from megagraph.planner.plan import Plan
from megagraph.planner.profile import predicts
from megagraph.timeline import bubble_in_theory


def dry_run(config: TrainConfig, data: Any = None) -> dict[str, Any]:
    """Read the graph and prepare it as ``Trainer.fit`` does, and say what would be trained; no run folder is made.

    Args:
        data: as for ``Trainer.fit``.

    Returns:
        graph, model, parameters, sequence_nodes (N), notes (how the graph became sequences, such as whose powers a
        bias has), sequences_of_an_epoch, steps_of_an_epoch (of the first: batches that hold training nodes), steps,
        plan, device, preprocess_seconds, and, where this machine has a profile (of ``megagraph profile`` or ``--plan
        auto``) for such a run, predicted_step_seconds and predicted_memory_bytes, or else, as no_prediction, why there
        are none.

    Raises:
        ValueError: as ``Trainer.fit``.

    Examples:
        >>> small = {"layers": 1, "dim": 16, "heads": 2, "batching": "cluster", "sequence_nodes": 128}
        >>> said = dry_run(mg.TrainConfig(max_steps=2, **small))
        >>> said["sequence_nodes"], said["steps"]
        (189, 2)
    """
    with process_group(config.timeout):
        plan = None if config.plan == "auto" else config.parallel_plan()
        if plan is not None:  # one process may ask about a plan of several
            several = world_size() if world_size() > 1 else plan.world_size
            plan.check(**config.sizes_of_plan, world_size=several)
        device = own_device(config)
        graph, split = same_graph(data, config)
        started = time.perf_counter()
        builder = same_batches(config, graph)
        preprocess_seconds = time.perf_counter() - started
        loader: Any = make_loader(replace(config, workers=0), builder, split.train, shuffle=True).epoch(0)
        epoch = loader.sampler
        sequences = sum(len(item) for item, _ in epoch) * (config.samples if config.batching == "ego" else 1)
        trained = np.zeros(graph.num_nodes, bool)
        trained[split.train] = True
        steps_of_epoch = sum(bool(trained[item[item >= 0]].any()) for item, _ in epoch)
        steps = config.epochs * steps_of_epoch
        predicted = _predicted(config, plan, graph, builder, split, device)
        return {
            "graph": asdict(graph_facts(config, data, graph, split, on_one_process_first(graph.fingerprint))),
            "model": config.model,
            "parameters": num_parameters(make_model(config, model_config_of(config, graph, builder))),
            "sequence_nodes": builder.sequence_nodes,
            "notes": on_rank_zero(lambda: builder.notes(0.0 if plan is None else bubble_in_theory(plan))),
            "sequences_of_an_epoch": sequences,
            "steps_of_an_epoch": steps_of_epoch,
            "steps": steps if config.max_steps is None else min(steps, config.max_steps),
            "plan": "auto, found when the run starts" if plan is None else str(plan),
            "device": str(device),
            "preprocess_seconds": preprocess_seconds,
        } | predicted


def _predicted(
    config: TrainConfig, plan: Plan | None, graph: Graph, builder: Builder, split: Split, device: torch.device
) -> dict[str, Any]:
    """What a step takes under the plan, or under the best one; collective."""
    if config.embedding == "learned":
        return {"no_prediction": "the cost model does not know the table of a learned embedding"}
    if plan is not None and plan.world_size != world_size():
        return {"no_prediction": f"a plan of {plan.world_size} processes is predicted by as many, started by torchrun"}
    rows = auto.measure(config, graph, builder, split.train, device, kept_only=True)
    if not rows:
        return {"no_prediction": "no profile of this machine is kept for such a run; megagraph profile makes one"}
    if plan is None:
        best = auto.choose(config, rows, device)
        return {
            "plan": str(best.plan),
            "predicted_step_seconds": best.step_seconds,
            "predicted_memory_bytes": int(best.peak_bytes),
        }

    def predict() -> dict[str, Any]:
        cost = fit(rows)
        if not predicts(cost):
            return {"no_prediction": "the kept profile does not predict its own rows; profile a quiet machine"}
        model, workload = cost.profiled()
        return {
            "predicted_step_seconds": cost.step_seconds(model, plan, workload),
            "predicted_memory_bytes": int(max(cost.memory_bytes(model, plan, workload))),
        }

    return on_rank_zero(predict)
