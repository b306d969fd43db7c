"""The attention operators: their contract, and their registration with PyTorch.

``biased_attention`` is functional: autograd, opcheck, compilation. ``attention_step_`` and ``attention_step_backward_``
are one step of a ring; they advance their state in place and have no autograd, as torch.library refuses both together.

Where only autograd watches, a call goes past the dispatcher, which takes longer than kernels of short sequences.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor as is_batch  # of autograd.grad(is_grads_batched=True)
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from megagraph.attention import reference, reuse
from megagraph.attention.bias import Bias
from megagraph.attention.checks import check_inputs, check_operands, check_scale, check_tensor, check_values
from megagraph.attention.engines import ENGINES, Impl, choose, state_dtype
from megagraph.attention.step import DeltaOf, Gradients, State, Step
from megagraph.attention.sums import as_bias
from megagraph.kernels.geometry import Geometry, geometry_of


@overload
def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = ...,
    *,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    dropout_key: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    impl: Impl | None = ...,
) -> Tensor: ...
@overload
def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = ...,
    *,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    dropout_key: Tensor | None = ...,
    return_lse: Literal[True],
    impl: Impl | None = ...,
) -> tuple[Tensor, Tensor]: ...
def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = None,
    *,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
    return_lse: bool = False,
    impl: Impl | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with an additive, learnable bias: out = softmax(scale * q k^T + b) v (paper Eq. 1-2).

    Differentiable in q, k, v and the learned part of the bias. A compact bias (``BucketBias``, ``ProjectedBias``) is
    never expanded to [H, M, N] except by ``impl="reference"``; kept for backward are q, k, v, out, lse and the bias
    as given.

    Args:
        q: [B, H, M, D] floating point, 1 <= D <= 256 (no padding needed). On CUDA products of fp32 are of inputs
            cut to TF32 where ``torch.backends.cuda.matmul.fp32_precision`` says so; PyTorch's own are rounded to it.
        k, v: [B, H, N, D] in q's dtype.
        bias: ``DenseBias``, ``BucketBias`` or ``ProjectedBias`` of shape [B or 1, H or 1, M, N]; a float tensor of
            2 to 4 dimensions is taken as dense, as ``attn_mask`` of ``F.scaled_dot_product_attention``.
        key_padding_mask: bool [B, N], True = ignore this key, as in ``nn.MultiheadAttention``.
        scale: multiplies q k^T; default D ** -0.5.
        dropout_p: probability to drop an attention weight, in [0, 1).
        dropout_key: int32 [B], one key per sequence (``dropout_keys``); required when ``dropout_p`` > 0. The mask is a
            function of key, head, row and column only.
        return_lse: also return lse [B, H, M], natural log, fp32 (fp64 for fp64 inputs), -inf for an empty row.
        impl: ``"triton"`` (CUDA, or the CPU under TRITON_INTERPRET=1), ``"blocked"`` (CPU) or ``"reference"`` (eager);
            ``None`` takes ``"triton"`` on CUDA and ``"blocked"`` elsewhere. On a CPU short sequences with narrow heads
            take loops of their own; ``"blocked_long"`` does without these. What you ask for runs, or raises.

    Returns:
        out [B, H, M, D] in q's dtype; a row that can attend to nothing is 0 with zero gradients.

    Raises:
        ValueError: shape, dtype, device or value of an argument; the message gives expected and actual.
        NotImplementedError: ``impl`` cannot run these inputs; every reason is listed. A second derivative, forward-mode
            differentiation, or that of ``torch.func``, but by ``"reference"``.

    Examples:
        >>> q, k, v = (torch.randn(2, 4, 50, 8, requires_grad=True) for _ in range(3))
        >>> distances = torch.randint(0, 12, (2, 50, 50), dtype=torch.uint8)
        >>> table = torch.zeros(4, 12, requires_grad=True)
        >>> out = mg.biased_attention(q, k, v, mg.BucketBias(distances, table))
        >>> out.shape
        torch.Size([2, 4, 50, 8])
        >>> out.square().sum().backward()
    """
    bias = as_bias(bias)
    check_inputs(q, k, v, bias, key_padding_mask, dropout_p, dropout_key)
    path = choose(impl, q)
    step = make_step(q, bias, key_padding_mask, scale, dropout_p, dropout_key, *path)
    out, lse = attention(step, q, k, v, bias)
    return (out, lse) if return_lse else out


