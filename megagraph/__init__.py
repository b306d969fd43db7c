"""MegaGraph: exact graph attention with a learnable structural bias, and Graph Transformers trained with it."""

from megagraph.attention.bias import BucketBias, DenseBias, ProjectedBias
from megagraph.attention.dropout import dropout_keys
from megagraph.attention.module import BiasedRingAttention
from megagraph.attention.operator import biased_attention
from megagraph.models.config import ModelConfig
from megagraph.models.hierarchical import HierarchicalGT

__version__ = "0.1.0"

__all__ = [
    "BiasedRingAttention",
    "BucketBias",
    "DenseBias",
    "HierarchicalGT",
    "ModelConfig",
    "ProjectedBias",
    "biased_attention",
    "dropout_keys",
]
