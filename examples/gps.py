"""A learned bias of hop distances in GPSConv of torch_geometric, whose attention knows nothing of the graph."""

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GPSConv
from torch_geometric.utils import to_undirected

import megagraph as mg
from megagraph.transforms import StructuralBias

N, WIDTH, HEADS, HOPS = 32, 8, 4, 6
ring = to_undirected(torch.stack([torch.arange(N), (torch.arange(N) + 1) % N]))
graph = StructuralBias(hops=HOPS)(Data(edge_index=ring, num_nodes=N))
buckets = graph.hop_buckets.view(1, N, N)  # uint8; further, or unreachable: the last one, HOPS + 1
far = (buckets[0] == 4).float() / 2  # the answer lies four hops away


def train(biased: bool) -> float:
    torch.manual_seed(0)
    conv = GPSConv(WIDTH, GCNConv(WIDTH, WIDTH), heads=HEADS, norm=None)
    conv.attn = mg.MultiheadAttention.from_multihead_attention(conv.attn)
    table = nn.Parameter(torch.zeros(HEADS, HOPS + 2))
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
