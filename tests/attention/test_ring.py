"""The ring in one process, all ranks in lockstep, against the eager reference; fp64 on the CPU, fp32 on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megagraph as mg
from megagraph.attention.context_parallel import loopback_attention
from tests import ranks
from tests.attention import ring_cases
from tests.problems import (
    CLOSE,
    DEVICE,
    FORMS,
    IMPLS,
    Problem,
    Shape,
    assert_matches,
    expected,
    make_problem,
    ring_problem,
    with_learned,
)

# (P, N_s, N'): blocks of equal and of unequal length, fewer nodes than ranks
CASES = [
    (P, num_super, num_nodes)
    for P in (1, 2, 3, 4)
    for num_super in (0, 1, 5)
    for num_nodes in (13, 2)
    if num_nodes == 13 or P > 2
]


@pytest.fixture(autouse=True)
def _triton(request):
    if "triton" in request.node.name:
        pytest.importorskip("triton", reason="triton has wheels for Linux only")


def run(problem: Problem, attend, **options) -> dict[str, torch.Tensor]:
    """out, lse and gradients of ``attend``."""
    q, k, v, *learned = inputs = [x.detach().requires_grad_() for x in problem.inputs]
    out, lse = attend(
        q,
        k,
        v,
        with_learned(problem.bias, *learned) if learned else None,
        key_padding_mask=problem.padding,
        dropout_p=problem.dropout_p,
        dropout_key=problem.dropout_key,
        **options,
    )
    finite_lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad([out, finite_lse], inputs, [problem.d_out, problem.d_lse])
    names = ("out", "lse", "dq", "dk", "dv", "d_learned")
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=False))


@pytest.mark.parametrize(
    ("form", "world_size", "num_super", "num_nodes", "impl"),
    [
        (form, *case, impl)
        for i, form in enumerate(FORMS)
        for j, case in enumerate(CASES)
        # every form and every size through Triton, not every pair: the interpreter takes its time
        for impl in (IMPLS if j % len(FORMS) == i else IMPLS[-1:])
    ],
)
def test_ring_is_dense_attention(form, world_size, num_super, num_nodes, impl):
    dropout_p = 0.25 * ((world_size + num_super) % 2)
    problem = ring_problem(
        form, world_size, num_super, num_nodes, B=1, H=1 if impl == "triton" else 2, dropout_p=dropout_p
    )
    got = run(problem, loopback_attention, num_super=num_super, world_size=world_size, impl=impl)
    assert_matches(got, problem)


@pytest.mark.parametrize(
    ("world_size", "num_super", "num_nodes", "impl"),
    [(*case, IMPLS[-1]) for case in CASES] + [(4, 5, 13, "triton")] * (len(IMPLS) - 1),
)
@pytest.mark.parametrize("form", FORMS)
def test_gathered_keys_are_dense_attention(form, world_size, num_super, num_nodes, impl):
    problem = ring_problem(form, world_size, num_super, num_nodes, dropout_p=0.25 * ((world_size + num_super) % 2))
    got = run(problem, loopback_attention, num_super=num_super, world_size=world_size, impl=impl, comm="allgather")
    assert_matches(got, problem)


@pytest.mark.parametrize(
    ("world_size", "num_super", "num_nodes", "impl"),
    [(*case, IMPLS[-1]) for case in CASES] + [(2, 5, 13, "reference")] + [(4, 5, 13, "triton")] * (len(IMPLS) - 1),
)
@pytest.mark.parametrize("form", FORMS)
def test_heads_of_ranks_are_dense_attention(form, world_size, num_super, num_nodes, impl):
    """Three heads a rank, whose numbers differ from those of the first rank in several bits."""
    B, H, dropout_p = (1, world_size, 0.25) if impl == "triton" else (2, 3 * world_size, 0.25 * (world_size % 2 == 0))
    problem = ring_problem(form, world_size, num_super, num_nodes, B=B, H=H, dropout_p=dropout_p)
    got = run(problem, loopback_attention, num_super=num_super, world_size=world_size, impl=impl, comm="ulysses")
    assert_matches(got, problem)


@pytest.mark.parametrize("planes", [(1, 1), (1, 4), (2, 1)])
def test_heads_of_ranks_share_a_dense_bias(planes):
    problem = make_problem("dense", Shape(15, 15, 4, H=4), planes=planes)
    got = run(problem, loopback_attention, num_super=2, world_size=2, impl=IMPLS[-1], comm="ulysses")
    assert_matches(got, problem)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [ranks.param(size, size, case) for size in (2, 3, 4) for case in ring_cases.ring_options(size)],
)
def test_ring_over_processes_is_dense_attention(world_size, case):
    problem = ring_cases.ring_problem(**ring_cases.ring_options(world_size)[case])
    for result in ranks.results(world_size):
        assert_matches(result[case], problem)


@pytest.mark.parametrize("world_size", ranks.SIZES)
def test_ring_over_processes_through_host_buffers_is_dense_attention(world_size):
    for case, options in ring_cases.staged_options(world_size).items():
        problem = ring_cases.ring_problem(**options)
        for result in ranks.results(world_size):
            assert_matches(result[case], problem)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; bench/gpu.sh --check runs it")
@pytest.mark.parametrize("world_size", ranks.SIZES)
def test_ring_of_ranks_that_share_a_gpu(world_size):
    for case, options in ring_cases.ring_options(world_size).items():
        problem = ring_cases.ring_problem(**options)
        for result in ranks.results(world_size, only="attention-"):
            assert_matches(result[case], problem)


@pytest.mark.parametrize("world_size", ranks.SIZES)
def test_a_loss_on_gathered_rows_gives_the_gradients_of_one_device(world_size):
    module, x, index = ring_cases.attention_and_input()
    table = ring_cases.learned_table()
    loss = (module(x.requires_grad_(), mg.BucketBias(index, table)) ** 2).mean()
    loss.backward()
    want = {name: parameter.grad for name, parameter in module.named_parameters()}
    want |= {"table": table.grad, "x": x.grad, "loss": loss.detach()}
    for result in ranks.results(world_size):
        for comm in ring_cases.DENSE_WAYS:
            torch.testing.assert_close(result[f"gather-{comm}"], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("comm", ring_cases.ROW_WAYS)
@pytest.mark.parametrize("world_size", ranks.SIZES)
def test_ring_over_processes_where_ranks_compute_few_rows_or_none(world_size, comm):
    problem = ring_cases.queries_problem(world_size)
    computed = torch.zeros(15, dtype=torch.bool)
    computed[[mg.NodeLayout(13, 2, rank, world_size).block().start for rank in range(1, world_size)]] = True
    problem.d_out *= computed[:, None]
    problem.d_lse.zero_()
    want = expected(problem)
    for result in ranks.results(world_size):
        torch.testing.assert_close(result[f"queries-{comm}"], [want["dk"], want["dv"]], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size", ranks.SIZES)
def test_halos_are_planned_by_all_ranks_where_some_compute_fewer_rows(world_size):
    for result in ranks.results(world_size):
        torch.testing.assert_close(*result["rows"])


@pytest.mark.parametrize("world_size", ranks.SIZES)
def test_ring_over_processes_sends_before_the_step_it_overlaps(world_size):
    """k and v of the next step first; dk and dv of a block, computed in step s, during step s + 1."""
    size = 2 * -(-7 // world_size) * 2 * 4  # 2 * R * H * D

    def send(i):
        return f"send message {i}, {size} elements"

    def wait(i):
        return f"wait for message {i}"

    steps = range(world_size - 1)
    want = {"forward": [event for s in steps for event in (send(s), "step", wait(s))] + ["step"]}
    want["backward"] = {
        2: [send(0), "step", wait(0), "step", send(1), wait(1)],
        3: [send(0), "step", wait(0), send(1), "step", send(2), wait(1), "step", wait(2), send(3), wait(3)],
        4: [
            *(send(0), "step", wait(0), send(1), "step", send(2), wait(1)),
            *(send(3), "step", wait(2), send(4), wait(3), "step", wait(4), send(5), wait(5)),
        ],
    }[world_size]
    for result in ranks.results(world_size):
        assert result["trace"] == want


@pytest.mark.parametrize("world_size", ranks.SIZES)
def test_heads_of_ranks_are_sent_in_two_exchanges_each_way(world_size):
    """q, k and v of R = 12 / P regular rows; results of these and of 2 super rows; no lse, as nobody asks for it."""
    of_a_row = (world_size - 1) * 12 * 4 // world_size
    there, back = 3 * 12 // world_size * of_a_row, (12 // world_size + 2) * of_a_row
    for result in ranks.results(world_size):
        assert result["sent"] == {"forward": [there, back], "backward": [back, there]}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("comm", [*ring_cases.DENSE_WAYS, "halo"])
def test_a_second_derivative_is_refused(comm, recompute):
    """Beside another term, too, where ``torch.autograd.grad`` would leave out that of attention."""
    torch.manual_seed(0)
    q, d_out = torch.randn(2, 1, 2, 9, 4, device=DEVICE)
    index, table = torch.ones(9, 9, dtype=torch.uint8, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    bias = mg.BucketBias(index.to_sparse_csr(), table) if comm == "halo" else mg.BucketBias(index[None], table)

    def attend(q):
        return loopback_attention(q, q, q, bias, num_super=1, world_size=2, comm=comm)[0]

    (dq,) = torch.autograd.grad(attend(q.requires_grad_()), q, d_out)
    out = checkpoint(attend, q, use_reentrant=False) if recompute else attend(q)
    (gradient,) = torch.autograd.grad(out, q, d_out, create_graph=True)
    assert torch.equal(gradient, dq)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad((gradient + q).square().sum(), q)


@pytest.mark.parametrize("form", FORMS)
def test_dropout_does_not_depend_on_the_number_of_ranks(form):
    problem = ring_problem(form, 3, 2, 13, dropout_p=0.5)
    got = [run(problem, loopback_attention, num_super=2, world_size=P, impl=IMPLS[-1]) for P in (1, 2, 3)]
    for other in got[1:]:
        torch.testing.assert_close(other, got[0], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_queries", [0, 3])
def test_fewer_queries(num_queries, impl):
    """The rank that computes no row still gives its keys and gets their gradient."""
    layout = mg.NodeLayout(9, 2)
    problem = make_problem("projected", Shape(11, 11, 4))
    q, k, v, weight = (x.detach().requires_grad_() for x in problem.inputs)
    bias = with_learned(problem.bias, weight).rows(slice(num_queries))
    out = mg.ring_attention(q[:, :, :num_queries], k, v, bias, layout=layout, impl=impl)
    full = mg.biased_attention(q, k, v, with_learned(problem.bias, weight), impl="reference")[:, :, :num_queries]
    torch.testing.assert_close(out, full)
    d_out = problem.d_out[:, :, :num_queries]
    for got, want in zip(*(torch.autograd.grad(x, [k, v, weight], d_out) for x in (out, full)), strict=True):
        torch.testing.assert_close(got, want)


def test_a_module_refuses_unknown_communication():
    with pytest.raises(ValueError, match="comm must be 'ring', 'allgather', 'halo' or 'ulysses', got 'alltoall'"):
        mg.BiasedRingAttention(8, 2, comm="alltoall")


def call(layout=None, k_rows=7, q_rows=7, **options):
    q, k, v = (torch.zeros(1, 2, rows, 4) for rows in (q_rows, k_rows, k_rows))
    return mg.ring_attention(q, k, v, layout=layout or mg.NodeLayout(5, 2), **options)


BAD_CALLS = {
    "comm": (
        dict(comm="alltoall"),
        ValueError,
        "comm must be 'ring', 'allgather', 'halo' or 'ulysses', got 'alltoall'",
    ),
    "layout of another rank": (
        dict(layout=mg.NodeLayout(10, 2, 1, 2)),
        ValueError,
        "the layout is that of rank 1 of 2, but this process is rank 0 of 1 in the mesh",
    ),
    "keys": (dict(k_rows=6), ValueError, r"k must have shape \[B, H, S, D\] = \[1, 2, 7, 4\], got \(1, 2, 6, 4\)"),
    "queries": (dict(q_rows=8), ValueError, "q must have at most the S = 7 rows of this rank, got 8"),
    "dropout": (dict(dropout_p=0.5), ValueError, "needs dropout_key, torch.int32"),
    "bias": (dict(bias=torch.zeros(7, 5)), ValueError, "pass these query rows and all 7 columns"),
}


def test_ranks_in_one_process_refuse_heads_that_they_cannot_deal_out():
    q = torch.zeros(1, 2, 7, 4)
    with pytest.raises(
        ValueError, match="heads must be a multiple of the 3 ranks that comm 'ulysses' deals them out to"
    ):
        loopback_attention(q, q, q, num_super=1, world_size=3, comm="ulysses")


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call(case):
    arguments, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        call(**arguments)


@pytest.mark.parametrize("case", ring_cases.BAD_CALLS)
def test_bad_call_on_a_mesh(case):
    for result in ranks.results(2):
        assert result[case].startswith(ring_cases.BAD_CALLS[case][1]), result[case]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_runs_on_one_rank_only(world_size):
    q = torch.zeros(1, 2, 7, 4)
    with pytest.raises(NotImplementedError, match=r"impl='reference' cannot run these inputs:\n.*all keys on one rank"):
        loopback_attention(q, q, q, num_super=1, world_size=world_size, impl="reference")
