"""The specification: biased attention in plain PyTorch, any floating dtype, differentiated by autograd.

Clear, not lean: it holds the dense [B, H, M, N] bias and scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megagraph.attention.bias import Bias
from megagraph.attention.dropout import keep_mask, row_keys


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    key_padding_mask: Tensor | None,
    scale: float,
    dropout_p: float,
    dropout_key: Tensor | None,
    first_head: int = 0,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + b) v -> out [B, H, M, D], lse [B, H, M] (natural log, -inf for an empty row)."""
    compute = torch.promote_types(q.dtype, torch.float32)
    s = scale * (q.to(compute) @ k.to(compute).transpose(-1, -2))  # [B, H, M, N]
    if bias is not None:
        s = s + bias.materialize().to(compute)
    if key_padding_mask is not None:
        s = s.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    empty = (s == -torch.inf).all(dim=-1, keepdim=True)
    # an empty row gets finite scores first, so that neither its softmax nor its gradient is NaN
    p = s.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    lse = s.masked_fill(empty, 0.0).logsumexp(dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)
    if dropout_key is not None:
        rows, columns = (torch.arange(n, device=q.device) for n in s.shape[-2:])
        keep = keep_mask(row_keys(dropout_key, q.shape[1], rows, first_head), columns, dropout_p)
        p = p * keep / (1.0 - dropout_p)  # dropped entries still count in the normaliser
    return (p @ v.to(compute)).to(q.dtype), lse
