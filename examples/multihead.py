"""nn.MultiheadAttention replaced, alone and inside nn.TransformerEncoderLayer: the same results, and a learned bias."""

import torch
from torch import nn

import megagraph as mg

B, N, E, H = 8, 40, 32, 4
torch.manual_seed(0)
x = torch.randn(B, N, E)

theirs = nn.MultiheadAttention(E, H, batch_first=True)
ours = mg.MultiheadAttention.from_multihead_attention(theirs)  # has the parameters of theirs
torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x, need_weights=False)[0])


def train(biased: bool) -> float:
    """Learn to give every node the mean of the two nodes three steps away on a path: who that is, only a bias says."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True)
    layer.self_attn = mg.MultiheadAttention.from_multihead_attention(layer.self_attn)
    model = nn.Sequential(layer, nn.Linear(E, E))
    place = torch.arange(N)
    steps = (place[:, None] - place).abs()
    table = nn.Parameter(torch.zeros(H, 8))  # a number per head and distance
    if biased:  # of all calls that follow; the table learns with the model
        layer.self_attn.attn_bias = mg.BucketBias(steps.clamp(max=7).to(torch.uint8)[None], table)
    near = (steps == 3).float()
    near /= near.sum(1, keepdim=True)
    # a bias learns faster at a rate of its own
    optimizer = torch.optim.Adam([{"params": model.parameters(), "lr": 3e-3}, {"params": [table], "lr": 0.1}])
    for _ in range(150):
        x = torch.randn(B, N, E)
        loss = (model(x) - near @ x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


without, with_bias = train(biased=False), train(biased=True)
print(f"error without a bias {without:.3f}, with one {with_bias:.3f}")
assert with_bias < without / 2