def make_step(
    q: Tensor,
    bias: Bias | None,
    key_padding_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    dropout_key: Tensor | None,
    engine: str,
    short: bool,
    first_head: int = 0,
) -> Step:
    """The arguments of a call, checked, as a step that has no keys yet."""
    lists: dict[str, Any] = {} if bias is None or bias.relation is None else bias.relation.lists
    return Step(
        engine=engine,
        short=short,
        form="none" if bias is None else bias.form,
        data=None if bias is None else bias.data,
        learned=None if bias is None else bias.learned,
        bias_mask=None if bias is None else bias.mask,
        key_padding_mask=key_padding_mask,
        segments=[],
        scale=q.shape[-1] ** -0.5 if scale is None else check_scale(scale),
        dropout_p=dropout_p,
        dropout_key=None if dropout_p == 0.0 or dropout_key is None else dropout_key.contiguous(),
        first_head=first_head,
        tf32=q.is_cuda and q.dtype == torch.float32 and products_are_tf32(),
        **lists,
    )


def products_are_tf32() -> bool:
    """Whether products of fp32 on a GPU may be in TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# as torch.compiler.assume_constant_result, whose import takes seconds; dynamo looks itself whether it has changed
products_are_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention(step: Step, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None) -> tuple[Tensor, Tensor]:
    """out and lse with all keys on one rank; differentiable. ``bias`` is the step's, for the reference."""
    if step.engine == "reference":
        check_values(step)
        with torch.autocast(q.device.type, enabled=False):  # every product in the dtype that was chosen for it
            return reference.biased_attention(
                q, k, v, bias, step.key_padding_mask, step.scale, step.dropout_p, step.dropout_key, step.first_head
            )
    step = step.but(segments=[(0, 0, k.shape[2])])
    if is_watched(q, k, v, step.learned):
        return _attention(q, k, v, *step.flat())
    return _Attention.apply(step, q, k, v, step.learned)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether operators are to be seen: by a compiler, a transform, a mode, a subclass of Tensor."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or any(x is not None and (type(x) not in (Tensor, nn.Parameter) or x.is_meta or is_batch(x)) for x in tensors)
    )


class _Attention(torch.autograd.Function):
    """out and lse of a step over all keys."""

    @staticmethod
    def forward(ctx, step, q, k, v, learned):
        step = _by_path(step, q, k)
        ctx.values, tensors = step.split()
        geometry = geometry_of((q, k, v, *tensors))
        if not _is_checked(geometry, step):
            check_operands(step, q, k, v, whole=True)
            geometry.checked = True
        out, lse = _forward(step, q, k, v, geometry)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        q, k, v, *tensors, out, lse = saved = ctx.saved_tensors
        step, learned_grad = Step.join(ctx.values, iter(tensors)), ctx.needs_input_grad[4]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        if torch.is_grad_enabled() or is_watched(d_out, d_lse):
            *gradients, d_learned = _attention_backward(d_out, d_lse, out, lse, q, k, v, learned_grad, *step.flat())
        else:
            geometry = geometry_of((*saved, d_out, d_lse))  # anew: much can be replaced or freed since forward
            if not _is_checked(geometry, step):
                _check_backward(step, q, k, v, d_out, d_lse, out, lse)
                geometry.checked = True
            step = _by_path(step, q, k)
            *gradients, d_learned = _gradients(step, q, k, v, (d_out, d_lse, out, lse), learned_grad, geometry)
        return None, *gradients, d_learned if learned_grad else None


def _is_checked(geometry: Geometry, step: Step) -> bool:
    """Whether the operands of a step over all keys are in order; values of lists, which CPUs look at, may be others."""
    return geometry.checked and (step.columns is None or step.columns.is_cuda)


# ---- one step of a ring

_QKV = "Tensor q, Tensor k, Tensor v"


