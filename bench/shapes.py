"""What is measured: attention problems and their random inputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megagraph.attention.bias import Bias, BucketBias, DenseBias, ProjectedBias, aligned_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
FORMS = ("dense", "bucket", "projected")
NUM_BUCKETS, NUM_CHANNELS, RANK = 32, 4, 8
MAX_SETS = 16


@dataclass(frozen=True)
class Case:
    """B sequences, H heads, M query rows, N keys, head dim D, one bias form."""

    B: int
    H: int
    M: int
    N: int
    D: int
    form: str  # "none", "dense", "bucket", "projected" or "factored"
    dtype: torch.dtype = DTYPE

    def __str__(self) -> str:
        rows = "" if self.M == self.N else f"-M{self.M}"
        return f"B{self.B}-H{self.H}{rows}-N{self.N}-D{self.D}-{self.form}-{self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def elements(self) -> int:
        """Scores, B * H * M * N."""
        return self.B * self.H * self.M * self.N

    def fields(self) -> dict[str, Any]:
        """The columns of a row that say what was measured."""
        return asdict(self) | {"dtype": self.dtype_name}


def square(B: int, H: int, N: int, D: int, form: str) -> Case:
    return Case(B, H, N, N, D, form)


# ANS-GT's ego batches, the same with more nodes and thin heads, one long sequence with thin and wide heads, clusters
SHAPES = {
    "cuda": [(8192, 8, 32, 8), (256, 32, 144, 4), (1, 8, 8192, 8), (1, 8, 8192, 64), (4, 16, 2048, 32)],
    "cpu": [(256, 8, 32, 8), (8, 32, 144, 4), (1, 8, 1024, 8), (1, 8, 1024, 64), (1, 16, 512, 32)],
}
_SWEPT_N = {"cuda": [256, 512, 1024, 2048, 4096, 8192], "cpu": [128, 256, 512, 1024, 2048]}


def cases(smoke: bool) -> list[tuple[str, Case]]:
    """(series, case), the five shapes first; ``smoke``: tiny cases."""
    if smoke:
        shapes = [("shapes", square(2, 2, 17, 8, form)) for form in ("none", *FORMS, "factored")]
        return shapes + [("N", square(1, 2, N, 8, "bucket")) for N in (16, 32)]
    shapes = [("shapes", square(*shape, form)) for shape in SHAPES[DEVICE] for form in FORMS]
    base = square(1, 8, 2048, 64, "bucket")
    sweep = [("N", replace(base, M=N, N=N)) for N in _SWEPT_N[DEVICE]]
    if DEVICE == "cuda":
        sweep += [("D", replace(base, D=D)) for D in (4, 8, 16, 32, 128, 256)]
        sweep += [("H", replace(base, H=H)) for H in (1, 2, 4, 16, 32)]
        sweep += [("form", replace(base, form=form)) for form in ("none", "dense", "projected", "factored")]
    return shapes + sweep


@dataclass(frozen=True)
class Inputs:
    """q, d_out [B, H, M, D]; k, v [B, H, N, D]; what the bias is made of."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    data: Tensor | None
    learned: tuple[Tensor, ...]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient."""
        return (self.q, self.k, self.v, *self.learned)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.leaves, self.d_out, self.data) if x is not None)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random inputs on the device; a table and a weight are fp32, as parameters are in mixed precision."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype, generator=generator)

    B, H, M, N, D = case.B, case.H, case.M, case.N, case.D
    q, d_out = normal(B, H, M, D), normal(B, H, M, D)
    k, v = normal(B, H, N, D), normal(B, H, N, D)
    data: Tensor | None = None
    learned: tuple[Tensor, ...] = ()
    if case.form == "dense":
        learned = (aligned_rows(normal(B, H, M, N)),)
    elif case.form == "bucket":
        index = torch.randint(NUM_BUCKETS, (B, M, N), device=DEVICE, dtype=torch.uint8, generator=generator)
        data, learned = aligned_rows(index), (normal(H, NUM_BUCKETS, dtype=torch.float32),)
    elif case.form == "projected":
        data = aligned_rows(normal(B, NUM_CHANNELS, M, N))
        learned = (normal(H, NUM_CHANNELS, dtype=torch.float32),)
    elif case.form == "factored":
        learned = (normal(B, H, M, RANK) / RANK**0.5, normal(B, H, N, RANK))
    return Inputs(q, k, v, d_out, data, learned)


def input_sets(case: Case) -> list[Inputs]:
    """Sets of inputs, so many that none is in the L2 cache when its turn comes again, at most ``MAX_SETS``."""
    sets = [make_inputs(case)]
    if DEVICE == "cuda":
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        count = min(math.ceil(3 * cache_bytes / sets[0].nbytes), MAX_SETS)
        sets += [make_inputs(case, seed) for seed in range(1, count)]
    return sets


def make_bias(form: str, data: Tensor | None, learned: tuple[Tensor, ...]) -> Bias | None:
    """The bias as our operators take it; factors have no form of their own."""
    if form == "none":
        return None
    if data is not None:
        return BucketBias(data, *learned) if form == "bucket" else ProjectedBias(data, *learned)
    return DenseBias(learned[0] if form == "dense" else learned[0] @ learned[1].transpose(-1, -2))
