"""Who is measured: our implementations and what a user would take instead, all from the same compact inputs.

A peer that knows dense biases only builds one and reduces its gradient to the table or weight inside its time, as its
user would have to; with the dense form it is given the bias. What a peer cannot run it refuses by raising.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import megagraph as mg
from bench.shapes import DEVICE, Case, Inputs, make_bias
from megagraph.attention.engines import Impl

Attend = Callable[..., Tensor]  # (form, q, k, v, data, *learned) -> out
Launch = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One way to compute attention.

    ``prepare(case, direction, sets)`` gives one launch per set of inputs, which starts forward, or forward and
    backward; ``read`` turns what a launch returns into out and, with backward, dq, dk, dv and the learned gradients.
    """

    prepare: Callable[[Case, str, list[Inputs]], list[Launch]]
    read: Callable[[Any], list[Tensor]] = list
    ours: bool = False
    compiles: bool = False  # worth compiling ahead, in parallel
    blocking: bool = False  # a launch returns when its work is done


def _launches(attend: Attend, direction: str, form: str, sets: list[Inputs]) -> list[Launch]:
    def forward(inputs: Inputs) -> list[Tensor]:
        with torch.no_grad():
            return [attend(form, inputs.q, inputs.k, inputs.v, inputs.data, *inputs.learned)]

    def forward_backward(inputs: Inputs, leaves: list[Tensor]) -> list[Tensor]:
        out = attend(form, *leaves[:3], inputs.data, *leaves[3:])
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.d_out)]

    if direction == "forward":
        return [partial(forward, inputs) for inputs in sets]
    return [partial(forward_backward, inputs, [x.detach().requires_grad_() for x in inputs.leaves]) for inputs in sets]


def _torch(attend: Attend, **about: bool) -> Contender:
    return Contender(lambda case, direction, sets: _launches(attend, direction, case.form, sets), **about)


def _compiled(attend: Attend) -> Contender:
    def prepare(case: Case, direction: str, sets: list[Inputs]) -> list[Launch]:
        torch.compiler.reset()  # past a number of shapes it would run uncompiled without a word
        return _launches(torch.compile(attend, dynamic=False, fullgraph=True), direction, case.form, sets)

    return Contender(prepare, compiles=True)


def _megagraph(impl: Impl) -> Attend:
    def attend(form, q, k, v, data, *learned):
        return mg.biased_attention(q, k, v, make_bias(form, data, learned), impl=impl)

    return attend


def dense_bias(form: str, dtype: torch.dtype, data: Tensor | None, learned: tuple[Tensor, ...]) -> Tensor | None:
    """[B, H, M, N], as Graphormer (an embedding) and ANS-GT (a linear layer) build it."""
    if form == "dense":
        return learned[0]
    if form == "bucket":
        return F.embedding(data.int(), learned[0].t().to(dtype)).permute(0, 3, 1, 2)
    if form == "projected":
        return torch.einsum("bcmn,hc->bhmn", data, learned[0].to(dtype))
    return learned[0] @ learned[1].transpose(-1, -2) if form == "factored" else None


def eager(form, q, k, v, data, *learned):
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    bias = dense_bias(form, q.dtype, data, learned)
    return (s if bias is None else s + bias).softmax(dim=-1) @ v


