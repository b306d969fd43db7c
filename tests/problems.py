"""Random attention problems, what plain PyTorch makes of them, and how close an implementation must come."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megagraph.attention import reference
from megagraph.attention.bias import Bias, BucketBias, DenseBias, ProjectedBias
from megagraph.attention.dropout import keep_mask, row_keys
from megagraph.attention.relation import Relation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = torch.float32 if DEVICE == "cuda" else torch.float64
CLOSE = 1e-4 if DEVICE == "cuda" else 1e-10  # of results in EXACT by another order of sums
IMPLS = ("triton", "blocked") if DEVICE == "cpu" else ("triton",)
of_a_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="impl='blocked' runs on a CPU")
FORMS = ("none", "dense", "bucket", "projected")
NUM_BUCKETS = 7
NUM_CHANNELS = 3
EAGER_DRAWS = 8


@dataclass
class Problem:
    """One attention problem, whole: global rows and columns."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None
    padding: Tensor | None
    dropout_p: float
    dropout_key: Tensor | None
    d_out: Tensor
    d_lse: Tensor

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v] + ([] if self.bias is None else [self.bias.learned])


def with_learned(bias: Bias | None, learned: Tensor | None) -> Bias | None:
    if bias is None:
        return None
    field = {"dense": "values", "bucket": "table", "projected": "weight"}[bias.form]
    return replace(bias, **{field: learned})


def make_bias(form, B, H, M, N, dtype, masked) -> Bias | None:
    """A random bias; ``masked`` bool [B, M, N] or None. B (and H, if dense) of 1 is a broadcast axis."""
    if form == "none":
        return None
    if form == "dense":
        values = torch.randn(B, H, M, N, dtype=dtype)
        return DenseBias(values if masked is None else values.masked_fill(masked[:B, None], -torch.inf))
    if form == "bucket":
        index = torch.randint(NUM_BUCKETS, (B, M, N))
        index = index if masked is None else index.masked_fill(masked[:B], 255)
        return BucketBias(index.to(torch.uint8), torch.randn(H, NUM_BUCKETS, dtype=dtype))
    channels = torch.randn(B, NUM_CHANNELS, M, N, dtype=dtype)
    weight = torch.randn(H, NUM_CHANNELS, dtype=dtype)
    return ProjectedBias(channels, weight, None if masked is None else masked[:B])


class Shape(NamedTuple):
    """Sizes of a problem: B sequences, H heads, M query rows, N keys, head dim D."""

    M: int
    N: int
    D: int
    B: int = 2
    H: int = 2


def make_problem(form, shape: Shape, *, dtype=EXACT, masked=True, padded=True, dropout_p=0.0, planes=None) -> Problem:
    """A random problem. ``masked``: a third of the pairs and all of row 0; ``planes``: the bias's B and H."""
    M, N, D, B, H = shape
    torch.manual_seed(M * 1000 + N * 10 + D)
    mask = None
    if masked and form != "none":
        mask = torch.rand(B, M, N) < 0.3
        mask[:, 0] = True
    padding = None
    if padded:
        padding = torch.rand(B, N) < 0.2
        padding[0] |= form == "none" and masked  # without a bias, a whole sequence that attends to nothing
    key = torch.randint(-(2**31), 2**31, (B,), dtype=torch.int32) if dropout_p else None
    q, k, v, d_out = (torch.randn(B, H, n, D, dtype=dtype) for n in (M, N, N, M))
    state_dtype = torch.promote_types(dtype, torch.float32)
    problem = Problem(
        q=q,
        k=k,
        v=v,
        bias=make_bias(form, *(planes or (B, H)), M, N, dtype, mask),
        padding=padding,
        dropout_p=dropout_p,
        dropout_key=key,
        d_out=d_out,
        d_lse=torch.randn(B, H, M, dtype=state_dtype),
    )
    return to(problem, DEVICE)


