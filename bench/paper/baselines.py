"""What a graph transformer is held against: graph networks of torch_geometric, and NodeFormer.

All are trained on the whole graph, Cluster-GCN on parts of it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, ClusterGCNConv, GATConv, GCNConv, GPSConv, Polynormer, SAGEConv, SGFormer
from torch_geometric.transforms import AddRandomWalkPE
from torch_geometric.utils import to_torch_csr_tensor

from bench.paper.nodeformer import NodeFormer
from bench.provenance import sized
from megagraph.data.coarsen import partition
from megagraph.data.graph import Graph, Split
from megagraph.objective import measures

Baseline = Literal["gcn", "sage", "gat", "cluster-gcn", "gps", "sgformer", "polynormer", "nodeformer"]
EVERY = 4  # epochs from one look at the validation nodes to the next
PATIENCE = 200  # epochs without a better one
MOST_EPOCHS = sized(2000, quick=8)
_HEADS = 4  # of GAT and GPS
_WALK = 16  # steps of the random walks whose chances to be back GPS has beside the features


class Network(nn.Module):
    """Convolutions with normalisation, residual connections and dropout, as tuned in Luo et al. (NeurIPS 2024).

    ``classic``: as they were published (Kipf and Welling, 2017; Velickovic et al., 2018): features of a node sum to 1,
    dropout comes before every convolution, and on the attention of a GAT, and the last one gives the scores.
    ``cached``: all calls have the same edges.
    """

    def __init__(
        self,
        kind: Literal["gcn", "sage", "gat", "cluster-gcn"],
        widths: tuple[int, int, int],
        *,
        layers: int,
        norm: Literal["none", "batch", "layer"],
        residual: bool,
        dropout: float,
        classic: bool = False,
        cached: bool = True,
    ) -> None:
        super().__init__()
        wide, hidden, classes = widths
        into = [wide] + [hidden] * (layers - 1 - classic)
        of_attention = dropout if classic else 0.0
        make: Callable[[int, int, int], nn.Module] = {
            "gcn": lambda n, m, heads: GCNConv(n, m, cached=cached),
            "sage": lambda n, m, heads: SAGEConv(n, m),
            "gat": lambda n, m, heads: GATConv(n, m // heads, heads=heads, dropout=of_attention),
            "cluster-gcn": lambda n, m, heads: ClusterGCNConv(n, m),
        }[kind]
        norms = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
        self.classic = classic
        self.convolutions = nn.ModuleList(make(n, hidden, _HEADS) for n in into)
        self.shortcuts = nn.ModuleList(nn.Linear(n, hidden) for n in into) if residual else None
        self.norms = nn.ModuleList(norms[norm](hidden) for _ in into)
        self.dropout = nn.Dropout(dropout)
        self.head = make(hidden, classes, 1) if classic else nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Features [V, d_in] -> scores [V, classes]."""
        if self.classic:
            x = self.dropout(nn.functional.normalize(x, p=1))
        for i, convolution in enumerate(self.convolutions):
            h = convolution(x, edges)
            if self.shortcuts is not None:
                h = h + self.shortcuts[i](x)
            x = self.dropout(self.norms[i](h).relu())
        return self.head(x, edges) if self.classic else self.head(x)


