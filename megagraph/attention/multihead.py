"""In place of ``nn.MultiheadAttention``: with its parameters, arguments and results, and a graph bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megagraph.attention.bias import Bias, DenseBias
from megagraph.attention.engines import Impl
from megagraph.attention.fields import check_strided
from megagraph.attention.operator import biased_attention
from megagraph.attention.sums import as_bias


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that computes [megagraph.biased_attention][], with the bias in ``attn_bias``.

    It is one, so that what asks for one takes it: ``GPSConv`` of torch_geometric, ``nn.TransformerEncoderLayer``.
    Parameters, their names and values are those of ``nn.MultiheadAttention``, and so are results. These callers hand on
    no bias: set ``attn_bias`` before a call, and anew, or to ``None``, before one with other nodes.

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as of ``nn.MultiheadAttention``.
        impl: see [megagraph.biased_attention][].

    Attributes:
        attn_bias: a bias class or a float tensor [B or 1, H or 1, M, N], or ``None``. A parameter is registered on the
            module that owns it, and wrapped here: ``mg.DenseBias(parameter)``.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``; what is said of the arguments of a call does not hold.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
        >>> layer.self_attn = mg.MultiheadAttention.from_multihead_attention(layer.self_attn)
        >>> distances, table = torch.zeros(1, 50, 50, dtype=torch.uint8), torch.zeros(4, 12, requires_grad=True)
        >>> layer.self_attn.attn_bias = mg.BucketBias(distances, table)
        >>> layer(torch.randn(2, 50, 32)).shape
        torch.Size([2, 50, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        impl: Impl | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias=bias, batch_first=batch_first, device=device, dtype=dtype)
        self.impl = impl
        self.attn_bias: Bias | Tensor | None = None
        self._qkv_same_embed_dim = False  # or nn.TransformerEncoderLayer computes attention itself in evaluation

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attn_bias" and isinstance(value, nn.Parameter):  # registered, it would leave room for no bias
            raise ValueError(
                "attn_bias must be a bias class, a float tensor or None, got a parameter; wrap it, "
                "mg.DenseBias(parameter), and register it on the module that owns it"
            )
        super().__setattr__(name, value)

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = True  # as its parameters are
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    @classmethod
    def from_multihead_attention(cls, module: nn.MultiheadAttention, *, impl: Impl | None = None) -> MultiheadAttention:
        """One with the same parameters: those of ``module``, not copies.

        Args:
            module: whose place it takes.
            impl: see [megagraph.biased_attention][].

        Raises:
            ValueError: ``module`` has keys or values of another width, ``add_bias_kv`` or ``add_zero_attn``.
        """
        made = cls(**sizes_of(module), batch_first=module.batch_first, impl=impl, device="meta")
        made.in_proj_weight, made.in_proj_bias = module.in_proj_weight, module.in_proj_bias
        made.out_proj = module.out_proj
        return made.train(module.training)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend; shapes as of ``nn.MultiheadAttention``, [B, M, E] with ``batch_first``, [M, B, E] without, or [M, E].

        Args:
            query: whose rows attend.
            key: [B, N, E], and so on, attended to.
            value: as key.
            key_padding_mask: bool [B, N], True = ignore; or floating point, 0 or -inf.
            need_weights: must be False, and is by default: the weights never exist as a whole.
            attn_mask: bool, True = must not attend, or floating point, added to the scores; [M, N] or [B * H, M, N].
                Beside an ``attn_bias`` that is no dense one, there is no place for it.
            average_attn_weights: has no effect, as there are none.
            is_causal: a hint that ``attn_mask`` is causal; it must be there.

        Returns:
            the result, and ``None`` in place of the weights.

        Raises:
            ValueError: what these say does not hold. Numbers other than 0 and -inf in a ``key_padding_mask`` on a GPU
                are an assertion of the device, as the host would have to wait for them.
        """
        if need_weights:
            raise ValueError("need_weights must be False, got True: the weights never exist as a whole")
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask must be there with is_causal=True, got None; pass the causal mask")
        for name, x in {"query": query, "key": key, "value": value}.items():
            check_strided(name, x)
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        weights = self.in_proj_weight.chunk(3)
        offsets = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, offset).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for x, weight, offset in zip((query, key, value), weights, offsets, strict=True)
        )
        dropout_p, dropout_key = self.dropout if self.training else 0.0, None
        if dropout_p > 0.0:
            dropout_key = torch.randint(-(2**31), 2**31, (len(q),), dtype=torch.int32, device=q.device)
        out = biased_attention(
            q,
            k,
            v,
            self._masked_bias(attn_mask, q, k),
            key_padding_mask=_padding(key_padding_mask),
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            impl=self.impl,
        )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _masked_bias(self, attn_mask: Tensor | None, q: Tensor, k: Tensor) -> Bias | None:
        """``attn_bias`` and ``attn_mask`` as one."""
        bias = as_bias(self.attn_bias)
        if isinstance(bias, Bias):  # of what is none, and of heads, biased_attention speaks
            shape, (batch, heads, rows, _), columns = list(bias.shape), q.shape, k.shape[2]
            if shape[0] not in (1, batch) or shape[2:] != [rows, columns]:
                raise ValueError(
                    f"attn_bias was set for other sequences; set it anew: expected [B or 1, H or 1, M, N] = [{batch} "
                    f"or 1, {heads}, {rows}, {columns}], got {shape}"
                )
        if attn_mask is None:
            return bias
        if attn_mask.ndim != 2 and (attn_mask.ndim != 3 or len(attn_mask) != q.shape[0] * self.num_heads):
            raise ValueError(
                f"attn_mask must have shape [M, N] or [B * H, M, N] with B * H = {q.shape[0] * self.num_heads}, got "
                f"{list(attn_mask.shape)}"
            )
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask, -torch.inf)
        values = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, self.num_heads))
        if bias is None:
            return DenseBias(values)
        if isinstance(bias, DenseBias) and bias.relation is None:
            return replace(bias, values=bias.values + values)
        raise ValueError(
            f"attn_mask must be None beside a {type(bias).__name__} or listed pairs, got one; mask pairs in the bias "
            "(bucket 255, mask, pairs that are not listed), and keys by key_padding_mask"
        )


