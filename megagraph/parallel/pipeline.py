"""Pipeline parallelism: a stage is a slice of the model's layers, and a batch runs through all of them.

    stage 0   embed, layers 0..a-1          [b, S, d] ->
    stage i   layers a..b-1                 -> [b, S, d] ->
    stage P-1 layers ..L-1, read-out        -> class scores, loss

The structure of a batch (bias data, masks, dropout keys) never travels: every rank has its own, chunked like x.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from megagraph.attention.layout import NodeLayout
from megagraph.data.batch import Batch
from megagraph.models.transformer import GraphTransformer
from megagraph.parallel.embedding import NodeTable
from megagraph.planner.plan import Plan

Loss = Callable[[Tensor, Tensor], Tensor]


class Stage(nn.Module):
    """Some layers of a model; the first stage embeds, the last reads out.

    Args:
        model: the whole model, left as it is; the stage shares its parameters.
        layers: the layers to take.
        autocast: run the forward pass in bf16 mixed precision.
    """

    def __init__(self, model: GraphTransformer, layers: range, *, autocast: bool = False) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == model.config.layers
        self.autocast = autocast
        shared = (*model.layers.values(), *model.parameters())
        self.model = copy.deepcopy(model, {id(part): part for part in shared})
        self.model.keep_layers(layers)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of what goes from stage to stage."""
        return torch.bfloat16 if self.autocast else next(self.parameters()).dtype

    def forward(
        self,
        x: Tensor | None = None,
        *,
        features: Tensor,
        degrees: Tensor,
        node_index: Tensor,
        structure: Tensor,
        key_padding_mask: Tensor,
        layout: NodeLayout,
        num_targets: int,
        dropout_key: Tensor | None = None,
        features_grad: Tensor | None = None,
    ) -> Tensor:
        """x [b, S, d], or nothing on the first stage -> [b, S, d], or class scores [b, T, classes] on the last.

        Args:
            features_grad: [U, d], the gradient of learned features is added to it; a schedule of torch's keeps no
                gradients of its inputs.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            if self.first:
                if features_grad is not None:
                    features = _collect_gradient(features, features_grad)
                x = self.model.embed(features, degrees, node_index, layout, dropout_key)
            assert x is not None
            x = self.model.transform(x, structure, key_padding_mask, layout, num_targets, dropout_key)
            # fully_shard hangs a hook on the result, and warns that one on a view can be lost; scores are small
            return self.model.read_out(x).clone() if self.last else x


class Pipeline:
    """This rank's stages, run with those of the other ranks of its pipeline.

    Args:
        stages: the bare stages, for evaluation.
        modules: every stage, or a wrapper that reduces its gradients, for training.
        table: of learned features, where this rank has the first stage.
        mesh: with the dim pp; ``None`` for one process.
    """

    def __init__(
        self,
        stages: list[Stage],
        modules: Sequence[nn.Module],
        plan: Plan,
        mesh: DeviceMesh | None = None,
        table: NodeTable | None = None,
    ) -> None:
        self.stages, self.modules, self.plan, self.mesh, self.table = stages, modules, plan, mesh, table
        self.config, self.device = stages[0].model.config, stages[0].device
        self._group = None if mesh is None or plan.pp == 1 else mesh["pp"]
        self._schedules: dict[tuple, ScheduleGPipe] = {}
        self._loss: Loss = _no_loss  # of the step that runs; the schedules, made once, call it

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's stages, by their names in the whole model; without the table."""
        return {name: parameter for stage in self.stages for name, parameter in stage.model.named_parameters()}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the whole model's state, with the table of learned features."""
        state = {name: value for stage in self.stages for name, value in stage.model.state_dict().items()}
        return state if self.table is None else state | {"node_table": self.table.whole(self.table.weight.detach())}

    def train(self, mode: bool = True) -> None:
        """Switch the stages to training, or to evaluation."""
        for stage in self.stages:
            stage.train(mode)

    def receive(self, batch: Batch) -> Batch:
        """The batch on this device."""
        kernel_dtype = self.stages[0].hidden_dtype if self.device.type == "cuda" else None
        return batch.to(self.device, kernel_dtype=kernel_dtype, non_blocking=True)

    def backward(self, batch: Batch, dropout_key: Tensor, loss: Loss) -> Tensor:
        """Forward and backward of this rank's share of a global batch; gradients are added to the parameters.

        Args:
            loss: (class scores [b, T, classes], labels [b, T]) -> sum over the targets.

        Returns:
            this rank's share of the global loss, the mean over the targets; 0 unless it has the last stage.
        """
        inputs = batch.model_inputs(dropout_key)
        self._loss = lambda scores, labels: loss(scores, labels) / batch.num_targets
        if self.table is None:
            return self._run(batch, inputs)
        route = self.table.route(batch.node_ids)
        inputs["features"] = self.table(route)
        inputs["features_grad"] = torch.zeros_like(inputs["features"])
        value = self._run(batch, inputs)
        self.table.add_gradient(route, inputs["features_grad"])
        return value

    def _run(self, batch: Batch, inputs: dict[str, Any]) -> Tensor:
        if self._group is None:
            value = self._loss(self.modules[0](**inputs), batch.labels)
            value.backward()
            return value.detach()
        losses: list[Tensor] = []
        target: dict[str, Any] = {"target": batch.labels, "losses": losses} if self.stages[-1].last else {}
        self._schedule(batch, inputs, training=True).step(**inputs, **target)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor | None:
        """Class scores [b, T, classes] of this rank's share; ``None`` unless it has the last stage."""
        inputs = batch.model_inputs()
        if self.table is not None:
            inputs["features"] = self.table(self.table.route(batch.node_ids))
        if self._group is None:
            return self.stages[0](**inputs)
        return self._schedule(batch, inputs, training=False).step(**inputs)

    def _schedule(self, batch: Batch, inputs: dict[str, Any], *, training: bool) -> ScheduleGPipe:
        """One for every shape of batch: what stages send each other is declared once and never looked at again."""
        key = (training, batch.batch_size, batch.layout.num_local, *batch.labels.shape, batch.structure.shape[0])
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(batch, inputs, training)
        return self._schedules[key]

    def _make_schedule(self, batch: Batch, inputs: dict[str, Any], training: bool) -> ScheduleGPipe:
        assert self._group is not None
        num_chunks, stage, config = self.plan.num_microbatches, self.stages[0], self.config
        if batch.batch_size % num_chunks:
            raise ValueError(
                f"a batch must be a multiple of num_microbatches = {num_chunks}, got {batch.batch_size} sequences"
            )
        size = batch.batch_size // num_chunks
        hidden, scores = (
            torch.empty(shape, dtype=stage.hidden_dtype, device=stage.device, requires_grad=True)
            for shape in (
                (size, batch.layout.num_local, config.dim),
                (size, batch.labels.shape[1], config.num_classes),
            )
        )
        part = PipelineStage(
            self.modules[0] if training else stage,
            self._group.get_local_rank(),
            self._group.size(),
            stage.device,
            input_args=() if stage.first else (hidden,),
            output_args=(scores,) if stage.last else (hidden,),
            group=self._group.get_group(),
        )
        return ScheduleGPipe(
            part,
            num_chunks,
            loss_fn=(lambda scores, labels: self._loss(scores, labels)) if training else None,
            kwargs_chunk_spec={name: _chunk_spec(name, x, batch.batch_size) for name, x in inputs.items()},
            scale_grads=False,
        )


def _collect_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """x, whose gradient is added to ``gradient``."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient.add_(leaf.grad)

    x = x.detach().requires_grad_()
    x.register_post_accumulate_grad_hook(add)
    return x


def _no_loss(scores: Tensor, labels: Tensor) -> Tensor:
    raise AssertionError("no step is running")


def _chunk_spec(name: str, x: Any, batch_size: int) -> Any:
    """By sequences, but for what all sequences share; torch would cut that along its first axis, too."""
    shared = name in ("layout", "num_targets") or x is None or (name == "structure" and len(x) == 1 < batch_size)
    return _Replicate() if shared else TensorChunkSpec(0)
