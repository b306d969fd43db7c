"""Pipeline parallelism: a stage is a slice of the model's layers, and a batch runs through all of them.

    stage 0    embed, layers 0..a-1         [b, S, d] ->
    stage i    layers a..b-1                -> [b, S, d] ->
    last stage layers ..L-1, read-out       -> class scores, loss

Of pp ranks, rank r holds the stages r, r + pp, ... The structure of a batch (bias data, masks, dropout keys) never
travels: every rank has its own, chunked like x.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, split_args_kwargs_into_chunks
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from megagraph.attention.bias import BorderedData
from megagraph.attention.exchange import travels_through_host
from megagraph.attention.layout import NodeLayout
from megagraph.attention.neighbours import Neighbours
from megagraph.data.batch import EMBEDDED, READ_OUT, Batch
from megagraph.models.layers import Context
from megagraph.models.transformer import GraphTransformer
from megagraph.parallel.captured import CapturedSteps
from megagraph.parallel.delivery import copied_ahead
from megagraph.parallel.embedding import NodeTable
from megagraph.planner.plan import Plan

Loss = Callable[[Tensor, Tensor], Tensor]
Schedule = PipelineScheduleSingle | PipelineScheduleMulti

_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
_MAX_SCHEDULES = 4  # training and evaluation, a full batch and the ragged one at the end


@dataclass(frozen=True)
class Setting:
    """What all sequences of a batch share.

    Args:
        layout: the nodes of this rank.
        num_targets: T, local rows to read out.
        loss: what the last stage gives in place of class scores.
    """

    layout: NodeLayout
    num_targets: int
    loss: Loss | None = None

    requires_grad: ClassVar[bool] = False  # torch 2.11 asks every argument of a stage, when it splits the backward pass
    grad_fn: ClassVar[None] = None


class Embedded(NamedTuple):
    """What the first stage embeds, cut into micro-batches as other tensors are."""

    features: Tensor
    degrees: Tensor
    node_index: Tensor


class Stage(nn.Module):
    """Some layers of a model; the first stage embeds, the last reads out.

    Args:
        model: the whole model, left as it is; the stage shares its parameters.
        layers: the layers to take.
        autocast: run the forward pass in bf16 mixed precision.
        checkpoint: keep the input of every layer only, and compute the rest again for the backward pass.
    """

    def __init__(
        self, model: GraphTransformer, layers: range, *, autocast: bool = False, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.first, self.last = layers.start == 0, layers.stop == model.config.layers
        self.autocast = autocast
        self.through_host = False
        shared = (*model.layers.values(), *model.parameters())
        self.model = copy.deepcopy(model, {id(part): part for part in shared})
        self.model.keep_layers(layers)
        for layer in self.model.layers.values():
            layer.checkpoint = checkpoint  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def wire(self) -> torch.device:
        """Device on which hidden states wait to be sent."""
        return torch.device("cpu") if self.through_host else self.device

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the hidden states that go from stage to stage."""
        return next(self.parameters()).dtype

    @record_function("stage forward")
    def forward(
        self,
        x: Tensor | None = None,
        *,
        setting: Setting,
        structure: Tensor | BorderedData,
        key_padding_mask: Tensor,
        neighbours: Neighbours | None = None,
        embedded: Embedded | None = None,
        labels: Tensor | None = None,
        dropout_key: Tensor | None = None,
        features_grad: Tensor | None = None,
    ) -> Tensor:
        """x [b, S, d], or nothing on the first stage -> [b, S, d]; on the last class scores [b, T, classes], or loss.

        Only the first stage reads ``embedded``, and only the last one labels.

        Args:
            features_grad: [U, d], the gradient of learned features is added to it; a schedule of torch's keeps no
                gradients of its inputs.
        """
        context = Context(
            structure=structure,
            key_padding_mask=key_padding_mask,
            layout=setting.layout,
            neighbours=neighbours,
            dropout_key=dropout_key,
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            if self.first:
                assert embedded is not None
                features, degrees, node_index = embedded
                if features_grad is not None:
                    features = _collect_gradient(features, features_grad)
                x = self.model.embed(features, degrees, node_index, context)
            assert x is not None
            x = self.model.transform(x.to(self.device), context, setting.num_targets)
            if not self.last:
                return x.to(self.wire)
            scores = self.model.read_out(x)
        if setting.loss is None:
            return scores
        assert labels is not None
        return setting.loss(scores, labels)


class _Part(PipelineStage):
    """torch's stage, with a name in traces for the backward pass without its waiting."""

    backward_maybe_with_nosync = record_function("stage backward")(PipelineStage.backward_maybe_with_nosync)


class Pipeline:
    """This rank's stages, run with those of the other ranks of its pipeline.

    Args:
        stages: the bare stages, for evaluation.
        modules: every stage, or a wrapper that reduces its gradients, for training.
        table: of learned features, where this rank has the first stage.
        mesh: with the dim pp; ``None`` for one process.
        captured: replay the steps of one stage, of all layers, as CUDA graphs.
    """

    def __init__(
        self,
        stages: list[Stage],
        modules: Sequence[nn.Module],
        plan: Plan,
        mesh: DeviceMesh | None = None,
        table: NodeTable | None = None,
        *,
        captured: bool = False,
    ) -> None:
        self.stages, self.modules, self.plan, self.mesh, self.table = stages, modules, plan, mesh, table
        self.config, self.device = stages[0].model.config, stages[0].device
        self._group = None if mesh is None or plan.pp == 1 else mesh["pp"]
        through_host = self._group is not None and travels_through_host(self._group, self.device)
        for stage in stages:
            stage.through_host = through_host
        self._schedules: dict[tuple, tuple[Schedule, list[_Part]]] = {}
        self._captured = CapturedSteps(self._loss_of, self.parameters(), ("features", "degrees")) if captured else None

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

    def receive(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches on this device, but for what none of the stages here reads."""
        put = partial(Batch.to, device=self.device, leave=self._unread, non_blocking=True)
        return copied_ahead(batches, put, self.device) if self.device.type == "cuda" else map(put, batches)

    def backward(self, batch: Batch, dropout_key: Tensor, loss: Loss) -> Tensor:
        """Forward and backward of this rank's share of a global batch; gradients are added to the parameters.

        Args:
            loss: (class scores [b, T, classes], labels [b, T] or [b, T, classes]) -> sum over those that count, in fp32
                or fp64 as the scores.

        Returns:
            this rank's share of the global loss, the mean over the targets; 0 unless it has the last stage.
        """

        if self._captured is not None:
            inputs = self._inputs(batch, dropout_key, loss)
            embedded, setting = inputs.pop("embedded"), inputs.pop("setting")
            return self._captured(batch.num_targets, inputs | embedded._asdict(), setting=setting)

        def share(scores: Tensor, labels: Tensor) -> Tensor:
            return loss(scores, labels) / batch.num_targets

        inputs = self._inputs(batch, dropout_key, share)
        if self.table is None:
            return self._run(batch, inputs)
        route = self.table.route(batch.node_ids)
        features = self.table(route)
        inputs["embedded"] = inputs["embedded"]._replace(features=features)
        inputs["features_grad"] = torch.zeros_like(features)
        value = self._run(batch, inputs)
        self.table.add_gradient(route, inputs["features_grad"])
        return value

    def _loss_of(self, *, features: Tensor, degrees: Tensor, node_index: Tensor, **inputs: Any) -> Tensor:
        return self.stages[0](embedded=Embedded(features, degrees, node_index), **inputs)

    def _run(self, batch: Batch, inputs: dict[str, Any]) -> Tensor:
        if self._group is None:
            return self._accumulate(self._microbatches(batch, inputs))
        losses: list[Tensor] = []
        target: dict[str, Any] = {"target": batch.labels, "losses": losses} if self.stages[-1].last else {}
        schedule, _ = self._schedule(batch, inputs, training=True)
        schedule.step(**inputs, **target, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    def _accumulate(self, parts: list[dict[str, Any]]) -> Tensor:
        """Forward and backward of one micro-batch after the other; DDP sums gradients over ranks with the last one."""
        (module,), values = self.modules, []
        for i, inputs in enumerate(parts):
            waits = isinstance(module, DistributedDataParallel) and i < len(parts) - 1
            with module.no_sync() if waits else nullcontext():  # type: ignore[operator, union-attr]
                value = module(**inputs)
                with record_function("stage backward"):
                    value.backward()
            values.append(value.detach())
        return torch.stack(values).sum()

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor | None:
        """Class scores [b, T, classes] of this rank's share; ``None`` unless it has the last stage."""
        inputs = self._inputs(batch)
        if self.table is not None:
            features = self.table(self.table.route(batch.node_ids))
            inputs["embedded"] = inputs["embedded"]._replace(features=features)
        if self._group is None:
            return torch.cat([self.stages[0](**part) for part in self._microbatches(batch, inputs)])
        schedule, parts = self._schedule(batch, inputs, training=False)
        scores = schedule.step(**inputs)
        for part in parts:
            part.clear_runtime_states()  # or it would keep the batch until its next step
        return scores

    @property
    def _unread(self) -> tuple[str, ...]:
        """The fields of a batch that no stage of this rank reads."""
        return (() if self.stages[0].first else EMBEDDED) + (() if self.stages[-1].last else READ_OUT)

    def _inputs(self, batch: Batch, dropout_key: Tensor | None = None, loss: Loss | None = None) -> dict[str, Any]:
        """What the stages of this rank are called with."""
        inputs = batch.model_inputs(dropout_key) | {"labels": batch.labels}
        setting = Setting(inputs.pop("layout"), inputs.pop("num_targets"), loss)
        embedded = Embedded(**{name: inputs.pop(name) for name in Embedded._fields})
        tensors = {name: x for name, x in inputs.items() if x is not None and name not in self._unread}
        return tensors | {"setting": setting} | ({"embedded": embedded} if self.stages[0].first else {})

    def _microbatches(self, batch: Batch, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Inputs of every micro-batch, cut as a schedule cuts them."""
        num = self.plan.num_microbatches
        if num == 1:
            return [inputs]
        return split_args_kwargs_into_chunks((), inputs, num, None, _chunk_specs(batch, inputs, num))[1]

    def _schedule(self, batch: Batch, inputs: dict[str, Any], *, training: bool) -> tuple[Schedule, list[_Part]]:
        """A schedule for every shape of batch: what stages send each other is declared once and never looked at again.

        Each holds buffers of b * S * d for what its stages receive, and in training as much for gradients; those not
        used for longest are given up. Shapes are few: of all sizes of a loader's batches only b differs.
        """
        of_all = isinstance(batch.structure, BorderedData) or batch.structure.shape[0] == 1
        key = (training, batch.batch_size, batch.layout.num_local, *batch.labels.shape, of_all)
        found = self._schedules.pop(key, None) or self._make_schedule(batch, inputs, training)
        if len(self._schedules) == _MAX_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        self._schedules[key] = found
        return found

    def _make_schedule(self, batch: Batch, inputs: dict[str, Any], training: bool) -> tuple[Schedule, list[_Part]]:
        assert self._group is not None
        num_chunks, config, dtype = self.plan.num_microbatches, self.config, self.stages[0].hidden_dtype
        specs = _chunk_specs(batch, inputs, num_chunks)
        size = batch.batch_size // num_chunks
        empty = partial(torch.empty, device=self.device, requires_grad=True)
        hidden = empty(size, batch.layout.num_local, config.dim, dtype=dtype, device=self.stages[0].wire)
        if training:  # the last stage gives the loss
            result = empty((), dtype=torch.promote_types(dtype, torch.float32))
        else:
            result = empty(size, batch.labels.shape[1], config.num_classes, dtype=dtype)
        parts = [
            _Part(
                module if training else stage,
                self._group.get_local_rank() + i * self.plan.pp,
                self.plan.num_stages,
                stage.wire,
                input_args=() if stage.first else (hidden,),
                output_args=(result,) if stage.last else (hidden,),
                group=self._group.get_group(),
            )
            for i, (stage, module) in enumerate(zip(self.stages, self.modules, strict=True))
        ]
        schedule = _SCHEDULES[self.plan.schedule](
            parts[0] if self.plan.schedule in ("gpipe", "1f1b") else parts,
            num_chunks,
            loss_fn=(lambda loss, labels: loss) if training else None,
            kwargs_chunk_spec=specs,
            scale_grads=False,
        )
        return schedule, parts


def _chunk_specs(batch: Batch, inputs: dict[str, Any], num_microbatches: int) -> dict[str, Any]:
    """How every input of a stage is cut."""
    if batch.batch_size % num_microbatches:
        raise ValueError(
            f"a batch must be a multiple of num_microbatches = {num_microbatches}, got {batch.batch_size} sequences"
        )
    return {name: _chunk_spec(name, x, batch.batch_size) for name, x in inputs.items()}


def _collect_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """x, whose gradient is added to ``gradient``."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient.add_(leaf.grad)

    x = x.detach().requires_grad_()
    x.register_post_accumulate_grad_hook(add)
    return x


def _chunk_spec(name: str, x: Any, batch_size: int) -> Any:
    """How an input is cut: by sequences, but for what all of them share, which torch would cut along its first axis."""
    if isinstance(x, Embedded):
        return Embedded._make(TensorChunkSpec(0) for _ in x)
    shared = not isinstance(x, Tensor) or (name == "structure" and len(x) == 1 < batch_size)
    return _Replicate() if shared else TensorChunkSpec(0)