def _padded(multiple: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros up to the next head dim that a peer accepts; they change no score."""
    return tuple(F.pad(x, (0, -x.shape[-1] % multiple)) for x in tensors)


def _sdpa(backend: SDPBackend, multiple: int = 8) -> Attend:
    def attend(form, q, k, v, data, *learned):
        bias = dense_bias(form, q.dtype, data, learned)
        if bias is not None and bias.stride(-1) != 1:
            bias = bias.contiguous()  # the fused kernels ask for it
        scale = q.shape[-1] ** -0.5
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*_padded(multiple, q, k, v), attn_mask=bias, scale=scale)
        return out[..., : q.shape[-1]]

    return attend


def flex(form, q, k, v, data, *learned):
    def score_mod(s, b, h, i, j):
        if form == "dense":
            return s + learned[0][b, h, i, j]
        if form == "bucket":
            return s + learned[0][h, data[b, i, j].int()]
        if form == "projected":
            return s + sum(learned[0][h, c] * data[b, c, i, j] for c in range(data.shape[1]))
        if form == "factored":
            return s + sum(learned[0][b, h, i, r] * learned[1][b, h, j, r] for r in range(learned[0].shape[-1]))
        return s

    scale = q.shape[-1] ** -0.5
    return flex_attention(*_padded(16, q, k, v), score_mod=score_mod, scale=scale)[..., : q.shape[-1]]


def flash_bias(form, q, k, v, data, *learned):
    """q k^T + phi_q phi_k^T as one product of concatenated heads (arXiv:2505.12044)."""
    if form != "factored":
        raise NotImplementedError("exact only where the bias comes as two factors")
    scale = q.shape[-1] ** -0.5
    wide_q, wide_k = torch.cat([q, learned[0] / scale], dim=-1), torch.cat([k, learned[1]], dim=-1)
    wide_v = F.pad(v, (0, learned[0].shape[-1]))  # FlashAttention wants equal head dims
    return F.scaled_dot_product_attention(*_padded(8, wide_q, wide_k, wide_v), scale=scale)[..., : q.shape[-1]]


_JAX_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # leaves the memory to PyTorch
    "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def _jax(implementation: str) -> Contender:
    """jax.nn.dot_product_attention; head dims padded to 8, bias and gradients inside jit, layouts changed outside."""

    def prepare(case: Case, direction: str, sets: list[Inputs]) -> list[Launch]:
        for name, value in _JAX_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import jax
        import jax.numpy as jnp

        if DEVICE == "cuda" and jax.default_backend() != "gpu":
            raise NotImplementedError("jax is installed without CUDA")

        def attend(leaves, data):
            q, k, v, *learned = leaves
            if case.form == "bucket":
                bias = learned[0].astype(q.dtype).T[data].transpose(0, 3, 1, 2)
            elif case.form == "projected":
                bias = jnp.einsum("bcmn,hc->bhmn", data, learned[0].astype(q.dtype))
            elif case.form == "factored":
                bias = jnp.einsum("bhmr,bhnr->bhmn", *learned)
            else:
                bias = learned[0] if learned else None
            wide = [jnp.pad(x, ((0, 0),) * 3 + ((0, -case.D % 8),)) for x in (q, k, v)]
            out = jax.nn.dot_product_attention(*wide, bias, scale=case.D**-0.5, implementation=implementation)
            return out[..., : case.D]

        def forward(leaves, data, d_out):
            return [attend(leaves, data)]

        def forward_backward(leaves, data, d_out):
            out, pullback = jax.vjp(lambda leaves: attend(leaves, data), leaves)
            return [out, *pullback(d_out)[0]]

        run = jax.jit(forward if direction == "forward" else forward_backward)

        def array(x: Tensor | None):
            return None if x is None else jax.dlpack.from_dlpack(x.detach().contiguous())

        def heads_last(x: Tensor):
            return array(x.transpose(1, 2))  # [B, N, H, D]

        def wait_for(*arguments):
            return jax.block_until_ready(run(*arguments))

        launches: list[Launch] = []
        for inputs in sets:
            leaves = [*map(heads_last, (inputs.q, inputs.k, inputs.v)), *map(array, inputs.learned)]
            launches.append(partial(wait_for, leaves, array(inputs.data), heads_last(inputs.d_out)))
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # jax has a stream of its own
        return launches

    def read(arrays: Any) -> list[Tensor]:
        tensors = [torch.from_dlpack(x) for x in arrays]
        return [x.transpose(1, 2) if i < 4 else x for i, x in enumerate(tensors)]

    return Contender(prepare, read, compiles=True, blocking=True)


def _our_impls() -> list[Impl]:
    """What runs on this device; the reference is only the specification."""
    return [impl for impl in get_args(Impl) if impl != "reference" and impl.startswith("triton") == (DEVICE == "cuda")]


_JAX = "cudnn" if DEVICE == "cuda" else "xla"
CONTENDERS = {f"megagraph_{impl}": _torch(_megagraph(impl), ours=True, compiles=True) for impl in _our_impls()} | {
    "eager": _torch(eager),
    "eager_compiled": _compiled(eager),
    "sdpa_math": _torch(_sdpa(SDPBackend.MATH, multiple=1)),
    "sdpa_efficient": _torch(_sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    "sdpa_cudnn": _torch(_sdpa(SDPBackend.CUDNN_ATTENTION)),
    "sdpa_flash": _torch(_sdpa(SDPBackend.FLASH_ATTENTION)),
    "flex_attention": _compiled(flex),
    "flash_bias": _torch(flash_bias),
    f"jax_{_JAX}": _jax(_JAX),
}
