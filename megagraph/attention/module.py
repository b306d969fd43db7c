"""Multi-head attention with a graph bias, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megagraph.attention.bias import Bias
from megagraph.attention.operator import Impl, biased_attention


class BiasedRingAttention(nn.Module):
    r"""Multi-head self-attention with an additive graph bias.

    .. math:: O_i = \mathrm{softmax}(Q_i K^\top / \sqrt{D} + b_i)\, V        (paper Eq. 1-2)

    Args:
        embed_dim: width E of the input and output.
        num_heads: attention heads H; must divide ``embed_dim``.
        dropout: probability to drop an attention weight in training.
        bias: learn an offset in the query, value and output projections; keys have none, it cancels in the softmax.
        impl: see :func:`megagraph.biased_attention`.

    Shapes:
        x:         [B, N, E]
        attn_bias: [B or 1, H or 1, M, N], a bias class or a float tensor; M = ``num_queries`` or N
        returns    [B, M, E]

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``; a shape above does not hold.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        impl: Impl | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim = {embed_dim}, got {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.impl = impl
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        attn_bias: Bias | Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        dropout_key: Tensor | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            key_padding_mask: bool [B, N], True = ignore.
            dropout_key: int32 [B], see :func:`megagraph.dropout_keys`; ``None`` in training draws one from the default
                generator. Not used in evaluation.
            num_queries: compute the first M rows only; ``attn_bias`` then has M rows.
        """
        dropout_p = self.dropout if self.training else 0.0
        if dropout_p > 0.0 and dropout_key is None:
            dropout_key = torch.randint(-(2**31), 2**31, (x.shape[0],), dtype=torch.int32, device=x.device)
        out = biased_attention(
            self._heads(self.q_proj(x[:, :num_queries])),
            self._heads(self.k_proj(x)),
            self._heads(self.v_proj(x)),
            attn_bias,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            impl=self.impl,
        )
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, H, N, D]."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
