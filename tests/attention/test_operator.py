"""``biased_attention``: values, gradients, registration, memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.profiler import ProfilerActivity, profile

import megagraph as mg
from bench.processes import forget_peak, peak_resident
from megagraph.attention.cpu import tiles
from megagraph.attention.engines import choose
from megagraph.attention.operator import (
    _attention,
    attention_step_,
    attention_step_backward_,
    make_step,
    products_are_tf32,
)
from megagraph.attention.step import Gradients, State
from tests.problems import (
    CLOSE,
    DEVICE,
    EXACT,
    FORMS,
    IMPLS,
    Shape,
    assert_matches,
    expected,
    make_problem,
    of_a_cpu,
    to,
    with_learned,
)

HEAD_DIMS = (4, 5, 8, 16, 40, 64)
SIZES = ((1, 17), (17, 33), (33, 50), (50, 1), (63, 129))
CASES = [
    (impl, form, D, *SIZES[i % len(SIZES)], i % 3 != 0, i % 2 == 0, 0.3 * (i // 2 % 2))
    for impl in IMPLS
    for i, (D, form) in enumerate(itertools.product(HEAD_DIMS, FORMS))
    if impl == "blocked" or i % 4 == i // 4 % 4  # one form per head dim: tests/kernels has the rest
]


def run(problem, impl):
    """out, lse and gradients by one implementation."""

    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        return mg.biased_attention(
            q,
            k,
            v,
            bias,
            key_padding_mask=padding,
            scale=scale,
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            return_lse=True,
            impl=impl,
        )

    return expected(problem, attend)


@pytest.mark.parametrize(("impl", "form", "D", "M", "N", "masked", "padded", "dropout_p"), CASES)
def test_values_and_gradients(impl, form, D, M, N, masked, padded, dropout_p):
    problem = make_problem(form, Shape(M, N, D), masked=masked, padded=padded, dropout_p=dropout_p)
    assert_matches(run(problem, impl), problem)


@pytest.mark.parametrize("impl", [*IMPLS, pytest.param("blocked_long", marks=of_a_cpu)])
@pytest.mark.parametrize("form", FORMS)
def test_fp32_is_as_good_as_eager(form, impl):
    problem = make_problem(form, Shape(33, 50, 8), dtype=torch.float32, dropout_p=0.2)
    assert_matches(run(problem, impl), problem)


@pytest.mark.parametrize(
    ("dtype", "dropout_p"),
    [
        (EXACT, 0.3),
        (OTHER := torch.float32 if DEVICE == "cpu" else torch.bfloat16, 0.0),
        pytest.param(EXACT, 0.0, marks=pytest.mark.slow),
        pytest.param(OTHER, 0.3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_for_long_sequences_with_narrow_heads(form, dtype, dropout_p):
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    problem = make_problem(form, Shape(33, 50, 5, H=3), dtype=dtype, dropout_p=dropout_p)
    assert_matches(run(problem, "triton"), problem)


@of_a_cpu
@pytest.mark.parametrize("D", [3, 24, 64])
@pytest.mark.parametrize("form", FORMS)
def test_blocked_of_many_tiles_in_fp32(form, D):
    problem = make_problem(form, Shape(203, 533, D), dtype=torch.float32, dropout_p=0.2 * (D == 24), padded=D != 64)
    assert_matches(run(problem, "blocked_long"), problem)


@of_a_cpu
@pytest.mark.parametrize("form", FORMS)
def test_blocked_of_wide_heads_in_fp32(form):
    """Whose products are long sums."""
    problem = make_problem(form, Shape(17, 17, 256), dtype=torch.float32)
    assert_matches(run(problem, "blocked"), problem)


@of_a_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_blocked_in_half_precision(form, dtype):
    problem = make_problem(form, Shape(33, 50, 16), dtype=dtype, dropout_p=0.2)
    assert_matches(run(problem, "blocked"), problem)


@of_a_cpu
@pytest.mark.parametrize("tile", [(6, 16), (6, 240), (96, 16)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("planes", [(3, 2), (1, 2), (1, 1)], ids=str)
def test_blocked_is_the_same_in_any_tile(form, planes, tile, monkeypatch):
    if form != "dense":
        planes = (planes[0], 2)
    problem = make_problem(form, Shape(19, 41, 5, B=3), dropout_p=0.7, planes=planes, masked=planes[0] == 3)
    monkeypatch.setattr(tiles, "TILE_ROWS", tile[0])
    monkeypatch.setattr(tiles, "TILE_KEYS", tile[1])
    assert_matches(run(problem, "blocked"), problem)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@of_a_cpu
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("planes", [(2, 3), (1, 3), (1, 1)], ids=str)
def test_blocked_in_threads_gives_the_same_bits(form, planes, monkeypatch):
    """Parts of the keys, and items that share a plane, are as many as with more threads than sequences."""
    if form != "dense":
        planes = (planes[0], 3)
    problem = make_problem(form, Shape(203, 533, 5, B=2, H=3), dropout_p=0.3, planes=planes)
    monkeypatch.setattr(tiles, "_SCORES_PER_THREAD", 1)
    results = [run(problem, "blocked") for _ in range(4)]
    assert_matches(results[0], problem)
    for other in results[1:]:
        for name, x in other.items():
            assert torch.equal(x, results[0][name]), name


@pytest.mark.parametrize("form", FORMS)
def test_reference_is_the_formula(form):
    """Against sums written out by hand, one query at a time."""
    problem = make_problem(form, Shape(7, 9, 5))
    got = expected(problem)["out"]
    bias = torch.zeros(2, 2, 7, 9, dtype=EXACT) if problem.bias is None else problem.bias.materialize().cpu()
    q, k, v = (x.tolist() for x in (problem.q, problem.k, problem.v))
    for b, h, i in itertools.product(range(2), range(2), range(7)):
        weights = []
        for j in range(9):
            visible = not problem.padding[b, j]
            s = sum(x * y for x, y in zip(q[b][h][i], k[b][h][j], strict=True)) / math.sqrt(5) + bias[b, h, i, j].item()
            weights.append(math.exp(s) if visible else 0.0)
        total = sum(weights) or 1.0
        want = [sum(w * v[b][h][j][d] for j, w in enumerate(weights)) / total for d in range(5)]
        want = torch.tensor(want, dtype=EXACT, device=DEVICE)
        torch.testing.assert_close(got[b, h, i], want, rtol=max(1e-6, CLOSE), atol=CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    problem = to(make_problem(form, Shape(4, 5, 3, B=1), masked=False, dropout_p=0.3), "cpu", torch.float64)

    def attend(q, k, v, *learned):
        bias = with_learned(problem.bias, *learned) if learned else None
        key = problem.dropout_key
        return mg.biased_attention(q, k, v, bias, dropout_p=0.3, dropout_key=key, return_lse=True, impl="blocked")

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in problem.inputs])


def jvp(attend, x):
    return torch.func.jvp(attend, (x,), (x,))[1]


def dual(attend, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(attend(forward_ad.make_dual(x, x.clone()))).tangent


def jacfwd(attend, x):
    return torch.func.jacfwd(attend)(x)


def grad(attend, x):
    return torch.func.grad(lambda x: attend(x).square().sum())(x)


def grad_of_several(attend, x):
    return torch.func.vmap(lambda x: grad(attend, x))(torch.stack([x, x]))


@pytest.mark.parametrize("differentiate", [jvp, dual, jacfwd, grad, grad_of_several])
@pytest.mark.parametrize("impl", [*IMPLS, pytest.param("blocked_long", marks=of_a_cpu)])
@pytest.mark.parametrize("of_table", [False, True])
def test_derivatives_but_by_autograd_are_refused(impl, differentiate, of_table):
    problem = make_problem("bucket", Shape(5, 7, 4), dtype=torch.float32)
    q, k, v, table = problem.inputs

    def attend(x, impl=impl):
        given = (q, k, v, with_learned(problem.bias, x)) if of_table else (x, k, v, problem.bias)
        return mg.biased_attention(*given, impl=impl)

    x = table if of_table else q
    with pytest.raises(NotImplementedError, match=r"no (forward-mode )?derivative.*or impl='reference'"):
        differentiate(attend, x)
    assert differentiate(lambda x: attend(x, "reference"), x).any()
    assert torch.equal(attend(x.clone().requires_grad_()), attend(x))
    for other in (lambda y: y.sum() * attend(x), torch.no_grad()(attend)):  # which ask for no derivative of it
        grad(other, x)


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_a_second_derivative_is_of_the_reference_alone(impl):
    q = torch.randn(1, 2, 5, 4, device=DEVICE, requires_grad=True)
    (dq,) = torch.autograd.grad(mg.biased_attention(q, q, q, impl=impl).square().sum(), q, create_graph=True)
    if impl == "reference":
        assert torch.autograd.grad(dq.sum(), q)[0].any()
        return
    with pytest.raises(NotImplementedError, match=r"no second derivative.* use impl='reference'"):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("impl", IMPLS)
def test_several_by_vmap(impl):
    q = torch.randn(3, 2, 2, 5, 4, device=DEVICE, requires_grad=True)

    def attend(x):
        return mg.biased_attention(x, x, x, impl=impl)

    results = torch.func.vmap(attend)(q), torch.stack([attend(x) for x in q])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q) for x in results))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("impl", [*IMPLS, pytest.param("blocked_long", marks=of_a_cpu)])
@pytest.mark.parametrize("of_lse", [False, True])
def test_several_gradients_at_once(impl, of_lse):
    q = torch.randn(1, 2, 5, 4, device=DEVICE, requires_grad=True)
    x = mg.biased_attention(q, q, q, impl=impl, return_lse=True)[of_lse]
    d_x = torch.randn(3, *x.shape, device=DEVICE)
    (got,) = torch.autograd.grad(x, q, d_x, retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close(got, torch.stack([torch.autograd.grad(x, q, d, retain_graph=True)[0] for d in d_x]))


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form):
    problem = make_problem(form, Shape(5, 7, 4), dtype=torch.float32, dropout_p=0.3)
    q, k, v, *_ = (x.requires_grad_() for x in problem.inputs)
    rows = torch.arange(3, 8, dtype=torch.int32, device=q.device)
    for impl in IMPLS:
        path = choose(impl, q)
        step = make_step(q, problem.bias, problem.padding, 0.5, 0.3, problem.dropout_key, *path)
        for row_ids in (None, rows):  # by the short path, and by tiles
            step = replace(step, segments=[(0, 0, 7)], row_ids=row_ids)
            torch.library.opcheck(_attention, (q, k, v, *step.flat()))


@pytest.mark.parametrize(("form", "impl"), list(zip(FORMS, itertools.cycle(IMPLS), strict=False)))
def test_opcheck_of_a_step(form, impl):
    problem = make_problem(form, Shape(5, 7, 4), dtype=torch.float32, dropout_p=0.3)
    q, k, v = problem.q, problem.k, problem.v
    step = make_step(q, problem.bias, problem.padding, None, 0.3, problem.dropout_key, impl, False)
    arguments = (q, k, v, *replace(step, segments=[(0, 0, 3), (3, 4, 3)]).flat())
    m, l, lse, delta = torch.rand(4, *q.shape[:3], device=q.device)
    state = State(first=False, last=False, m=m, l=l, acc=torch.rand_like(q), out=torch.rand_like(q), lse=lse)
    for last in (False, True):
        torch.library.opcheck(attention_step_, (*arguments, *state.at(first=False, last=last).flat()))
    d_out, dq, dk, dv = (torch.rand_like(x) for x in (q, q, k, v))
    d_learned = torch.rand_like(problem.bias.learned) if problem.bias else None
    sums = Gradients(d_out=d_out, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, d_learned=d_learned, accumulate=True)
    torch.library.opcheck(attention_step_backward_, (*arguments, *sums.flat()))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("num_rows", "segments"), [(0, [(0, 0, 7)]), (5, []), (5, [(2, 2, 0)])])
@pytest.mark.parametrize("impl", IMPLS)
def test_backward_of_a_step_without_pairs(impl, num_rows, segments, accumulate):
    problem = make_problem("bucket", Shape(num_rows, 7, 4), dtype=torch.float32, masked=False)
    step = make_step(problem.q, problem.bias, None, None, 0.0, None, impl, False)
    lse = torch.zeros(problem.q.shape[:3], device=DEVICE)
    learned = problem.bias.learned
    written = {f"d{name}": torch.full_like(x, 2.0) for name, x in zip("qkv", problem.inputs, strict=False)}
    sums = Gradients(
        d_out=problem.q, lse=lse, delta=lse, **written, d_learned=torch.full_like(learned, 2.0), accumulate=accumulate
    )
    attention_step_backward_(*problem.inputs[:3], *replace(step, segments=segments).flat(), *sums.flat())
    for x in (*written.values(), sums.d_learned):
        assert (x == (2.0 if accumulate else 0.0)).all()


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_autocast_stays_outside(impl):
    """Mixed precision is a matter of the inputs; products and sums inside keep their own."""
    problem = make_problem("projected", Shape(33, 50, 8), dtype=torch.float32)
    results = []
    for enabled in (False, True):
        q, k, v, weight = (x.detach().requires_grad_() for x in problem.inputs)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            out = mg.biased_attention(q, k, v, with_learned(problem.bias, weight), impl=impl)
        results.append((out, *torch.autograd.grad(out, (q, k, v, weight), problem.d_out)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize("form", ["none", *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[1:])])
def test_compiles(form):
    problem = make_problem(form, Shape(9, 11, 8), dtype=torch.float32, dropout_p=0.3)

    @torch.compile(fullgraph=True)
    def compiled(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        return mg.biased_attention(
            q,
            k,
            v,
            bias,
            key_padding_mask=padding,
            scale=scale,
            dropout_p=dropout_p,
            dropout_key=dropout_key,
            return_lse=True,
        )

    got, want = expected(problem, compiled), run(problem, None)
    assert got.keys() == want.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, want[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.filterwarnings("ignore")  # the tracer warns about our checks, and about itself
@pytest.mark.parametrize("impl", IMPLS)
def test_a_trace_is_of_the_reference_alone(impl):
    q, k = torch.randn(2, 1, 2, 5, 4, device=DEVICE)
    traced = torch.jit.trace(lambda q: mg.biased_attention(q, q, q, impl="reference"), q)
    torch.testing.assert_close(traced(k), mg.biased_attention(k, k, k, impl=impl))
    with pytest.raises(NotImplementedError, match=r"torch.jit.trace sees nothing .* or impl='reference'"):
        torch.jit.trace(lambda q: mg.biased_attention(q, q, q, impl=impl), q)


def test_compiled_code_follows_how_products_are_rounded():
    def rounded(x):
        return x + products_are_tf32()

    before, compiled = torch.get_float32_matmul_precision(), torch.compile(rounded, fullgraph=True, backend="eager")
    try:
        for precision, tf32 in [("highest", 0), ("high", 1), ("highest", 0)]:
            torch.set_float32_matmul_precision(precision)
            assert compiled(torch.zeros(())).item() == rounded(torch.zeros(())).item() == tf32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("impl", IMPLS)
def test_float_tensor_is_the_mask_of_sdpa(impl):
    problem = make_problem("none", Shape(9, 11, 8), dtype=torch.float32, masked=False, padded=False)
    for mask in (torch.randn(9, 11), torch.randn(2, 1, 9, 11)):
        mask = mask.to(DEVICE)
        got = mg.biased_attention(problem.q, problem.k, problem.v, mask, impl=impl)
        want = torch.nn.functional.scaled_dot_product_attention(problem.q, problem.k, problem.v, attn_mask=mask)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_no_rows_and_no_keys(impl):
    q, k = (torch.randn(2, 2, n, 4, dtype=EXACT, device=DEVICE, requires_grad=True) for n in (0, 3))
    out = mg.biased_attention(q, k, k, impl=impl)
    assert out.shape == (2, 2, 0, 4)
    out.sum().backward()
    assert torch.equal(k.grad, torch.zeros_like(k))
    if impl != "reference":
        out, lse = mg.biased_attention(k, q, q, impl=impl, return_lse=True)
        assert torch.equal(out, torch.zeros_like(k))
        assert (lse == -torch.inf).all()


def test_a_large_bias_does_not_overflow():
    problem = make_problem("dense", Shape(9, 11, 8), masked=False, padded=False)
    problem.bias.values[:, :, 2] += 1e4
    problem.bias.values[:, :, 3, 4] = 1e6
    for impl in IMPLS:
        assert_matches(run(problem, impl), problem)


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # to -inf, in base 2
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_least_number_masks_as_minus_infinity_does(impl, dtype):
    problem = make_problem("dense", Shape(9, 37, 8), dtype=dtype, padded=False)
    problem.bias.values[..., 0] = 0.0  # no row is empty
    least = torch.where(problem.bias.values == -torch.inf, torch.finfo(dtype).min, problem.bias.values)
    got, want = run(replace(problem, bias=mg.DenseBias(least)), impl), run(problem, impl)
    for name, x in want.items():
        assert torch.equal(got[name], x), name


@of_a_cpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["blocked", "blocked_long"])
def test_another_default_device(form, impl):
    problem = make_problem(form, Shape(9, 11, 8), dtype=torch.float32, dropout_p=0.3)
    want = run(problem, impl)
    with torch.device("meta"):
        got = run(problem, impl)
    for name, x in want.items():
        assert torch.equal(got[name], x), name


# Memory: nothing of size [H, M, N], only the inputs kept for backward.


def forward_and_backward(problem, impl):
    inputs = [x.requires_grad_() for x in problem.inputs]
    out = mg.biased_attention(
        *inputs[:3],
        problem.bias,
        key_padding_mask=problem.padding,
        dropout_p=0.1,
        dropout_key=problem.dropout_key,
        impl=impl,
    )
    torch.autograd.grad(out, inputs, problem.d_out)


@pytest.mark.skipif(DEVICE != "cpu", reason="counts allocations on the CPU")
@pytest.mark.parametrize(("impl", "dense"), [("blocked_long", False), ("triton", False), ("reference", True)])
def test_only_the_reference_holds_all_scores(impl, dense, monkeypatch):
    """Scores are looked for among what torch allocates; constants make of this one a large problem."""
    monkeypatch.setattr("megagraph.kernels.biased_attention.PIECE_BYTES", 1)
    monkeypatch.setattr("megagraph.kernels.tiles.MULTIPROCESSORS", 1)
    B, H, N = 1, 4, 96
    problem = make_problem("bucket", Shape(N, N, 8, B=B, H=H), dtype=torch.float32, masked=False, dropout_p=0.1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        forward_and_backward(problem, impl)
    changes = [e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert changes, "the profiler saw no allocation"
    assert (max(changes) >= B * H * N * N * 4) == dense


@of_a_cpu
@pytest.mark.usefixtures("three_threads")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resets the process's peak of memory by /proc")
@pytest.mark.parametrize("form", ["bucket", "projected", "none"])
@pytest.mark.parametrize(("B", "H", "N"), [(1, 8, 2048), (4, 8, 1024)])
def test_blocked_holds_a_few_tiles_for_each_thread(B, H, N, form):
    """Whoever allocates them."""
    for size in (16, N):  # the first compiles
        problem = make_problem(form, Shape(size, size, 8, B=B, H=H), dtype=torch.float32, masked=False, dropout_p=0.1)
        before = forget_peak()
        forward_and_backward(problem, "blocked_long")
        grown = peak_resident() - before
    threads = torch.get_num_threads()
    of_rows = 20 * problem.q.nbytes + 2 * threads * problem.q.nbytes  # gradients, shares of dq, keys of dropout
    assert of_rows + threads * 2**22 < B * H * N * N * 4 / 2, "the limit is no less than all scores"
    assert 0 < grown < of_rows + threads * 2**22


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
def test_saved_for_backward_are_the_inputs_and_the_result(form, impl):
    problem = make_problem(form, Shape(9, 11, 8), dtype=torch.float32, dropout_p=0.3)
    saved = []
    inputs = [x.requires_grad_() for x in problem.inputs]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = mg.biased_attention(
            *inputs[:3],
            problem.bias,
            key_padding_mask=problem.padding,
            dropout_p=0.3,
            dropout_key=problem.dropout_key,
            return_lse=True,
            impl=impl,
        )
    allowed = [*inputs, out, lse, problem.padding, problem.dropout_key]
    allowed += [] if problem.bias is None else [problem.bias.data, problem.bias.mask]
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in allowed if x is not None}


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_saved_may_come_back_elsewhere(impl):
    problem = make_problem("bucket", Shape(9, 11, 8), dtype=torch.float32)
    found = []
    for give in (lambda x: x, torch.clone):
        inputs = [x.detach().requires_grad_() for x in problem.inputs]
        bias = mg.BucketBias(problem.bias.index, inputs[3])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, give):
            out = mg.biased_attention(*inputs[:3], bias, impl=impl)
            found.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all(map(torch.equal, *found))
