"""Where the attention of a trained model goes: what share of it each kind of pair gets.

lse_i is the log of a sum of exponentials of scores, so its derivative by a number that is added to the scores of some
pairs is the attention that row i pays to these: that of sum_i lse_i by a table of buckets is all of it at once, and no
attention weight is ever held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.bias import Bias, BorderedBias, BucketBias, DenseBias
from megagraph.attention.context_parallel import ring_attention
from megagraph.attention.layout import NodeLayout
from megagraph.attention.module import BiasedRingAttention
from megagraph.data.batch import Batch
from megagraph.data.start import bias_labels
from megagraph.evaluate import batches, choose_split, make_loader, open_run
from megagraph.models.transformer import GraphTransformer

MOST_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Focus:
    """Shares of attention.

    Args:
        shares: fp64 [L, H, K], of the rows of a layer that are read, which in the last one are the targets; each head's
            add up to 1.
        kinds: what each of the K is, in a word.
    """

    shares: np.ndarray
    kinds: list[str]


def attention_focus(run: Path | str, data: Any = None, *, most_batches: int = MOST_BATCHES, **changes: Any) -> Focus:
    """By kind of pair, in the first batches of the validation and test nodes of a run's split.

    Kinds are the buckets of a bucket bias. Of a projected one they are the least power of the adjacency that is not
    zero, which is the distance in hops; pairs with a super node; and those with a global token.

    Args:
        run, data, changes: as for ``predict``.
        most_batches: how many of these batches, at most.

    Returns:
        ``kinds``, what each of the K kinds is, in a word, and ``shares``, fp64 [L, H, K], the share of the attention of
        each layer and head that a kind gets.

    Raises:
        FileNotFoundError, ValueError: as for ``predict``.

    Examples:
        >>> small = {"layers": 1, "dim": 16, "heads": 2, "batching": "cluster", "sequence_nodes": 128}
        >>> _ = mg.Trainer(mg.TrainConfig(max_steps=2, out="runs/looked-at", **small)).fit()
        >>> focus = attention_focus("runs/looked-at")
        >>> focus.shares.shape == (1, 2, len(focus.kinds))
        True
    """
    opened = open_run(run, data, changes)
    config, (stage,) = opened.config, opened.pipeline.stages
    split = choose_split(opened.graph, config)
    loader = make_loader(config, batches(config, opened.graph), np.concatenate([split.val, split.test]))
    if config.bias_form == "bucket":
        kinds = bias_labels(config.batch_options)
    else:
        kinds = ["self", *map(str, range(1, config.channels + 1)), "further", "super node", "token"]
    layers = opened.pipeline.config.layers
    sums, rows = np.zeros((layers, config.heads, len(kinds))), np.zeros(layers, np.int64)
    opened.pipeline.train(False)
    for batch in opened.pipeline.receive(islice(loader.epoch(0), most_batches)):
        index = None if config.bias_form == "bucket" else _kinds(batch, config.channels)
        found, counts = _of_batch(stage.model, opened.pipeline.logits, batch, index, len(kinds))
        sums, rows = sums + found, rows + counts
    return Focus(shares=sums / np.maximum(rows, 1)[:, None, None], kinds=kinds)


def _of_batch(
    model: GraphTransformer, run: Callable[[Batch], Any], batch: Batch, index: Tensor | None, num_kinds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Attention [L, H, K] summed over rows, and how many rows these are, [L]."""
    found: list[np.ndarray] = []
    counts: list[int] = []

    def look(attention: BiasedRingAttention, args: tuple, options: dict[str, Any]) -> None:
        (x, bias), packing = args, options["packing"]
        x = x if packing is None else packing.unpack(x)
        given = {name: options[name] for name in ("layout", "key_padding_mask", "num_queries")}
        mass, rows = _mass(attention, x.detach(), bias, index, num_kinds, **given)
        found.append(mass)
        counts.append(rows)

    hooks = [
        layer.attention.register_forward_pre_hook(look, with_kwargs=True)  # type: ignore[operator, union-attr]
        for layer in model.layers.values()
    ]
    try:
        run(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack(found), np.array(counts)


@torch.enable_grad()
def _mass(
    attention: BiasedRingAttention,
    x: Tensor,
    bias: Bias,
    index: Tensor | None,
    num_kinds: int,
    *,
    layout: NodeLayout,
    key_padding_mask: Tensor,
    num_queries: int | None,
) -> tuple[np.ndarray, int]:
    """What the rows of one layer attend to [H, K], and how many rows."""
    q, k = (attention._split(project(x)).detach() for project in (attention.q_proj, attention.k_proj))
    q = q[:, :, :num_queries]
    watched, leaf = _with_leaf(bias, index is not None)
    _, lse = ring_attention(
        q, k, k, watched, layout=layout, key_padding_mask=key_padding_mask, return_lse=True, impl=attention.impl
    )
    seen = ~key_padding_mask[:, : q.shape[2]] & (lse.detach() > -torch.inf).all(dim=1)
    (mass,) = torch.autograd.grad(lse.transpose(1, 2)[seen].sum(), leaf)
    if index is not None:  # attention itself, [B, H, M, N]
        kinds = index[:, : q.shape[2]].long().expand(len(mass), -1, -1)
        mass = torch.stack([(mass * (kinds == kind)[:, None]).sum(dim=(0, 2, 3)) for kind in range(num_kinds)], dim=1)
    return mass.double().cpu().numpy(), int(seen.sum())


def _with_leaf(bias: Bias, dense: bool) -> tuple[Bias, Tensor]:
    """The bias with a new learned part, to differentiate by; ``dense``: that of every pair."""
    if dense:
        values = bias.materialize().detach().contiguous().requires_grad_()
        return DenseBias(values), values
    table = bias.learned.detach().clone().requires_grad_()
    if isinstance(bias, BorderedBias):
        supers = None if bias.super_rows is None else replace(bias.super_rows, table=table)
        parts = replace(bias.pairs, table=table), replace(bias.super_columns, table=table), supers
        return BorderedBias(*parts), table
    assert isinstance(bias, BucketBias)
    return replace(bias, table=table), table


def _kinds(batch: Batch, num_powers: int) -> Tensor:
    """Kind of every pair of a projected bias, int64 [b, N, N]."""
    channels, layout = batch.structure, batch.layout
    assert isinstance(channels, Tensor)
    powers, num_tokens = channels[:, :num_powers] != 0, batch.num_nodes - batch.node_index.shape[1]
    # the first power that is not zero
    kinds = torch.where(powers.any(dim=1), powers.int().argmax(dim=1) + 1, num_powers + 1)
    kinds.diagonal(dim1=1, dim2=2).zero_()
    at = torch.arange(batch.num_nodes, device=kinds.device)
    for first, kind in ((layout.num_nodes, num_powers + 2), (batch.num_nodes - num_tokens, num_powers + 3)):
        beyond = at >= first
        kinds[:, beyond], kinds[:, :, beyond] = kind, kind
    return kinds
