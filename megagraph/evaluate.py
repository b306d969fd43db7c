"""What a configuration names, graph, split, batches and model; and the vote over the sequences of a node."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megagraph import files
from megagraph.config import TrainConfig
from megagraph.data.batch import WHOLE, Batch, Share
from megagraph.data.build import Builder
from megagraph.data.datasets import load_graph
from megagraph.data.graph import PARTS, Graph, Split, labelled, random_split
from megagraph.data.loader import Loader
from megagraph.data.names import Names
from megagraph.data.prepare import prepare
from megagraph.data.start import bias_start
from megagraph.data.store import StoredGraph
from megagraph.history import GraphFacts, graph_of
from megagraph.models.config import ModelConfig
from megagraph.models.named import MODELS
from megagraph.models.transformer import GraphTransformer
from megagraph.objective import SOMETIMES, choose_metric, measures, of_the_majority, predicted, probabilities_of
from megagraph.parallel.delivery import NodeLoader
from megagraph.parallel.embedding import NodeTable
from megagraph.parallel.mesh import check_equal, checksums, on_every_rank, on_one_process_first, sum_over_ranks
from megagraph.parallel.pipeline import Pipeline, Stage
from megagraph.planner.plan import Plan
from megagraph.progress import Progress, log
from megagraph.run import Run
from megagraph.weights import fill


def batches(config: TrainConfig, graph: Graph) -> Builder:
    """All that is computed once per graph."""
    if config.embedding == "learned":
        graph = replace(graph, features=graph.features[:, :0])  # nobody reads them
    known = choose_split(graph, config).train if config.label_input else None
    return prepare(graph, config.batch_options, known=known)


def same_batches(config: TrainConfig, graph: Graph) -> Builder:
    """``batches`` on every rank; where a store keeps pairs, one process of each machine goes first. Collective."""
    is_kept = config.batching == "full" and isinstance(graph, StoredGraph)
    return (on_one_process_first if is_kept else on_every_rank)(lambda: batches(config, graph))


def unread(config: TrainConfig) -> list[str]:
    """Flags that are not at their default and change nothing in training."""
    others = dict.fromkeys(("batch_size", "workers"), config.batching == "full")
    others["max_degree"] = config.model != "graphormer"
    others["comm"] = config.plan != "auto" and config.parallel_plan().cp == 1
    changed = [name for name, idle in others.items() if idle and getattr(config, name) != getattr(TrainConfig, name)]
    return config.batch_options.unread + changed


def make_model(config: TrainConfig, model_config: ModelConfig, mesh: DeviceMesh | None = None) -> GraphTransformer:
    """The model that the configuration names, as its seed has it start; ``mesh`` is its CP group."""
    default = torch.get_default_dtype()
    # on the CPU and in fp32, so that the seed alone says which numbers; the caller's random state stays as it is
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(config.seed)
        torch.set_default_dtype(torch.float32)
        try:
            return MODELS[config.model](model_config, mesh=mesh)
        finally:
            torch.set_default_dtype(default)


def num_parameters(model: GraphTransformer) -> int:
    """Number of parameters of the whole model; the table of a learned embedding is none of its modules."""
    learned = model.config.in_features * model.config.dim if model.config.embedding == "learned" else 0
    return sum(parameter.numel() for parameter in model.parameters()) + learned


def model_config_of(config: TrainConfig, graph: Graph, builder: Builder) -> ModelConfig:
    """The sizes of the model, of the graph and of the bias."""
    learned = config.embedding == "learned"
    unit, start = bias_start(builder)
    return config.model_config(
        in_features=builder.num_rows if learned else builder.in_features,
        num_classes=graph.num_classes,
        multi_label=graph.multi_label,
        bias_size=builder.structure.size,
        bias_unit=unit,
        bias_start=start,
        graph_checksum=graph.checksum() if learned else 0,
    )


def make_loader(
    config: TrainConfig,
    builder: Builder,
    nodes: np.ndarray,
    *,
    shuffle: bool = False,
    share: Share = WHOLE,
) -> Loader:
    """Batches in which the labels of ``nodes`` count."""
    return Loader(
        builder,
        nodes,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=shuffle,
        num_workers=0 if config.batching == "full" else config.workers,  # its batches are built once
        share=share,
    )


def as_graph(data: Any, config: TrainConfig) -> Graph:
    """``None`` is the configured data set; what is no :class:`Graph` is read as a ``torch_geometric.data.Data``."""
    if data is None:
        graph = load_graph(config.dataset, config.root, seed=config.seed)
    else:
        graph = data if isinstance(data, Graph) else Graph.from_data(data, seed=config.seed)
    if config.embedding == "features" and graph.in_features == 0 and not config.degree_input:
        raise ValueError(
            "expected nodes with features, got none; add some, or pass --embedding learned or --degree-input"
        )
    return graph


def same_graph(data: Any, config: TrainConfig) -> tuple[Graph, Split]:
    """The graph to train on and its split, on every rank; ValueError on all of them where they are not the same, or
    have fewer nodes than partitions. Collective."""
    graph = on_one_process_first(lambda: as_graph(data, config))
    split = on_every_rank(lambda: choose_split(graph, config))
    check_equal("the graph", checksums(graph) | checksums(split))
    if config.partitions > graph.num_nodes:
        raise ValueError(f"partitions must be at most {graph.num_nodes}, the nodes, got {config.partitions}")
    return graph, split


def choose_split(graph: Graph, config: TrainConfig) -> Split:
    """The split that the configuration asks for, of labelled nodes.

    Raises:
        ValueError: the data set has no split of its own, a part is empty, or does not suit the metric.
    """
    metric = choose_metric(config.metric, graph.labels)
    if config.split == "random":
        split = random_split(graph.labels, config.seed)
    elif graph.split is None:
        raise ValueError(f"split must be 'random': {graph.name} has no split of its own")
    else:
        parts = (getattr(graph.split, part) for part in PARTS)
        split = Split(*(nodes[labelled(graph.labels[nodes])] for nodes in parts))
    for name in PARTS:
        labels = graph.labels[getattr(split, name)]
        if not len(labels):
            raise ValueError(f"the {name} part of the split is empty; {graph.name} has too few labelled nodes")
        present = len(np.unique(labels))
        if metric == "roc_auc" and not graph.multi_label and not present == graph.num_classes == 2:
            raise ValueError(
                "metric must be accuracy unless there are two classes, both of them in every part of the split; "
                f"{graph.name} has {graph.num_classes}, and {present} of them in the {name} part"
            )
    if graph.multi_label and metric in SOMETIMES:
        said = measures(np.zeros(graph.labels.shape, np.float32), graph.labels, split)
        if None in (said[f"val_{metric}"], said[f"test_{metric}"]):
            raise ValueError(
                f"metric must be micro_f1 or macro_f1 where {metric} has nothing to tell apart: among the validation, "
                f"or the test, nodes of {graph.name} no label is there, or none is missing"
            )
    return split


def graph_facts(config: TrainConfig, data: Any, graph: Graph, split: Split, fingerprint: str) -> GraphFacts:
    """What of a graph a run keeps; ``data`` is what ``as_graph`` made it of."""
    path: Path | None = None
    if isinstance(graph, StoredGraph):
        path = graph.store
    elif data is None and config.dataset != "synthetic":
        path = Path(config.dataset) if config.dataset.endswith(".npz") else config.root
    return GraphFacts(
        name=graph.name,
        path=None if path is None else str(path.absolute()),
        nodes=graph.num_nodes,
        edges=graph.num_edges // 2,
        features=graph.in_features,
        classes=graph.num_classes,
        several_labels=graph.multi_label,
        train_nodes=len(split.train),
        val_nodes=len(split.val),
        test_nodes=len(split.test),
        fingerprint=fingerprint,
        **_digests(graph.names),
        **of_the_majority(graph.labels, graph.num_classes, split),
    )


def _digests(names: Names | None) -> dict[str, Any]:
    """Digests of what is known of the classes and columns."""
    known = {} if names is None else {"class_names": names.classes, "columns": names.columns}
    return {what: xxhash.xxh3_64_hexdigest(repr(values).encode()) for what, values in known.items() if values}


def class_probabilities(
    pipeline: Pipeline,
    loader: Loader | NodeLoader,
    between: Callable[[], None] = lambda: None,
    change: Callable[[Batch], Batch] = lambda batch: batch,
    what: str = "evaluation",
) -> np.ndarray:
    """Mean of softmax over all sequences of a node, of several labels of the sigmoid, fp32 [V, classes]; rows of nodes
    that were not read out are 0.

    ANS-GT counts one vote per sequence; the mean weighs each vote by its confidence, and is a probability. Every rank
    gets the probabilities of all nodes.

    Args:
        between: called before every batch, on every rank.
        change: what the model is given in place of a batch.
        what: is going on, for those who wait.
    """
    size = (loader.num_nodes, pipeline.config.num_classes + 1)
    total = torch.zeros(size, dtype=torch.float32, device=pipeline.device)
    for nodes, votes in _votes(pipeline, loader, between, change, what):
        total.index_add_(0, nodes, votes)
    if pipeline.mesh is not None:
        sum_over_ranks(total)
    return _mean(total.cpu().numpy())


def _votes(
    pipeline: Pipeline,
    loader: Loader | NodeLoader,
    between: Callable[[], None] = lambda: None,
    change: Callable[[Batch], Batch] = lambda batch: batch,
    what: str = "evaluation",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes [n] and votes [n, classes + 1] of every batch, from the ranks that have the last stage: probabilities, and
    a one to count them."""
    pipeline.train(False)
    batches = loader.epoch(0)
    for batch in Progress(pipeline.receive(batches), what, len(batches)):
        between()
        batch = change(batch)
        scores = pipeline.logits(batch)
        if scores is not None:
            real = batch.target_nodes >= 0
            votes = probabilities_of(scores, multi_label=pipeline.config.multi_label)[real]
            yield batch.target_nodes[real], torch.nn.functional.pad(votes, (0, 1), value=1.0)


