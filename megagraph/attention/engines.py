"""Who can run a step of attention, by which path, and why not.

An engine computes steps; both take the same arguments, of ``step``, and the operators in ``operator`` know no more of
them than :class:`Engine` says.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megagraph.attention.step import DeltaOf, Gradients, State, Step
from megagraph.kernels.geometry import Geometry

Impl = Literal["triton", "blocked", "blocked_long", "reference"]
_INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("numba", "triton")}
SHORT, NARROW = 256, 16  # most rows and keys, widest heads of the short path


class Engine(Protocol):
    """Computes steps on one kind of device."""

    def refusals(self, q: Tensor) -> list[str]:
        """Why the engine cannot run here, a sentence each."""

    def takes_short(self, step: Step, q: Tensor, k: Tensor) -> bool:
        """Whether the engine takes its path for short sequences; all keys are here."""

    def prepare(self, step: Step, q: Tensor) -> Step:
        """The step with what would else be made anew in every step of a ring."""

    def forward(
        self, step: Step, q: Tensor, k: Tensor, v: Tensor, state: State, geometry: Geometry | None = None
    ) -> None:
        """Fold the visiting keys into the state, or into its result at the last step.

        q: [B, H, M, D]; k, v: [B, H, n, D] in its dtype; any strides. ``geometry``: that of all that is read, where the
        state is new memory.
        """

    def delta(self, step: Step, d_out: Tensor, out: Tensor, d_lse: Tensor | None) -> Tensor:
        """What the softmax subtracts in ds = p * (dp - delta), [B, H, M], in every step of a ring, so far as
        ``backward`` does not find it itself; a gradient of lse enters with the other sign, None is 0."""

    def backward(
        self,
        step: Step,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gradients: Gradients,
        of: DeltaOf | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        """The share of one visiting block; ``of``: what to make delta of first; ``geometry``: that of all that is read,
        where what is written is new memory."""


class Triton:
    """The kernels: CUDA, or the CPU in Triton's interpreter."""

    def refusals(self, q: Tensor) -> list[str]:
        interpreted, reasons = os.environ.get("TRITON_INTERPRET") == "1", []
        if not _INSTALLED["triton"]:
            reasons.append("triton is not installed (it has wheels for Linux only)")
        if not q.is_cuda and not interpreted:
            reasons.append(f"q is on {q.device}; move it to a CUDA device, or set TRITON_INTERPRET=1 before starting")
        if q.dtype == torch.float64 and not interpreted:
            reasons.append("q is torch.float64; use impl='blocked', or TRITON_INTERPRET=1 on the CPU")
        return reasons

    def takes_short(self, step: Step, q: Tensor, k: Tensor) -> bool:
        return False

    def prepare(self, step: Step, q: Tensor) -> Step:
        if step.form != "bucket" or step.columns is not None:
            return step
        from megagraph.kernels.biased_attention import pad_table

        assert step.learned is not None
        return step.but(learned=pad_table(step.learned, q))

    def forward(
        self, step: Step, q: Tensor, k: Tensor, v: Tensor, state: State, geometry: Geometry | None = None
    ) -> None:
        if step.columns is not None:  # whose tiles follow from what is listed
            from megagraph.kernels.listed_attention import launch_pairs_fwd

            launch_pairs_fwd(q, k, v, step, state)
        else:
            from megagraph.kernels.biased_attention import launch_step_fwd

            launch_step_fwd(q, k, v, step, state, geometry=geometry)

    def delta(self, step: Step, d_out: Tensor, out: Tensor, d_lse: Tensor | None) -> Tensor:
        from megagraph.kernels.biased_attention import launch_row_delta

        delta = torch.empty(out.shape[:-1], dtype=state_dtype(out), device=out.device)
        launch_row_delta(d_out, delta, DeltaOf(out=out, d_lse=None if d_lse is None else d_lse.contiguous()))
        return delta

    def backward(
        self,
        step: Step,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gradients: Gradients,
        of: DeltaOf | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        if step.columns is not None:
            from megagraph.kernels.listed_attention import launch_pairs_bwd

            launch_pairs_bwd(q, k, v, step, gradients, of)
        else:
            from megagraph.kernels.biased_attention import launch_step_bwd

            launch_step_bwd(q, k, v, step, gradients, of, geometry)


class Blocked:
    """Loops that Numba compiles, on a CPU; it takes a second to import."""

    def refusals(self, q: Tensor) -> list[str]:
        reasons = [] if _INSTALLED["numba"] else ["numba is not installed"]
        if q.device.type not in ("cpu", "meta"):
            reasons.append(f"q is on {q.device}; use impl='reference', or 'triton' on a CUDA device")
        return reasons

    def takes_short(self, step: Step, q: Tensor, k: Tensor) -> bool:
        if step.columns is not None:
            return False
        if step.form == "dense":  # a plane per head
            dense = step.learned
            assert dense is not None
            if dense.shape[:2] != q.shape[:2] or dense.dtype != q.dtype:
                return False
        short = is_short_shape(max(q.shape[2], k.shape[2]), q.shape[3])
        return short and q.device.type == "cpu" and q.dtype == torch.float32 and step.row_ids is None

    def prepare(self, step: Step, q: Tensor) -> Step:
        return step

    def forward(
        self, step: Step, q: Tensor, k: Tensor, v: Tensor, state: State, geometry: Geometry | None = None
    ) -> None:
        _cpu_path(step).forward(step, q, k, v, state)

    def delta(self, step: Step, d_out: Tensor, out: Tensor, d_lse: Tensor | None) -> Tensor:
        dtype = state_dtype(out)
        if step.short:  # it adds the product itself, of the p and dp that it has at hand
            return torch.zeros(out.shape[:-1], dtype=dtype, device="cpu") if d_lse is None else -d_lse
        delta = (d_out.to(dtype) * out).sum(dim=-1)
        return (delta if d_lse is None else delta - d_lse).contiguous()

    def backward(
        self,
        step: Step,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gradients: Gradients,
        of: DeltaOf | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        if of is not None:
            gradients = gradients.but(delta=self.delta(step, gradients.d_out, of.out, of.d_lse))
        _cpu_path(step).backward(step, q, k, v, gradients)


def _cpu_path(step: Step) -> Any:
    from megagraph.attention.cpu import pairs, rows, tiles

    return pairs if step.columns is not None else rows if step.short else tiles


ENGINES: dict[str, Engine] = {"triton": Triton(), "blocked": Blocked()}
# the engine, and whether it may take its path for short sequences
_NAMED = {
    "triton": ("triton", False),
    "blocked": ("blocked", True),
    "blocked_long": ("blocked", False),
    "reference": ("reference", True),
}


def is_short_shape(num_nodes: int, head_dim: int) -> bool:
    """Whether whole sequences of so many nodes, in float32, take an engine's path for short sequences."""
    return num_nodes <= SHORT and head_dim <= NARROW


def choose(impl: Impl | None, q: Tensor, *, ring: bool = False) -> tuple[str, bool]:
    """The engine to run, or "reference": the one asked for, or by device; and ``Step.short``, which no ring is.

    Without Numba a CPU computes by the reference, with a warning.

    Raises:
        ValueError: there is none of this name.
        NotImplementedError: it cannot run these inputs; every reason is listed.
    """
    if impl is None:
        impl = "triton" if q.is_cuda else "blocked"
        if impl == "blocked" and not _INSTALLED["numba"] and not ring:
            warnings.warn(
                "numba is not installed, so attention on this CPU is computed by impl='reference', slowly and with all "
                "scores in memory; pip install numba",
                stacklevel=2,
            )
            impl = "reference"
    if impl not in _NAMED:
        raise ValueError(f"impl must be {', '.join(map(repr, _NAMED))} or None, got {impl!r}")
    name, short = _NAMED[impl]
    reasons = ENGINES[name].refusals(q) if name in ENGINES else []
    if name in ENGINES and torch.jit.is_tracing():
        reasons.append("torch.jit.trace sees nothing of what it computes; use torch.export, or impl='reference'")
    if ring and name not in ENGINES:
        reasons.append("it needs all keys on one rank, not in a ring; use impl='blocked' or 'triton'")
    if reasons:
        raise NotImplementedError(f"impl={impl!r} cannot run these inputs:\n  " + "\n  ".join(reasons))
    return name, short and not ring


def state_dtype(q: Tensor) -> torch.dtype:
    """Dtype of sums: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
