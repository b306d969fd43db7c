"""What the operators refuse before compiled loops or kernels address it; ``BAD_INPUTS`` has what callers pass."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import megagraph as mg
from megagraph.attention.packed import packed_attention
from megagraph.attention.packing import Packing
from tests.problems import DEVICE, Shape, make_problem, of_a_cpu

B, H, M, N, D, R = 2, 4, 24, 30, 8, 7


def zeros(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


LISTS = ("row_starts", "columns", "key_starts", "key_rows", "key_pairs", "column_ids")


def valid(name: str) -> dict:
    """Arguments of one of the operators, all tensors among them."""
    problem = make_problem("bucket", Shape(M, N, D, B=B, H=H), dtype=torch.float32, dropout_p=0.3)
    row_ids = torch.arange(M, dtype=torch.int32, device=DEVICE)
    given = dict(
        q=problem.q,
        k=problem.k,
        v=problem.v,
        engine="triton" if DEVICE == "cuda" else "blocked",
        short="step" not in name,
        form="bucket",
        data=problem.bias.index,
        learned=problem.bias.table,
        bias_mask=None,
        key_padding_mask=problem.padding,
        segments=[0, 0, N],
        scale=0.5,
        dropout_p=0.3,
        dropout_key=problem.dropout_key,
        row_ids=row_ids,
        first_column=0,
        first_head=0,
        tf32=False,
        **dict.fromkeys(LISTS),
    )
    out, (lse, m, l) = torch.zeros_like(problem.q), (zeros(B, H, M) for _ in range(3))
    if name == "biased_attention_backward":
        given |= dict(d_out=problem.d_out, d_lse=problem.d_lse, out=out, lse=lse, learned_grad=True)
    elif name == "attention_step_":
        given |= dict(first=False, last=True, m=m, l=l, acc=out.clone(), out=out, lse=lse)
    elif name == "attention_step_backward_":
        sums = {f"d{x}": torch.zeros_like(given[x]) for x in ("q", "k", "v")}
        given |= dict(d_out=problem.d_out, lse=lse, delta=m, d_learned=zeros(H, R), **sums, accumulate=True)
    return given


OPERATORS = ("biased_attention", "biased_attention_backward", "attention_step_", "attention_step_backward_")
FORWARD, BACKWARD, STEP, STEP_BACKWARD = OPERATORS
BAD_OPERANDS = {
    "index": (FORWARD, dict(data=zeros(1, 1, 1, dtype=torch.uint8)), r"data .*\[2 or 1, 24, 30\], got \[1, 1, 1\]"),
    "wide index": (FORWARD, dict(data=zeros(B, M, N + 1, dtype=torch.uint8)), r"data .*got \[2, 24, 31\]"),
    "int index": (FORWARD, dict(data=zeros(B, M, N, dtype=torch.int32)), "data must be torch.uint8 .*got torch.int32"),
    "no index": (FORWARD, dict(data=None), "bias data must have shape .*got None"),
    "table": (FORWARD, dict(learned=zeros(H - 1, R)), r"learned part of bias must have shape \[4, 7\], got \[3, 7\]"),
    "table of one axis": (FORWARD, dict(learned=zeros(H)), r"learned part of bias .*got \[4\]"),
    "channels": (FORWARD, dict(form="projected", data=zeros(B, R - 1, M, N)), r"\[2 or 1, 7, 24, 30\], got \[2, 6"),
    "dense": (FORWARD, dict(form="dense", learned=zeros(B, H, M, 1)), r"\[2 or 1, 4 or 1, 24, 30\], got \[2, 4, 24, 1"),
    "form": (FORWARD, dict(form="alibi"), "form must be 'none', 'dense', 'bucket' or 'projected', got 'alibi'"),
    "engine": (FORWARD, dict(engine="cuda"), "engine must be 'triton' or 'blocked', got 'cuda'"),
    "segments of a whole": (FORWARD, dict(segments=[0, 0, N - 1]), r"\[\(0, 0, 30\)\], all keys, got \[\(0, 0, 29\)\]"),
    "short step": (STEP, dict(short=True), "short must be False in one step of several, got True"),
    "short step backward": (STEP_BACKWARD, dict(short=True), "short must be False in one step of several, got True"),
    "mask": (FORWARD, dict(bias_mask=zeros(B, N, M, dtype=torch.bool)), r"mask .*\[2 or 1, 24, 30\], got \[2, 30, 24"),
    "float mask": (FORWARD, dict(bias_mask=zeros(B, M, N)), "bias mask must be torch.bool"),
    "padding": (FORWARD, dict(key_padding_mask=zeros(B, M, dtype=torch.bool)), r"padding.*\[2, 30\], got \[2, 24\]"),
    "key": (FORWARD, dict(dropout_key=zeros(1, dtype=torch.int32)), r"dropout_key must have shape \[2\], got \[1\]"),
    "rows": (FORWARD, dict(row_ids=zeros(M - 1, dtype=torch.int32)), r"row_ids must have shape \[24\], got \[23\]"),
    "k of one axis": (FORWARD, dict(k=zeros(D)), r"shape \[B, H, M or N, D\], got \[2, 4, 24, 8\] and \[8\]"),
    "heads of k": (FORWARD, dict(k=zeros(B, 1, N, D)), r"k must have shape \[2, 4, 30, 8\], got \[2, 1, 30, 8\]"),
    "v": (FORWARD, dict(v=zeros(B, H, N - 1, D)), r"v must have shape \[2, 4, 30, 8\], got \[2, 4, 29, 8\]"),
    "dtype": (FORWARD, dict(v=zeros(B, H, N, D, dtype=torch.float64)), "v must be torch.float32 .*got torch.float64"),
    "d_out": (BACKWARD, dict(d_out=zeros(B, H, 1, D)), r"q must have shape \[2, 4, 1, 8\], got \[2, 4, 24, 8\]"),
    "d_lse": (BACKWARD, dict(d_lse=zeros(B, H)), r"d_lse must have shape \[2, 4, 24\], got \[2, 4\]"),
    "many keys": (STEP, dict(segments=[0, 0, 50_000_000]), r"within 30 keys and 30 columns .*got \(0, 0, 50000000\)"),
    "key before the first": (STEP, dict(segments=[-1, 0, 3]), r"got \(-1, 0, 3\)"),
    "column beyond": (STEP_BACKWARD, dict(segments=[0, 20, 24]), r"within 30 keys .*got \(0, 20, 24\)"),
    "no triple": (
        STEP,
        dict(segments=[0, 0]),
        r"\(key_start, column_start, length\) of each in one list, got \[0, 0\]",
    ),
    "columns that differ": (STEP, dict(key_padding_mask=zeros(B, 3, dtype=torch.bool)), r"\[2, 30\], got \[2, 3\]"),
    "no state": (STEP, dict(m=None), r"m must have shape \[2, 4, 24\], got None"),
    "acc": (STEP, dict(acc=zeros(B, H, 1, D)), r"acc must have shape \[2, 4, 24, 8\], got \[2, 4, 1, 8\]"),
    "acc in strides": (STEP, dict(acc=zeros(B, H, D, M).mT), r"acc must be contiguous, .*pass acc.contiguous\(\)"),
    "l": (STEP, dict(l=zeros(B, H, M, dtype=torch.float64)), "l must be torch.float32 .*got torch.float64"),
    "out": (STEP, dict(out=zeros(B, H, M, 1)), r"out must have shape \[2, 4, 24, 8\], got \[2, 4, 24, 1\]"),
    "no lse": (STEP, dict(lse=None), "lse must have shape .*got None"),
    "delta": (STEP_BACKWARD, dict(delta=zeros(B, H, 1)), r"delta must have shape \[2, 4, 24\], got \[2, 4, 1\]"),
    "dk": (STEP_BACKWARD, dict(dk=zeros(B, H, M, D)), r"dk must have shape \[2, 4, 30, 8\], got \[2, 4, 24, 8\]"),
    "d_learned": (STEP_BACKWARD, dict(d_learned=zeros(1, R)), r"d_learned must have shape \[4, 7\], got \[1, 7\]"),
}


@pytest.mark.parametrize("case", BAD_OPERANDS)
def test_bad_operand(case):
    name, changes, message = BAD_OPERANDS[case]
    with pytest.raises(ValueError, match=message):
        getattr(torch.ops.megagraph, name)(**valid(name) | changes)


@pytest.mark.parametrize("name", OPERATORS)
def test_freed_or_cut_memory(name):
    operator = getattr(torch.ops.megagraph, name)
    operator(**valid(name))
    for argument, given in valid(name).items():
        for left in (0, given.nbytes - 1) if isinstance(given, torch.Tensor) else ():
            arguments = valid(name)
            arguments[argument].untyped_storage().resize_(left)
            with pytest.raises(ValueError, match=f"needs {given.nbytes} bytes of its storage, got {left}: it was"):
                operator(**arguments)


IMPLS = ("blocked", "blocked_long") if DEVICE == "cpu" else ("triton",)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_changed_since_a_bias_was_made(impl):
    problem = make_problem("projected", Shape(M, N, D, B=B, H=H), dtype=torch.float32)
    mask = problem.bias.mask
    mask.data = mask[:, :1, :1].clone()
    with pytest.raises(ValueError, match="bias mask must have shape"):
        mg.biased_attention(problem.q, problem.k, problem.v, problem.bias, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["q", "k", "v", "index", "table", "padding", "key"])
def test_what_changes_before_backward(name, impl):
    problem = make_problem("bucket", Shape(M, N, D, B=B, H=H), dtype=torch.float32, dropout_p=0.3)
    q, k, v, table = (x.requires_grad_() for x in problem.inputs)
    tensors = dict(q=q, k=k, v=v, index=problem.bias.index, table=table)
    tensors |= dict(padding=problem.padding, key=problem.dropout_key)
    out = mg.biased_attention(
        q,
        k,
        v,
        problem.bias,
        key_padding_mask=problem.padding,
        dropout_p=0.3,
        dropout_key=problem.dropout_key,
        impl=impl,
    )
    x = tensors[name]
    x.data = torch.zeros_like(x[(0,) * x.ndim]).reshape((1,) * x.ndim)
    with pytest.raises(ValueError, match=r"must have shape .* keep it so until backward"):
        out.sum().backward(retain_graph=True)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"must have shape|bytes of its storage"):
        out.sum().backward()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["q", "v", "index", "table"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_freed_or_cut_memory_of_what_was_in_order_before(when, name, impl):
    def call():
        return mg.biased_attention(q, k, v, problem.bias, key_padding_mask=problem.padding, impl=impl)

    problem = make_problem("bucket", Shape(M, N, D, B=B, H=H), dtype=torch.float32)
    q, k, v, table = (x.requires_grad_() for x in problem.inputs)
    call().sum().backward()
    out = call()
    x = dict(q=q, v=v, index=problem.bias.index, table=table)[name]
    x.data = x.detach().clone()  # memory that nobody has seen as an array, which could not be freed
    for left in (x.nbytes - 1, 0):
        x.untyped_storage().resize_(left)
        with pytest.raises(ValueError, match=f"needs {x.nbytes} bytes of its storage, got {left}: it was"):
            call() if when == "forward" else out.sum().backward(retain_graph=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_freed_memory_of_what_is_expanded(impl):
    q, index = torch.randn(B, H, M, D), torch.zeros(1, M, M, dtype=torch.uint8)
    memory = torch.randn(1, 1, M, D)
    k, bias = memory.expand(B, H, M, D), mg.BucketBias(index, torch.zeros(H, R))
    mg.biased_attention(q, k, k, bias, impl=impl)
    k = (memory := torch.randn(1, 1, M, D)).expand(B, H, M, D)
    memory.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="of its storage, got 0: it was freed"):
        mg.biased_attention(q, k, k, bias, impl=impl)


@of_a_cpu
def test_packed_rows():
    q, k, v = (torch.randn(8, 6, requires_grad=True) for _ in range(3))
    index, table = torch.zeros(2, 5, 5, dtype=torch.uint8), torch.zeros(3, R, requires_grad=True)
    packing = Packing(torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))

    def attend(k):
        return packed_attention(q, k, v, mg.BucketBias(index, table), packing, 3)

    with pytest.raises(ValueError, match=r"k must have shape \[8, 6\], got \[7, 6\]"):
        attend(k[:7])
    out = attend(k)
    before, index.data = index.data, torch.zeros(1, 1, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"data must have shape \[2 or 1, 5, 5\], got \[1, 1, 1\]"):
        out.sum().backward(retain_graph=True)
    index.data = before
    out.sum().backward(retain_graph=True)
    index.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    freed = torch.randn(8, 6)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="k needs 192 bytes of its storage, got 0"):
        attend(freed)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_bucket_beyond_the_table_that_was_not_seen_gives_nan(impl):
    problem = make_problem("bucket", Shape(M, N, D, B=B, H=H), dtype=torch.float32, masked=False, padded=False)
    for _ in range(2):
        out = mg.biased_attention(problem.q, problem.k, problem.v, problem.bias, impl=impl)
        problem.bias.index.data[0, 5, 7] = 200  # which no version counts
    assert out[0, :, 5].isnan().all()
    assert out.isnan().sum() == out[0, :, 5].numel()


@pytest.mark.parametrize("impl", [None, "reference"])
def test_fake_tensors(impl):
    with FakeTensorMode():
        q, index = torch.zeros(B, H, M, D, device=DEVICE), torch.zeros(B, M, M, dtype=torch.uint8, device=DEVICE)
        bias = mg.BucketBias(index, torch.zeros(H, R, device=DEVICE))
        assert mg.biased_attention(q, q, q, bias, impl=impl).shape == q.shape
