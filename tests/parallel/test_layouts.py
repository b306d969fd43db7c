"""Nobody can tell from the numbers which layout ran: losses, gradients, parameters and predictions of one process."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import megagraph as mg
from tests import ranks
from tests.parallel.cases import BATCHINGS, CASES, CLIP_NORM, MIXED_PRECISION, case_name, train

TOLERANCE = {"fp32": 1e-5, "fp64": 1e-9}


@cache
def one_process(batching, dtype, optimizer, dropout=0.2):
    return train(mg.Plan(), batching, dtype, optimizer, dropout)


def assert_tensors_close(got, want, tolerance):
    """max|a - b| <= tolerance * max|b|, tensor by tensor."""
    assert got.keys() == want.keys()
    for name, b in want.items():
        error, scale = (got[name] - b).abs().max().item(), b.abs().max().item()
        assert scale > 0, f"{name} is zero"
        assert error <= tolerance * scale, f"{name}: {error:.2e} > {tolerance:g} * {scale:.2e}"


@pytest.mark.parametrize(("layout", "batching", "dtype", "shard"), CASES, ids=[case_name(*case) for case in CASES])
def test_layout_equals_one_process(layout, batching, dtype, shard):
    tolerance = TOLERANCE[dtype]
    results = ranks.results(int(np.prod(layout)))
    for optimizer in ("adamw", "sgd"):
        name = case_name(layout, batching, dtype, shard, optimizer)
        got, want = results[0][name], one_process(batching, dtype, optimizer)
        assert min(want["norms"]) > CLIP_NORM, "clipping is not active"
        for result in results:
            np.testing.assert_allclose(result[name]["losses"], want["losses"], rtol=tolerance)
            np.testing.assert_allclose(result[name]["norms"], want["norms"], rtol=10 * tolerance)
        if optimizer == "sgd":
            assert_tensors_close(got["gradients"], want["gradients"], tolerance)
            assert_tensors_close(got["parameters"], want["parameters"], tolerance)
            if dtype == "fp64":
                for result in results:
                    np.testing.assert_allclose(result[name]["probabilities"], want["probabilities"], atol=1e-6)
        elif dtype == "fp64":
            assert_tensors_close(got["parameters"], want["parameters"], 1e-7)


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
    name = case_name((2, 1, 2), batching, "fp64", optimizer="sgd")
    last = [result[name]["targets"][-1] for result in ranks.results(4)]
    assert last[0] > 0 and last[1] == 0  # the last batch has sequences for dp rank 0 alone


@pytest.mark.parametrize(("layout", "batching"), MIXED_PRECISION, ids=[case_name(*x, "bf16") for x in MIXED_PRECISION])
def test_mixed_precision_runs_in_every_layout(layout, batching):
    name = case_name(layout, batching, "bf16")
    results, want = ranks.results(int(np.prod(layout))), one_process(batching, "bf16", "adamw")
    np.testing.assert_allclose(results[0][name]["losses"], want["losses"], rtol=0.01)
    stages = [result[name]["scores"] for result in results]
    assert stages == [None] * (len(stages) - len(stages) // layout[0]) + [torch.bfloat16] * (len(stages) // layout[0])
    assert all(weight.dtype == torch.float32 for weight in results[0][name]["parameters"].values())
