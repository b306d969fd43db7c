"""Values and gradients of what runs on this device against fp64: dtypes, head dims, bias forms, dropout, masks, rings.

pytest bench/test_values.py            # -n CORES compiles in parallel
"""

from __future__ import annotations

from itertools import product

import torch

import megagraph as mg
from bench.peers import CONTENDERS
from bench.shapes import DEVICE, Case, cases, make_inputs, square
from megagraph.attention.context_parallel import loopback_attention
from tests.problems import FORMS, Shape, assert_matches, expected, make_problem

IMPLS = [name.removeprefix("megagraph_") for name, contender in CONTENDERS.items() if contender.ours]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (1, 4, 5, 8, 16, 24, 32, 40, 64, 72, 96, 128, 160, 256)
SIZES = ((17, 17), (32, 32), (144, 144), (63, 129), (300, 257))  # M, N
RUNS = 100


def pytest_generate_tests(metafunc):
    smoke = metafunc.config.getoption("--smoke")
    if metafunc.function is test_operator:
        dims = (4, 64) if smoke else HEAD_DIMS
        metafunc.parametrize(("dtype", "D", "form"), list(product(DTYPES, dims, FORMS)), ids=_short)
    if metafunc.function is test_ring:
        dims = (8,) if smoke else (4, 8, 64)
        chosen = list(product(DTYPES[:1] if smoke else DTYPES, dims, FORMS, (1, 2, 4)))
        metafunc.parametrize(("dtype", "D", "form", "world_size"), chosen, ids=_short)
    if metafunc.function is test_same_bits:
        shapes = [case for series, case in cases(smoke) if series == "shapes"]
        if not smoke:  # what a race writes shows once in a while only
            shapes += [square(2, 2, 144, D, form) for D, form in product(HEAD_DIMS, FORMS[1:])]
        metafunc.parametrize("case", shapes, ids=str)
    if "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", IMPLS)


def _short(value) -> str:
    return str(value).removeprefix("torch.")


def test_operator(dtype, D, form, impl):
    variant = DTYPES.index(dtype) + D + FORMS.index(form)  # every dtype and form meets every size, mask and dropout
    M, N = SIZES[variant % len(SIZES)]
    options = dict(masked=variant % 3 != 0, padded=variant % 2 == 0, dropout_p=0.3 * (variant // 2 % 2))
    problem = make_problem(form, Shape(M, N, D), dtype=dtype, **options)

    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        return mg.biased_attention(
            q,
            k,
            v,
            bias,
            key_padding_mask=padding,
            scale=scale,
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            return_lse=True,
            impl=impl,
        )

    assert_matches(expected(problem, attend), problem)


def test_ring(dtype, D, form, world_size, impl):
    num_super = 0 if world_size == 2 else 5
    N = 131 + num_super
    problem = make_problem(form, Shape(N, N, D), dtype=dtype, dropout_p=0.2 * (D % 8 == 0))

    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        return loopback_attention(
            q,
            k,
            v,
            bias,
            num_super=num_super,
            world_size=world_size,
            key_padding_mask=padding,
            scale=scale,
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            impl=impl,
        )

    assert_matches(expected(problem, attend), problem)


def test_same_bits(case: Case, impl, request):
    launch = CONTENDERS[f"megagraph_{impl}"].prepare(case, "forward_backward", [make_inputs(case)])[0]
    first = launch()
    for _ in range(2 if request.config.getoption("--smoke") or DEVICE == "cpu" else RUNS - 1):
        assert all(map(torch.equal, launch(), first))
