"""The CPU's short path: eight heads side by side, one row of scores at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import megagraph as mg
from megagraph.attention.cpu import rows
from megagraph.attention.cpu import tiles as long_path
from megagraph.attention.operator import _by_path, make_step
from tests.attention.test_operator import run
from tests.problems import FORMS, Shape, assert_matches, make_problem, to

#        M    N   D   H
SHAPES = ((1, 17, 4, 8), (17, 33, 8, 12), (33, 9, 5, 3), (40, 40, 16, 16), (63, 129, 16, 2), (5, 6, 1, 1))


@pytest.fixture(autouse=True)
def _only_this_path(monkeypatch):
    """``blocked`` takes it for all problems here: it has no other one meanwhile."""
    for name in ("forward", "backward"):
        monkeypatch.delattr(long_path, name)


def problem_of(form, shape, B=2, **options):
    M, N, D, H = shape
    return to(make_problem(form, Shape(M, N, D, B=B, H=H), dtype=torch.float32, **options), "cpu")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("masked", "padded", "dropout_p"), [(True, True, 0.3), (True, False, 0.0), (False, True, 0.5)])
def test_values_and_gradients(form, shape, masked, padded, dropout_p):
    problem = problem_of(form, shape, B=3, masked=masked, padded=padded, dropout_p=dropout_p)
    assert_matches(run(problem, "blocked"), problem)


@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_threads_gives_the_same(form, monkeypatch):
    problem = problem_of(form, (17, 33, 8, 12), B=7, dropout_p=0.3)
    alone = run(problem, "blocked")
    monkeypatch.setattr(rows, "_SCORES_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        results = [run(problem, "blocked") for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    for got in results:
        for name, x in got.items():
            assert torch.equal(x, results[0][name]), name
            if name == "d_learned":  # sums of other parts
                torch.testing.assert_close(x, alone[name])
            else:
                assert torch.equal(x, alone[name]), name


@pytest.mark.parametrize("form", FORMS)
def test_any_strides(form):
    problem = problem_of(form, (17, 17, 8, 8), B=3, dropout_p=0.2)

    def turned(x, *order):
        """Values of x with its axes in another order in memory."""
        back = np.argsort(order).tolist()
        return x.permute(*order).contiguous().permute(*back)

    strided = {name: turned(getattr(problem, name), 0, 2, 1, 3) for name in ("q", "k")}
    strided["v"] = turned(problem.v, 0, 1, 3, 2)  # rows that are not contiguous
    strided["d_out"] = turned(problem.d_out, 3, 2, 0, 1)
    if problem.bias is not None:
        data = {name: x.mT.contiguous().mT for name, x in vars(problem.bias).items() if x is not None and x.ndim > 2}
        strided["bias"] = replace(problem.bias, **data)
    got, want = run(replace(problem, **strided), "blocked"), run(problem, "blocked")
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("form", ["bucket", "projected"])
def test_sequences_may_share_a_bias(form):
    problem = problem_of(form, (9, 11, 4, 8), B=3, planes=(1, 8))
    assert_matches(run(problem, "blocked"), problem)


def test_what_is_not_finite_stays_so():
    problem = problem_of("none", (3, 9, 8, 8), masked=False, padded=False)
    problem.q[0, 2, 1, 0] = torch.nan
    problem.k[1, 3, 4, 2] = torch.inf
    problem.v[1, 5, 0, 1] = -torch.inf
    got, want = (mg.biased_attention(problem.q, problem.k, problem.v, impl=impl) for impl in ("blocked", "reference"))
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, equal_nan=True)


def test_chosen_by_shape():
    def chosen(M=8, N=8, D=8, dtype=torch.float32, bias=None, short=True):
        q, k = (torch.zeros(2, 4, n, D, dtype=dtype) for n in (M, N))
        bias = bias and mg.DenseBias(bias.values[:, :, :M, :N])
        step = replace(make_step(q, bias, None, None, 0.0, None, "blocked", short), segments=[(0, 0, N)])
        return _by_path(step, q, k).short

    def dense(H, dtype=torch.float32):
        return mg.DenseBias(torch.zeros(2, H, 8, 8, dtype=dtype))

    assert chosen() and chosen(256, 256, 16) and chosen(bias=dense(4))
    for options in ({"M": 257}, {"N": 257}, {"D": 17}, {"dtype": torch.float64}, {"bias": dense(1)}, {"M": 0}):
        assert not chosen(**options), options
    assert not chosen(bias=dense(4, torch.float64)) and not chosen(short=False)
