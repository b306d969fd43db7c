"""NodeFormer (Wu et al., NeurIPS 2022), written from its paper: all nodes attend to all in time linear in their number.

Scores go through positive random features, and in training each node's keys are weighed by Gumbel noise, which draws
latent edges; edges of the graph add the relational bias and, to the loss, how unlikely the model takes them to be.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NodeFormerLayer(nn.Module):
    """softmax((q k^T / sqrt(D) + Gumbel noise) / tau) v, by ``features`` random features, beside a mean over edges.

    Args:
        width: of nodes, into ``heads`` of D = width / heads.
        features: random features of a head (the paper's m); drawn for every pass in training.
        tau: temperature of the Gumbel softmax.
        draws: of noise, whose results are averaged (the paper's K).
    """

    def __init__(self, width: int, heads: int, features: int = 30, tau: float = 0.25, draws: int = 5) -> None:
        super().__init__()
        self.heads, self.features, self.tau, self.draws = heads, features, tau, draws
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.edge_bias = nn.Parameter(torch.zeros(heads))
        self.register_buffer("directions", torch.randn(features, width // heads), persistent=False)

    def forward(self, x: Tensor, edges: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes [N, width] and their next values, and of every edge the log of its probability, mean of the heads [E].

        Args:
            edges: int64 [2, E], from the second to the first.
            weights: 1 / degree of the first [E].
        """
        q, k, v = (f(x).view(len(x), self.heads, -1) for f in (self.q, self.k, self.v))
        if self.training:
            self.directions = torch.randn_like(self.directions)
        scale = (q.shape[-1] ** 0.5 * self.tau) ** -0.5
        q, k = self._features(scale * q, dim=(2,)), self._features(scale * k, dim=(0, 2))
        noise = x.new_zeros(len(x), self.heads, 1)
        if self.training:
            noise = -x.new_empty(len(x), self.heads, self.draws).exponential_().log() / self.tau
        drawn = (noise - noise.amax(dim=0)).exp()  # softmax is the same for noise less a number
        weighed = torch.einsum("nhm,nhk->hkmn", k, drawn)
        sums = torch.einsum("hkmn,nhd->hkmd", weighed, v)
        there = torch.einsum("nhm,hkm->nhk", q, weighed.sum(dim=3))
        attended = torch.einsum("nhm,hkmd->nhkd", q, sums) / there[..., None]
        to, source = edges
        near = torch.zeros_like(v).index_add(0, to, weights[:, None, None] * v[source])
        h = attended.mean(dim=2) + self.edge_bias.sigmoid()[:, None] * near
        chance = (q[to] * k[source]).sum(dim=2) / (q[to] * k.sum(dim=0)).sum(dim=2)
        return self.out(h.flatten(1)), chance.log().mean(dim=1)

    def _features(self, x: Tensor, dim: tuple[int, ...]) -> Tensor:
        """[N, H, D] -> [N, H, m], positive, with products that are exp of those of x on average, times a constant."""
        exponent = x @ self.directions.T - x.square().sum(dim=2, keepdim=True) / 2
        return (exponent - exponent.detach().amax(dim=dim, keepdim=True)).exp() + 1e-6


class NodeFormer(nn.Module):
    """Layers with residual connections; ``edge_loss`` is what the last pass adds to the loss of training."""

    def __init__(
        self, widths: tuple[int, int, int], *, layers: int, heads: int, dropout: float, edge_weight: float
    ) -> None:
        super().__init__()
        wide, hidden, classes = widths
        self.inputs, self.head = nn.Linear(wide, hidden), nn.Linear(hidden, classes)
        self.layers = nn.ModuleList(NodeFormerLayer(hidden, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers + 1))
        self.dropout, self.edge_weight = nn.Dropout(dropout), edge_weight
        self.edge_loss = torch.zeros(())

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Features [V, d_in] and int64 [2, E] -> scores [V, classes]."""
        weights = 1 / torch.bincount(edges[0], minlength=len(x)).clamp(min=1)[edges[0]]
        x, chances = self.dropout(F.elu(self.norms[0](self.inputs(x)))), []
        for layer, norm in zip(self.layers, self.norms[1:], strict=True):
            h, chance = layer(x, edges, weights)
            chances.append(chance)
            x = self.dropout(F.elu(norm(h + x)))
        self.edge_loss = -self.edge_weight * (torch.stack(chances) * weights).sum() / (len(x) * len(chances))
        return self.head(x)
