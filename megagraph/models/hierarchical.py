"""HierarchicalGT: ANS-GT's architecture (Zhang et al., NeurIPS 2022) for node classification."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megagraph.attention.dropout import hidden_dropout, mix_key
from megagraph.models.config import ModelConfig
from megagraph.models.layers import GraphTransformerLayer

_INPUT_SITE = 3  # after the layers' own sites 0..2, with the layer index -1


class HierarchicalGT(nn.Module):
    """Linear(d_in -> d) on raw features, learned global tokens, L pre-LN layers, LayerNorm, Linear(d -> classes).

    Super nodes are rows like any other: the mean feature of their members passes the same projection. Raw features
    are projected once per distinct node of the batch, and the last layer computes the rows that are read out only.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.input_proj = nn.Linear(config.in_features, config.dim)
        self.global_tokens = nn.Parameter(torch.empty(config.global_tokens, config.dim))
        self.layers = nn.ModuleList(GraphTransformerLayer(config, index) for index in range(config.layers))
        self.final_norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights from N(0, 0.02 / sqrt(L)), global tokens from N(0, 0.02), offsets zero, as ANS-GT."""
        std = 0.02 / self.config.layers**0.5
        for name, parameter in self.named_parameters():
            if name == "global_tokens":
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        features: Tensor,
        node_index: Tensor,
        structure: Tensor,
        key_padding_mask: Tensor,
        *,
        num_targets: int = 1,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Class scores of the first rows of every sequence.

        Args:
            features: [U, d_in], the batch's distinct raw rows (graph nodes and super nodes).
            node_index: int64 [B, N - G], the row of ``features`` at each position; G global tokens follow at the end.
            structure: channels [B or 1, C, N, N] or uint8 buckets [B or 1, N, N].
            key_padding_mask: bool [B, N], True = padding.
            num_targets: T, rows to read out.
            dropout_key: int32 [B] from :func:`megagraph.dropout_keys`; needed in training, ignored in evaluation.

        Returns:
            logits [B, T, num_classes].
        """
        if self.training and dropout_key is None:
            raise ValueError("dropout_key is needed in training; make one with megagraph.dropout_keys(seed, step, ids)")
        key = dropout_key if self.training else None
        x = self.embed(features, node_index, key)
        for layer in self.layers:
            rows = num_targets if layer is self.layers[-1] else None
            x = layer(x, structure, key_padding_mask, key, rows)
        return self.head(self.final_norm(x))

    def embed(self, features: Tensor, node_index: Tensor, dropout_key: Tensor | None) -> Tensor:
        """Input rows [B, N, d], global tokens last."""
        projected = self.input_proj(features.to(self.input_proj.weight.dtype))
        x = nn.functional.embedding(node_index, projected)
        tokens = self.global_tokens.to(x.dtype).expand(x.shape[0], -1, -1)
        key = None if dropout_key is None else mix_key(dropout_key, -1, _INPUT_SITE)
        return hidden_dropout(torch.cat([x, tokens], dim=1), self.config.input_dropout, key)
