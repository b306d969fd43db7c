"""Which model a name means."""

from __future__ import annotations

from megagraph.models.config import ModelName
from megagraph.models.graphormer import Graphormer
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.models.transformer import GraphTransformer

MODELS: dict[ModelName, type[GraphTransformer]] = {"hierarchical": HierarchicalGT, "graphormer": Graphormer}
