"""One attention step at a time, by both implementations, against the eager reference.

fp64 on the CPU, where the kernels are interpreted; fp32 on a GPU. All uninitialised memory is NaN here, so that
whatever reads before it is written shows.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megagraph.attention.bias import DenseBias
from megagraph.attention.cpu import tiles as cpu_tiles
from megagraph.attention.operator import biased_attention, make_step
from tests.problems import (
    CLOSE,
    DEVICE,
    EXACT,
    FORMS,
    IMPLS,
    NUM_BUCKETS,
    Shape,
    assert_matches,
    expected,
    hide_row,
    make_problem,
    to,
    with_learned,
)
from tests.steps import run_steps

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from megagraph.kernels import biased_attention as kernels
from megagraph.kernels.launch import Recorder, plans
from megagraph.kernels.operands import operands_of


@pytest.fixture(autouse=True)
def _poison():
    """Uninitialised memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_plans():
    """None is known from other tiles, and none stays."""
    plans.clear()
    yield
    plans.clear()


@pytest.fixture
def small_tiles(monkeypatch, no_plans):
    """Tiles of 16 keys, so that small problems have many."""

    def choose(kernel, *args):
        group = {"GROUP": 8} if kernel == "learned" else {}
        return group | {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1, "num_stages": 1}

    def choose_narrow_fwd(H, itemsize, M, N):
        group = kernels.tiles.heads_of_program(H, itemsize)
        return {"GROUP": group, "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 1, "num_stages": 1}

    monkeypatch.setattr(kernels.tiles, "choose", choose)
    monkeypatch.setattr(kernels.tiles, "choose_narrow_fwd", choose_narrow_fwd)
    monkeypatch.setattr(cpu_tiles, "TILE_ROWS", 6)
    monkeypatch.setattr(cpu_tiles, "TILE_KEYS", 16)


HEAD_DIMS = (4, 5, 8, 16, 40, 64)
SIZES = ((1, 17), (17, 33), (33, 50), (50, 1), (17, 50))
CASES = [
    (form, D, *SIZES[i % len(SIZES)], i % 3 != 0, i % 2 == 0, 0.3 * (i // 2 % 2))
    for i, (D, form) in enumerate(itertools.product(HEAD_DIMS, FORMS))
]


@pytest.mark.parametrize(
    ("form", "D", "M", "N", "masked", "padded", "dropout_p"),
    CASES,
    ids=lambda x: f"{x:g}" if isinstance(x, float) else None,
)
def test_one_step(form, D, M, N, masked, padded, dropout_p):
    problem = make_problem(form, Shape(M, N, D), masked=masked, padded=padded, dropout_p=dropout_p)
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize("form", FORMS)
def test_many_tiles(form, small_tiles):
    problem = make_problem(form, Shape(33, 50, 5, B=1), dropout_p=0.2)
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize(
    ("form", "H", "dtype"),
    [
        (form, H, (EXACT, torch.float32, torch.float16)[(i + j) % 3])
        for i, form in enumerate(FORMS)
        for j, H in enumerate([1, 3, 9])
    ],
    ids=str,
)
def test_heads_need_not_fill_their_groups(form, H, dtype):
    problem = make_problem(form, Shape(33, 50, 13, B=1, H=H), dtype=dtype)
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize("learned_grad", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_pieces_of_keys(form, accumulate, learned_grad, monkeypatch, no_plans):
    """One key tile a launch: the softmax and the sums so far are carried from launch to launch."""
    monkeypatch.setattr(kernels, "PIECE_BYTES", 1)
    monkeypatch.setattr(kernels.tiles, "MULTIPROCESSORS", 1)
    problem = make_problem(form, Shape(33, 80, 8), dropout_p=0.2)
    columns = torch.arange(80, device=DEVICE)
    halves = [(columns[:49], [(0, 0, 20), (20, 20, 29)]), (columns[49:], [(0, 49, 31)])]
    got = run_steps(problem, halves if accumulate else None, learned_grad=learned_grad)
    assert_matches(got, problem, learned_grad=learned_grad)


@pytest.mark.parametrize("scale", [0.0, -1e-3, 1e-30])
def test_scales_that_say_little(scale):
    """What narrow heads divide by the scale must not show: dq and dk are nearly 0, out is what the bias makes it."""
    problem = make_problem("bucket", Shape(17, 33, 8))

    def attend(q, k, v, bias, padding, _, dropout_p, dropout_key):
        return biased_attention(
            q, k, v, bias, key_padding_mask=padding, scale=scale, impl=impl, return_lse=True
        )  # fmt: skip

    impl = "reference"
    want = expected(problem, attend)
    impl = "triton"
    for name, x in expected(problem, attend).items():
        torch.testing.assert_close(x, want[name], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("D", [100, 256])
def test_wide_heads(D):
    problem = make_problem("dense", Shape(17, 33, D, B=1, H=1))
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize(
    ("H", "D", "dropout_p"),
    [
        pytest.param(*heads, dropout_p, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, heads in enumerate([(3, 7), (3, 16), (9, 8), (9, 15)])
        for j, dropout_p in enumerate([0.0, 0.25])
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_heads_that_share_a_program(form, H, D, dropout_p, small_tiles, monkeypatch):
    """Eight heads to a program, of which some do not exist; D with and without room for a column of ones; a softmax
    that is carried over three steps, of several tiles each."""
    monkeypatch.setattr(kernels.tiles, "heads_of_program", lambda H, itemsize: 8)
    M, N = 18, 73
    problem = make_problem(form, Shape(M, N, D, B=1, H=H), dropout_p=dropout_p)
    columns = torch.arange(N, device=DEVICE).split(25)
    steps = [(block, [(0, int(block[0]), len(block))]) for block in columns]
    assert_matches(run_steps(problem, steps), problem)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_ring_of_steps(form, num_steps, impl, small_tiles):
    """Super columns come with the first keys; rows are permuted; row 1 sees one key, in the last step."""
    N, num_super = 50, 3
    problem = make_problem(form, Shape(N, N, 8, B=1), dropout_p=0.25, padded=False)
    if form != "none":
        hidden = torch.ones(N, dtype=torch.bool, device=DEVICE)
        hidden[N - num_super - 1] = False  # its column arrives in the last step
        hide_row(problem.bias, 1, hidden)
    regular = torch.arange(N - num_super, device=DEVICE).chunk(num_steps)
    columns = [torch.cat((regular[0], torch.arange(N - num_super, N, device=DEVICE))), *regular[1:]]
    segments = [[(0, int(block[0]), len(block))] for block in regular]
    segments[0].append((len(regular[0]), N - num_super, num_super))

    rows = torch.randperm(N).to(DEVICE)
    local = replace(
        problem,
        q=problem.q[:, :, rows],
        bias=None if form == "none" else problem.bias.rows(rows),
        d_out=problem.d_out[:, :, rows],
        d_lse=problem.d_lse[:, :, rows],
    )
    got = run_steps(local, list(zip(columns, segments, strict=True)), row_ids=rows.to(torch.int32), name=impl)
    by_row = ["out", "lse", "dq"] + ["d_learned"] * (form == "dense")
    for name in by_row:
        got[name] = got[name][:, :, rows.argsort()]
    assert_matches(got, problem)


@pytest.mark.parametrize(
    ("form", "planes"),
    [("dense", (1, 2)), ("dense", (3, 1)), ("dense", (1, 1)), ("bucket", (1, 2)), ("projected", (1, 2))],
)
def test_broadcast_planes(form, planes, small_tiles):
    problem = make_problem(form, Shape(17, 33, 4, B=3), masked=False, planes=planes)
    assert_matches(run_steps(problem), problem)


def test_mask_broadcast_over_sequences():
    problem = make_problem("projected", Shape(17, 33, 4), masked=False)
    problem.bias = replace(problem.bias, mask=torch.rand(1, 17, 33, device=DEVICE) < 0.3)
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
def test_any_strides(form, impl, small_tiles):
    """q, k, v are slices of one [B, N, 3, H, D] projection; what surrounds every input is NaN."""
    B, H, N, D = 2, 2, 33, 5
    problem = make_problem(form, Shape(N, N, D, B=B, H=H))
    fused = torch.empty(B, N + 1, 4, H, D + 3, dtype=EXACT, device=DEVICE)
    for i, name in enumerate(("q", "k", "v", "d_out")):
        view = fused[:, :N, i, :, 1 : D + 1].transpose(1, 2)
        setattr(problem, name, view.copy_(getattr(problem, name)))
    if form == "dense":
        values = torch.empty(B, H, N + 1, N + 3, dtype=EXACT, device=DEVICE)[:, :, :N, 1 : N + 1]
        problem.bias = DenseBias(values.copy_(problem.bias.values))
    elif form != "none":
        data = problem.bias.data
        strided = torch.full((*data.shape[:-1], N + 3), 255).to(data)[..., 1 : N + 1].copy_(data)
        problem.bias = replace(problem.bias, **{"index" if form == "bucket" else "channels": strided})
    assert not problem.q.is_contiguous()
    assert_matches(run_steps(problem, name=impl), problem)


def test_head_dim_need_not_be_the_fastest_axis():
    problem = make_problem("none", Shape(17, 17, 8))
    for name in ("q", "k", "v", "d_out"):
        setattr(problem, name, getattr(problem, name).transpose(2, 3).contiguous().transpose(2, 3))
    assert problem.q.stride(-1) == 17
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_low_precision(form, dtype):
    problem = make_problem(form, Shape(33, 50, 16), dtype=dtype, dropout_p=0.1)
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize("D", [8, 24])
@pytest.mark.parametrize("form", ["dense", "bucket", "projected"])
def test_learned_may_have_another_dtype(form, D):
    problem = make_problem(form, Shape(17, 33, D), dtype=torch.float32)
    half = to(problem, dtype=torch.float16)
    mixed = replace(problem, bias=with_learned(problem.bias, half.bias.learned))
    rounded = replace(problem, bias=with_learned(problem.bias, half.bias.learned.float()))
    got, want = run_steps(mixed), run_steps(rounded)
    if form == "dense":  # written once, in the dtype of the values
        assert torch.equal(got.pop("d_learned"), want["d_learned"].half())
        got["d_learned"] = want["d_learned"]
    assert_matches(got, rounded)


@pytest.mark.parametrize(
    ("asked", "dtype", "taken"),
    [("ieee", torch.float32, "ieee"), ("tf32", torch.float32, "tf32"), ("tf32", torch.float16, "ieee")],
    ids=str,
)
def test_products_are_rounded_where_those_of_pytorch_may_be(asked, dtype, taken, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", asked)
    with FakeTensorMode():
        q = torch.empty(1, 1, 2, 4, dtype=dtype, device="cuda")
    step = make_step(q, None, None, None, 0.0, None, "triton", False)
    x = torch.empty(1, 1, 2, 4, dtype=dtype, device=DEVICE)
    assert operands_of(Recorder(x.device), step, None, x, x, x).PRECISION.value == taken


def test_large_bias_row_stays_finite():
    problem = make_problem("dense", Shape(17, 33, 8), dtype=torch.float32)
    problem.bias.values[:, :, 3] += 1e4
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize("form", FORMS)
def test_two_runs_give_the_same_bits(form, small_tiles):
    planes = (1, 1) if form == "dense" else None
    problem = make_problem(form, Shape(17, 33, 8), dtype=torch.float32, dropout_p=0.1, masked=False, planes=planes)
    first, second = run_steps(problem), run_steps(problem)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize(("D", "dtype"), [(8, torch.float16), (8, EXACT), (24, EXACT)], ids=str)
@pytest.mark.parametrize("entries", [1, 31, 32, 33, 255])
def test_tables_of_any_size(entries, D, dtype):
    """Those of at most 32 entries lie in the lanes of a warp."""
    problem = make_problem("bucket", Shape(17, 33, D), dtype=dtype)
    problem.bias.index[problem.bias.index != 255] = entries - 1  # the last one
    problem.bias.index[:, ::2, ::3] = 0
    table = torch.randn(2, entries, dtype=problem.bias.table.dtype, device=DEVICE)
    problem.bias = replace(problem.bias, table=table)
    assert_matches(run_steps(problem), problem)


@pytest.mark.parametrize(("D", "dtype"), [(8, torch.float16), (8, EXACT), (24, EXACT)], ids=str)
@pytest.mark.parametrize("bucket", [NUM_BUCKETS, 31, 32, 200, 254])
def test_bucket_outside_the_table_gives_nan(bucket, D, dtype, monkeypatch):
    monkeypatch.setattr("megagraph.attention.operator.check_values", lambda step: None)  # as on a GPU
    problem = make_problem("bucket", Shape(17, 33, D), dtype=dtype, masked=False, padded=False)
    problem.bias.index[0, 5, 7] = bucket
    out = run_steps(problem)["out"]
    assert out[0, :, 5].isnan().all()
    assert out[1].isfinite().all() and out[0, :, :5].isfinite().all()


def test_learned_gradient_is_optional():
    problem = make_problem("bucket", Shape(17, 33, 8))
    got = run_steps(problem, learned_grad=False)
    want = expected(problem)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize(("M", "N"), [(0, 17), (17, 0)])
def test_nothing_to_attend(M, N):
    problem = make_problem("none", Shape(M, N, 8), masked=False, padded=False)
    got = run_steps(problem)
    assert got["out"].eq(0).all() and got["lse"].eq(-torch.inf).all()
    assert all(got[name].eq(0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_step_may_bring_no_keys(impl):
    """A rank without regular rows sends an empty block, in the first step or a later one."""
    problem = make_problem("bucket", Shape(17, 33, 8, B=1))
    keys, nothing = torch.arange(33, device=DEVICE), torch.arange(0, device=DEVICE)
    for steps in ([(nothing, [(0, 0, 0)]), (keys, [(0, 0, 33)])], [(keys, [(0, 0, 33)]), (nothing, [(0, 33, 0)])]):
        assert_matches(run_steps(problem, steps, name=impl), problem)
