"""Values of every variant of the kernels in the pairwise cover, at sizes that the interpreter can run."""

from __future__ import annotations

import pytest
import torch

from tests.problems import DEVICE, Problem, Shape, assert_matches, make_problem, plain_attention, tf32_attention
from tests.steps import run_steps

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from megagraph.kernels.variants import Variant, cover

M = 50


def problem_of(variant: Variant) -> Problem:
    # the interpreter's bf16 is wrong: it multiplies bit patterns
    fp32 = variant.dtype == "tf32" or (DEVICE == "cpu" and variant.dtype == "bfloat16")
    dtype = torch.float32 if fp32 else getattr(torch, variant.dtype)
    N = 80 if variant.aligned else 79
    head_dim = variant.head_dim if variant.path == "long" else min(variant.head_dim, 16)
    planes = None
    if variant.plane == "shared":
        planes = (1, 1) if variant.form == "dense" else (1, 3)
    problem = make_problem(
        variant.form,
        Shape(M, N, head_dim, H=3),
        dtype=dtype,
        masked=variant.padding,
        padded=variant.padding,
        dropout_p=0.2 * variant.dropout,
        planes=planes,
    )
    if variant.rows_first:
        for name in ("q", "k", "v", "d_out"):
            rows = getattr(problem, name)
            setattr(problem, name, rows.transpose(1, 2).contiguous().transpose(1, 2))
    return problem


def steps_of(variant: Variant, N: int):
    """One step of two segments, or three steps of which the first has two."""
    regular, columns = N - (16 if variant.aligned else 17), torch.arange(N, device=DEVICE)
    if variant.step == "only":
        return [(columns, [(0, 0, regular), (regular, regular, N - regular)])]
    third = 16 if variant.aligned else 21
    local = torch.cat([columns[:third], columns[regular:]])
    return [
        (local, [(0, 0, third), (third, regular, N - regular)]),
        (columns[third : 2 * third], [(0, third, third)]),
        (columns[2 * third : regular], [(0, 2 * third, regular - 2 * third)]),
    ]


@pytest.mark.parametrize("variant", cover(), ids=lambda variant: variant.name)
def test_values(variant):
    tf32 = variant.dtype == "tf32"
    problem = problem_of(variant)
    steps = None if variant.path == "short" else steps_of(variant, problem.k.shape[2])
    got = run_steps(problem, steps, learned_grad=variant.learned_grad, tf32=tf32)
    plain = tf32_attention if tf32 and DEVICE == "cuda" else plain_attention  # the interpreter computes in fp32
    assert_matches(got, problem, variant.learned_grad, plain)


def test_cover_has_every_pair():
    from itertools import combinations

    from megagraph.kernels.variants import FACTORS

    variants = cover()
    assert len(variants) <= 120
    for a, b in combinations(FACTORS, 2):
        met = {(getattr(v, a), getattr(v, b)) for v in variants}
        assert met == {(x, y) for x in FACTORS[a] for y in FACTORS[b]}, (a, b)
