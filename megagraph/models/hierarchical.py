"""HierarchicalGT: ANS-GT's architecture (Zhang et al., NeurIPS 2022) for node classification."""

from __future__ import annotations

from megagraph.models.transformer import GraphTransformer


class HierarchicalGT(GraphTransformer):
    """ANS-GT: all that is known of a node is its features, and of a pair of nodes the bias.

    Args:
        config: sizes, see [megagraph.ModelConfig][].
        mesh: the context-parallel group over which the nodes of a sequence are spread; ``None`` for one rank.

    Examples:
        Eight sequences of 16 nodes, which are rows of ``features``, and a global token.

        >>> config = mg.ModelConfig(in_features=10, num_classes=3, layers=2, dim=32, heads=4, bias_size=7)
        >>> model = mg.HierarchicalGT(config).eval()
        >>> features, node_index = torch.randn(40, 10), torch.randint(0, 40, (8, 16))
        >>> channels, padding = torch.rand(8, 7, 17, 17), torch.zeros(8, 17, dtype=torch.bool)
        >>> model(features, node_index, channels, padding).shape  # scores of the first node of each
        torch.Size([8, 1, 3])
    """
