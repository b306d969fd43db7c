"""HierarchicalGT: ANS-GT's architecture (Zhang et al., NeurIPS 2022) for node classification."""

from __future__ import annotations

from megagraph.models.transformer import GraphTransformer


class HierarchicalGT(GraphTransformer):
    """ANS-GT: all that is known of a node is its features, and of a pair of nodes the bias."""