def hide_row(bias: Bias, row: int, hidden: Tensor) -> None:
    """Mask the hidden columns of one row, in place."""
    if bias.form == "dense":
        bias.values[:, :, row] = bias.values.new_zeros(len(hidden)).masked_fill(hidden, -torch.inf)
    elif bias.form == "bucket":
        bias.index[:, row] = hidden.to(torch.uint8) * 255
    else:
        bias.mask[:, row] = hidden


def ring_problem(form, world_size, num_super, num_nodes, *, B=2, H=2, **options) -> Problem:
    """Row 0 lives on rank 0 and can attend to one key only: the first of rank 1's block, which arrives last."""
    N = num_nodes + num_super
    problem = make_problem(form, Shape(N, N, 4, B=B, H=H), **options)
    if form != "none":
        hidden = torch.ones(N, dtype=torch.bool, device=DEVICE)
        hidden[-(-num_nodes // world_size) % num_nodes] = False
        hide_row(problem.bias, 0, hidden)
    return problem


def to(problem: Problem, device=None, dtype=None) -> Problem:
    """The problem on another device, its floating point tensors in another dtype."""

    def move(x):
        if isinstance(x, Tensor):
            return x.to(device, dtype if x.is_floating_point() else None)
        if isinstance(x, Relation):
            return x if device is None else x.to(device)
        return type(x)(**{name: move(value) for name, value in vars(x).items()}) if hasattr(x, "form") else x

    return Problem(**{name: move(value) for name, value in vars(problem).items()})


def expected(problem: Problem, attend=reference.biased_attention) -> dict[str, Tensor]:
    """out, lse and gradients by autograd."""
    q, k, v, *learned = inputs = [x.detach().requires_grad_() for x in problem.inputs]
    bias = with_learned(problem.bias, *learned) if learned else None
    scale = q.shape[-1] ** -0.5
    out, lse = attend(q, k, v, bias, problem.padding, scale, problem.dropout_p, problem.dropout_key)
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad([out, finite_lse], inputs, [problem.d_out, problem.d_lse.to(lse.dtype)])
    names = ("out", "lse", "dq", "dk", "dv", "d_learned")
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=False))  # no d_learned without a bias


class _CutProduct(torch.autograd.Function):
    """a b of fp32 as tensor cores take it: without the last 13 bits of each number, which are cut off, not rounded."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _cut(a) @ _cut(b)

    @staticmethod
    def backward(ctx, gradient):
        a, b = (_cut(x).mT for x in ctx.saved_tensors)
        return _cut(gradient) @ b, a @ _cut(gradient)


def _cut(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def tf32_attention(*arguments):
    """``plain_attention`` in TF32, of any size: PyTorch's own products are exact where matrices are small."""
    return plain_attention(*arguments, product=_CutProduct.apply)


def plain_attention(q, k, v, bias, key_padding_mask, scale, dropout_p, dropout_key, product=torch.matmul):
    """The reference's formula, with every intermediate in q's dtype."""
    s = scale * product(q, k.transpose(-1, -2))
    if bias is not None:
        s = s + bias.materialize()
    if key_padding_mask is not None:
        s = s.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    empty = (s == -torch.inf).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    p = s.softmax(dim=-1).masked_fill(empty, 0.0)
    if dropout_key is not None:
        rows, columns = (torch.arange(n, device=q.device) for n in s.shape[-2:])
        keep = keep_mask(row_keys(dropout_key, q.shape[1], rows), columns, dropout_p)
        p = p * keep / (1.0 - dropout_p)
    return product(p, v), s.logsumexp(dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)


