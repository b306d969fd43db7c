"""The attention operators: their contract, their registration with PyTorch, and the choice of implementation.

``biased_attention`` is functional: autograd, opcheck, compilation. ``attention_step_`` and ``attention_step_backward_``
are one step of a ring; they advance their state in place and have no autograd, as torch.library refuses both together.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from megagraph.attention import reference, reuse
from megagraph.attention.bias import Bias, DenseBias, check_strided
from megagraph.attention.checks import check_inputs, check_operands, check_tensor, check_values
from megagraph.attention.step import Step

Impl = Literal["triton", "triton_short", "triton_long", "blocked", "blocked_short", "blocked_long", "reference"]
SHORT, NARROW = 256, 16  # most rows and keys, widest heads of the short paths, as in megagraph.kernels.tiles


@overload
def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias | Tensor | None = ..., *,
    key_padding_mask: Tensor | None = ..., scale: float | None = ..., dropout_p: float = ...,
    dropout_key: Tensor | None = ..., return_lse: Literal[False] = ..., impl: Impl | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias | Tensor | None = ..., *,
    key_padding_mask: Tensor | None = ..., scale: float | None = ..., dropout_p: float = ...,
    dropout_key: Tensor | None = ..., return_lse: Literal[True], impl: Impl | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
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
    r"""Exact attention with an additive, learnable bias (paper Eq. 1-2).

    .. math:: \mathrm{out} = \mathrm{softmax}(\mathrm{scale} \cdot q k^\top + b)\, v

    Differentiable in q, k, v and the learned part of the bias. A compact bias (``BucketBias``, ``ProjectedBias``) is
    never expanded to [H, M, N] except by ``impl="reference"``; kept for backward are q, k, v, out, lse and the bias
    as given.

    Args:
        q: [B, H, M, D] floating point, 1 <= D <= 256 (no padding needed).
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
            ``None`` takes ``"triton"`` on CUDA and ``"blocked"`` elsewhere. Short sequences with narrow heads take
            kernels of their own; ``"triton_short"`` and ``"triton_long"``, ``"blocked_short"`` and ``"blocked_long"``
            ask for one of the two paths. What you ask for runs, or raises.

    Returns:
        out [B, H, M, D] in q's dtype; a row that can attend to nothing is 0 with zero gradients.

    Raises:
        ValueError: shape, dtype, device or value of an argument; the message gives expected and actual.
        NotImplementedError: ``impl`` cannot run these inputs; every reason is listed. Forward-mode differentiation but
            by ``"reference"``.
    """
    bias = as_bias(bias)
    check_inputs(q, k, v, bias, key_padding_mask, scale, dropout_p, dropout_key)
    step = make_step(q, bias, key_padding_mask, scale, dropout_p, dropout_key)
    out, lse = attention(step, q, k, v, bias, choose_impl(impl, q, k, bias))
    return (out, lse) if return_lse else out


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """A float tensor of 2 to 4 dimensions is a dense bias."""
    if isinstance(bias, Tensor):
        check_strided("bias", bias)
        return DenseBias(bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)))
    return bias


def make_step(
    q: Tensor,
    bias: Bias | None,
    key_padding_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    dropout_key: Tensor | None,
) -> Step:
    """The arguments of a call, checked, as a step that has no keys yet."""
    return Step(
        form="none" if bias is None else bias.form,
        data=None if bias is None else bias.data,
        learned=None if bias is None else bias.learned,
        bias_mask=None if bias is None else bias.mask,
        key_padding_mask=key_padding_mask,
        segments=[],
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        dropout_key=None if dropout_p == 0.0 else dropout_key,
    )


def attention(step: Step, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, impl: Impl) -> tuple[Tensor, Tensor]:
    """out and lse with all keys on one rank; differentiable."""
    if impl == "reference":
        check_values(step)
        with torch.autocast(q.device.type, enabled=False):  # every product in the dtype that was chosen for it
            return reference.biased_attention(
                q, k, v, bias, step.key_padding_mask, step.scale, step.dropout_p, step.dropout_key
            )
    return _attention(
        q, k, v, step.data, step.learned, step.bias_mask, step.key_padding_mask, step.dropout_key, step.row_ids,
        step.form, step.scale, step.dropout_p, impl,
    )  # fmt: skip


@torch.library.custom_op("megagraph::attention_step_", mutates_args=("m", "l", "acc", "out", "lse"))
def attention_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: str,
    data: Tensor | None,
    learned: Tensor | None,
    bias_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    segments: list[int],
    scale: float,
    dropout_p: float,
    dropout_key: Tensor | None,
    row_ids: Tensor | None,
    impl: str,
    first: bool,
    last: bool,
    m: Tensor | None,
    l: Tensor | None,
    acc: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Fold the visiting keys into the state (paper Eq. 3); the last step writes ``out`` and ``lse`` instead.

    q [B, H, M, D]; k, v [B, H, n, D]; the next ten arguments are a :class:`Step`, its segments in one list. m, l
    [B, H, M] and acc [B, H, M, D], contiguous, fp32 (fp64 for fp64 q), are read unless ``first`` and written unless
    ``last``; out [B, H, M, D] in q's dtype and lse [B, H, M], as m, are written if ``last``.
    """
    step = Step.from_flat(
        form, data, learned, bias_mask, key_padding_mask, segments, scale, dropout_p, dropout_key, row_ids
    )
    check_operands(step, q, k, v, whole=False)
    if not (first and last):
        _check_rows(q, m=m, l=l)
        check_tensor("acc", acc, q.device, q.shape, state_dtype(q), contiguous=True)
    if last:
        _check_rows(q, lse=lse)
        check_tensor("out", out, q.device, q.shape, q.dtype)
    if first:
        check_values(step)
    _run_step(step, impl, q, k, v, first=first, last=last, m=m, l=l, acc=acc, out=out, lse=lse)