def _padding(mask: Tensor | None) -> Tensor | None:
    """A key padding mask as bool; ``nn.TransformerEncoderLayer`` makes numbers of it."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    hidden = mask == -torch.inf
    taken = (hidden | (mask == 0)).all()
    message = "key_padding_mask must be bool, or 0 and -inf, got other numbers; add these as attn_mask"
    if torch.compiler.is_compiling() or mask.is_cuda:  # a compiler cannot branch on a number, a host would wait for it
        torch._assert_async(taken, message)
    elif not taken:
        raise ValueError(message)
    return hidden


def sizes_of(module: nn.MultiheadAttention) -> dict[str, Any]:
    """Arguments that make a module like this; ValueError where there is no such attention here."""
    if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
        raise ValueError(
            f"keys and values must be as wide as queries, {module.embed_dim}, got {module.kdim} and {module.vdim}; "
            "project them before"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn must be off, got a module with a key of its own")
    if not isinstance(module.in_proj_weight, nn.Parameter):
        raise ValueError(
            "in_proj_weight must be a parameter, got one that is computed; replace the module first, and parametrize "
            "what takes its place"
        )
    names = ("embed_dim", "num_heads", "dropout")
    return {name: getattr(module, name) for name in names} | {"bias": module.in_proj_bias is not None}


def take_multihead_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: that of an ``nn.MultiheadAttention`` as one of three projections. The offset of
    keys is left out: it adds the same to all scores of a query, and cancels in the softmax."""
    weight, offset = state.pop(f"{prefix}in_proj_weight", None), state.pop(f"{prefix}in_proj_bias", None)
    for given, names in ((weight, ("q_proj.weight", "k_proj.weight", "v_proj.weight")), (offset, _OFFSETS)):
        if given is not None:
            state |= {f"{prefix}{name}": part for name, part in zip(names, given.chunk(3), strict=True) if name}


_OFFSETS = ("q_proj.bias", "", "v_proj.bias")
