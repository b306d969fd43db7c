"""What a trained model loses without one of its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.neighbours import Neighbours
from megagraph.config import Part
from megagraph.data.batch import Batch
from megagraph.data.loader import Loader
from megagraph.evaluate import batches, check_classes, choose_split, class_probabilities, make_loader, open_run
from megagraph.models.transformer import is_bias
from megagraph.objective import measures, predicted, same_answer
from megagraph.parallel.delivery import NodeLoader
from megagraph.parallel.mesh import on_rank_zero
from megagraph.parallel.pipeline import Pipeline
from megagraph.parallel.replicate import gather_tensors
from megagraph.progress import log


def evaluate(
    run: Path | str, data: Any = None, ablate: Sequence[Part] = (), **changes: Any
) -> dict[str, dict[str, float]]:
    """How good a run's weights are on the validation and test nodes of its split, whole and without each of some parts.

    bias, initial: the learned part of the attention bias is zero, or as it was before training. features: those of all
    nodes and super nodes are zero, labels among them. labels: no node's label is input. super_nodes, global_token:
    nobody attends to super nodes, or to global tokens. convolution: nobody has neighbours in it. samples: one sequence
    of a target (ego) in place of all.

    Args:
        run: run folder of ``Trainer.fit``.
        data, changes: as for ``predict``.

    Returns:
        "whole" and each part: val_accuracy, test_accuracy, for two classes val_roc_auc and test_roc_auc, and, of a
        part, changed_classes: the share of these nodes whose most probable class is another one without it. Of several
        labels a node micro_f1, macro_f1, average_precision and roc_auc in place of these, and changed_labels: the share
        of the labels of these nodes that are given with it and not without, or the other way round.

    Raises:
        FileNotFoundError: ``run`` is not the folder of a finished run.
        ValueError: the run has no such part, the graph has classes that the model does not know, or, as for
            ``predict``, it does not fit.

    Examples:
        >>> small = {"layers": 1, "dim": 16, "heads": 2, "batching": "cluster", "sequence_nodes": 128}
        >>> _ = mg.Trainer(mg.TrainConfig(max_steps=2, out="runs/evaluated", **small)).fit()
        >>> sorted(evaluate("runs/evaluated", ablate=["bias"])["bias"])
        ['changed_classes', 'test_accuracy', 'val_accuracy']
    """
    opened = open_run(run, data, changes)
    config, model, graph = opened.config, opened.pipeline.config, opened.graph
    if unknown := [part for part in ablate if part not in get_args(Part)]:
        raise ValueError(f"ablate must be some of {', '.join(get_args(Part))}, got {unknown[0]!r}")
    missing = {
        "initial": not model.bias_start and "its bias started at random",
        "labels": not config.label_input and "its input has none",
        "global_token": config.global_tokens == 0 and "it has no global tokens",
        "convolution": not model.convolution and "its layers have none",
        "samples": (config.batching != "ego" or config.samples == 1) and "a target has one sequence already",
    }
    if refused := [part for part in ablate if missing.get(part)]:
        raise ValueError(f"the run {run} cannot be evaluated without {refused[0]!r}: {missing[refused[0]]}")
    split = choose_split(graph, config)
    nodes = np.concatenate([split.val, split.test])
    check_classes(model, graph)
    builder = batches(config, graph)
    loader = make_loader(config, builder, nodes)
    whole = class_probabilities(opened.pipeline, loader)
    if (same := same_answer(predicted(whole, multi_label=model.multi_label), graph, nodes)) is not None:
        log.warning(same)

    def measured(probabilities: np.ndarray) -> dict[str, float]:
        values = measures(probabilities, graph.labels, split)
        return {name: value for name, value in values.items() if isinstance(value, float)}

    results = {"whole": measured(whole)}
    for part in ablate:
        if part == "samples":
            fewer = copy.copy(builder)
            fewer.samples = 1
            probabilities = class_probabilities(opened.pipeline, make_loader(config, fewer, nodes))
        else:
            with _without(opened.pipeline, part) as change:
                probabilities = class_probabilities(opened.pipeline, loader, change=change)
        others, own = (predicted(p[nodes], multi_label=model.multi_label) for p in (probabilities, whole))
        changed = "changed_labels" if model.multi_label else "changed_classes"
        results[part] = measured(probabilities) | {changed: float((others != own).mean())}
    return results


@dataclass(frozen=True, kw_only=True)
class BiasEffect:
    """What the learned part of the attention bias does in a model.

    Args:
        bias_changed_classes: share of nodes whose most probable class is another one where it is zero; of several
            labels a node, the share of their labels.
        bias_correlation: with what it was before training, over all layers, heads and channels or buckets; ``None``
            where one of the two is constant, or was random.
        bias_norm, bias_start_norm: root mean square of it, now and before training.
    """

    bias_changed_classes: float
    bias_correlation: float | None
    bias_norm: float
    bias_start_norm: float | None


def bias_effect(
    pipeline: Pipeline,
    loader: Loader | NodeLoader,
    nodes: np.ndarray,
    classes: np.ndarray | None = None,
    between: Callable[[], None] = lambda: None,
) -> BiasEffect:
    """The effect on ``nodes``, which the loader reads out; the same on every rank. Collective.

    Args:
        classes: as ``class_probabilities`` of the loader has them, ``predicted``; ``None``: they are found out.
        between: called before every batch, on every rank.
    """
    learned = gather_tensors(biases(pipeline), pipeline.mesh)
    several = pipeline.config.multi_label
    if classes is None:
        classes = predicted(class_probabilities(pipeline, loader, between), multi_label=several)
    with _without(pipeline, "bias"):
        without = predicted(class_probabilities(pipeline, loader, between), multi_label=several)
    changed = float((without != classes)[nodes].mean())

    def compare() -> BiasEffect:
        values = torch.stack([*learned.values()]).double().numpy()
        start = np.broadcast_to(pipeline.config.bias_start, values.shape) if pipeline.config.bias_start else None
        varied = start is not None and min(values.std(), start.std()) > 0
        return BiasEffect(
            bias_changed_classes=changed,
            bias_correlation=float(np.corrcoef(values.ravel(), start.ravel())[0, 1]) if varied else None,  # type: ignore[union-attr]
            bias_norm=_norm(values),
            bias_start_norm=None if start is None else _norm(start),
        )

    return on_rank_zero(compare)


def biases(pipeline: Pipeline) -> dict[str, Tensor]:
    """The learned parts of the biases of this rank's layers, [H, C] or [H, R] each: the live tensors."""
    return {name: x for name, x in pipeline.state_dict().items() if is_bias(name)}