@torch.no_grad()
def norms(problem: Problem) -> dict[str, float]:
    """Norms of what is added up for each result: the root of the sum of squares, scores' own rounding included."""
    q, k, v, d_out, d_lse = (x.square() for x in (problem.q, problem.k, problem.v, problem.d_out, problem.d_lse))
    scale, bias = q.shape[-1] ** -0.5, problem.bias
    where = torch.zeros_like(q @ k.mT) if bias is None else bias.materialize()
    s = scale * (problem.q @ problem.k.mT) + where
    if problem.padding is not None:
        s = s.masked_fill(problem.padding[:, None, None, :], -torch.inf)
    rounded = (scale**2 * (q @ k.mT) + where.square()).masked_fill(s == -torch.inf, 0.0)
    p = s.softmax(dim=-1).nan_to_num(0.0).square() * (1.0 + rounded)
    kept = (1.0 - problem.dropout_p) ** -2
    dp = kept * (d_out @ v.mT)
    ds = p * (dp + (p * dp).sum(dim=-1, keepdim=True) + d_lse[..., None])
    largest = {"out": kept * (p @ v), "lse": rounded, "dq": scale**2 * (ds @ k), "dk": scale**2 * (ds.mT @ q)}
    largest["dv"] = kept * (p.mT @ d_out)
    if bias is not None:
        squared = replace(bias, channels=bias.channels.square()) if bias.form == "projected" else bias
        learned = bias.learned.detach().requires_grad_()
        with torch.enable_grad():
            values = with_learned(squared, learned).materialize()
            (largest["d_learned"],) = torch.autograd.grad(values.masked_fill(s == -torch.inf, 0.0), learned, ds)
    return {name: x.max().sqrt().item() for name, x in largest.items()}


def distances(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """The largest of each result from fp64's; both are -inf in the same places, and finite elsewhere."""
    largest = {}
    for name, x in want.items():
        empty = x == -torch.inf
        assert torch.equal(got[name] == -torch.inf, empty), f"{name}: -inf in other places"
        difference = (got[name].double() - x).masked_fill(empty, 0.0)
        assert torch.isfinite(difference).all(), f"{name}: non-finite values"
        largest[name] = difference.abs().max().item()
    return largest


def moved(problem: Problem, seed: int) -> Problem:
    """The problem a thousandth off, so that every number of fp32 rounds anew; bf16 hardly knows so little."""
    torch.manual_seed(seed)

    def move(x: Tensor) -> Tensor:
        return x * (1.0 + 1e-3 * torch.randn_like(x))

    bias = None if problem.bias is None else with_learned(problem.bias, move(problem.bias.learned))
    given = {name: move(getattr(problem, name)) for name in ("q", "k", "v", "d_out", "d_lse")}
    return replace(problem, bias=bias, **given)


def assert_matches(got: dict[str, Tensor], problem: Problem, learned_grad: bool = True, plain=plain_attention):
    """fp64 to 1e-10; else within twice (the error of ``plain`` PyTorch in the same dtype + rounding).

    That error, the largest of what may be six numbers, is luck: what exceeds it is held against the largest of
    ``EAGER_DRAWS`` problems a thousandth off. Where fp32 stands in for fp64, each term of a sum, which may cancel,
    may be off by a digit, too.
    """
    want = expected(to(problem, dtype=torch.float64))
    if not learned_grad:
        want.pop("d_learned", None)
    assert got.keys() == want.keys()
    if problem.q.dtype == torch.float64:
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
        return
    rounded = {name: x if name == "lse" else x.to(problem.q.dtype) for name, x in got.items()}  # as the caller does
    stands_in = problem.q.dtype == EXACT  # fp32, for fp64; where there is fp64 the bound of fp32 is without it
    sums = norms(to(problem, dtype=torch.float64)) if stands_in else dict.fromkeys(got, 0.0)
    eps, single = torch.finfo(problem.q.dtype).eps, torch.finfo(torch.float32).eps
    largest = {name: x.masked_fill(x == -torch.inf, 0.0).abs().max().item() for name, x in want.items()}
    error, eager = (distances(x, want) for x in (rounded, expected(problem, attend=plain)))

    def over() -> list[str]:
        budget = {name: 2 * (eager[name] + eps * largest[name] + single * sums[name]) for name in error}
        return [
            f"{name}: error {error[name]:.2e} > {budget[name]:.2e} (eager {eager[name]:.2e})"
            for name in error
            if error[name] > budget[name]
        ]

    for seed in range(1, EAGER_DRAWS):
        if not over():
            return
        other = moved(problem, seed)
        drawn = distances(expected(other, attend=plain), expected(to(other, dtype=torch.float64)))
        eager = {name: max(x, drawn[name]) for name, x in eager.items()}
    assert not over(), "; ".join(over())
