"""Nobody can tell from the numbers which layout ran: losses, gradients, parameters and predictions of one process."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import megagraph as mg
from tests import ranks
from tests.parallel.cases import (
    BATCHINGS,
    CASES,
    CLIP_NORM,
    MIXED_PRECISION,
    NUM_LAYERS,
    SCHEDULES,
    case_name,
    optimizers,
    train,
)

TOLERANCE = {"fp32": 1e-5, "fp64": 1e-9}


@cache
def one_process(batching, dtype, optimizer, dropout=0.2, layers=NUM_LAYERS):
    return train(mg.Plan(), batching, dtype, optimizer, dropout, layers)


def assert_tensors_close(got, want, tolerance):
    """max|a - b| <= tolerance * max|b|, tensor by tensor."""
    assert got.keys() == want.keys()
    for name, b in want.items():
        error, scale = (got[name] - b).abs().max().item(), b.abs().max().item()
        assert scale > 0, f"{name} is zero"
        assert error <= tolerance * scale, f"{name}: {error:.2e} > {tolerance:g} * {scale:.2e}"


def assert_trained_alike(results, want, dtype, optimizer):
    """What ``train`` returned on every rank, and in one process."""
    got, tolerance = results[0], TOLERANCE[dtype]
    assert min(want["norms"]) > CLIP_NORM, "clipping is not active"
    for result in results:
        np.testing.assert_allclose(result["losses"], want["losses"], rtol=tolerance)
        np.testing.assert_allclose(result["norms"], want["norms"], rtol=10 * tolerance)
    if optimizer == "sgd":
        assert_tensors_close(got["gradients"], want["gradients"], tolerance)
        assert_tensors_close(got["parameters"], want["parameters"], tolerance)
        if dtype == "fp64":
            for result in results:
                np.testing.assert_allclose(result["probabilities"], want["probabilities"], atol=1e-6)
                np.testing.assert_allclose(result["bias effect"], want["bias effect"], rtol=1e-9)
    elif dtype == "fp64":
        assert_tensors_close(got["parameters"], want["parameters"], 1e-7)


@pytest.mark.parametrize(
    ("layout", "batching", "dtype", "shard"),
    [ranks.param(np.prod(case[0]), *case, id=case_name(*case)) for case in CASES],
)
def test_layout_equals_one_process(layout, batching, dtype, shard):
    results = ranks.results(int(np.prod(layout)))
    for optimizer in optimizers(batching, dtype, shard):
        name = case_name(layout, batching, dtype, shard, optimizer)
        want = one_process(batching, dtype, optimizer)
        assert_trained_alike([result[name] for result in results], want, dtype, optimizer)


@pytest.mark.parametrize("name", [ranks.param(plan.world_size, name) for name, (plan, *_) in SCHEDULES.items()])
def test_schedule_equals_one_process(name):
    plan, batching, dtype = SCHEDULES[name]
    results = [result[name] for result in ranks.results(plan.world_size)]
    want = one_process(batching, dtype, "sgd", layers=sum(plan.layers) or NUM_LAYERS)
    assert_trained_alike(results, want, dtype, "sgd")
    # of a full batch and a ragged one, in training and in evaluation
    assert all(result["schedules_made"] <= 4 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_comparison_can_fail(batching):
    """Dropout matters, labels are uneven, and some rank has no target at all."""
    with_dropout, without = (one_process(batching, "fp64", "sgd", p)["losses"][0] for p in (0.2, 0.0))
    assert abs(with_dropout - without) > 1e-3
    name = case_name((1, 2, 2), batching, "fp64", optimizer="sgd")
    counts = np.array([result[name]["targets"] for result in ranks.results(4)])  # [rank, step]
    assert counts.sum(axis=0).tolist() == one_process(batching, "fp64", "sgd")["targets"]
    if batching == "cluster":
        assert len(set(counts[:, 0])) == 4
        return
    assert (counts[:, 0] > 0).tolist() == [True, False, True, False]  # the target is a row of cp rank 0
    last = {
        name: [result[name]["targets"][-1] for result in ranks.results(4)]
        for name in (case_name((2, 1, 2), batching, "fp64", optimizer="sgd"), "uneven-pp")
    }
    even, uneven = last.values()
    assert even[0] == even[1] > 0  # the two sequences of the last batch are dealt out
    assert uneven[0] == 0 < uneven[1]  # to the larger of unequal shares alone


@pytest.mark.parametrize(
    ("layout", "batching"),
    [ranks.param(np.prod(case[0]), *case, id=case_name(*case, "bf16")) for case in MIXED_PRECISION],
)
def test_mixed_precision_runs_in_every_layout(layout, batching):
    name = case_name(layout, batching, "bf16")
    results, want = ranks.results(int(np.prod(layout))), one_process(batching, "bf16", "adamw")
    np.testing.assert_allclose(results[0][name]["losses"], want["losses"], rtol=0.01)
    stages = [result[name]["scores"] for result in results]
    assert stages == [None] * (len(stages) - len(stages) // layout[0]) + [torch.bfloat16] * (len(stages) // layout[0])
    assert all(weight.dtype == torch.float32 for weight in results[0][name]["parameters"].values())
