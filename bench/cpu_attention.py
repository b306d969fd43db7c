"""Forward and backward of biased attention on a CPU, beside plain PyTorch, in one run.

    python -m bench.cpu_attention

The machine should be quiet: threads wait for each other actively, unless OMP_WAIT_POLICY=passive is set, and lose a
time slice at every operation if anything else runs.

Every contender gets the data of the bias (bucket index or channels) and what is learned (table, weight or dense
values), builds its bias from them, and returns the gradients of q, k, v and the learned part. ``eager`` and ``sdpa``
hold the bias [B, H, N, N], built in the fastest of the usual ways; SDPA takes it as a mask that needs a gradient.
Values and gradients are compared with the reference in fp64 first; then the contenders take turns, so that a busy
machine slows all of them. ``products`` takes its turns, too: the seven products alone that attention without kept
scores consists of (two forward, five backward), on tiles that stay in the cache; eager / products is what nobody gets
past with these products.

Fixed: fp32, seed 0, no masks, no dropout, 32 buckets, 4 channels, 2 warm-up rounds, 9 rounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import megagraph as mg
from bench.provenance import write_rows
from megagraph.attention.bias import Bias

SEED, WARMUP_ROUNDS, ROUNDS = 0, 2, 9
SHAPES = ((1, 8, 2048, 64), (64, 32, 144, 4), (256, 8, 32, 8))  # B, H, N, D
NUM_BUCKETS, NUM_CHANNELS = 32, 4
TILE = 512  # rows and columns of the scores of all heads; every shape is a multiple or smaller
LEARNED = {"bucket": "table", "projected": "weight", "dense": "values"}

Attend = Callable[[Tensor, Tensor, Tensor, Bias], Tensor]


def make_bias(form: str, B: int, H: int, N: int) -> Bias:
    if form == "bucket":
        index = torch.randint(NUM_BUCKETS, (B, N, N), dtype=torch.uint8)
        return mg.BucketBias(index, torch.randn(H, NUM_BUCKETS))
    if form == "projected":
        return mg.ProjectedBias(torch.randn(B, NUM_CHANNELS, N, N), torch.randn(H, NUM_CHANNELS))
    return mg.DenseBias(torch.randn(B, H, N, N))


def dense(bias: Bias) -> Tensor:
    """The bias [B, H, N, N] in plain PyTorch."""
    if isinstance(bias, mg.BucketBias):
        return bias.table[:, bias.index.long()].transpose(0, 1)
    if isinstance(bias, mg.ProjectedBias):
        return torch.einsum("bcmn,hc->bhmn", bias.channels, bias.weight)
    return bias.values


def blocked(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
    return mg.biased_attention(q, k, v, bias, impl="blocked")


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + dense(bias)).softmax(dim=-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=dense(bias))


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
    return mg.biased_attention(q, k, v, bias, impl="reference")


def products(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> None:
    """Scores and output; scores again, dp, dv, dq and dk."""
    q, k, v, d_out = (x.flatten(0, 1) for x in (q, k, v, d_out))
    s, dp = q.new_zeros(2, len(q), min(TILE, q.shape[1]), min(TILE, q.shape[1]))
    for rows in range(0, q.shape[1], TILE):
        q_t, d_out_t = (x[:, rows : rows + TILE] for x in (q, d_out))
        for columns in range(0, q.shape[1], TILE):
            k_t, v_t = (x[:, columns : columns + TILE] for x in (k, v))
            torch.bmm(q_t, k_t.mT, out=s)
            torch.bmm(s, v_t)
            torch.bmm(q_t, k_t.mT, out=s)
            torch.bmm(d_out_t, v_t.mT, out=dp)
            torch.bmm(s.mT, d_out_t)
            torch.bmm(dp, k_t)
            torch.bmm(dp.mT, q_t)


CONTENDERS: dict[str, Attend] = {"blocked": blocked, "eager": eager, "sdpa": sdpa}


def run(attend: Attend, qkv: list[Tensor], bias: Bias, d_out: Tensor) -> list[Tensor]:
    """out and the gradients of q, k, v and the learned part."""
    q, k, v, learned = inputs = [x.detach().requires_grad_() for x in (*qkv, bias.learned)]
    out = attend(q, k, v, replace(bias, **{LEARNED[bias.form]: learned}))
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def relative_error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest of all results, each relative to its own largest value."""
    return max(((x - ref).abs().max() / ref.abs().max()).item() for x, ref in zip(got, want, strict=True))


def measure(form: str, shape: tuple[int, int, int, int]) -> dict:
    """One row: median and range of every contender's time, and of the ratios of a round to ours."""
    torch.manual_seed(SEED)
    B, H, N, D = shape
    bias = make_bias(form, B, H, N)
    *qkv, d_out = (torch.randn(B, H, N, D) for _ in range(4))
    exact = replace(bias, **{LEARNED[form]: bias.learned.double()})
    want = run(reference, [x.double() for x in qkv], exact, d_out.double())
    errors = {name: relative_error(run(attend, qkv, bias, d_out), want) for name, attend in CONTENDERS.items()}
    del want
    assert max(errors.values()) < 1e-4, f"the contenders do not compute the same: {errors}"

    turns: dict[str, Callable[[], object]] = {
        name: partial(run, attend, qkv, bias, d_out) for name, attend in CONTENDERS.items()
    }
    turns["products"] = partial(products, *qkv, d_out)
    milliseconds: dict[str, list[float]] = {name: [] for name in turns}
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        order = list(turns)
        for name in order[round_ % 4 :] + order[: round_ % 4]:
            started = time.perf_counter()
            turns[name]()
            if round_ >= WARMUP_ROUNDS:
                milliseconds[name].append((time.perf_counter() - started) * 1e3)
    row = {"form": form, "B": B, "H": H, "N": N, "D": D, "unit": "ms", "dtype": "fp32", "relative_error": errors}
    row["wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "default")
    for name, times in milliseconds.items():
        row[name] = {"median": float(np.median(times)), "range": [min(times), max(times)]}
    for name in ("eager", "sdpa"):
        ratios = np.divide(milliseconds[name], milliseconds["blocked"])
        row[f"{name}_ratio"] = {
            "of_medians": row[name]["median"] / row["blocked"]["median"],
            "median": float(np.median(ratios)),
            "range": [float(ratios.min()), float(ratios.max())],
        }
    return row


def main() -> None:
    """Print the rows and write them to bench/results/cpu/attention.json."""
    rows = []
    for form in LEARNED:
        for shape in SHAPES:
            row = measure(form, shape)
            rows.append(row)
            times = ", ".join(f"{name} {row[name]['median']:.1f} ms" for name in (*CONTENDERS, "products"))
            ratios = ", ".join(
                "{} / blocked {of_medians:.2f} ({range[0]:.2f} to {range[1]:.2f})".format(name, **row[f"{name}_ratio"])
                for name in ("eager", "sdpa")
            )
            print(f"{form:9} b{row['B']} h{row['H']} N{row['N']} d{row['D']}: {times}; {ratios}", flush=True)
    print(write_rows("attention", rows))


if __name__ == "__main__":
    tyro.cli(main)
