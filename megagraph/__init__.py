"""MegaGraph: exact graph attention with a learnable structural bias, and Graph Transformers trained with it."""

from megagraph import planner
from megagraph.attention.bias import BucketBias, DenseBias, ProjectedBias
from megagraph.attention.context_parallel import ring_attention
from megagraph.attention.dropout import dropout_keys
from megagraph.attention.layout import NodeLayout
from megagraph.attention.module import BiasedRingAttention
from megagraph.attention.multihead import MultiheadAttention
from megagraph.attention.operator import biased_attention
from megagraph.config import TrainConfig
from megagraph.data.graph import Graph
from megagraph.evaluate import predict
from megagraph.models.config import ModelConfig
from megagraph.models.graphormer import Graphormer
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.planner.plan import Plan
from megagraph.train import Trainer

__version__ = "0.1.0"

__all__ = [
    "BiasedRingAttention",
    "BucketBias",
    "DenseBias",
    "Graph",
    "Graphormer",
    "HierarchicalGT",
    "ModelConfig",
    "MultiheadAttention",
    "NodeLayout",
    "Plan",
    "ProjectedBias",
    "TrainConfig",
    "Trainer",
    "biased_attention",
    "dropout_keys",
    "planner",
    "predict",
    "ring_attention",
]
