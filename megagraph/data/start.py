"""Where the learned part of a bias starts, and in which units."""

from __future__ import annotations

import numpy as np
import torch

from megagraph.data.batch import Share
from megagraph.data.build import Builder
from megagraph.data.options import PAIR_CLASSES, BatchOptions
from megagraph.data.structure import BiasChannels

_NODES = 2**12  # so many slots of sequences are looked at
_ROWS = 128  # and of a sequence about so many of its regular rows


def bias_start(builder: Builder) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Units and initial values of the learned part of a bias, ``ModelConfig.bias_unit`` and ``bias_start``.

    Buckets: distance d starts at -d, "further" as one more than the largest, likewise to super nodes and, in full
    batches, for pairs that PageRank lists; the own super node and global tokens at 0.

    Channels: the unit of a channel is its standard deviation over the pairs of two nodes in which it is not 0, 1 where
    all of these are equal.
    """
    structure = builder.structure
    return channel_deviations(builder) if isinstance(structure, BiasChannels) else (), structure.start


def bias_labels(options: BatchOptions) -> list[str]:
    """What each channel or bucket of a bias says of a pair of nodes, in a word."""
    if options.batching == "full":
        classes = [*(f"above 2^-{c + 3}" for c in range(PAIR_CLASSES - 1)), "less"]
        near = [f"hop {h}, {c}" for h in range(1, options.hops + 1) for c in classes]
        listed = [f"listed, {c}" for c in classes] if options.top else []
        coarse = [*map(str, range(options.max_distance + 1)), "further"]
        return ["self", *near, *listed, *(f"super {d}" for d in coarse), "own super", "token"]
    tokens = [f"token {g}" for g in range(options.global_tokens)]
    if options.bias == "projected":
        powers = [f"power {k}" for k in range(1, options.channels + 1)]
        return [*powers, *tokens, *(["own super"] if options.batching == "cluster" else [])]
    distances = [*map(str, range(options.max_distance + 1)), "further"]
    return [*distances, *(f"super {d}" for d in distances), "own super", "token"]


def channel_deviations(builder: Builder) -> tuple[float, ...]:
    """Standard deviation of every channel, over the pairs of two nodes where it is not 0, in some sequences.

    Rounded to three digits: machines may sum in another order, and must agree.
    """
    rng = np.random.default_rng(0)
    num_nodes = builder.graph.num_nodes
    item = builder.plan(rng.permutation(num_nodes), max(1, _NODES // builder.sequence_nodes), None)[0]
    share = Share(cp=max(1, builder.num_regular // _ROWS), embeds=False)
    batch = builder.build(item, np.zeros(num_nodes, bool), rng, share)
    off_diagonal = batch.layout.local_to_global[:, None].numpy() != np.arange(batch.num_nodes)
    deviations = []
    assert isinstance(batch.structure, torch.Tensor)
    for channel in batch.structure.unbind(1):
        values = channel[:, off_diagonal].double().numpy()
        deviation = values[values != 0].std() if values.any() else 0.0
        deviations.append(float(f"{deviation:.3g}") or 1.0)
    return tuple(deviations)