def _mean(votes: np.ndarray) -> np.ndarray:
    return votes[:, :-1] / np.maximum(votes[:, -1:], 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A finished run, ready to evaluate."""

    config: TrainConfig
    graph: Graph
    pipeline: Pipeline


def open_run(run: Path | str, data: Any, changes: dict[str, Any]) -> Opened:
    """The weights of a run and the graph to evaluate them on; arguments and errors as of ``predict``."""
    opened = Run.open(run)
    config, model_config = _changed(opened.config, changes), opened.model_config
    if data is None and "dataset" not in changes:
        place = "" if config.root is None or "root" in changes else f" in {config.root}"
        log.info(f"megagraph: reading {config.dataset}{place}, as {opened.folder / 'config.json'} says")
    graph = as_graph(data, config)
    another = data is not None or {"dataset", "seed"} & changes.keys()
    _check_graph(graph, graph_of(opened), None if another else config.dataset)
    learned = model_config.embedding == "learned"
    if learned and graph.checksum() != model_config.graph_checksum:
        raise ValueError(
            "the model has learned a vector for every node of the graph it was trained on, and this graph has other "
            "edges; for another graph train with --embedding features"
        )
    if config.label_input:
        check_classes(model_config, graph)
        graph = replace(graph, num_classes=model_config.num_classes)  # a part of a graph may lack some
    columns = model_config.in_features - (model_config.num_classes if config.label_input else 0)
    trained_on = columns // (1 + config.propagate) - config.degree_input
    if not learned and graph.in_features != trained_on:
        raise ValueError(f"the model was trained on {trained_on} features a node, got a graph with {graph.in_features}")
    model, weights, table = make_model(config, model_config), opened.weights(), None
    if learned:
        table = NodeTable(model_config.in_features, model_config.dim)
        table.to(config.torch_device(), config.parameter_dtype)
        fill(table, {"weight": weights.pop("node_table", torch.empty(0))}, opened.folder)
    stage = Stage(model, range(model_config.layers), autocast=config.dtype == "bf16")
    stage.to(config.torch_device(), config.parameter_dtype)
    fill(stage.model, weights, opened.folder)  # last, as a model in fp32 would round them
    return Opened(config=config, graph=graph, pipeline=Pipeline([stage], [stage], Plan(), table=table))


_INPUT_FIELDS = (  # what the numbers mean that a model reads, beside those of its own configuration
    "model", "batching", "bias_form", "channels", "max_distance", "hops", "top", "propagate", "degree_input",
    "label_input",
)  # fmt: skip
_OF_TRAINING = ("bias", "init", "dropout", "input_dropout", "attention_dropout")  # bias: bias_form says what is read


def _changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The configuration of a run with other values, of which the weights may know nothing."""
    if unknown := sorted(changes.keys() - {field.name for field in fields(TrainConfig)}):
        raise ValueError(f"expected fields of TrainConfig to change, got {', '.join(unknown)}")
    changed = replace(config, **changes)
    of_the_model = (field.name for field in fields(ModelConfig) if hasattr(config, field.name))
    idle = {*_OF_TRAINING, *unread(config), *unread(changed)}
    for name in dict.fromkeys((*_INPUT_FIELDS, *of_the_model)):
        own, other = getattr(config, name), getattr(changed, name)
        if own != other and name not in idle:
            name = name.removesuffix("_form")
            raise ValueError(f"{name} must stay {own!r}, as the model was trained with it, got {other!r}")
    return changed


def check_classes(model: ModelConfig, graph: Graph) -> None:
    """Raise ValueError unless the labels of the graph are among those that the model tells apart."""
    fewer = not model.multi_label and graph.num_classes < model.num_classes
    if graph.multi_label != model.multi_label or not (fewer or graph.num_classes == model.num_classes):
        told = [
            f"{x.num_classes} {'labels, several' if x.multi_label else 'classes, one'} a node" for x in (model, graph)
        ]
        raise ValueError(f"the model was trained on {told[0]}, got a graph with {told[1]}")


def _check_graph(graph: Graph, facts: GraphFacts, read_from: str | None) -> None:
    """Whether it is what a run was trained on, where nobody asked for another one (``read_from``), or is called so."""
    if read_from is not None and (found := graph.fingerprint()) != facts.fingerprint:
        raise ValueError(
            f"expected the graph that the run was trained on, {facts.name} with the fingerprint {facts.fingerprint}, "
            f"got {graph.name} with {found} from {read_from}: it has changed since, or the run was trained on a graph "
            f"that was handed over; pass that graph (data in Python, --dataset), or this one, --dataset {read_from}"
        )
    called, like = _digests(graph.names), f"import it with --like {facts.path or 'STORE'}"
    if graph.names is not None and facts.class_names not in (None, called.get("class_names", facts.class_names)):
        raise ValueError(
            f"expected a graph with the classes of {facts.name}, on which the model was trained, got "
            f"{', '.join(graph.names.classes[:20])}; {like}"
        )
    if facts.columns not in (None, called.get("columns", facts.columns)):
        log.warning(
            f"megagraph: features of {graph.name} are made of other columns than those of {facts.name}, on which the "
            f"model was trained, or on another scale; {like}"
        )


def predict(run: Path | str, data: Any = None, out: Path | str | None = None, **changes: Any) -> np.ndarray:
    """Class probabilities fp32 [V, classes] of every node, by the weights of a run; of several labels a node each has
    its own, and a row need not sum to 1.

    Args:
        run: run folder of ``Trainer.fit``.
        data: a ``Graph`` or ``torch_geometric.data.Data``; ``None`` loads the data set that the run's configuration
            names, which must be the graph that it was trained on.
        out: a file to write them to: .npy, a batch at a time, from which the result is then mapped, or .csv or
            .parquet, a line a node with its number or id, its likeliest class, or all its labels of a probability of at
            least 1/2 (with ";" between them, in Parquet a list), and the probability of each. One in the run folder
            must not be a file of the run.
        changes: fields of the run's configuration to replace, such as ``dataset``, ``root`` or ``device``; those that
            the weights depend on must stay. What is read because the run says so is said through the logger
            "megagraph", and by the command line on stderr.

    Raises:
        FileNotFoundError: ``run`` is not the folder of a finished run, or there is no folder for ``out``.
        FileExistsError: ``out`` is a file of the run, or a link.
        ValueError: ``out`` is no .npy, .csv or .parquet; a file of the run is damaged; the graph does not have the
            features or the classes that the model was trained on, or, for a learned embedding, is another graph; the
            data set that the configuration names has changed since, or is not what was handed to ``Trainer.fit``.

    Examples:
        >>> small = {"layers": 1, "dim": 16, "heads": 2, "batching": "cluster", "sequence_nodes": 128}
        >>> _ = mg.Trainer(mg.TrainConfig(max_steps=2, out="runs/trained", **small)).fit()
        >>> mg.predict("runs/trained").shape
        (2000, 6)
    """
    if out is not None:
        Run.open(run).check_output(Path(out))
        if Path(out).suffix not in (".npy", *_TABLES):
            raise ValueError(f"out must end in .npy, .csv or .parquet, got {out}")
    opened = open_run(run, data, changes)
    config, graph, pipeline = opened.config, opened.graph, opened.pipeline
    nodes = np.arange(graph.num_nodes)
    loader = make_loader(config, batches(config, graph), nodes)
    if out is None or Path(out).suffix in _TABLES:
        probabilities = class_probabilities(pipeline, loader, what="prediction")
        if out is not None:
            _TABLES[Path(out).suffix](Path(out), probabilities, graph.names, multi_label=pipeline.config.multi_label)
        return probabilities
    shape = (graph.num_nodes, pipeline.config.num_classes)
    with files.replacing(Path(out)) as file:
        probabilities = np.lib.format.open_memmap(file.name, mode="w+", dtype=np.float32, shape=shape)
        for targets, votes in _votes(pipeline, loader, what="prediction"):
            # all sequences of a node are in one batch
            found, index = targets.unique(return_inverse=True)
            total = votes.new_zeros(len(found), votes.shape[1]).index_add_(0, index, votes)
            probabilities[found.cpu().numpy()] = _mean(total.cpu().numpy())
        probabilities.flush()
    return probabilities


def _write_csv(path: Path, probabilities: np.ndarray, names: Names | None, *, multi_label: bool) -> None:
    """Write predictions as CSV, with ids and classes as the graph calls them, where it has as many classes."""
    classes, what = _called(names, probabilities.shape[1]), "labels" if multi_label else "class"
    with files.replacing(path) as file:
        text = TextIOWrapper(file, "utf-8", newline="")
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(["node", what, *(f"probability_{name}" for name in classes)])
        for node, (best, row) in enumerate(
            zip(predicted(probabilities, multi_label=multi_label), probabilities, strict=True)
        ):
            who = node if names is None else names.ids[node]
            given = ";".join(classes[best]) if multi_label else classes[best]
            lines.writerow([who, given, *(f"{p:.6g}" for p in row)])
        text.detach()  # or it would close the file


def _write_parquet(path: Path, probabilities: np.ndarray, names: Names | None, *, multi_label: bool) -> None:
    """Write predictions as Parquet: probabilities as fp32, several labels as a list."""
    import polars

    classes, best = _called(names, probabilities.shape[1]), predicted(probabilities, multi_label=multi_label)
    nodes = range(len(best)) if names is None else [names.ids[node] for node in range(len(best))]
    if multi_label:
        given = {"labels": polars.Series([list(classes[row]) for row in best], dtype=polars.List(polars.String))}
    else:
        given = {"class": polars.Series(classes[best].tolist(), dtype=polars.String)}
    columns = {"node": polars.Series(nodes)} | given
    columns |= {f"probability_{name}": polars.Series(p) for name, p in zip(classes, probabilities.T, strict=True)}
    with files.replacing(path) as file:
        polars.DataFrame(columns).write_parquet(file)


_TABLES = {".csv": _write_csv, ".parquet": _write_parquet}


def _called(names: Names | None, num_classes: int) -> np.ndarray:
    """Names of the classes, or their numbers where the graph has no such, or not so many."""
    if names is not None and len(names.classes) == num_classes:
        return np.array(names.classes, object)
    return np.array([str(i) for i in range(num_classes)], object)