@contextmanager
def _without(pipeline: Pipeline, part: str) -> Iterator[Callable[[Batch], Batch]]:
    """The pipeline without a part until the block ends; gives what is to be done with its batches."""
    zeroed = {}
    if part in ("bias", "initial"):
        zeroed = biases(pipeline)
    elif part == "features" and pipeline.table is not None:
        zeroed = {"node_table": pipeline.table.weight.detach()}
    kept = {name: x.clone() for name, x in zeroed.items()}
    for x in zeroed.values():
        x.copy_(torch.tensor(pipeline.config.bias_start)) if part == "initial" else x.zero_()
    try:
        changes = _CHANGES | {"labels": partial(_without_labels, classes=pipeline.config.num_classes)}
        yield changes.get(part, lambda batch: batch)
    finally:
        # fully_shard may hold whole copies of them meanwhile, which it gives up where its state is asked for
        for name, x in (biases(pipeline) if part in ("bias", "initial") else zeroed).items():
            x.copy_(kept[name])


def _without_features(batch: Batch) -> Batch:
    return replace(batch, features=torch.zeros_like(batch.features))


def _without_labels(batch: Batch, classes: int) -> Batch:
    features = batch.features.clone()
    features[:, -classes:] = 0
    return replace(batch, features=features)


def _without_columns(batch: Batch, start: int, stop: int) -> Batch:
    padding = batch.key_padding_mask.clone()
    padding[:, start:stop] = True
    return replace(batch, key_padding_mask=padding)


def _without_supers(batch: Batch) -> Batch:
    return _without_columns(batch, batch.layout.num_nodes, batch.node_index.shape[1])


def _without_global(batch: Batch) -> Batch:
    return _without_columns(batch, batch.node_index.shape[1], batch.num_nodes)


def _without_convolution(batch: Batch) -> Batch:
    assert batch.neighbours is not None
    nobody = Neighbours(batch.neighbours.relation, torch.zeros_like(batch.neighbours.weights))
    return replace(batch, neighbours=nobody)


_CHANGES: dict[str, Callable[[Batch], Batch]] = {
    "features": _without_features,
    "super_nodes": _without_supers,
    "global_token": _without_global,
    "convolution": _without_convolution,
}


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))
