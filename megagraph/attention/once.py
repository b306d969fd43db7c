"""Gradients that have no derivative themselves, and say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For ``once_differentiable``, whose error ``torch.autograd.grad`` does not meet: there the gradients count as
    constants, and a second derivative lacks their share."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *grads)
        read = _Read(ctx)
        with torch.no_grad():
            gradients = backward(read, *(None if x is None else x.detach() for x in grads))
        return _refusing(gradients if isinstance(gradients, tuple) else (gradients,), (*grads, *read.saved_tensors))

    return run


class _Read:
    """A context whose saved tensors are read: activation checkpointing gives them once."""

    def __init__(self, ctx: Any) -> None:
        self.saved_tensors, self._ctx = ctx.saved_tensors, ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _refusing(gradients: tuple[Any, ...], sources: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients, made of ``sources``; their derivative is an error."""
    there = [x for x in gradients if x is not None]
    refusing = iter(_Refusal.apply(len(there), *there, *(x for x in sources if x is not None and x.requires_grad)))
    return tuple(None if x is None else next(refusing) for x in gradients)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, number: int, *tensors: Tensor):
        return tensors[:number]

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("no second derivative (create_graph=True); use impl='reference' on one rank")
