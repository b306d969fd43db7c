"""The transformer layer that all models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from megagraph.attention.bias import Bias, BorderedData, BucketBias, ProjectedBias
from megagraph.attention.convolution import convolve
from megagraph.attention.exchange import make_exchange
from megagraph.attention.hidden import hidden_dropout
from megagraph.attention.layout import NodeLayout
from megagraph.attention.module import BiasedRingAttention
from megagraph.attention.neighbours import Neighbours
from megagraph.attention.packing import Packing
from megagraph.models.config import ModelConfig
from megagraph.models.recompute import recomputed

# one number per place where a layer drops something; the key of a place is mix_key(key, layer, place)
DROPOUT_PLACES = 3
_IN_ATTENTION, _AFTER_ATTENTION, _AFTER_FFN = range(DROPOUT_PLACES)


@dataclass(frozen=True, eq=False, kw_only=True)
class Context:
    """What a batch tells every layer.

    Args:
        structure: channels [B or 1, C, S, N] or uint8 buckets [B or 1, S, N]; S = N on one rank, and N for S where
            ranks attend by heads. Or, of a whole graph, the buckets of listed pairs and of super nodes.
        key_padding_mask: bool [B, N], True = padding.
        layout: which nodes the S rows are.
        neighbours: of the regular nodes of one sequence, where layers have a convolution.
        dropout_key: int32 [B], the step's key of each sequence; ``None`` outside training.
        place_keys: of each layer those of its places that drop something, int32 [B] each.
        packing: hidden states are packed rows [T, d] of whole sequences on one rank; ``None``: they are [B, S, d].
    """

    structure: Tensor | BorderedData
    key_padding_mask: Tensor
    layout: NodeLayout
    neighbours: Neighbours | None = None
    dropout_key: Tensor | None = None
    place_keys: Mapping[int, Sequence[Tensor]] | None = None
    packing: Packing | None = None


class GraphTransformerLayer(nn.Module):
    """Pre-LN layer: x += Drop(Attention(LN(x))); x += Drop(FFN(LN(x))), FFN = Linear, GELU, Linear.

    With ``config.convolution`` regular nodes have A~ W LN(x) beside Attention(LN(x)), GCN's sum over neighbours.

    The structure of the batch (adjacency channels or distance buckets) is shared by all layers; each layer owns the
    weight [H, C] or table [H, R] that turns it into its bias, in units of ``config.bias_unit``.

    With ``checkpoint`` set, a layer keeps its inputs only and computes the rest again for the backward pass, with the
    same dropout; on several ranks all of them must do so.

    Args:
        index: position of this layer in the whole model, part of its dropout key.
        mesh: the CP group over which the nodes of a sequence are spread; ``None`` for one rank.
    """

    def __init__(self, config: ModelConfig, index: int, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.index = index
        self.bias_form = config.bias
        self.dropout = config.dropout
        self.checkpoint = False
        self.bias_weight = nn.Parameter(torch.empty(config.heads, config.bias_size))
        self.bias_unit: Tensor | None
        unit = torch.tensor(config.bias_unit) if config.bias_unit else None
        self.register_buffer("bias_unit", unit, persistent=False)
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = BiasedRingAttention(config.dim, config.heads, dropout=config.attention_dropout, mesh=mesh)
        self.convolution = nn.Linear(config.dim, config.dim, bias=False) if config.convolution else None
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim), nn.GELU(), nn.Linear(config.ffn_dim, config.dim)
        )

    def forward(self, x: Tensor, context: Context, num_queries: int | None = None) -> Tensor:
        """One layer, on the S rows of a rank (all N on one rank).

        Args:
            x: [B, S, d], or packed.
            num_queries: compute only the first M rows of every sequence.

        Returns:
            [B, M, d], M = S unless ``num_queries`` says less; packed as x is, but with ``num_queries``.
        """
        if self.checkpoint and torch.is_grad_enabled():
            # inside the layer, so that fully_shard has gathered its weights once by then
            return checkpoint(self._forward, x, context, num_queries, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, context, num_queries)

    def _forward(self, x: Tensor, context: Context, num_queries: int | None) -> Tensor:
        rows, packing = slice(num_queries), context.packing
        keys = DROPOUT_PLACES * (None,) if context.place_keys is None else context.place_keys[self.index]
        learned = self.bias_weight if self.bias_unit is None else self.bias_weight / self.bias_unit
        bias: Bias
        if isinstance(context.structure, BorderedData):
            bias = context.structure.bias(learned)
        elif self.bias_form == "bucket":
            bias = BucketBias(context.structure, learned)
        else:
            bias = ProjectedBias(context.structure, learned)
        # else all layers have one tensor, whose values are checked once
        if num_queries is not None and not self.attention.by_heads:
            bias = bias.rows(rows)
        with self._cheap(self.attention_norm, x) as normed:
            h = self.attention(
                normed,
                bias,
                layout=context.layout,
                key_padding_mask=context.key_padding_mask,
                dropout_key=keys[_IN_ATTENTION],
                num_queries=num_queries,
                packing=packing,
            )
            if self.convolution is not None:
                h = _with_first_rows(h, self._convolved(self.convolution, normed, context))
        if num_queries is not None:
            x, packing = x[:, rows] if packing is None else packing.first_rows(x, num_queries), None
        x = x + hidden_dropout(h, self.dropout, keys[_AFTER_ATTENTION], context.layout, packing)
        grow, activate, shrink = self.ffn
        with self._cheap(self.ffn_norm, x) as h:
            h = grow(h)
        with self._cheap(activate, h) as h:
            h = shrink(h)
        return x + hidden_dropout(h, self.dropout, keys[_AFTER_FFN], context.layout, packing)

    def _convolved(self, weight: nn.Linear, x: Tensor, context: Context) -> Tensor:
        """Convolution of the regular rows of one sequence, [1, R, d]."""
        layout, mesh = context.layout, self.attention.mesh
        assert context.neighbours is not None
        exchange = None if mesh is None or layout.world_size == 1 else make_exchange(mesh, x.device)
        (sums,) = convolve(exchange, [layout], [context.neighbours], [weight(x[0, : layout.block_size])])
        return sums[None]

    def _cheap(self, function: nn.Module, x: Tensor) -> AbstractContextManager[Tensor]:
        """function(x), which what reads it does not keep for backward; a layer that is computed again keeps nothing."""

        def make(x: Tensor) -> Tensor:
            return _rounded(function(x))

        return nullcontext(make(x)) if self.checkpoint else recomputed(make, x)


def _with_first_rows(x: Tensor, more: Tensor) -> Tensor:
    """x [1, M, d], to whose first rows those of ``more`` [1, R, d] are added."""
    rows = min(x.shape[1], more.shape[1])
    return torch.cat([x[:, :rows] + more[:, :rows], x[:, rows:]], dim=1)


def _rounded(x: Tensor) -> Tensor:
    """x in the dtype in which autocast's products read it, rounded once for all of them."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
