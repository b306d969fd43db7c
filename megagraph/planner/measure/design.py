"""Which sizes a profile measures, with a model and random data of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megagraph.attention.bias import BorderedData, aligned_rows
from megagraph.attention.dropout import dropout_keys
from megagraph.attention.fields import MASKED_BUCKET
from megagraph.attention.layout import NodeLayout
from megagraph.attention.neighbours import Neighbours
from megagraph.attention.relation import Relation
from megagraph.models.config import ModelConfig, ModelName
from megagraph.models.named import MODELS
from megagraph.models.transformer import GraphTransformer
from megagraph.objective import loss_sum
from megagraph.planner.workload import Precision, Workload, listed_scores

PAIRED_NODES = 1 << 14  # of a sequence whose pairs are listed, at most
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of parameters
PARTS = (1, 4, 16)  # of the largest micro-batch, whose sequences are measured
MAX_TOKENS = 1 << 14  # rows of a micro-batch on a CPU; time grows with them in proportion long before


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size to measure: sequences of N nodes through a model."""

    sequences: int
    nodes: int
    config: ModelConfig
    targets: int
    feature_rows: int  # in all
    num_super: int = 0  # of the nodes, the last ones
    filled: float = 1.0  # part of the others that are no padding
    pairs: int = 0  # that are listed in a sequence; 0: all attend to all
    dtype: Precision = "fp32"
    model: ModelName = "hierarchical"

    def make_model(self, device: torch.device) -> GraphTransformer:
        return MODELS[self.model](self.config).to(device, DTYPES[self.dtype])

    def forward(self, model: GraphTransformer, inputs: dict[str, Any]) -> Tensor:
        """Class scores, as training computes them."""
        device = inputs["features"].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.dtype == "bf16"):
            scores: Tensor = model(**inputs)
        return scores

    def loss(self, scores: Tensor) -> Tensor:
        """A loss of class scores, which takes as much memory as that of training."""
        if not self.config.multi_label:
            return scores.square().mean()
        return loss_sum(scores, torch.ones_like(scores, dtype=torch.int8)) / scores.numel()

    def fields(self) -> dict[str, Any]:
        config, columns, listed = self.config, float(self.nodes), {}
        if self.pairs:
            columns = listed_scores(self.nodes - self.num_super, self.num_super, self.pairs) / self.nodes
            listed = {"num_super": self.num_super, "pairs": self.pairs, "convolution": int(config.convolution)}
        return {
            **listed,
            "sequences": self.sequences,
            "rows": self.nodes,
            "columns": columns,
            "dim": config.dim,
            "ffn_dim": config.ffn_dim,
            "heads": config.heads,
            "bias": config.bias,
            "bias_size": config.bias_size,
            "in_features": config.in_features,
            "num_classes": config.num_classes,
            "feature_rows": self.feature_rows,
            "global_tokens": config.global_tokens,
            "dtype": self.dtype,
            "codes": config.max_degree + 1 if self.model == "graphormer" else 0,
        }


def design(config: ModelConfig, workload: Workload, device: torch.device) -> list[Point]:
    """Sizes around those of the workload, small ones first: micro-batches, nodes, widths and heads."""
    given: dict[str, Any] = {"dtype": workload.dtype, "model": workload.model, "filled": workload.filled}
    points = _design_of_pairs(config, workload) if workload.pairs else _design_of_sequences(config, workload, device)
    return [replace(point, **given) for point in points]


