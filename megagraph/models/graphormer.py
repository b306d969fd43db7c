"""Graphormer (Ying et al., NeurIPS 2021) for node classification."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megagraph.models.config import ModelConfig
from megagraph.models.transformer import GraphTransformer


class Graphormer(GraphTransformer):
    """Features plus a learned code of the node's degree; the bias is a learned table of hop distances.

    A super node has the mean degree of its members, as it has their mean features. Global tokens have no degree: its
    code, added to a learned vector, would be that vector again. Degrees above ``max_degree`` share the last code.

    What differs from the published model, which classifies whole molecules: one degree instead of two, as our graphs
    are undirected; features are projected, not looked up; a bias table in every layer instead of one for all;
    no bias of edge features, which our graphs do not have; pre-LN, there an option; class scores of nodes, not of the
    token. Initial values are the published ones unless ``config.init`` says otherwise, but for bias tables, which start
    where the data says.

    Args:
        config: sizes, see [megagraph.ModelConfig][].
        mesh: the context-parallel group over which the nodes of a sequence are spread; ``None`` for one rank.

    Raises:
        ValueError: ``config.bias`` is not "bucket".

    Examples:
        >>> config = mg.ModelConfig(in_features=10, num_classes=3, dim=32, heads=4, bias="bucket", bias_size=9)
        >>> model = mg.Graphormer(config).eval()
        >>> features, node_index = torch.randn(40, 10), torch.randint(0, 40, (8, 16))
        >>> buckets, padding = torch.zeros(8, 17, 17, dtype=torch.uint8), torch.zeros(8, 17, dtype=torch.bool)
        >>> model(features, node_index, buckets, padding, degrees=torch.randint(0, 9, (40,))).shape
        torch.Size([8, 1, 3])
    """

    def __init__(self, config: ModelConfig, *, mesh: DeviceMesh | None = None) -> None:
        if config.bias != "bucket":
            raise ValueError(f"Graphormer needs a bias of 'bucket', its hop distances, got {config.bias!r}")
        super().__init__(config, mesh=mesh)
        self.degree_table = nn.Parameter(torch.empty(config.max_degree + 1, config.dim))
        self.reset_parameters()

    def keep_layers(self, layers: range) -> None:
        super().keep_layers(layers)
        if 0 not in layers:
            del self.degree_table

    def encode(self, features: Tensor, degrees: Tensor | None) -> Tensor:
        """Raw rows [U, d_in] and degrees int64 [U] -> [U, d]."""
        if degrees is None:
            raise ValueError("degrees is needed by Graphormer: int64 [U], one for each row of features")
        if degrees.shape != features.shape[:1]:  # a single one would do for all
            raise ValueError(
                f"degrees must be int64 [U] = [{len(features)}], one for each row of features, got "
                f"{list(degrees.shape)}; pass those of the same nodes"
            )
        codes = nn.functional.embedding(degrees.clamp(max=self.config.max_degree), self.degree_table)
        return super().encode(features, degrees) + codes