@torch.library.custom_op("megagraph::attention_step_backward_", mutates_args=("dq", "dk", "dv", "d_learned"))
def attention_step_backward_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: str,
    data: Tensor | None,
    learned: Tensor | None,
    bias_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    segments: list[int],
    scale: float,
    dropout_p: float,
    dropout_key: Tensor | None,
    row_ids: Tensor | None,
    impl: str,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_learned: Tensor | None,
) -> None:
    """Add one visiting block's gradients into dq, dk, dv and d_learned (``None``: not wanted).

    lse [B, H, M] is that of the whole softmax, delta [B, H, M] = sum(d_out * out) - d_lse, both contiguous; dq, dk
    and dv are fp32 or fp64, shaped as q, k and v; d_learned is as :func:`learned_gradient` makes it.
    """
    step = Step.from_flat(
        form, data, learned, bias_mask, key_padding_mask, segments, scale, dropout_p, dropout_key, row_ids
    )
    check_operands(step, q, k, v, whole=False)
    check_tensor("d_out", d_out, q.device, q.shape, q.dtype)
    _check_rows(q, lse=lse, delta=delta)
    for name, x, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        check_tensor(name, x, q.device, like.shape)
    if d_learned is not None and learned is not None:
        shape = learned.shape
        if form == "bucket" and d_learned.ndim == 2:  # ``prepare`` pads a table
            shape = torch.Size((shape[0], min(shape[1], d_learned.shape[1])))
        check_tensor("d_learned", d_learned, q.device, shape)
    sums = {"dq": dq, "dk": dk, "dv": dv, "d_learned": d_learned}
    _run_step_backward(step, impl, q, k, v, d_out=d_out, lse=lse, delta=delta, **sums, accumulate=True)


def _check_rows(q: Tensor, **numbers: Tensor | None) -> None:
    """``check_tensor`` of what has a number for each row of q."""
    for name, x in numbers.items():
        check_tensor(name, x, q.device, q.shape[:3], state_dtype(q), contiguous=True)


@attention_step_.register_fake
def _(*args, **kwargs):
    return None


@attention_step_backward_.register_fake
def _(*args, **kwargs):
    return None


