"""What a rank trains: its stages of the model and their optimizers, and one step of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from megagraph.attention.module import BiasedRingAttention
from megagraph.config import TrainConfig
from megagraph.data.batch import Batch, Share
from megagraph.models.transformer import GraphTransformer, is_bias
from megagraph.objective import loss_sum
from megagraph.parallel.embedding import NodeTable
from megagraph.parallel.failure import phase
from megagraph.parallel.mesh import replicas_of, sum_over_ranks
from megagraph.parallel.pipeline import Pipeline, Stage
from megagraph.parallel.replicate import clip_gradients, replicate
from megagraph.parallel.stop import Stop
from megagraph.planner.plan import Plan


def make_pipeline(
    model: GraphTransformer, plan: Plan, mesh: DeviceMesh | None, device: torch.device, config: TrainConfig
) -> Pipeline:
    """This rank's stages of a model under a plan, gradients summed over their replicas."""
    for module in model.modules():
        if isinstance(module, BiasedRingAttention):
            module.comm = plan.comm
    own = plan.stages(model.config.layers)[0 if mesh is None else mesh.get_local_rank("pp") :: plan.pp]
    stages = [Stage(model, layers, autocast=config.dtype == "bf16", checkpoint=plan.checkpoint) for layers in own]
    for stage in stages:
        stage.to(device, config.parameter_dtype)
    table = None
    if config.embedding == "learned" and stages[0].first:
        table = NodeTable(model.config.in_features, config.dim, seed=config.seed, replicas=replicas_of(mesh))
        table.to(device, config.parameter_dtype)
    modules = [replicate(stage, mesh, shard=plan.shard) for stage in stages]
    return Pipeline(stages, modules, plan, mesh, table, captured=config.cuda_graphs)


def own_share(plan: Plan, mesh: DeviceMesh | None) -> Share:
    """The part of every global batch that this rank builds."""
    if mesh is None:
        return Share(num_microbatches=plan.num_microbatches)
    dp_rank, cp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    return Share(
        dp_rank=dp_rank,
        dp=plan.dp,
        weights=plan.shares,
        cp_rank=cp_rank,
        cp=plan.cp,
        num_microbatches=plan.num_microbatches,
        embeds=mesh.get_local_rank("pp") == 0,
        whole_bias=plan.comm == "ulysses",
    )


def make_optimizers(pipeline: Pipeline, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for the layers, SparseAdam for the table of a learned embedding.

    The learned parts of biases are a group of their own, without decay and at a rate of their own.
    """
    rate, named = config.learning_rate, pipeline.named_parameters().items()
    weights = {"params": [p for name, p in named if not is_bias(name)], "scale": 1.0}
    biases = {"params": [p for name, p in named if is_bias(name)], "scale": config.bias_lr_scale}
    groups = [
        weights | {"lr": rate, "weight_decay": config.weight_decay},
        biases | {"lr": rate * config.bias_lr_scale, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, fused=True)]
    if pipeline.table is not None:
        optimizers.append(torch.optim.SparseAdam(pipeline.table.parameters()))
    return optimizers


@torch.enable_grad()
def train_step(
    pipeline: Pipeline,
    optimizers: list[torch.optim.Optimizer],
    batch: Batch,
    dropout_key: Tensor,
    clip_norm: float,
    stop: Stop | None = None,
) -> tuple[float, float]:
    """One step of all optimizers on this rank's share of a global batch: the global loss, and its gradient's norm.

    Where one of the two is not finite, nothing has changed.

    Args:
        stop: learns whether any rank was asked to leave.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = pipeline.backward(batch, dropout_key, loss_sum)
    phase("optimizer")
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    with record_function("optimizer"):
        norm = clip_gradients(parameters, clip_norm, pipeline.mesh)
        sums = torch.stack([loss.double(), loss.new_tensor(stop is not None and stop.asked).double()])
        if pipeline.mesh is not None:
            sums = sum_over_ranks(sums)
        # waits for the device, so the step's time is all of it
        total, asked, gradient_norm = torch.cat([sums, norm.double().to(sums.device)[None]]).tolist()
        if stop is not None:
            stop.leave = asked > 0
        if math.isfinite(total + gradient_norm):
            for optimizer in optimizers:
                optimizer.step()
    return total, gradient_norm


def schedule(step: float, total_steps: float, warmup: float) -> float:
    """Factor on the peak learning rate: linear from 0 over the warm-up steps, then linear down to 0."""
    warmup_steps = warmup * total_steps
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return (total_steps - step) / max(total_steps - warmup_steps, 1)
