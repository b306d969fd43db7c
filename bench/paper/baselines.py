"""Graph networks of torch_geometric, trained on the whole graph: what a graph transformer is held against."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, Polynormer, SAGEConv, SGFormer
from torch_geometric.utils import to_torch_csr_tensor

from bench.provenance import sized
from megagraph.data.graph import Graph, Split
from megagraph.objective import measures

Baseline = Literal["gcn", "sage", "gat", "sgformer", "polynormer"]
EVERY = 4  # epochs from one look at the validation nodes to the next
PATIENCE = 200  # epochs without a better one
MOST_EPOCHS = sized(2000, quick=8)
_HEADS = 4  # of GAT


class Network(nn.Module):
    """Convolutions with normalisation, residual connections and dropout, as tuned in Luo et al. (NeurIPS 2024)."""

    def __init__(
        self,
        kind: Literal["gcn", "sage", "gat"],
        widths: tuple[int, int, int],
        *,
        layers: int,
        norm: Literal["none", "batch", "layer"],
        residual: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        wide, hidden, classes = widths
        into = [wide] + [hidden] * (layers - 1)
        make: Callable[[int], nn.Module] = {
            "gcn": lambda n: GCNConv(n, hidden, cached=True),
            "sage": lambda n: SAGEConv(n, hidden),
            "gat": lambda n: GATConv(n, hidden // _HEADS, heads=_HEADS),
        }[kind]
        norms = {"none": nn.Identity, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
        self.convolutions = nn.ModuleList(make(n) for n in into)
        self.shortcuts = nn.ModuleList(nn.Linear(n, hidden) for n in into) if residual else None
        self.norms = nn.ModuleList(norms[norm](hidden) for _ in into)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Features [V, d_in] -> scores [V, classes]."""
        for i, convolution in enumerate(self.convolutions):
            h = convolution(x, edges)
            if self.shortcuts is not None:
                h = h + self.shortcuts[i](x)
            x = self.dropout(self.norms[i](h).relu())
        return self.head(x)


class _WithBatch(nn.Module):
    """SGFormer and Polynormer ask which graph a node is of; here all are of one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.network(x, edges, torch.zeros(len(x), dtype=torch.int64))


def make(baseline: Baseline, widths: tuple[int, int, int], settings: dict[str, Any]) -> nn.Module:
    """The network of these widths (features, hidden, classes); settings are those of its class."""
    if baseline == "sgformer":
        return _WithBatch(SGFormer(*widths, **settings))
    if baseline == "polynormer":
        return _WithBatch(Polynormer(*widths, **settings))
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
    most_epochs: int = MOST_EPOCHS,
    **settings: Any,
) -> tuple[dict[str, Any], np.ndarray]:
    """Train until validation has not improved for PATIENCE epochs, or for this many CPU seconds.

    Args:
        metric: ``accuracy`` or ``roc_auc``, by which the epoch is chosen.
        local_epochs: of Polynormer, before its global attention joins.
        most_epochs: no more of them, of which every EVERY-th is looked at.
        settings: as of ``make``.

    Returns:
        ``best_val`` and ``test`` of that epoch, ``best_epoch``, ``epochs``, ``stopped`` by what, ``cpu_seconds``; and
        the probabilities [V, classes] of that epoch.
    """
    started = time.process_time()
    torch.manual_seed(seed)
    network = make(baseline, (graph.in_features, hidden, graph.num_classes), settings)
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    adjacency = graph.adjacency.tocoo()
    edges = torch.from_numpy(np.stack([adjacency.row, adjacency.col]).astype(np.int64))
    if not (baseline == "gat" or settings.get("local_attn")):  # attention needs the edges one by one
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, on its sparse tensors as such
            edges = to_torch_csr_tensor(edges, size=(graph.num_nodes, graph.num_nodes))
    x = torch.empty(graph.num_nodes, graph.in_features)
    graph.read_features(np.arange(graph.num_nodes), x.numpy())
    labels, nodes = torch.tensor(graph.labels), torch.from_numpy(split.train)
    best: dict[str, Any] = {"best_val": -1.0}
    of_best = np.empty(0)
    for epoch in range(most_epochs):
        if baseline == "polynormer":
            network.network._global = epoch >= local_epochs
        network.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x, edges)[nodes], labels[nodes]).backward()
        optimizer.step()
        if epoch % EVERY == EVERY - 1:
            network.eval()
            with torch.no_grad():
                probabilities = network(x, edges).softmax(dim=1).numpy()
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
