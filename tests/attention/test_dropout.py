"""The counter-based dropout: its bits are part of the interface."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import megagraph as mg
from megagraph.attention.dropout import (
    dropout_keys,
    keep_mask,
    mix32,
    mix_key,
    place_keys,
    row_keys,
)
from megagraph.attention.engines import choose
from megagraph.attention.hidden import _drop_rows, hidden_dropout
from megagraph.attention.operator import attention, make_step
from tests.problems import of_a_cpu

KEY = dropout_keys(2**31 + 7, 3, torch.tensor([0, 9]))


def murmur3_finaliser(x: int) -> int:
    """Written once more, in Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def as_unsigned(x: torch.Tensor) -> list[int]:
    return [value % 2**32 for value in x.tolist()]


def test_golden_vectors():
    # MurmurHash3's fmix32, values that any other implementation gives too
    golden = {0: 0, 1: 0x514E28B7, 2: 0x30F4C306, 0xDEADBEEF: 0x0DE5C6A9, 0xFFFFFFFF: 0x81F16F39}
    assert {x: murmur3_finaliser(x) for x in golden} == golden
    signed = [x - 2**32 if x >= 2**31 else x for x in golden]
    assert as_unsigned(mix32(torch.tensor(signed, dtype=torch.int32))) == list(golden.values())


def test_keys_and_masks_equal_python_integers():
    def fold(*values):
        key = 0
        for value in values:
            key = murmur3_finaliser((key ^ value) % 2**32)
        return key

    seed, step, layer, site, p = 2**31 + 7, 3, 5, 1, 0.3
    key = mix_key(dropout_keys(seed, step, torch.tensor([0, 9])), layer, site)
    assert as_unsigned(key) == [fold(seed, step, sequence, layer, site) for sequence in (0, 9)]
    rows, columns = torch.tensor([4, 0, 70_000]), torch.tensor([1, 2**20, 3])
    got = keep_mask(row_keys(key, 2, rows), columns, p)
    for b in range(2):
        for h in range(2):
            for i, row in enumerate(rows.tolist()):
                row_key = murmur3_finaliser(murmur3_finaliser(as_unsigned(key)[b] ^ h) ^ row)
                for j, column in enumerate(columns.tolist()):
                    hashed = murmur3_finaliser(row_key ^ column * 0x9E3779B9 % 2**32)
                    assert got[b, h, i, j] == (hashed >= int(p * 2**32))


def test_layers_have_keys_of_their_own_and_the_first_has_that_without():
    ids = torch.tensor([0, 9])
    assert torch.equal(dropout_keys(2**31 + 7, 3, ids, layer=0), KEY)
    keys = torch.cat([dropout_keys(seed, 3, ids, layer=layer) for seed in range(4) for layer in range(4)])
    assert len(keys.unique()) == len(keys)
    columns = torch.arange(512)
    first, second = (
        keep_mask(row_keys(dropout_keys(0, 3, ids, layer=layer), 2, columns), columns, 0.5).double() - 0.5
        for layer in range(2)
    )
    assert abs((first * second).mean()) < 5 * 0.25 / 1024


def test_integers_of_numpy_are_integers():
    ids = torch.tensor([0, 9])
    assert torch.equal(dropout_keys(np.int64(2**31 + 7), np.uint8(3), ids, layer=np.int32(0)), KEY)
    with pytest.raises(TypeError, match="integer"):
        dropout_keys(0.5, 3, ids)
    for bad, got in ((ids / 2, "torch.float32"), ([0, 1], "list")):  # halves would have the keys of other sequences
        with pytest.raises(ValueError, match=f"sequence_ids must be a tensor of integers, got {got}"):
            dropout_keys(0, 3, bad)


def test_the_mask_is_random_enough():
    """Rate, and no correlation between neighbouring rows, columns, heads, sequences, steps or sites."""
    rows = columns = torch.arange(512)
    p = 0.4

    def mask(step, site):
        key = mix_key(dropout_keys(1, step, torch.arange(2)), 0, site)
        return keep_mask(row_keys(key, 2, rows), columns, p).double() - (1 - p)

    first = mask(0, 0)
    noise = 5 * (p * (1 - p)) / 512  # five standard deviations of the mean of 512**2 products
    assert abs(first.mean()) < 5 * (p * (1 - p)) ** 0.5 / 1024
    shifted = (first.roll(1, 2), first.roll(1, 3), first.flip(1), first.flip(0), mask(1, 0), mask(0, 1))
    for other in shifted:
        assert abs((first * other).mean()) < noise


