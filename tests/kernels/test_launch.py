"""Launches that repeat a plan: other memory, other values, the same kernels."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import megagraph as mg
from tests.problems import DEVICE, FORMS, Problem, Shape, make_problem, of_a_cpu

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from megagraph.kernels import operands
from megagraph.kernels.forward import pad_table
from megagraph.kernels.launch import Plan, Recorder, plans

SHAPE = Shape(17, 33, 8)


@pytest.fixture(autouse=True)
def _no_plans():
    plans.clear()
    yield
    plans.clear()


def call(problem: Problem, inputs: list[Tensor]) -> list[Tensor]:
    """out and gradients of leaves with these values."""
    q, k, v, *learned = inputs = [x.detach().requires_grad_() for x in inputs]
    names = {"dense": "values", "bucket": "table", "projected": "weight"}
    bias = problem.bias and type(problem.bias)(**vars(problem.bias) | {names[problem.bias.form]: learned[0]})
    out = mg.biased_attention(
        q,
        k,
        v,
        bias,
        key_padding_mask=problem.padding,
        dropout_p=problem.dropout_p,
        dropout_key=problem.dropout_key,
        impl="triton",
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, problem.d_out)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("D", [8, 40])
@pytest.mark.parametrize("form", FORMS)
def test_a_plan_serves_other_memory(form, D):
    problem = make_problem(form, SHAPE._replace(D=D), dropout_p=0.3)
    call(problem, problem.inputs)
    known = len(plans)
    others = [torch.randn_like(x) for x in problem.inputs]
    got = call(problem, others)
    assert len(plans) == known
    plans.clear()
    assert_same(got, call(problem, others))


def test_strides_and_alignment_make_another_plan():
    problem = make_problem("projected", SHAPE)
    want = call(problem, problem.inputs)
    q, k, v, weight = problem.inputs
    rows_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.empty(v.numel() + 1, dtype=v.dtype, device=v.device)[1:].view_as(v).copy_(v)
    for inputs in ([q, rows_first, v, weight], [q, k, odd, weight], [q, k, v, weight.T.contiguous().T]):
        known = len(plans)
        for x, y in zip(call(problem, inputs), want, strict=True):
            torch.testing.assert_close(x, y)
        assert len(plans) > known


def test_where_in_its_memory_a_tensor_lies_makes_no_other_plan():
    problem = make_problem("none", SHAPE)
    call(problem, problem.inputs)
    known, (q, k, v) = len(plans), problem.inputs
    for rows in (1, 2, 5):
        memory = torch.empty(2 * rows * q.numel(), dtype=q.dtype, device=q.device)
        moved = memory[rows * q.numel() :][: q.numel()].view_as(q).copy_(q)
        call(problem, [moved, k, v])
    assert len(plans) == known


def test_values_are_read_anew():
    problem = make_problem("bucket", SHAPE)
    table = problem.bias.table
    before = call(problem, problem.inputs)
    table.data.mul_(2)  # leaves the version as it is
    after = call(problem, problem.inputs)
    plans.clear()
    assert_same(after, call(problem, problem.inputs))
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("same", ["qkv", "kv", ""])
def test_who_shares_memory_makes_another_plan(same):
    """A plan of q = k = v would else serve three tensors of this geometry with one of them."""
    problem = make_problem("none", Shape(33, 33, 8), padded=False)
    q, k, v, d_out = problem.q, problem.k, problem.v, problem.d_out

    def forward(q, k, v):
        return mg.biased_attention(q, k, v, impl="triton")

    forward({"qkv": k}.get(same, q), k, v if not same else k)
    want = mg.biased_attention(q, k, v, impl="reference")
    torch.testing.assert_close(forward(q, k, v), want)
    torch.testing.assert_close(forward(q, d_out, v), mg.biased_attention(q, d_out, v, impl="reference"))


def test_a_gradient_that_is_the_output_itself_makes_another_plan():
    """As of out.square() / 2; the plan would serve any other gradient with the output."""
    problem = make_problem("none", SHAPE)
    q, k, v = inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    got, want = (mg.biased_attention(q, k, v, impl=impl) for impl in ("triton", "reference"))
    for d_out in (None, problem.d_out):
        grads, expected = (
            torch.autograd.grad(out, inputs, out.detach() if d_out is None else d_out, retain_graph=True)
            for out in (got, want)
        )
        for x, y in zip(grads, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_a_launcher_hands_over_nothing_of_its_own():
    recorder, table = Recorder(torch.device(DEVICE)), torch.randn(1, 5, device=DEVICE)
    padded = torch.empty(1, 256, 1, device=DEVICE)  # neither given nor the recorder's
    from megagraph.kernels.tile import Strided

    recorder.launch(pad_table, 1, Strided(table, table.stride()), padded, 1, 5, 1, BLOCK=256)
    with pytest.raises(KeyError):
        Plan(recorder, [table], None)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_waits_for_nothing_and_copies_nothing(form):
    """What a CUDA graph cannot hold, and what takes the host's time: none of it where plans are known."""
    problem = make_problem(form, SHAPE, dropout_p=0.3)
    call(problem, problem.inputs)
    for plan in plans.values():
        plan._runs = [lambda *_: None] * len(plan._kernels)  # the interpreter's own operations are not ours
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        call(problem, problem.inputs)
    ran = {event.key.removeprefix("aten::") for event in prof.key_averages() if event.key.startswith("aten::")}
    views = {"view", "transpose", "expand", "as_strided", "slice", "flatten", "unflatten", "detach", "reshape"}
    views |= {"to"}  # of the dtype it has: a copy would be one more operation
    makes = {"empty", "new_empty", "empty_like", "empty_strided", "zeros", "zeros_like", "zero_", "fill_", "ones_like"}
    sums = {"sum", "add_"} if form in ("bucket", "projected") else set()
    assert ran <= views | makes | sums, sorted(ran - views - makes - sums)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; bench/gpu.sh --check runs it")
