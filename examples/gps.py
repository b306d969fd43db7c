"""A learned bias of hop distances in GPSConv of torch_geometric, whose attention knows nothing of the graph."""

import torch
from scipy.sparse.csgraph import shortest_path
from torch import nn
from torch_geometric.nn import GCNConv, GPSConv
from torch_geometric.utils import to_scipy_sparse_matrix, to_undirected

import megagraph as mg

N, WIDTH, HEADS, MAX_DISTANCE = 32, 8, 4, 6
ring = to_undirected(torch.stack([torch.arange(N), (torch.arange(N) + 1) % N]))
hops = torch.from_numpy(shortest_path(to_scipy_sparse_matrix(ring), unweighted=True))
buckets = hops.clamp(max=MAX_DISTANCE + 1).to(torch.uint8)[None]  # [1, N, N]; further, or unreachable: the last one
far = (hops == 4).float() / 2  # the answer lies four hops away


def train(biased: bool) -> float:
    torch.manual_seed(0)
    conv = GPSConv(WIDTH, GCNConv(WIDTH, WIDTH), heads=HEADS, norm=None)
    conv.attn = mg.MultiheadAttention.from_multihead_attention(conv.attn)
    table = nn.Parameter(torch.zeros(HEADS, MAX_DISTANCE + 2))
    if biased:
        conv.attn.attn_bias = mg.BucketBias(buckets, table)  # set it anew for other nodes
    head = nn.Linear(WIDTH, WIDTH)
    # a bias learns faster at a rate of its own
    groups = [{"params": [*conv.parameters(), *head.parameters()], "lr": 1e-2}, {"params": [table], "lr": 0.1}]
    optimizer = torch.optim.Adam(groups)
    for _ in range(400):
        x = torch.randn(N, WIDTH)
        loss = (head(conv(x, ring)) - far @ x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


without, with_bias = train(biased=False), train(biased=True)
print(f"error without a bias {without:.3f}, with one {with_bias:.3f}")
assert with_bias < without / 2
