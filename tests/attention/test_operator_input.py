"""Input of attention on one device that is wrong: one table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import megagraph as mg
from tests.problems import (
    DEVICE,
)


def bad(**changes):
    """The arguments of a small valid call, changed."""
    q = torch.zeros(2, 2, 3, 4)
    valid = dict(q=q, k=torch.zeros(2, 2, 5, 4), v=torch.zeros(2, 2, 5, 4), bias=None)
    return valid | changes


INDEX, CHANNELS = torch.zeros(2, 3, 5, dtype=torch.uint8), torch.zeros(2, 2, 3, 5)
BAD_INPUTS = {
    "q of three dimensions": (
        lambda: bad(q=torch.zeros(2, 3, 4)),
        r"q must have shape \[B, H, M, D\], got \(2, 3, 4\)",
    ),
    "integer q": (
        lambda: bad(q=torch.zeros(2, 2, 3, 4, dtype=torch.int64)),
        "q must be floating point, got torch.int64",
    ),
    "head dim": (lambda: bad(q=torch.zeros(2, 2, 3, 300)), "head dim D must be 1 to 256, got 300"),
    "k of another batch": (lambda: bad(k=torch.zeros(1, 2, 5, 4)), r"k must have shape .*got \(1, 2, 5, 4\)"),
    "v shorter than k": (
        lambda: bad(v=torch.zeros(2, 2, 4, 4)),
        r"v must have shape .*\[2, 2, 5, 4\], got \(2, 2, 4, 4\)",
    ),
    "v of another dtype": (
        lambda: bad(v=torch.zeros(2, 2, 5, 4).double()),
        "v must have the dtype of q, torch.float32",
    ),
    "v on another device": (
        lambda: bad(v=torch.zeros(2, 2, 5, 4, device="meta")),
        "v must be on the device of q, cpu, got meta",
    ),
    "boolean mask": (
        lambda: bad(bias=torch.zeros(3, 5, dtype=torch.bool)),
        "True means 'attend' to F.scaled_dot_product_attention and 'ignore' to nn.MultiheadAttention",
    ),
    "integer bias": (lambda: bad(bias=torch.zeros(3, 5, dtype=torch.int64)), "must be floating point, got torch.int64"),
    "bias of five dimensions": (
        lambda: bad(bias=torch.zeros(1, 1, 1, 3, 5)),
        r"must have shape \[B or 1, H or 1, M, N\], got \(1, 1, 1, 3, 5\)",
    ),
    "a list as bias": (
        lambda: bad(bias=[0.0]),
        "bias must be a DenseBias, a BucketBias, a ProjectedBias or a float tensor, got list",
    ),
    "bias rows": (lambda: bad(bias=torch.zeros(4, 5)), r"\[2 or 1, 2 or 1, 3, 5\], got \[1, 1, 4, 5\]"),
    "bias heads": (lambda: bad(bias=torch.zeros(1, 3, 3, 5)), r"2 or 1, 3, 5\], got \[1, 3, 3, 5\]"),
    "table heads": (
        lambda: bad(bias=mg.BucketBias(INDEX, torch.zeros(1, 4))),
        r"\[2 or 1, 2, 3, 5\], got \[2, 1, 3, 5\]",
    ),
    "index dtype": (
        lambda: bad(bias=mg.BucketBias(INDEX.float(), torch.zeros(2, 4))),
        "index must be torch.uint8, or another integer, got torch.float32",
    ),
    "negative index": (
        lambda: bad(bias=mg.BucketBias(INDEX.long() - 1, torch.zeros(2, 4))),
        r"index must be in 0\.\.254, or 255 for a pair that must not attend, got -1\.\.",
    ),
    "large index": (
        lambda: bad(bias=mg.BucketBias(INDEX.long() + 256, torch.zeros(2, 4))),
        r"index must be in 0\.\.254, .*; nodes that cannot reach each other",
    ),
    "table of nn.Embedding": (
        lambda: bad(bias=mg.BucketBias(INDEX, nn.Embedding(4, 2).weight)),
        r"must have a table \[H, R\] for 2 heads, got \[4, 2\]; pass its transpose",
    ),
    "several biases": (
        lambda: bad(bias=(mg.BucketBias(INDEX, torch.zeros(2, 4)), torch.zeros(1, 2, 3, 5))),
        "got tuple; add several by megagraph.add_biases",
    ),
    "index dimensions": (
        lambda: bad(bias=mg.BucketBias(INDEX[0], torch.zeros(2, 4))),
        r"index must have shape \[B or 1, M, N\], got \(3, 5\)",
    ),
    "empty table": (lambda: bad(bias=mg.BucketBias(INDEX, torch.zeros(2, 0))), "1 to 255 buckets"),
    "bucket out of the table": (
        lambda: bad(bias=mg.BucketBias(INDEX + 4, torch.zeros(2, 4))),
        "must be below the table's 4 buckets, or 255 for a masked pair; got 4",
    ),
    "weight channels": (lambda: bad(bias=mg.ProjectedBias(CHANNELS, torch.zeros(2, 3))), r"with C = 2 .*got \(2, 3\)"),
    "too many channels": (lambda: bad(bias=mg.ProjectedBias(torch.zeros(1, 17, 3, 5), torch.zeros(2, 17))), "1 to 16"),
    "channels to be learned": (
        lambda: bad(bias=mg.ProjectedBias(CHANNELS.clone().requires_grad_(), torch.zeros(2, 2))),
        "channels are data and get no gradient; pass channels.detach()",
    ),
    "non-finite channels": (
        lambda: bad(bias=mg.ProjectedBias(CHANNELS / 0, torch.zeros(2, 2))),
        "channels must be finite",
    ),
    "mask dtype": (lambda: bad(bias=mg.ProjectedBias(CHANNELS, torch.zeros(2, 2), INDEX)), "mask must be torch.bool"),
    "mask shape": (
        lambda: bad(bias=mg.ProjectedBias(CHANNELS, torch.zeros(2, 2), torch.zeros(2, 5, 3, dtype=torch.bool))),
        r"mask must have shape \[2 or 1, 3, 5\], got \(2, 5, 3\)",
    ),
    "padding of queries": (
        lambda: bad(key_padding_mask=torch.zeros(2, 3, dtype=torch.bool)),
        r"key_padding_mask must be torch.bool \[B, N\] = \[2, 5\]",
    ),
    "float padding": (lambda: bad(key_padding_mask=torch.zeros(2, 5)), "got torch.float32"),
    "an array as q": (lambda: bad(q=np.zeros((2, 2, 3, 4))), "q must be a tensor, got ndarray; torch.as_tensor"),
    "no k": (lambda: bad(k=None), "k must be a tensor, got NoneType"),
    "an array as index": (
        lambda: bad(bias=mg.BucketBias(INDEX.numpy(), torch.zeros(2, 4))),
        "BucketBias index must be a tensor, got ndarray",
    ),
    "a list as table": (
        lambda: bad(bias=mg.BucketBias(INDEX, [[0.0]] * 2)),
        "BucketBias table must be a tensor, got list",
    ),
    "a list as mask": (
        lambda: bad(bias=mg.ProjectedBias(CHANNELS, torch.zeros(2, 2), [[False]])),
        "ProjectedBias mask must be a tensor, got list",
    ),
    "a list as padding": (
        lambda: bad(key_padding_mask=[[False] * 5] * 2),
        "key_padding_mask must be a tensor, got list",
    ),
    "a list as key": (lambda: bad(dropout_key=[1, 2]), "dropout_key must be a tensor, got list"),
    "sparse q": (
        lambda: bad(q=torch.zeros(2, 2, 3, 4).to_sparse()),
        r"q must be a dense tensor, got one of .*to_dense",
    ),
    "sparse k": (
        lambda: bad(k=torch.zeros(2, 2, 5, 4).to_sparse_csr()),
        r"k must be a dense tensor, got one of torch.sparse_csr; pass its to_dense\(\)",
    ),
    "nested v": (
        lambda: bad(v=torch.nested.nested_tensor([torch.zeros(2, 5, 4)] * 2)),
        r"v must be a dense tensor, got a nested one; pad it .* and pass key_padding_mask",
    ),
    "jagged q": (
        lambda: bad(q=torch.nested.nested_tensor([torch.zeros(n, 2, 4) for n in (3, 2)], layout=torch.jagged)),
        "q must be a dense tensor, got a nested one",
    ),
    "sparse bias": (lambda: bad(bias=torch.zeros(3, 5).to_sparse()), "bias must be a dense tensor"),
    "sparse values": (
        lambda: bad(bias=mg.DenseBias(torch.zeros(1, 1, 3, 5).to_sparse())),
        "DenseBias values must be a",
    ),
    "sparse index": (
        lambda: bad(bias=mg.BucketBias(INDEX.to_sparse(), torch.zeros(2, 4))),
        "BucketBias index must be a dense tensor",
    ),
    "nested weight": (
        lambda: bad(bias=mg.ProjectedBias(CHANNELS, torch.nested.nested_tensor([torch.zeros(2)] * 2))),
        "ProjectedBias weight must be a dense tensor, got a nested one",
    ),
    "sparse mask": (
        lambda: bad(bias=mg.ProjectedBias(CHANNELS, torch.zeros(2, 2), (INDEX > 0).to_sparse())),
        "ProjectedBias mask must be a dense tensor",
    ),
    "sparse padding": (
        lambda: bad(key_padding_mask=torch.zeros(2, 5, dtype=torch.bool).to_sparse()),
        "key_padding_mask must be a dense tensor",
    ),
    "scale of nan": (lambda: bad(scale=float("nan")), r"scale must be finite, got nan; None takes D \*\* -0.5"),
    "infinite scale": (lambda: bad(scale=-math.inf), "scale must be finite, got -inf"),
    "a tensor as scale": (
        lambda: bad(scale=torch.tensor(0.5, requires_grad=True)),
        "scale must be a number, got a tensor; multiply q by it",
    ),
    "probability": (lambda: bad(dropout_p=1.0), r"dropout_p must be in \[0, 1\), got 1.0"),
    "no key": (lambda: bad(dropout_p=0.5), r"needs dropout_key, torch.int32 \[B\] = \[2\], got None"),
    "key dtype": (lambda: bad(dropout_p=0.5, dropout_key=torch.zeros(2, dtype=torch.int64)), r"got torch.int64 \[2\]"),
    "impl": (
        lambda: bad(impl="cudnn"),
        "impl must be 'triton', 'blocked', 'blocked_long', 'reference' or None, got 'cudnn'",
    ),
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")  # of sparse and nested tensors
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input(case):
    arguments, message = BAD_INPUTS[case]
    with pytest.raises(ValueError, match=message):
        mg.biased_attention(**arguments())


def test_data_that_changed_is_checked_again():
    index, channels = INDEX.clone(), CHANNELS.clone()
    biases = {
        "below the table": mg.BucketBias(index, torch.zeros(2, 4)),
        "finite": mg.ProjectedBias(channels, torch.zeros(2, 2)),
    }
    for _ in range(2):
        for bias in biases.values():
            mg.biased_attention(**bad(bias=bias))
    index[0, 0, 0], channels[0, 0, 0, 0] = 4, torch.inf
    for message, bias in biases.items():
        with pytest.raises(ValueError, match=message):
            mg.biased_attention(**bad(bias=bias))
    with torch.inference_mode(), pytest.raises(ValueError, match="finite"):  # such tensors count no changes
        mg.biased_attention(**bad(bias=mg.ProjectedBias(channels.clone(), torch.zeros(2, 2))))


@pytest.mark.skipif(DEVICE != "cpu", reason="needs a machine without CUDA")
def test_triton_on_a_cpu_names_every_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    q = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"(?s)q is on cpu.*q is torch.float64"):
        mg.biased_attention(q, q, q, impl="triton")