class GPS(nn.Module):
    """Layers of a GCN convolution beside attention of all nodes (Rampasek et al., NeurIPS 2022)."""

    def __init__(self, widths: tuple[int, int, int], *, layers: int, dropout: float) -> None:
        super().__init__()
        wide, hidden, classes = widths
        self.inputs = nn.Linear(wide, hidden)
        self.layers = nn.ModuleList(  # none of the attention's own dropout, with which torch keeps all scores
            GPSConv(hidden, GCNConv(hidden, hidden, cached=True), _HEADS, dropout) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Features and encodings [V, d_in + _WALK] -> scores [V, classes]."""
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


class _WithBatch(nn.Module):
    """SGFormer and Polynormer ask which graph a node is of; here all are of one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.network(x, edges, torch.zeros(len(x), dtype=torch.int64))


def make(baseline: Baseline, widths: tuple[int, int, int], settings: dict[str, Any]) -> nn.Module:
    """The network of these widths (features, hidden, classes); settings are those of its class.

    ``classic`` SGFormer: as its authors have it for graphs of this size, whose convolutions have neither normalisation
    nor residual connections; torch_geometric's are those for large graphs.
    """
    if baseline == "sgformer":
        given = {name: value for name, value in settings.items() if name != "classic"}
        network = SGFormer(*widths, **given)
        if "classic" in settings:
            network.graph_conv = GCN(*widths[:2], given["gnn_num_layers"], dropout=given["gnn_dropout"], cached=True)
        return _WithBatch(network)
    if baseline == "polynormer":
        return _WithBatch(Polynormer(*widths, **settings))
    if baseline == "nodeformer":
        return NodeFormer(widths, **settings)
    if baseline == "gps":
        return GPS(widths, **settings)
    return Network(baseline, widths, **settings)


def train(
    baseline: Baseline,
    graph: Graph,
    split: Split,
    *,
    seed: int,
    metric: str,
    most_seconds: float,
    hidden: int,
    learning_rate: float,
    weight_decay: float,
    local_epochs: int = 0,
    clusters: int = 1,
    clusters_together: int = 1,
    label_input: float = 0.0,
    most_epochs: int = MOST_EPOCHS,
    **settings: Any,
) -> tuple[dict[str, Any], np.ndarray]:
    """Train until validation has not improved for PATIENCE epochs, or for this many CPU seconds.

    Args:
        metric: ``accuracy`` or ``roc_auc``, by which the epoch is chosen.
        local_epochs: of Polynormer, before its global attention joins.
        clusters, clusters_together: into how many METIS cuts the graph, and of how many a step is (Cluster-GCN).
        label_input: labels of this part of the training nodes, drawn every epoch, are input beside features, and the
            loss is that of the others; in evaluation those of all of them (Shi et al., 2021).
        most_epochs: no more of them, of which every EVERY-th is looked at.
        settings: as of ``make``.

    Returns:
        ``best_val`` and ``test`` of that epoch, ``best_epoch``, ``epochs``, ``stopped`` by what, ``cpu_seconds``; and
        the probabilities [V, classes] of that epoch.
    """
    started = time.process_time()
    torch.manual_seed(seed)
    # attention and Cluster-GCN need the edges one by one
    edges_of = _pairs if baseline in ("gat", "cluster-gcn", "nodeformer") or settings.get("local_attn") else _csr
    edges = edges_of(graph.adjacency)
    x = torch.empty(graph.num_nodes, graph.in_features)
    graph.read_features(np.arange(graph.num_nodes), x.numpy())
    if baseline == "gps":
        x = AddRandomWalkPE(_WALK, attr_name=None)(Data(x, _pairs(graph.adjacency))).x
    if clusters > 1:
        settings["cached"] = False
    wide = x.shape[1] + (graph.num_classes if label_input else 0)
    network = make(baseline, (wide, hidden, graph.num_classes), settings)
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    labels, known = torch.tensor(graph.labels), torch.zeros(graph.num_nodes, dtype=torch.bool)
    known[split.train] = True
    parts, draws = partition(graph, clusters), np.random.default_rng(seed)

    def of(*chosen: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        nodes = np.flatnonzero(np.isin(parts, chosen))
        return x[nodes], edges_of(graph.adjacency[nodes][:, nodes]), labels[nodes], known[nodes]

    batch = cache(of) if clusters_together == 1 else of  # a cluster alone is the same each time

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Batches of an epoch: features, edges, labels, and which nodes are trained on."""
        if clusters == 1:
            yield x, edges, labels, known
            return
        for chosen in np.split(draws.permutation(clusters), range(clusters_together, clusters, clusters_together)):
            found = batch(*chosen)
            if found[3].any():
                yield found

    def told(features: Tensor, right: Tensor, shown: Tensor) -> Tensor:
        """Features, and the labels of these nodes."""
        columns = nn.functional.one_hot(right.clamp(min=0), graph.num_classes) * shown[:, None]
        return torch.cat([features, columns], dim=1)

    best: dict[str, Any] = {"best_val": -1.0}
    of_best = np.empty(0)
    for epoch in range(most_epochs):
        if baseline == "polynormer":
            network.network._global = epoch >= local_epochs
        network.train()
        for features, among, right, asked in batches():
            optimizer.zero_grad()
            if label_input:
                shown = asked & (torch.rand(len(asked)) < label_input)
                features, asked = told(features, right, shown), asked & ~shown
            loss = nn.functional.cross_entropy(network(features, among)[asked], right[asked])
            (loss + getattr(network, "edge_loss", 0.0)).backward()
            optimizer.step()
        if epoch % EVERY == EVERY - 1:
            network.eval()
            with torch.no_grad():
                inputs = told(x, labels, known) if label_input else x
                probabilities = network(inputs, edges).softmax(dim=1).numpy()
            measured = measures(probabilities, graph.labels, split)
            if measured[f"val_{metric}"] > best["best_val"]:
                best = {"best_val": measured[f"val_{metric}"], "test": measured[f"test_{metric}"], "best_epoch": epoch}
                of_best = probabilities
        seconds = time.process_time() - started
        late = epoch - max(best.get("best_epoch", 0), local_epochs) > PATIENCE
        if late or seconds > most_seconds:
            break
    stopped = "patience" if late else "seconds" if seconds > most_seconds else "epochs"
    return best | {"epochs": epoch + 1, "stopped": stopped, "cpu_seconds": round(seconds, 1)}, of_best


def _pairs(adjacency: sp.csr_array) -> Tensor:
    """int64 [2, E]."""
    edges = adjacency.tocoo()
    return torch.from_numpy(np.stack([edges.row, edges.col]).astype(np.int64))


def _csr(adjacency: sp.csr_array) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on its sparse tensors as such
        return to_torch_csr_tensor(_pairs(adjacency), size=adjacency.shape)