@torch.library.custom_op(
    "megagraph::attention_step_",
    mutates_args=State.WRITTEN,
    schema=f"({_QKV}, {Step.schema()}, {State.schema()}) -> ()",
)
def attention_step_(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> None:
    """Fold the visiting keys k, v [B, H, n, D] into the state of q [B, H, M, D] (paper Eq. 3); then come a
    :class:`Step` and a :class:`State`."""
    values = iter(arguments)
    step, state = Step.read(values), State.read(values)
    check_operands(step, q, k, v, whole=False)
    if not (state.first and state.last):
        _check_rows(q, m=state.m, l=state.l)
        check_tensor("acc", state.acc, q.device, q.shape, state_dtype(q), contiguous=True)
    if state.last:
        _check_rows(q, lse=state.lse)
        check_tensor("out", state.out, q.device, q.shape, q.dtype)
    check_values(step)
    if q.numel():
        ENGINES[step.engine].forward(step, q, k, v, state)


@torch.library.custom_op(
    "megagraph::attention_step_backward_",
    mutates_args=Gradients.WRITTEN,
    schema=f"({_QKV}, {Step.schema()}, {Gradients.schema()}) -> ()",
)
def attention_step_backward_(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> None:
    """The gradients of one visiting block; after a :class:`Step` come its :class:`Gradients`."""
    values = iter(arguments)
    step, gradients = Step.read(values), Gradients.read(values)
    check_operands(step, q, k, v, whole=False)
    check_tensor("d_out", gradients.d_out, q.device, q.shape, q.dtype)
    _check_rows(q, lse=gradients.lse, delta=gradients.delta)
    for name, x, like in (("dq", gradients.dq, q), ("dk", gradients.dk, k), ("dv", gradients.dv, v)):
        check_tensor(name, x, q.device, like.shape)
    d_learned, learned = gradients.d_learned, step.learned
    if d_learned is not None and learned is not None:
        shape = learned.shape
        if step.form == "bucket" and d_learned.ndim == 2:  # ``prepare`` pads a table
            shape = torch.Size((shape[0], min(shape[1], d_learned.shape[1])))
        check_tensor("d_learned", d_learned, q.device, shape)
    if q.numel() and any(length for _, _, length in step.segments):
        ENGINES[step.engine].backward(step, q, k, v, gradients)
    else:
        gradients.of_no_keys()


def _check_rows(q: Tensor, **numbers: Tensor | None) -> None:
    """``check_tensor`` of what has a number for each row of q."""
    for name, x in numbers.items():
        check_tensor(name, x, q.device, q.shape[:3], state_dtype(q), contiguous=True)


@attention_step_.register_fake
@attention_step_backward_.register_fake
def _(*args, **kwargs):
    return None


# ---- all keys at once


@torch.library.custom_op(
    "megagraph::biased_attention", mutates_args=(), schema=f"({_QKV}, {Step.schema()}) -> (Tensor, Tensor)"
)
def _attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """out [B, H, M, D], lse [B, H, M]: one step that is first and last, over all keys."""
    step = Step.read(iter(arguments))
    check_operands(step, q, k, v, whole=True)
    return _forward(_by_path(step, q, k), q, k, v)


def _forward(step: Step, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of a checked step over all keys; ``geometry``: of all of it."""
    check_values(step)
    out = torch.empty_like(q)  # heads cut out of [B, M, H * D] give rows of it back without a copy
    lse = torch.empty(q.shape[:-1], dtype=state_dtype(q), device=q.device)
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if q.numel():
        ENGINES[step.engine].forward(step, q, k, v, State(first=True, last=True, out=out, lse=lse), geometry)
    return out, lse


def _by_path(step: Step, q: Tensor, k: Tensor) -> Step:
    """The step over all keys on one rank, ``short`` only where the engine takes that path."""
    short = step.short and q.numel() > 0 and k.numel() > 0 and ENGINES[step.engine].takes_short(step, q, k)
    return step if short == step.short else step.but(short=short)


@_attention.register_fake
def _(q, k, v, *arguments):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=state_dtype(q))


@torch.library.custom_op(
    "megagraph::biased_attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {_QKV}, bool learned_grad, {Step.schema()}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    learned_grad: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient of the learned part (empty unless ``learned_grad``)."""
    step = Step.read(iter(arguments))
    _check_backward(step, q, k, v, d_out, d_lse, out, lse)
    step = _by_path(step, q, k)
    dq, dk, dv, d_learned = _gradients(step, q, k, v, (d_out, d_lse, out, lse), learned_grad)
    return dq, dk, dv, q.new_empty(0) if d_learned is None else d_learned


def _check_backward(
    step: Step, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    check_tensor("q", q, d_out.device, d_out.shape, d_out.dtype)  # the others are to fit q
    check_operands(step, q, k, v, whole=True)
    check_tensor("d_out", d_out, q.device, q.shape, q.dtype)
    if d_lse is not None:
        check_tensor("d_lse", d_lse, q.device, q.shape[:3], state_dtype(q))
    check_tensor("out", out, q.device, q.shape, q.dtype)
    _check_rows(q, lse=lse)


def _gradients(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor],
    learned_grad: bool,
    geometry: Geometry | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and the gradient of the learned part, of a checked step; ``saved``: d_out, d_lse, out, lse;
    ``geometry``: of all of these."""
    d_out, d_lse, out, lse = saved
    dq, dk, dv = (reuse.empty_like(x) for x in (q, k, v))
    learned = step.learned if learned_grad else None
    d_learned = None if learned is None else learned_gradient(step, q, learned, accumulate=False)
    gradients = Gradients(
        d_out=d_out, lse=lse, delta=torch.empty_like(lse), dq=dq, dk=dk, dv=dv, d_learned=d_learned, accumulate=False
    )
    if q.numel() and k.shape[2]:
        delta_of = DeltaOf(out=out, d_lse=None if d_lse is None else d_lse.contiguous())
        ENGINES[step.engine].backward(step, q, k, v, gradients, delta_of, geometry)
    else:
        gradients.of_no_keys()
    return dq, dk, dv, None if d_learned is None or learned is None else d_learned.to(learned.dtype)


@_attention_backward.register_fake
def _(d_out, d_lse, out, lse, q, k, v, learned_grad, *arguments):
    learned = Step.read(iter(arguments)).learned
    d_learned = learned.new_empty(learned.shape) if learned_grad and learned is not None else q.new_empty(0)
    return *(torch.empty_like(x) for x in (q, k, v)), d_learned


def _setup_context(ctx, inputs, output):
    ctx.values = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output)


_LEARNED = 3 + [field.name for field in fields(Step)].index("learned")


def _backward(ctx, d_out, d_lse):
    *tensors, out, lse = ctx.saved_tensors
    q, k, v, *arguments = (x if given is None else given for x, given in zip(tensors, ctx.values, strict=True))
    learned_grad = ctx.needs_input_grad[_LEARNED]
    *gradients, d_learned = _attention_backward(d_out, d_lse, out, lse, q, k, v, learned_grad, *arguments)
    gradients += [None] * len(arguments)
    gradients[_LEARNED] = d_learned if learned_grad else None
    return tuple(gradients)


def _refuse_second(ctx, *gradients):
    raise NotImplementedError("biased_attention has no second derivative (create_graph=True); use impl='reference'")


_attention.register_autograd(_backward, setup_context=_setup_context)
_attention_backward.register_autograd(_refuse_second)


def _refuse_transforms(key: str) -> None:
    """Refuse transforms: formulas of torch.library know none, and drop tangents where no input requires a gradient."""
    kernel = torch.library.get_kernel("megagraph::biased_attention", key)

    def autograd(keyset, *arguments):
        if any(isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in arguments):
            raise NotImplementedError(
                "biased_attention has no forward-mode derivative, got a tangent (torch.func.jvp, jacfwd, forward_ad); "
                "use reverse mode, or impl='reference'"
            )
        wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if wanted and torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "biased_attention has no derivative by torch.func (grad, vjp, jacrev), got inputs that ask for one; "
                "use torch.autograd.grad, or impl='reference'"
            )
        return kernel.call_boxed(keyset, *arguments)

    _library.impl("biased_attention", autograd, key, with_keyset=True)


_library = torch.library.Library("megagraph", "FRAGMENT")
for _key in ("AutogradCPU", "AutogradCUDA"):
    _refuse_transforms(_key)


def learned_gradient(step: Step, q: Tensor, learned: Tensor, *, accumulate: bool) -> Tensor:
    """Room for the gradient of the learned part: in lse's dtype, zeroed where it is added to; dense planes of each
    sequence and head are written once, in their own dtype."""
    if step.form == "dense" and step.columns is None and learned.shape[:2] == q.shape[:2]:
        return reuse.empty_like(learned)
    added = accumulate or step.form == "dense"
    return (torch.zeros_like if added else torch.empty_like)(learned, dtype=state_dtype(q))
