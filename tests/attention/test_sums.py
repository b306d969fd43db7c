"""Several biases as one: the operator's results and gradients are those of the sum of their scores, in fp64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import megagraph as mg
from megagraph.attention.bias import BucketBias, DenseBias, ProjectedBias
from tests.problems import make_bias

B, H, M, N, D = 2, 3, 5, 7, 4
FORMS = ("dense", "bucket", "projected")


def scores(bias, learned):
    """Every pair's bias [B, H, M, N] by its definition, a loop over heads and pairs."""
    out = torch.zeros(B, H, M, N, dtype=torch.float64)
    rows = []
    for b, h, i, j in product(range(B), range(H), range(M), range(N)):
        if isinstance(bias, DenseBias):
            value = learned[b % learned.shape[0], h % learned.shape[1], i, j]
        elif isinstance(bias, BucketBias):
            bucket = int(bias.index[b % len(bias.index), i, j])
            value = out.new_tensor(-torch.inf) if bucket == 255 else learned[h, bucket]
        else:
            value = (learned[h] * bias.channels[b % len(bias.channels), :, i, j]).sum()
            if bias.mask is not None and bias.mask[b % len(bias.mask), i, j]:
                value = value - torch.inf
        rows.append(value)
    return torch.stack(rows).view(B, H, M, N)


@pytest.mark.parametrize(("first", "second"), [*product(FORMS, FORMS)])
def test_a_sum_attends_as_its_parts_say(first, second):
    torch.manual_seed(0)
    masks = [torch.rand(B, M, N) < 0.3 for _ in range(2)]
    masks[0][:, :, 0] = masks[1][:, :, 0] = False
    biases = [
        make_bias(first, B, H, M, N, torch.float64, masks[0]),
        make_bias(second, B if second == "projected" else 1, H, M, N, torch.float64, masks[1]),
    ]
    learned = [bias.learned.detach().clone().requires_grad_() for bias in biases]
    name = {"dense": "values", "bucket": "table", "projected": "weight"}
    parts = [replace(bias, **{name[bias.form]: x}) for bias, x in zip(biases, learned, strict=True)]
    total = mg.add_biases(*parts)
    compact = {("bucket", "bucket"): BucketBias, ("projected", "projected"): ProjectedBias}
    assert type(total) is compact.get((first, second), DenseBias)
    q, k, v = (torch.randn(B, H, rows, D, dtype=torch.float64) for rows in (M, N, N))
    out = mg.biased_attention(q, k, v, total)
    expected = ((q @ k.mT) / D**0.5 + scores(biases[0], learned[0]) + scores(biases[1], learned[1])).softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(out)
    got = torch.autograd.grad((out * cotangent).sum(), learned)
    torch.testing.assert_close(got, torch.autograd.grad((expected * cotangent).sum(), learned), rtol=1e-9, atol=1e-12)


def test_three_in_a_row_and_tables_that_are_too_large_for_one():
    torch.manual_seed(0)
    index = torch.randint(0, 16, (B, M, N), dtype=torch.uint8)
    small = [BucketBias(index[:1] % 4, torch.randn(H, 4)) for _ in range(3)]
    merged = mg.add_biases(*small)
    assert merged.table.shape == (H, 64)
    torch.testing.assert_close(merged.materialize(), sum(bias.materialize() for bias in small))
    large = [BucketBias(index, torch.randn(H, 16)) for _ in range(2)]  # 256 pairs of buckets
    assert isinstance(mg.add_biases(*large), DenseBias)
    with pytest.raises(ValueError, match="bucket"):  # beyond the first table, which the second would have hidden
        bad = mg.add_biases(BucketBias(torch.full_like(index, 4), torch.zeros(H, 4)), small[0])
        mg.biased_attention(torch.zeros(B, H, M, D), torch.zeros(B, H, N, D), torch.zeros(B, H, N, D), bad)


@pytest.mark.parametrize("form", FORMS)
def test_pairs_of_a_sparse_bias_get_a_second_one(form):
    torch.manual_seed(0)
    dense = torch.randint(1, 5, (M, N)) * (torch.rand(M, N) < 0.5)
    first = BucketBias(dense.to(torch.uint8).to_sparse_csr(), torch.randn(H, 5))
    num = len(first.index)
    second = {
        "dense": lambda: DenseBias(torch.randn(num, H), first.relation),
        "bucket": lambda: replace(first, table=torch.randn(H, 5)),
        "projected": lambda: ProjectedBias(torch.rand(num, 2), torch.randn(H, 2), relation=first.relation),
    }[form]()
    total = mg.add_biases(first, second)
    torch.testing.assert_close(total.materialize(), first.materialize() + second.materialize())
    assert total.relation is first.relation


def test_sparse_biases_of_the_same_pairs_that_were_built_apart():
    torch.manual_seed(0)
    exists = torch.rand(M, N) < 0.5
    kinds, values = torch.randint(1, 5, (M, N), dtype=torch.uint8) * exists, torch.randn(M, N, 1)
    lists = kinds.to_sparse_csr()
    first = BucketBias(lists, torch.randn(H, 5))
    hybrid = torch.sparse_csr_tensor(lists.crow_indices(), lists.col_indices(), values[exists], size=(M, N, 1))
    second = ProjectedBias(hybrid, torch.randn(H, 1))
    total = mg.add_biases(first, second)
    assert total.relation is first.relation
    torch.testing.assert_close(total.materialize(), first.materialize() + second.materialize())
    same = mg.add_biases(first, BucketBias(lists.clone(), torch.randn(H, 5)))
    assert isinstance(same, BucketBias) and same.relation is first.relation


def test_float_tensors_are_biases_to_add():
    torch.manual_seed(0)
    index, plane = torch.randint(4, (1, M, N), dtype=torch.uint8), torch.randn(M, N, requires_grad=True)
    bias = BucketBias(index, torch.randn(H, 4))
    for total in (mg.add_biases(bias, plane), mg.add_biases(plane, bias)):
        torch.testing.assert_close(total.materialize(), bias.materialize() + plane)
    assert torch.equal(mg.add_biases(plane).values, plane[None, None])
    with pytest.raises(ValueError, match=r"floating point, got torch\.bool"):
        mg.add_biases(bias, plane > 0)


BAD = {
    "no bias": (lambda bias: (bias, 1.0), "each a DenseBias, .* or a float tensor, got float"),
    "columns": (
        lambda bias: (bias, DenseBias(torch.zeros(B, H, M, N + 1))),
        r"same \[B, H, M, N\], got \(2, 3, 5, 7\)",
    ),
    "heads": (lambda bias: (bias, DenseBias(torch.zeros(B, 2, M, N))), r"got \(2, 3, 5, 7\) and \(2, 2, 5, 7\)"),
    "sparse": (
        lambda bias: (bias, BucketBias(torch.eye(M, N, dtype=torch.uint8).to_sparse_csr(), torch.zeros(H, 2))),
        "must all be dense, or list the same pairs",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_biases_that_cannot_be_added(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        mg.add_biases(*make(BucketBias(torch.zeros(B, M, N, dtype=torch.uint8), torch.zeros(H, 4))))
