"""The nodes of a sequence spread over processes: the loss and the gradients of one.

python examples/two_processes.py
torchrun --nproc-per-node 2 examples/two_processes.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megagraph as mg


class Encoder(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        # was: nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        self.attention = mg.BiasedRingAttention(32, num_heads=4, mesh=mesh)
        self.distance = nn.Parameter(torch.zeros(4, 12))  # a learned bias per head and distance
        self.ffn = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x, index, layout):
        # was: self.attention(h, h, h, attn_mask=bias)[0]
        x = x + self.attention(self.norm(x), mg.BucketBias(index, self.distance), layout=layout)
        return x + self.ffn(x)


world_size = int(os.environ.get("WORLD_SIZE", 1))
mesh = init_device_mesh("cpu", (world_size,)) if world_size > 1 else None
layout = mg.NodeLayout(num_nodes=201, num_super=4, rank=mesh.get_local_rank() if mesh else 0, world_size=world_size)

torch.manual_seed(0)  # the same weights and data everywhere; a loader of your own would read this rank's rows only
encoder = Encoder(mesh)
x, index = torch.randn(2, 205, 32), torch.randint(0, 12, (2, 205, 205), dtype=torch.uint8)

out = encoder(layout.shard(x, dim=1), layout.shard(index, dim=1), layout)  # this rank's nodes, all columns
loss = layout.gather(out, dim=1, mesh=mesh).square().mean()  # on every rank
loss.backward()
if mesh:
    for parameter in encoder.parameters():  # each rank has its share of the gradient; DDP would take the mean
        dist.all_reduce(parameter.grad)
    dist.destroy_process_group()
if layout.rank == 0:
    norm = torch.stack([parameter.grad.norm() for parameter in encoder.parameters()]).norm().item()
    print(f"loss {loss.item():.6f}, norm of the gradient {norm:.6f}, on {world_size} processes")