@pytest.mark.parametrize("D", [8, 64])
@pytest.mark.parametrize("form", FORMS)
def test_a_training_step_in_a_cuda_graph(form, D):
    """Captured once; a replay sees new inputs, and a table that has changed."""
    problem = make_problem(form, Shape(64, 80, D), dropout_p=0.1)
    inputs = [x.clone() for x in problem.inputs]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(problem, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(problem, inputs)
    for x in inputs:
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(captured, call(problem, inputs))


@pytest.mark.parametrize(("heads", "kind"), [(8, "int32"), (256, "int32"), (512, "int64")])
def test_offsets_of_many_heads_are_wide_enough(heads, kind):
    """In elements, up to the last head and the last row of a tile."""
    rows = torch.empty(1, heads, 4, 8, device="meta").as_strided((1, heads, 4, 8), (1, (1 << 23) - 8, 8, 1))
    assert str(operands._offsets_dtype([rows])) == kind


@of_a_cpu
def test_columns_of_an_index_may_lie_far_apart():
    """Pages that nobody touches take no memory; the third column is 2**32 - 128 bytes from the first."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (4, 3, 3))
    index, table = torch.randint(1, 5, (1, 4, 3), dtype=torch.uint8), torch.randn(2, 5)
    memory = mmap.mmap(-1, (1 << 32) + 4096)
    far = torch.frombuffer(memory, dtype=torch.uint8).as_strided((1, 4, 3), (0, 1, (1 << 31) - 64), 1024).copy_(index)
    problems = (Problem(q, k, v, mg.BucketBias(x, table), None, 0.0, None, q, q[..., 0]) for x in (index, far))
    assert_same(*(call(problem, problem.inputs) for problem in problems))


@of_a_cpu
@pytest.mark.parametrize("entries", [0, 40], ids=["one head a program", "narrow heads"])
def test_columns_of_rows_may_lie_far_apart(entries):
    """The third number of a row is 2**33 - 4096 bytes from the first."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 3, dtype=torch.float16)
    bias = mg.BucketBias(torch.randint(entries, (1, 4, 4)), torch.randn(2, entries)) if entries else None
    memory = torch.frombuffer(mmap.mmap(-1, (1 << 33) + 65536), dtype=torch.float16)
    far = memory.as_strided(q.shape, (0, 64, 8, (1 << 31) - 1024), 4096).copy_(q)
    problems = (Problem(x, q, q, bias, None, 0.0, None, x, q[..., 0]) for x in (q, far))
    assert_same(*(call(problem, problem.inputs) for problem in problems))
