"""A rank's ring steps beside one call on its rows and all columns: what cutting the keys into P blocks costs.

    pytest bench/test_ring.py --rows FOLDER

All P ranks take their steps in one process, without communication; a row is the time of one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import megagraph as mg
from bench.measure import problem, times
from bench.shapes import DEVICE, FORMS, Case, Inputs, make_bias, square
from megagraph.attention.bias import aligned_rows
from megagraph.attention.comm import attend
from megagraph.attention.engines import choose
from megagraph.attention.exchange import Loopback
from megagraph.attention.operator import make_step

pytestmark = pytest.mark.timeout(120)

WORLD_SIZE = 4
# (N', N_s, D)
_SIZES = {
    "cuda": [(8192, 0, 8), (8192, 0, 64), (8001, 17, 8), (8001, 17, 64)],
    "cpu": [(512, 0, 8), (501, 17, 64)],
}
HEADS = 8


def ring_cases(smoke: bool) -> list[tuple[Case, int]]:
    """(all rows and columns, N_s)."""
    sizes = [(29, 3, 8)] if smoke else _SIZES[DEVICE]
    return [(square(1, HEADS, nodes + supers, D, form), supers) for nodes, supers, D in sizes for form in FORMS]


def pytest_generate_tests(metafunc):
    chosen = ring_cases(metafunc.config.getoption("--smoke"))
    names = [f"{case}-Ns{supers}" for case, supers in chosen]
    metafunc.parametrize(("case", "num_super"), chosen, ids=names)
    metafunc.parametrize("direction", ["forward", "forward_backward"])
    metafunc.parametrize("contender", ["ring_steps", "one_call"])


def test_ring(case, num_super, direction, contender, pedantic, record, request):
    launch = checked(case, num_super, direction, contender)
    row = {"series": "ring", "contender": contender, **case.fields(), "direction": direction, "unit": "s"}
    row |= {"M": -(-(case.N - num_super) // WORLD_SIZE) + num_super, "P": WORLD_SIZE, "num_super": num_super}
    row |= times([launch], pedantic, calls=WORLD_SIZE)
    record(row)
    request.getfixturevalue("benchmark").extra_info.update(row)


def checked(case: Case, num_super: int, direction: str, contender: str) -> Callable[[], list[Tensor]]:
    """A launch whose results are right."""
    make = ring_steps if contender == "ring_steps" else one_call
    launch = make(case, problem(case).sets[0], num_super, direction)
    problem(case).check(_whole(case, num_super, launch()))
    return launch


def _whole(case: Case, num_super: int, results: list[Tensor]) -> list[Tensor]:
    """out, and where there are any the gradients of q, k, v and the learned part, from those of every rank."""
    layout = _layouts(case, num_super)[0]
    outs, gradients = results[:WORLD_SIZE], results[WORLD_SIZE:]

    def summed(parts: list[Tensor]) -> Tensor:
        parts = [x.float() for x in parts]
        if parts[0].shape[-2] != layout.num_local:  # not of a rank's rows alone
            return sum(parts)
        return layout.join(parts, sum(x[:, :, layout.block_size :] for x in parts), dim=2)

    out = layout.join(outs, outs[0][:, :, layout.block_size :], dim=2)
    return [out, *(summed(gradients[i::4]) for i in range(4) if gradients)]


def _layouts(case: Case, num_super: int) -> list[mg.NodeLayout]:
    return [mg.NodeLayout(case.N - num_super, num_super, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]


def _rank_rows(inputs: Inputs, layout: mg.NodeLayout, form: str) -> Inputs:
    """The rows of one rank, laid out as its loader would: copied before any time is taken."""
    q, k, v, d_out = (layout.shard(x, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.d_out))
    d_out *= layout.owned.to(DEVICE)[:, None]  # super rows are there on every rank, and count once
    bias = make_bias(form, inputs.data, inputs.learned).rows(layout.local_to_global.clamp(min=0).to(DEVICE))
    data = None if bias.data is None else aligned_rows(bias.data)
    learned = aligned_rows(bias.learned) if form == "dense" else bias.learned
    return Inputs(q, k, v, d_out, data, (learned,))


def ring_steps(case: Case, inputs: Inputs, num_super: int, direction: str) -> Callable[[], list[Tensor]]:
    layouts = _layouts(case, num_super)
    parts = [_rank_rows(inputs, layout, case.form) for layout in layouts]
    leaves = [x.detach().requires_grad_() for part in parts for x in part.leaves]
    path = choose(None, inputs.q, ring=True)
    biases = [make_bias(case.form, part.data, part.learned) for part in parts]
    steps = [(make_step(part.q, bias, None, None, 0.0, None, *path),) for part, bias in zip(parts, biases, strict=True)]

    def forward():
        return attend("ring", Loopback(), layouts, steps, [], leaves)

    return _launch(forward, leaves, [part.d_out for part in parts], direction)


def one_call(case: Case, inputs: Inputs, num_super: int, direction: str) -> Callable[[], list[Tensor]]:
    """The rows of every rank, a rank at a time, each in one call with the keys of all nodes."""
    parts = [
        replace(_rank_rows(inputs, layout, case.form), k=inputs.k, v=inputs.v) for layout in _layouts(case, num_super)
    ]
    leaves = [[x.detach().requires_grad_() for x in part.leaves] for part in parts]

    def forward():
        results = []
        for part, (q, k, v, learned) in zip(parts, leaves, strict=True):
            bias = make_bias(case.form, part.data, (learned,))
            results += mg.biased_attention(q, k, v, bias, return_lse=True)
        return results

    return _launch(forward, [x for of_rank in leaves for x in of_rank], [part.d_out for part in parts], direction)


def _launch(forward, leaves: list[Tensor], d_outs: list[Tensor], direction: str) -> Callable[[], list[Tensor]]:
    """``forward`` gives out and lse in turn; a launch gives every out, and the gradients of every leaf."""

    def forward_only():
        with torch.no_grad():
            return [*forward()[0::2]]

    def forward_backward():
        outs = forward()[0::2]
        return [*outs, *torch.autograd.grad(outs, leaves, d_outs)]

    return forward_only if direction == "forward" else forward_backward