@of_a_cpu
@pytest.mark.parametrize(
    ("impl", "dtype", "D"),
    # eight heads side by side, tiles, and kernels of narrow and of wide heads
    [("reference", torch.float64, 4), ("blocked", torch.float32, 4), ("blocked", torch.float64, 4)]
    + [("triton", torch.float32, D) for D in (4, 20)],
    ids=str,
)
@pytest.mark.parametrize("listed", [False, True])
def test_heads_drop_as_those_that_they_are(impl, dtype, D, listed):
    """Heads 5 to 14 of 19 as a call of their own."""
    if impl == "triton":
        pytest.importorskip("triton", reason="triton has wheels for Linux only")
    torch.manual_seed(0)
    q, d_out = (torch.randn(2, 19, 9, D, dtype=dtype, requires_grad=True) for _ in range(2))
    pairs = (torch.rand(9, 9) < 0.7).to(dtype)
    bias = mg.BucketBias(pairs.to(torch.uint8).to_sparse_csr(), torch.randn(19, 2, dtype=dtype)) if listed else None
    of_heads = replace(bias, table=bias.table[5:15]) if listed else None
    engine, short = choose(impl, q)
    results = []
    for x, b, first_head in ((q, bias, 0), (q[:, 5:15], of_heads, 5)):
        step = make_step(x, b, None, None, 0.4, KEY, engine, short, first_head)
        out, _ = attention(step, x, x, x, b)
        results.append((out, torch.autograd.grad(out, q, d_out[:, first_head : first_head + x.shape[1]])[0]))
    (out, d_q), (of_some, d_some) = results
    torch.testing.assert_close(of_some, out[:, 5:15], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d_some[:, 5:15], d_q[:, 5:15], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 63)], ids=str)
def test_dropped_rows_are_the_mask(shape, dtype):
    x, row_key = torch.randn(shape).to(dtype), torch.randint(-(2**31), 2**31, shape[:-1], dtype=torch.int32)
    for p in (0.1, 0.7):
        keep = keep_mask(row_key, torch.arange(shape[-1]), p).to(dtype)
        assert torch.equal(_drop_rows(x, p, row_key), x * keep * (1 / (1 - p)))
        view = x.mT.contiguous().mT
        assert torch.equal(_drop_rows(view, p, row_key), x * keep * (1 / (1 - p)))
    assert _drop_rows(x[..., :0], p, row_key).shape == (*shape[:-1], 0)


def test_the_module_drops_weights_in_training_only():
    torch.manual_seed(0)
    module = mg.BiasedRingAttention(12, 3, dropout=0.4).double()
    x, bias = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(3, 7, 7, dtype=torch.float64)
    q, k, v = (f(x).view(2, 7, 3, 4).transpose(1, 2) for f in (module.q_proj, module.k_proj, module.v_proj))
    weights = (q @ k.mT / 2 + bias).softmax(dim=-1)
    kept = weights * keep_mask(row_keys(KEY, 3, torch.arange(7)), torch.arange(7), 0.4) / 0.6
    for training, attended in ((True, kept @ v), (False, weights @ v)):
        module.train(training)
        want = module.out_proj(attended.transpose(1, 2).flatten(2))
        torch.testing.assert_close(module(x, bias, dropout_key=KEY), want)


def test_hidden_dropout_keeps_row_keys_only():
    x = torch.randn(3, 50, 40, dtype=torch.float64, requires_grad=True)
    key = dropout_keys(0, 0, torch.arange(3))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = hidden_dropout(x, 0.25, key, mg.NodeLayout(x.shape[1], 0))
    assert sum(t.nbytes for t in saved) == 4 * 3 * 50
    dropped = out == 0
    assert abs(dropped.double().mean() - 0.25) < 0.03
    torch.testing.assert_close(out[~dropped], x[~dropped] / 0.75)
    (d_x,) = torch.autograd.grad(out, x, torch.ones_like(x))
    torch.testing.assert_close(d_x, (~dropped).double() / 0.75)
    assert hidden_dropout(x, 0.25, None, mg.NodeLayout(x.shape[1], 0)) is x


def test_opcheck_of_dropped_rows():
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
        torch.library.opcheck(_drop_rows, (x, 0.3, row_keys(KEY, 5, torch.zeros(1))[0, :, 0]))


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_keys_of_all_places_are_those_of_each(batch):
    key = dropout_keys(3, 1, torch.arange(batch))
    keys = place_keys(key, range(2, 6), 3)
    for layer, of_layer in enumerate(keys, 2):
        for place, got in enumerate(of_layer):
            assert torch.equal(got, mix_key(key, layer, place))
            assert got.is_contiguous() and got.storage_offset() % 4 == 0
    assert len(keys) == 4 and len(keys[0]) == 3