def _run_step(step: Step, impl: str, q: Tensor, k: Tensor, v: Tensor, **state: Any) -> None:
    if q.numel() == 0:
        return
    if impl.startswith("triton"):
        from megagraph.kernels.biased_attention import launch_step_fwd

        launch_step_fwd(q, k, v, **vars(step), **state, path=_path(impl))
    else:
        from megagraph.attention import blocked  # Numba takes a second to import

        blocked.attention_step(step, q, k, v, **state)


def _path(impl: str) -> str | None:
    """Of the kernels: ``"short"``, ``"long"``, or by shape."""
    return impl.removeprefix("triton").removeprefix("_") or None


def _run_step_backward(
    step: Step, impl: str, q: Tensor, k: Tensor, v: Tensor, *, accumulate: bool, **gradients: Any
) -> None:
    if q.numel() == 0:
        return
    if impl.startswith("triton"):
        from megagraph.kernels.biased_attention import launch_step_bwd

        launch_step_bwd(q, k, v, **vars(step), **gradients, accumulate=accumulate, path=_path(impl))
    else:
        from megagraph.attention import blocked

        blocked.attention_step_backward(step, q, k, v, **gradients)


@torch.library.custom_op("megagraph::biased_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    data: Tensor | None,
    learned: Tensor | None,
    bias_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_key: Tensor | None,
    row_ids: Tensor | None,
    form: str,
    scale: float,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """out [B, H, M, D], lse [B, H, M]: one step that is first and last, over all keys."""
    step = _whole_step(k, form, data, learned, bias_mask, key_padding_mask, scale, dropout_p, dropout_key, row_ids)
    check_operands(step, q, k, v, whole=True)
    check_values(step)
    out = torch.empty_like(q)  # heads cut out of [B, M, H * D] give rows of it back without a copy
    lse = torch.empty(q.shape[:-1], dtype=state_dtype(q), device=q.device)
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if _is_short(impl, step, q, k):
        from megagraph.attention import short

        short.attention(step, q, k, v, short.whole_rows(step, q, k), out=out, lse=lse)
    else:
        _run_step(step, impl, q, k, v, first=True, last=True, m=None, l=None, acc=None, out=out, lse=lse)
    return out, lse


def _whole_step(
    k: Tensor, form: str, data, learned, bias_mask, key_padding_mask, scale, dropout_p, dropout_key, row_ids
) -> Step:
    """The only step where all keys are on one rank."""
    segments = [0, 0, k.shape[2] if k.ndim == 4 else 0]  # ``check_operands`` refuses what has other axes
    return Step.from_flat(
        form, data, learned, bias_mask, key_padding_mask, segments, scale, dropout_p, dropout_key, row_ids
    )


@_attention.register_fake
def _(q, k, v, data, learned, bias_mask, key_padding_mask, dropout_key, row_ids, form, scale, dropout_p, impl):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=state_dtype(q))


