"""What is chosen of the files of a graph, and of batches, whatever the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

SEQUENCE_ALIGNMENT = 128
MOST_BUCKETS = 255
MOST_CHANNELS = 16
PAIR_CLASSES = 8  # of the weight of a pair of nodes, in full batches
_CLUSTER_SUPER_NODES = 64

Scope = Literal["auto", "graph", "batch"]
Batching = Literal["ego", "cluster", "full"]
_READ_BY = {  # kinds of batches, or forms of the bias, that alone read these
    "ego": ("samples", "sample_nodes", "candidates", "epsilon", "super_ratio"),
    "cluster": ("sequence_nodes",),
    "full": ("hops", "top", "max_pairs"),
    "projected": ("channels", "power_scope", "power_gib"),
    "bucket": ("max_distance",),
}
FeatureForm = Literal["same", "fp32", "fp16", "sparse"]  # of a store


@dataclass(frozen=True, kw_only=True)  # no slots: TrainConfig has these defaults from the class
class BatchOptions:
    """How sequences are made of a graph; paper symbols in brackets.

    Args:
        batching: ``"ego"`` (``EgoBatches``), ``"cluster"`` (``ClusterBatches``) or ``"full"`` (``FullBatches``).
        bias: ``"projected"`` (``BiasChannels``) or ``"bucket"`` (``DistanceBuckets``).
        channels, channel_dtype: of a projected bias: powers of the adjacency, and the dtype they come in.
        power_scope, power_gib: whose powers, and what they may take [GiB] (``AdjacencyPowers``).
        max_distance: of a bucket bias: largest distance with a bucket of its own.
        global_tokens: G, at the end of every sequence.
        propagate: features of so many powers of the adjacency beside a node's own (``smooth.propagated``).
        degree_input: the degree of a node beside its features (``smooth.with_degrees``).
        label_input: of full batches: labels of training nodes are input, of such a part of them in a training step
            (``FullBatches``); 0: of none.
        partitions: of full batches: training takes a step on each of so many parts of the graph, other ones every
            epoch (``FullBatches``).
        convolution: of full batches: they say who is whose neighbour (``Neighbours``), for the convolution of a layer.
        sample_nodes, samples: of ego batches: nodes sampled around a target, and sequences of it.
        candidates, epsilon: of ego batches: the most others that a node samples from, the nearest by PageRank, and to
            what precision these are found (``Pagerank``); ``num_candidates`` has the default.
        shuffle_structure: the bias is that of a random relabelling of the nodes, with partitions one that keeps pieces
            together, and tells nothing of them.
        super_ratio: of ego batches: super nodes of the coarsened graph per node.
        sequence_nodes: of cluster batches: regular nodes of a sequence [N'].
        hops, top, max_pairs: of full batches: which pairs of nodes attend (``PairBuckets``), and how many may.
        super_nodes: of a sequence, with the global tokens; ``num_super`` has the default.

    Raises:
        ValueError: a value that no batch can have.
    """

    batching: Batching = "ego"
    bias: Literal["projected", "bucket"] = "projected"
    channels: int = 6
    power_scope: Scope = "auto"
    power_gib: float = 4.0
    channel_dtype: Literal["fp32", "bf16"] = "fp32"
    max_distance: int = 5
    global_tokens: int = 1
    propagate: int = 0
    degree_input: bool = False
    label_input: float = 0.0
    partitions: int = 1
    convolution: bool = False
    sample_nodes: int = 14
    samples: int = 8
    candidates: int | None = None
    epsilon: float = 1e-4
    shuffle_structure: bool = False
    super_ratio: float = 0.1
    sequence_nodes: int = 1024
    hops: int = 1
    top: int = 32
    max_pairs: int = 1 << 28
    super_nodes: int | None = None

    def __post_init__(self) -> None:
        words = {"batching": get_args(Batching), "bias": ("projected", "bucket"), "power_scope": get_args(Scope)}
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}")
        if not 0.0 < self.power_gib < math.inf:
            raise ValueError(f"power_gib must be above 0, got {self.power_gib}")
        least = dict.fromkeys(("channels", "max_distance", "sample_nodes", "samples", "sequence_nodes", "hops"), 1)
        least |= {"max_pairs": 1, "partitions": 1, "global_tokens": 0, "propagate": 0, "top": 0}
        for name, low in least.items():
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not 0.0 <= self.label_input < 1.0:
            raise ValueError(f"label_input must be in [0, 1), got {self.label_input}")
        only_full = {
            "label_input": self.label_input > 0.0,
            "partitions": self.partitions > 1,
            "convolution": self.convolution,
        }
        for name, given in only_full.items():
            if given and self.batching != "full":
                raise ValueError(f"{name} needs batching full, got {self.batching}")
        if self.batching == "full" and self.bias != "bucket":
            raise ValueError(f"bias must be bucket or auto for full batches, got {self.bias}")
        if self.batching == "full" and (buckets := self.num_full_buckets) > MOST_BUCKETS:
            raise ValueError(
                f"hops and max_distance must make at most {MOST_BUCKETS} buckets, got {buckets}; lower them"
            )
        if self.bias == "projected" and self.num_channels > MOST_CHANNELS:
            raise ValueError(
                f"channels with one for each of {self.global_tokens} global_tokens"
                + (" and one for the own super node" if self.batching == "cluster" else "")
                + f" must be at most {MOST_CHANNELS}, got {self.num_channels}; lower them"
            )
        if self.bias == "bucket" and self.batching != "full" and num_buckets(self.max_distance) > MOST_BUCKETS:
            most = (MOST_BUCKETS - num_buckets(0)) // 2
            raise ValueError(f"max_distance must be at most {most}, got {self.max_distance}")
        if self.candidates is not None and self.candidates < self.sample_nodes:
            raise ValueError(f"candidates must be at least sample_nodes = {self.sample_nodes}, got {self.candidates}")
        if not 0.0 < self.epsilon < 1.0:
            raise ValueError(f"epsilon must be above 0 and below 1, got {self.epsilon}")
        if not 0.0 < self.super_ratio <= 1.0:
            raise ValueError(f"super_ratio must be in (0, 1], got {self.super_ratio}")
        if self.batching == "cluster" and self.sequence_nodes % SEQUENCE_ALIGNMENT:
            raise ValueError(f"sequence_nodes must be a multiple of {SEQUENCE_ALIGNMENT}, got {self.sequence_nodes}")
        if self.num_super <= self.global_tokens:
            raise ValueError(f"super_nodes must be above global_tokens = {self.global_tokens}, got {self.num_super}")

    @property
    def unread(self) -> list[str]:
        """Fields that are not at their default and change nothing in these batches."""
        others = (names for who, names in _READ_BY.items() if who not in (self.batching, self.bias))
        return [name for names in others for name in names if getattr(self, name) != getattr(BatchOptions, name)]

    @property
    def num_channels(self) -> int:
        """Of a projected bias: powers, and who is a global token, and, in cluster batches, the own super node."""
        return self.channels + self.global_tokens + (self.batching == "cluster")

    @property
    def num_candidates(self) -> int:
        """The most others that a node of ego batches samples from."""
        # samples of one target differ only if there are clearly more candidates than are drawn
        return max(128, 4 * self.sample_nodes) if self.candidates is None else self.candidates

    @property
    def num_pair_buckets(self) -> int:
        """Number of buckets for pairs of two regular nodes, in full batches."""
        return 1 + PAIR_CLASSES * (self.hops + (self.top > 0))

    @property
    def num_full_buckets(self) -> int:
        """Number of buckets for pairs of any nodes, in full batches."""
        return self.num_pair_buckets + self.max_distance + 4

    @property
    def num_super(self) -> int:
        """Super nodes of a sequence, with the global tokens [N_s]."""
        if self.super_nodes is not None:
            return self.super_nodes
        return self.global_tokens + 1 if self.batching == "ego" else _CLUSTER_SUPER_NODES


def num_buckets(max_distance: int) -> int:
    """Of a bucket bias of ego and cluster batches: hops 0..max_distance and "further" for regular pairs, the same again
    for super nodes, own super, global."""
    return 2 * (max_distance + 2) + 2


def deal(number: int, weights: Sequence[int]) -> list[int]:
    """Where so many sequences in a row are cut, 0 and the end among it, to leave parts of these weights."""
    ends = list(accumulate(weights))
    return [0, *(number * end // ends[-1] for end in ends)]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Files of a graph, and what their columns are.

    Args:
        edges: CSV or Parquet (also .gz, .tsv): two columns, the ids of both ends, which may be called as they like.
            Edges have no direction here, none counts twice, and more columns are refused unless they are all the same:
            weights and features of edges are not supported.
        nodes: a column of ids, further ones features; without it nodes are the ends of edges, without features.
        labels: two columns, ids and classes, where the nodes' file has none; who is not in it is not labelled. Where
            an id has several rows a node has several labels: those of its rows, and none of the others.
        id: nodes' column of ids; default the first one.
        label: nodes' column of classes; default the one called label, if there is one. Several columns are several
            labels a node, called as they are: 1 or true, 0 or false, or nothing where it is not known; default those
            called label:NAME, if there are any.
        split: nodes' column that says train, val (or valid, validation) or test; default the one called split, if
            there is one. Who has something else there is in no part.
        drop: nodes' columns to leave out.
    """

    edges: Path | None = None
    nodes: Path | None = None
    labels: Path | None = None
    id: str | None = None
    label: tuple[str, ...] = ()
    split: str | None = None
    drop: tuple[str, ...] = ()
