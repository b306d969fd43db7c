"""Data parallelism over dp x cp: gradients summed, clipped by one norm over all stages, weights put together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megagraph.parallel.mesh import replicas_of, sum_over_ranks
from megagraph.parallel.pipeline import Stage


def replicate(stage: Stage, mesh: DeviceMesh | None, *, shard: bool) -> nn.Module:
    """The stage with gradients summed over dp x cp: each rank brings its share of the global batch's gradient.

    Args:
        shard: fully_shard, layer by layer; else DistributedDataParallel.
    """
    replicas = replicas_of(mesh)
    if mesh is None or replicas is None:
        return stage
    if not shard:
        # buckets that DDP makes anew after its first step sum in another order, where three or more summands have one:
        # a run that goes on would differ in the last bit. It keeps them where it looks for parameters without use.
        ordered = replicas.size() > 2 and replicas.device_type == "cpu"
        # buffers are constants of the model, which DDP would send before every forward
        constants = [name for name, _ in stage.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, constants)
        replicated = DistributedDataParallel(stage, process_group=replicas.get_group(), find_unused_parameters=ordered)
        replicated.register_comm_hook(replicas.get_group(), _sum_bucket)
        return replicated
    # in a pipeline the weights stay, or every micro-batch would gather them again
    reshard = mesh["pp"].size() == 1
    for layer in stage.model.layers.values():
        fully_shard(layer, mesh=replicas, reshard_after_forward=reshard)
    fully_shard(stage, mesh=replicas, reshard_after_forward=reshard)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return stage


def _sum_bucket(group, bucket):  # DDP refuses annotations that are strings
    """The all-reduce of DDP without its division by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def clip_gradients(parameters: list[nn.Parameter], max_norm: float, mesh: DeviceMesh | None) -> Tensor:
    """Scale the gradients down to a global norm of ``max_norm``; the norm before, each parameter counted once.

    A sparse gradient is that of a ``NodeTable``: each rank of a stage has other rows of it.
    """
    sparse = [p for p in parameters if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    norm = nn.utils.get_total_norm([p.grad for p in dense if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    square = norm.double() ** 2
    for gradient in (p.grad for p in sparse if p.grad is not None):
        own = gradient.values().double().square().sum()
        if (replicas := replicas_of(mesh)) is not None:
            sum_over_ranks(own, replicas.get_group())
        square += own
    if mesh is not None and mesh.get_group("pp").size() > 1:
        sum_over_ranks(square, mesh.get_group("pp"))
    norm = square.sqrt().to(norm.dtype)
    for kind in (dense, sparse):
        nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def gather_tensors(tensors: dict[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """The named tensors of all stages, whole and on the CPU; complete on rank 0 only. Collective."""
    own = {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu() for name, x in tensors.items()}
    if mesh is None or mesh.get_local_rank("dp") or mesh.get_local_rank("cp"):
        return own
    pipeline = mesh.get_group("pp")
    parts: list[Any] | None = [None] * pipeline.size() if mesh.get_local_rank("pp") == 0 else None
    dist.gather_object(own, parts, group=pipeline, group_dst=0)
    return own if parts is None else {name: x for part in parts for name, x in part.items()}