@torch.library.custom_op("megagraph::biased_attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    data: Tensor | None,
    learned: Tensor | None,
    bias_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_key: Tensor | None,
    row_ids: Tensor | None,
    form: str,
    scale: float,
    dropout_p: float,
    impl: str,
    learned_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient of the learned part (empty unless ``learned_grad``)."""
    step = _whole_step(k, form, data, learned, bias_mask, key_padding_mask, scale, dropout_p, dropout_key, row_ids)
    check_tensor("q", q, d_out.device, d_out.shape, d_out.dtype)  # the others are to fit q
    check_operands(step, q, k, v, whole=True)
    check_tensor("d_out", d_out, q.device, q.shape)
    check_tensor("out", out, q.device, q.shape, q.dtype)
    check_tensor("d_lse", d_lse, q.device, q.shape[:3], state_dtype(q))
    _check_rows(q, lse=lse)
    is_short = _is_short(impl, step, q, k)
    # these write each gradient once, in its own dtype; blocked adds tile by tile
    kernels = impl.startswith("triton") and q.numel() > 0 and k.shape[2] > 0
    written = kernels or (is_short and key_padding_mask is None)
    dq, dk, dv = (torch.empty_like(x) if written else torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    d_learned = None
    if learned_grad and learned is not None:
        d_learned = learned_gradient(form, q, learned)
    gradients: dict[str, Any] = {"d_out": d_out, "dq": dq, "dk": dk, "dv": dv, "d_learned": d_learned}
    if is_short:
        from megagraph.attention import short

        if form == "dense" and d_learned is not None and key_padding_mask is not None:
            d_learned.zero_()
        short.attention_backward(step, q, k, v, short.whole_rows(step, q, k), d_lse=d_lse, **gradients)
    elif k.shape[2]:
        delta = row_delta(d_out, out, d_lse, impl)
        _run_step_backward(step, impl, q, k, v, lse=lse, delta=delta, **gradients, accumulate=False)
    d_learned = q.new_empty(0) if d_learned is None or learned is None else d_learned.to(learned.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_learned


@_attention_backward.register_fake
def _(d_out, d_lse, out, lse, q, k, v, data, learned, bias_mask, key_padding_mask, dropout_key, row_ids, form, scale,
      dropout_p, impl, learned_grad):  # fmt: skip
    d_learned = learned.new_empty(learned.shape) if learned_grad and learned is not None else q.new_empty(0)
    return *(torch.empty_like(x) for x in (q, k, v)), d_learned


def _setup_context(ctx, inputs, output):
    *tensors, ctx.form, ctx.scale, ctx.dropout_p, ctx.impl = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, d_out, d_lse):
    *tensors, out, lse = ctx.saved_tensors
    learned_grad = ctx.needs_input_grad[4]
    dq, dk, dv, d_learned = _attention_backward(
        d_out, d_lse, out, lse, *tensors, ctx.form, ctx.scale, ctx.dropout_p, ctx.impl, learned_grad
    )
    return dq, dk, dv, None, d_learned if learned_grad else None, *(None,) * 8


_attention.register_autograd(_backward, setup_context=_setup_context)


def _refuse_tangents(key: str) -> None:
    """Forward mode: a formula of torch.library has none, and drops the tangents where no input requires a gradient."""
    kernel = torch.library.get_kernel("megagraph::biased_attention", key)

    def autograd(keyset, *arguments):
        q, k, v, _, learned, *_ = arguments
        if any(x is not None and unpack_dual(x).tangent is not None for x in (q, k, v, learned)):
            raise NotImplementedError(
                "biased_attention has no forward-mode derivative, got a tangent (torch.func.jvp, jacfwd, forward_ad); "
                "use reverse mode, or impl='reference'"
            )
        return kernel.call_boxed(keyset, *arguments)

    _library.impl("biased_attention", autograd, key, with_keyset=True)


_library = torch.library.Library("megagraph", "FRAGMENT")
for _key in ("AutogradCPU", "AutogradCUDA"):
    _refuse_tangents(_key)


def _is_short(impl: str, step: Step, q: Tensor, k: Tensor) -> bool:
    """Whether a CPU goes row by row (``short``): asked for, or by shape."""
    if q.numel() == 0 or k.numel() == 0:
        return False
    if impl == "blocked_short":
        return True
    if impl != "blocked" or step.row_ids is not None:
        return False
    return not _not_short(q, k, step.learned if step.form == "dense" else None)


def is_short_shape(num_nodes: int, head_dim: int) -> bool:
    """Whether ``"blocked"`` takes its short path for whole sequences of so many nodes in float32."""
    return num_nodes <= SHORT and head_dim <= NARROW


def _not_short(q: Tensor, k: Tensor, dense: Tensor | None) -> list[str]:
    """Why ``blocked_short`` cannot run these inputs."""
    reasons = _too_large(q, k, "blocked_short")
    if q.device.type != "cpu" or q.dtype != torch.float32:
        reasons.append(f"it takes torch.float32 on a CPU, got {q.dtype} on {q.device}; use impl='blocked'")
    if dense is not None and (dense.shape[:2] != q.shape[:2] or dense.dtype != q.dtype):
        reasons.append(
            f"a dense bias must have a plane per head in the dtype of q, got {tuple(dense.shape)} in {dense.dtype}; "
            "use impl='blocked'"
        )
    return reasons


def _too_large(q: Tensor, k: Tensor, impl: Impl) -> list[str]:
    M, N, D = q.shape[2], k.shape[2], q.shape[3]
    if is_short_shape(max(M, N), D):
        return []
    long = impl.removesuffix("_short")
    return [f"it takes at most {SHORT} rows and keys of head dim {NARROW}, got {M}, {N} and {D}; use impl={long!r}"]


def row_delta(d_out: Tensor, out: Tensor, d_lse: Tensor, impl: str) -> Tensor:
    """What the softmax subtracts in ds = p * (dp - delta), [B, H, M]; a gradient of lse enters with the other sign."""
    if impl.startswith("triton"):
        from megagraph.kernels.biased_attention import launch_row_delta

        delta = torch.empty_like(d_lse, memory_format=torch.contiguous_format)
        launch_row_delta(d_out, out, d_lse.contiguous(), delta)
        return delta
    return ((d_out.to(d_lse.dtype) * out).sum(dim=-1) - d_lse).contiguous()


def prepare(step: Step, q: Tensor, impl: str) -> Step:
    """The step with what the kernels would else make anew in every step of a ring: a table padded to all indices."""
    if step.form != "bucket" or not impl.startswith("triton"):
        return step
    from megagraph.kernels.biased_attention import pad_table

    assert step.learned is not None
    return replace(step, learned=pad_table(step.learned, state_dtype(q)))


def learned_gradient(form: str, q: Tensor, learned: Tensor) -> Tensor:
    """Where the gradient of the learned part is summed: in lse's dtype, zeroed; a dense plane that no heads share is
    written once, in its own dtype."""
    if form == "dense" and learned.shape[:2] == q.shape[:2]:
        return reuse.empty_like(learned)
    return torch.zeros_like(learned, dtype=state_dtype(q))


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def choose_impl(impl: Impl | None, q: Tensor, k: Tensor, bias: Bias | None, *, ring: bool = False) -> Impl:
    """The implementation to run: the one asked for, or by device."""
    if impl is None:
        impl = "triton" if q.is_cuda else "blocked"
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be {', '.join(map(repr, get_args(Impl)))} or None, got {impl!r}")
    reasons = []
    if impl.startswith("triton"):
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed (it has wheels for Linux only)")
        if not q.is_cuda and not interpreted:
            reasons.append(f"q is on {q.device}; move it to a CUDA device, or set TRITON_INTERPRET=1 before starting")
        if q.dtype == torch.float64 and not interpreted:
            reasons.append("q is torch.float64; use impl='blocked', or TRITON_INTERPRET=1 on the CPU")
    elif impl.startswith("blocked") and q.device.type not in ("cpu", "meta"):
        reasons.append(f"q is on {q.device}; use impl='reference', or 'triton' on a CUDA device")
    if impl.endswith("_short") and ring:
        long = impl.removesuffix("_short")
        reasons.append(f"it needs all keys on one rank, not in a ring; use impl={long!r}")
    elif impl == "blocked_short":
        reasons += _not_short(q, k, bias.values if isinstance(bias, DenseBias) else None)
    elif impl == "triton_short" and importlib.util.find_spec("triton") is not None:
        reasons += _too_large(q, k, impl)
        if isinstance(bias, DenseBias) and bias.shape[:2] != q.shape[:2]:
            reasons.append(f"a dense bias must have a plane per head, got {tuple(bias.shape)}; use impl='triton'")
    if impl == "reference" and ring:
        reasons.append("it needs all keys on one rank, not in a ring; use impl='blocked' or 'triton'")
    if reasons:
        raise NotImplementedError(f"impl={impl!r} cannot run these inputs:\n  " + "\n  ".join(reasons))
    return impl
