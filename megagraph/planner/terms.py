"""How costs grow: the terms of every part of a step, each of which has a coefficient of the device (paper Sec. 3.3).

m sequences, ``rows`` of each on a rank, ``queries`` of these that go through a layer. A term is a count: multiply-adds
("product"), numbers read and written ("element", "row", "state"), scores, bytes, or calls.

    paper                      here
    b, N', N_s, S              m, num_nodes, num_super, rows
    d, d_ff, h, l              dim, ffn_dim, heads, layers
    t_fwd, t_bwd               layer_terms and attention_terms, times "forward", "backward"
    t_emb, t_proj              embedding_terms, head_terms
    t_p2p, t_allreduce         Links.boundaries, all_reduce_terms
    c_mlp, c_attn              kept.element, kept.score
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megagraph.models.config import ModelConfig
from megagraph.planner.split import Floats

Terms = dict[str, float]
Rates = Mapping[str, float]


_LAUNCHES = {
    f"{part}.call": f"{part}.launch" for part in ("layer", "attention", "pair", "embedding", "head", "optimizer")
}


def dot(rates: Rates, terms: Terms) -> float:
    """Seconds or bytes: every term times its rate, what has none is free.

    Launches of a GPU's kernels run ahead of it: of what the host spends on them and what they start the longer counts.
    """
    work = sum(rates.get(name, 0.0) * value for name, value in terms.items())
    if "layer.launch" not in rates and "attention.launch" not in rates:  # of a CPU; a search asks very often
        return work
    return max(work, sum(rates.get(_LAUNCHES[name], 0.0) * terms[name] for name in terms.keys() & _LAUNCHES.keys()))


def as_launches(name: str) -> str:
    """The rate of a term where the device works on while the host calls: of calls, that of their launches."""
    return _LAUNCHES.get(name, name)


def layer_terms(m: float, rows: float, queries: float, config: ModelConfig) -> Terms:
    """A layer but for its attention and the sums of a convolution; keys and values, and what a convolution sums, of all
    rows, the rest for the queries only."""
    d = config.dim
    return {
        "layer.call": 1.0,
        "layer.product": m * (rows * (2 + config.convolution) * d**2 + queries * (2 * d**2 + 2 * d * config.ffn_dim)),
        "layer.element": m * (rows + queries) * d,
        "layer.ffn_element": m * queries * config.ffn_dim,
    }


def attention_terms(m: float, queries: float, keys: float, config: ModelConfig, *, ring: bool, ranks: int = 1) -> Terms:
    """One call of the fused step [t_step(S, n)]: ``queries`` rows against ``keys`` columns; to ``ranks`` the heads are
    dealt out."""
    scores, heads, dim = m * queries * keys, config.heads / ranks, config.dim / ranks
    channels = config.bias_size if config.bias == "projected" else 1
    return {
        "attention.call": 1.0,
        "attention.score": scores * heads,
        "attention.product": scores * dim,
        "attention.bias": scores * channels,
        "attention.row": m * queries * heads,
        "attention.state": m * queries * dim if ring else 0.0,
    }


def listed_terms(
    m: float, block: float, num_super: float, pairs: float, config: ModelConfig, *, supers: bool, ranks: int = 1
) -> Terms:
    """Attention where pairs are listed: of ``block`` regular rows to super nodes and along the pairs, and of the super
    rows, if they are computed, to all; ``ranks`` as above. The sums of a convolution are of its pairs, too."""
    terms = attention_terms(m, block, num_super, config, ring=False, ranks=ranks)
    if supers:
        others = attention_terms(m, num_super, block + num_super, config, ring=False, ranks=ranks)
        terms = {name: value + others[name] for name, value in terms.items()}
    scores, products = m * pairs * config.heads / ranks, m * pairs * config.dim / ranks
    return terms | {"pair.call": 1.0, "pair.score": scores, "pair.product": products}


def embedding_terms(m: float, rows: float, dim: int, in_features: int, feature_rows: float) -> Terms:
    return {
        "embedding.call": 1.0,
        "embedding.product": feature_rows * in_features * dim,
        "embedding.element": m * rows * dim,
    }


def head_terms(m: float, targets: float, dim: int, num_classes: int) -> Terms:
    return {"head.call": 1.0, "head.product": m * targets * dim * num_classes, "head.element": m * targets * dim}


def optimizer_terms(parameters: float) -> Terms:
    return {"optimizer.call": 1.0, "optimizer.parameter": parameters}


def all_reduce_terms(size: float, ranks: int) -> Terms:
    """A ring all-reduce: every rank sends 2 (n - 1) / n of the message in 2 (n - 1) parts."""
    return {"all_reduce.call": 2.0 * (ranks - 1), "all_reduce.byte": 2 * (ranks - 1) / ranks * size}


def kept_terms(
    m: float, rows: float, queries: float, columns: float, config: ModelConfig, *, mixed: bool = False
) -> Terms:
    """What a layer keeps for backward; the scores only where an implementation stores them [c_attn].

    Args:
        mixed: weights are rounded in every forward pass, and these kept, too.
    """
    weights = (4 + config.convolution) * config.dim**2 + 2 * config.dim * config.ffn_dim
    return ({"kept.weight": float(weights)} if mixed else {}) | {
        "kept.key": m * rows * config.dim,
        "kept.element": m * queries * config.dim,
        "kept.ffn_element": m * queries * config.ffn_dim,
        "kept.row": m * (rows + queries),
        "kept.head_row": m * queries * config.heads,
        "kept.score": m * queries * columns * config.heads,
    }


def embedding_kept_terms(m: float, rows: float, config: ModelConfig, *, mixed: bool = False) -> Terms:
    rounded = {"kept.in_weight": float(config.in_features * config.dim)} if mixed else {}
    return rounded | {"kept.embedding": m * rows * config.dim}


def head_kept_terms(m: float, rows: float, targets: float, config: ModelConfig, *, mixed: bool = False) -> Terms:
    """The read-out's inputs and scores; where the last layer's rows are not one piece of memory, a copy of them."""
    rounded = {"kept.out_weight": float(config.dim * config.num_classes)} if mixed else {}
    return rounded | {
        "kept.head": m * targets * config.dim,
        "kept.class": m * targets * config.num_classes,
        "kept.slice": m * targets * config.dim if m > 1 and targets < rows else 0.0,
    }


def workspace_terms(m: float, rows: float, targets: float, config: ModelConfig) -> Terms:
    """What a layer needs while it runs, or the gradient of the loss."""
    return {
        "workspace.fixed": 1.0,
        "workspace.element": m * rows * config.dim,
        "workspace.ffn_element": m * rows * config.ffn_dim,
        "workspace.class": m * targets * config.num_classes,
    }


def stage_parameters(config: ModelConfig, layers: Sequence[float] | Floats, codes: int = 0) -> Floats:
    """Parameters of every stage of a model, from its layers, and from the degrees that have a vector on the first one;
    [stages, ...], as ``layers``."""
    d, ffn = config.dim, config.ffn_dim
    attention = (4 + config.convolution) * d * d + 3 * d
    feed_forward = 2 * d * ffn + ffn + d
    parameters = np.asarray(layers, float) * (attention + feed_forward + 4 * d + config.heads * config.bias_size)
    parameters[0] += config.in_features * d + d + (config.global_tokens + codes) * d
    parameters[-1] += 2 * d + d * config.num_classes + config.num_classes
    return parameters
