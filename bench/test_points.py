"""A step of every size of which `bench.paper` measures whole models on a GPU: does it run, and is it finite?

pytest bench/test_points.py            # `python -m bench.ahead OUT bench/test_points.py` compiles them elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from bench.paper import cost_model, one_device, step_memory
from bench.paper.live_bytes import Rank
from bench.shapes import DEVICE
from megagraph.planner.measure.design import Point, design, random_inputs

pytestmark = pytest.mark.timeout(300)


def points(smoke: bool) -> Iterator[tuple[str, Point]]:
    """Points of the grid of configurations, of profiles, and deep steps; kernels do not know how many layers follow."""
    grid = list(product(cost_model.SEQUENCES, cost_model.HEADS, cost_model.WIDTHS))
    for sequences, heads, dim in grid[:1] if smoke else grid:
        yield f"grid-{sequences}-{heads}-{dim}", cost_model.point(sequences, 2, heads, dim)
    for name, config in () if smoke else one_device.CASES.items():
        rank = Rank(replace(config, device="cpu"), one_device.graph())
        model, workload = rank.pipeline.stages[0].model.config, rank.workload()
        for i, point in enumerate(design(model, workload, torch.device(DEVICE))):
            yield f"{name}-{i}", point
    for (_, heads, dim), (nodes, sequences), dtype in product(
        step_memory.MODELS["cuda"][: 1 if smoke else None],
        ((9, 2),) if smoke else ((9, 2), (145, 16), (145, 256)),
        ("bf16",) if smoke else ("fp32", "tf32", "bf16"),
    ):
        sizes = step_memory.config(2, heads=heads, dim=dim, ffn_dim=dim, **step_memory.RATES)
        yield (
            f"deep-{heads}-{nodes}-{dtype}",
            Point(
                sequences=sequences,
                nodes=nodes,
                config=sizes,
                targets=1,
                feature_rows=sequences * (nodes - 1),
                dtype=dtype.replace("tf32", "fp32"),
            ),
        )


def pytest_generate_tests(metafunc):
    named = dict(points(metafunc.config.getoption("--smoke")))
    chosen = [(point, "high" if "tf32" in name else "highest") for name, point in named.items()]
    metafunc.parametrize(("point", "products"), chosen, ids=named)


@pytest.mark.parametrize("training", [True, False])
def test_a_step(point, products, training):
    torch.set_float32_matmul_precision(products)
    device = torch.device(DEVICE)
    model, inputs = point.make_model(device).train(training), random_inputs(point, device)
    loss = point.loss(point.forward(model, inputs))
    loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert loss.isfinite()
