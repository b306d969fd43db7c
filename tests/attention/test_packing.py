"""Rows without padding: there and back, and attention among them, values and gradients."""

from __future__ import annotations

import pytest
import torch

import megagraph as mg
from megagraph.attention.module import BiasedRingAttention
from megagraph.attention.packing import Packing, Rows

PADDING = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 0, 0]], dtype=torch.bool)


def test_there_and_back():
    packing = Packing(PADDING)
    x = torch.randn(4, 5, 6)
    rows = packing.pack(x)
    assert torch.equal(rows, x[~PADDING])
    assert torch.equal(packing.unpack(rows), x.masked_fill(PADDING[..., None], 0))
    first = packing.first_rows(rows, 2)
    assert torch.equal(first[~PADDING[:, :2]], x[:, :2][~PADDING[:, :2]]) and first.isfinite().all()


def test_loops_get_rows_of_one_type_and_are_compiled_once():
    kinds = Rows.whole(4, 5), Rows.unpadded(PADDING), Rows.unpadded(PADDING).packed()
    assert {(x.dtype.name, x.flags.c_contiguous) for rows in kinds for x in rows} == {("int64", True)}


def test_gradients():
    packing = Packing(PADDING)
    for move, shape in (
        (packing.pack, (4, 5, 6)),
        (packing.unpack, (10, 6)),
        (lambda x: packing.first_rows(x, 3), (10, 6)),
    ):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(move, x)


@pytest.mark.parametrize("num_queries", [None, 1, 3])
@pytest.mark.parametrize("form", ["none", "bucket", "projected"])
def test_attention_is_that_with_padding(form, num_queries):
    torch.manual_seed(0)
    attention = BiasedRingAttention(24, 3, dropout=0.3)
    rows, key = slice(num_queries), mg.dropout_keys(0, 0, torch.arange(4))
    visible = ~PADDING[:, rows, None]
    learned = {"bucket": torch.randn(3, 7), "projected": torch.randn(3, 2)}.get(form)
    index, channels = torch.randint(7, (4, 5, 5), dtype=torch.uint8)[:, rows], torch.randn(4, 2, 5, 5)[:, :, rows]
    x, d_out = torch.randn(4, 5, 24), torch.randn(4, 5, 24)[:, rows] * visible

    def results(packing):
        inputs = [x.clone().requires_grad_(), *attention.parameters()]
        bias = None
        if learned is not None:
            inputs.append(learned.clone().requires_grad_())
            bias = mg.BucketBias(index, inputs[-1]) if form == "bucket" else mg.ProjectedBias(channels, inputs[-1])
        options = {"dropout_key": key, "num_queries": num_queries}
        if packing is None:
            out = attention(inputs[0], bias, key_padding_mask=PADDING, **options)
        else:
            out = attention(packing.pack(inputs[0]), bias, packing=packing, **options)
            out = packing.unpack(out) if num_queries is None else out
        d_x, *gradients = torch.autograd.grad(out, inputs, d_out)
        return out * visible, d_x.masked_fill(PADDING[..., None], 0), *gradients

    for got, want in zip(results(Packing(PADDING)), results(None), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("planes", [(4, 3), (1, 3), (4, 1), (1, 1)])
def test_dense_biases_that_sequences_or_heads_share(planes, dtype):
    torch.manual_seed(0)
    attention, packing = BiasedRingAttention(24, 3), Packing(PADDING)
    x, d_out = torch.randn(4, 5, 24), torch.randn(4, 5, 24) * ~PADDING[..., None]
    bias = torch.randn(*planes, 5, 5, dtype=dtype, requires_grad=True)
    got = packing.unpack(attention(packing.pack(x), bias, packing=packing))
    want = attention(x, bias, key_padding_mask=PADDING) * ~PADDING[..., None]
    torch.testing.assert_close(got, want)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    gradients = [torch.autograd.grad(out, bias, d_out)[0] for out in (got, want)]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.zeros(4, 3, 2, 5), r"bias must have shape .* \[4 or 1, 3 or 1, 5, 5\], got \[4, 3, 2, 5\]"),
        (mg.BucketBias(torch.ones(5, 5).byte().to_sparse_csr(), torch.zeros(3, 2)), "must be dense .* listed pairs"),
    ],
    ids=["other rows", "listed pairs"],
)
def test_a_bias_that_is_refused(bias, message):
    attention = BiasedRingAttention(24, 3)
    with pytest.raises(ValueError, match=message):
        attention(torch.randn(10, 24), bias, packing=Packing(PADDING))
