"""What a model is built from: what is chosen, and what the data says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from megagraph import files
from megagraph.data.options import BatchOptions

ModelName = Literal["hierarchical", "graphormer"]
Init = Literal["small", "xavier"]
# what nobody could build, in time or in memory; others fit into 32 bits
_AT_MOST = {"layers": 10_000, "dim": 1 << 24, "ffn_dim": 1 << 24, "heads": 1 << 24}


@dataclass(frozen=True, kw_only=True)  # no slots: TrainConfig has these defaults from the class
class ModelConfig:
    """A graph transformer; paper symbols in brackets.

    The data says ``in_features``, ``num_classes``, ``multi_label``, ``bias_size``, ``bias_unit``, ``bias_start`` and
    ``graph_checksum``; the others are chosen.

    Args:
        in_features: width of the raw node features [d_in]; rows of the table of a learned embedding.
        num_classes: classes to tell apart [d_out].
        multi_label: a node has several of them, or none: each has a probability of its own.
        layers: transformer layers [L].
        dim: hidden width [d]; ``heads`` must divide it.
        ffn_dim: inner width of the feed-forward network [d_ff].
        heads: attention heads [h].
        global_tokens: learned tokens that every node attends to.
        bias: ``"projected"`` (adjacency powers, one Linear per layer) or ``"bucket"`` (distances, one table per layer).
        bias_size: channels C of a projected bias, or buckets R of a table.
        bias_unit: what the learned part of a bias is divided by, a number for each of ``bias_size``; none: 1.
        bias_start: where it starts, in these units, in every layer and head; none: random, as small weights.
        init: of weights: ``"small"`` (N(0, 0.02 / sqrt(L)), as ANS-GT and Graphormer) or ``"xavier"`` (uniform, by the
            widths of a layer: Glorot and Bengio, 2010).
        convolution: every layer has a graph convolution beside attention, in full batches.
        embedding: ``"features"`` (raw features, projected) or ``"learned"`` (vectors of width ``dim`` from a table
            outside the model, in place of features).
        graph_checksum: of the graph whose nodes a learned embedding knows.
        max_degree: largest degree with a code of its own (Graphormer).
        dropout, input_dropout, attention_dropout: probabilities in [0, 1).

    Raises:
        ValueError: a field of another type, a size or probability out of its range, or ``heads`` does not divide
            ``dim``.

    Examples:
        >>> mg.ModelConfig(in_features=10, num_classes=3).layers
        4
    """

    in_features: int
    num_classes: int
    multi_label: bool = False
    layers: int = 4
    dim: int = 128
    ffn_dim: int = 128
    heads: int = 8
    global_tokens: int = BatchOptions.global_tokens
    bias: Literal["projected", "bucket"] = BatchOptions.bias
    bias_size: int = BatchOptions.channels + BatchOptions.global_tokens
    bias_unit: tuple[float, ...] = ()
    bias_start: tuple[float, ...] = ()
    init: Init = "small"
    max_degree: int = 512
    convolution: bool = BatchOptions.convolution
    embedding: Literal["features", "learned"] = "features"
    graph_checksum: int = 0
    dropout: float = 0.5
    input_dropout: float = 0.5
    attention_dropout: float = 0.5

    def __post_init__(self) -> None:
        files.check_fields(self)
        for name in ("in_features", "num_classes", "layers", "dim", "ffn_dim", "heads", "bias_size", "max_degree"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
            if getattr(self, name) > (most := _AT_MOST.get(name, (1 << 31) - 1)):
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim = {self.dim}, got {self.heads}")
        if not 0 <= self.global_tokens < 1 << 31:
            raise ValueError(f"global_tokens must be 0 or more and below 2^31, got {self.global_tokens}")
        for name in ("bias_unit", "bias_start"):
            values = getattr(self, name)
            if len(values) not in (0, self.bias_size) or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} must be {self.bias_size} finite numbers or none, got {values}")
        if not all(value > 0 for value in self.bias_unit):
            raise ValueError(f"bias_unit must be above 0, got {self.bias_unit}")
        for name in ("dropout", "input_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelConfig:
        """A configuration from the values of a JSON object; ValueError names a field that is not right."""
        return files.typed(cls, values, "the sizes of a model")
