"""What a training step changes, by its names in the whole model: parameters and the state of their optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megagraph.parallel.mesh import all_gather
from megagraph.parallel.pipeline import Pipeline


class TrainingState:
    """Parameters and optimizer state of a rank by their names in the whole model.

    Tensors are the live ones, no copies: what is loaded into them is loaded.
    """

    def __init__(self, pipeline: Pipeline, optimizers: list[torch.optim.Optimizer]) -> None:
        self.pipeline, self.optimizers = pipeline, optimizers

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Name, parameter and state; an optimizer without any makes it."""
        table = self.pipeline.table
        names = {parameter: name for name, parameter in self.pipeline.named_parameters().items()}
        if table is not None:
            names[table.weight] = "node_table"
        for optimizer in self.optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if not optimizer.state:
                _make_state(optimizer, parameters)
            for parameter in parameters:
                yield names[parameter], parameter, optimizer.state[parameter]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state by name; a number, such as the steps that SparseAdam has made, as a tensor."""
        table = self.pipeline.table
        tensors = {f"parameters.{name}": x for name, x in self.pipeline.state_dict().items()}
        for name, parameter, values in self._optimizer_state():
            for key, x in values.items():
                x = x if isinstance(x, Tensor) else torch.tensor(x)
                if table is not None and parameter is table.weight and x.ndim:
                    x = table.whole(x)
                tensors[f"optimizer.{name}.{key}"] = x
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take the numbers from what was loaded into ``tensors()``; the rest is there already."""
        for name, _, values in self._optimizer_state():
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    values[key] = type(value)(tensors[f"optimizer.{name}.{key}"].item())


def _make_state(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """An optimizer makes its tensors in its first step: one that changes nothing and does not count."""
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in parameters:
        empty = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
        parameter.grad = empty if sparse else torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        optimizer.state[parameter]["step"] *= 0


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raise FloatingPointError for a tensor that is not finite."""
    if (name := next(_not_finite(tensors), None)) is not None:
        raise FloatingPointError(
            f"{name} is not finite, and a checkpoint of it would be of no use; "
            "go on from an earlier one with a lower --learning-rate"
        )


def cause(pipeline: Pipeline) -> str:
    """Why numbers that a model gives are not finite, and what to do. Collective."""
    if any(all_gather(next(_not_finite(pipeline.state_dict()), None))):
        return "so the weights are not; go on from an earlier checkpoint with a lower --learning-rate"
    return "though all weights are: look for extreme values in the features, and scale them"


def _not_finite(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Names of the tensors that are not finite."""
    for name, tensor in tensors.items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.numel() and own.is_floating_point() and not torch.stack(own.aminmax()).isfinite().all():
            yield name