def _design_of_sequences(config: ModelConfig, workload: Workload, device: torch.device) -> list[Point]:
    nodes = workload.num_nodes + workload.num_super
    most = workload.batch_sequences
    if device.type == "cpu":
        most = max(1, min(most, MAX_TOKENS // nodes))
    counts = sorted({max(1, most // part) for part in PARTS})
    lengths = sorted({max(workload.num_nodes // cp, 1) + workload.num_super for cp in (1, 2, 4)})
    widths, points = _widths(config), []
    for dim, heads in widths:
        for length in lengths:
            for count in counts:
                if (dim, heads) != widths[0] and (length not in (lengths[0], lengths[-1]) or count != counts[-1]):
                    continue
                shape = _of_width(config, dim, heads)
                targets = max(1, min(workload.num_targets, length - workload.num_super))
                per_sequence = length if workload.feature_rows is None else min(workload.feature_rows, length)
                features = max(1, int(count * per_sequence))
                points.append(
                    Point(
                        sequences=count,
                        nodes=length,
                        config=shape,
                        targets=targets,
                        feature_rows=features,
                        num_super=workload.num_super,
                    )
                )
    return sorted(points, key=lambda p: p.sequences * p.nodes * p.config.dim * (p.nodes + p.config.dim))


def _widths(config: ModelConfig) -> list[tuple[int, int]]:
    """The model's width and number of heads, and halves of them."""
    widths = [(config.dim, config.heads)]
    if config.dim % 2 == 0 and config.dim // 2 % config.heads == 0:
        widths.append((config.dim // 2, config.heads))
    if config.heads % 2 == 0:
        widths.append((config.dim, config.heads // 2))
    return widths


def _of_width(config: ModelConfig, dim: int, heads: int) -> ModelConfig:
    ffn_dim = max(1, config.ffn_dim * dim // config.dim)
    return replace(config, layers=2, dim=dim, heads=heads, ffn_dim=ffn_dim)


def _design_of_pairs(config: ModelConfig, workload: Workload) -> list[Point]:
    """Sequences whose pairs are listed: time grows with nodes and pairs, and parts of a graph say what it takes."""
    widths, points = _widths(config), []
    degree = max(1, round(workload.pairs / workload.num_nodes))
    lengths = {min(workload.num_nodes // 4**i, PAIRED_NODES // 4 ** (i - 1)) for i in (1, 2, 3)}
    lengths = {min(max(length, 4 * degree), workload.num_nodes) for length in lengths}
    for dim, heads in widths:
        for length in sorted(lengths):
            for times in (1, 4):
                if ((dim, heads) != widths[0] and times > 1) or times * degree > length:
                    continue
                nodes = length + workload.num_super
                features = nodes if workload.feature_rows is None else min(int(workload.feature_rows), nodes)
                points.append(
                    Point(
                        sequences=1,
                        nodes=nodes,
                        config=_of_width(config, dim, heads),
                        targets=min(workload.num_targets, length),
                        feature_rows=max(1, features),
                        num_super=workload.num_super,
                        pairs=times * degree * length,
                    )
                )
    return sorted(points, key=lambda p: p.nodes * p.config.dim**2 + p.pairs * p.config.dim)


def of_every_width(points: list[Point]) -> list[Point]:
    """The smallest point of each width and number of heads, and a longer one: bytes grow as the terms say."""
    chosen: dict[tuple[int, ...], Point] = {}
    for point in points:
        chosen.setdefault((point.config.dim, point.config.heads), point)
    longer = [point for point in points if point.nodes > points[0].nodes][:1]
    return [*chosen.values(), *longer]


def largest(points: list[Point], config: ModelConfig) -> Point:
    """The largest of the sizes with the model's own width and heads, with up to four layers."""
    own = [point for point in points if (point.config.dim, point.config.heads) == (config.dim, config.heads)]
    return replace(own[-1], config=replace(own[-1].config, layers=min(config.layers, 4)))


def random_inputs(point: Point, device: torch.device) -> dict[str, Any]:
    """What a model reads, of one size, with dropout on."""
    generator = torch.Generator().manual_seed(0)
    config, m, n = point.config, point.sequences, point.nodes
    tokens = min(config.global_tokens, n - 1)
    assert tokens == config.global_tokens, "a sequence holds its global tokens and a node"
    structure: Tensor | BorderedData
    if point.pairs:
        structure = _random_pairs(point, generator)
    elif config.bias == "bucket":
        structure = torch.randint(0, config.bias_size, (m, n, n), dtype=torch.uint8, generator=generator)
    else:
        channels = torch.bfloat16 if point.dtype == "bf16" else torch.float32
        structure = torch.rand(m, config.bias_size, n, n, generator=generator, dtype=channels)
    padding = _random_padding(point, generator)
    if point.filled < 1 and not point.pairs:  # as batches have it
        assert isinstance(structure, Tensor)
        hidden = padding[:, None] | padding[:, :, None]
        if config.bias == "bucket":
            structure.masked_fill_(hidden, MASKED_BUCKET)
        else:
            structure.masked_fill_(hidden[:, None], 0.0)
    inputs = {
        "features": torch.rand(point.feature_rows, config.in_features, dtype=torch.float32, generator=generator),
        "node_index": torch.randint(0, point.feature_rows, (m, n - tokens), generator=generator),
        "key_padding_mask": padding,
        "dropout_key": dropout_keys(0, 0, torch.arange(m)),
    }
    if point.model == "graphormer":
        inputs["degrees"] = torch.randint(0, config.max_degree + 1, (point.feature_rows,), generator=generator)
    layout = NodeLayout(n - point.num_super, point.num_super) if point.pairs else None
    moved: dict[str, Any] = {name: x.to(device) for name, x in inputs.items()}
    structure = structure.to(device)
    moved["structure"] = aligned_rows(structure) if isinstance(structure, Tensor) else structure  # as batches have it
    if config.convolution:
        assert isinstance(structure, BorderedData)
        own, weights = structure.relation, torch.rand(len(structure.index), dtype=torch.float32, generator=generator)
        lists = {name: x.clone() for name, x in own.lists.items()}  # a batch has others
        moved["neighbours"] = Neighbours(Relation(**lists, num_columns=own.num_columns), weights.to(device))
    return moved | {"num_targets": point.targets, "layout": layout}


def _random_padding(point: Point, generator: torch.Generator) -> Tensor:
    """bool [m, n]: behind the first nodes of each sequence, on average as many as are missing."""
    regular = point.nodes - point.num_super
    there = (regular * point.filled + torch.rand(point.sequences, generator=generator)).floor().clamp(max=regular)
    padding = torch.zeros(point.sequences, point.nodes, dtype=torch.bool)
    padding[:, :regular] = torch.arange(regular) >= there[:, None].clamp(min=1)
    return padding


def _random_pairs(point: Point, generator: torch.Generator) -> BorderedData:
    """Each node attends to those beside it, as near as clusters put them."""
    rows, supers, kinds = point.nodes - point.num_super, point.num_super, point.config.bias_size
    degree = point.pairs // rows
    first = (torch.arange(rows) - degree // 2).clamp(0, rows - degree)
    columns = (first[:, None] + torch.arange(degree)).flatten().int()
    relation = Relation.of_rows(torch.arange(rows + 1) * degree, columns, rows, 1)
    sizes = (len(columns),), (1, rows, supers), (1, supers, point.nodes)
    buckets = (torch.randint(0, kinds, size, dtype=torch.uint8, generator=generator) for size in sizes)
    return BorderedData(relation, *buckets)
