"""Sparse biases: attention over listed pairs is dense attention with all other pairs masked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch_geometric.utils import to_torch_csr_tensor

import megagraph as mg
from megagraph.attention.bias import BorderedData, BucketBias, DenseBias, ProjectedBias
from megagraph.attention.layout import NodeLayout
from megagraph.attention.operator import _attention, make_step
from megagraph.attention.relation import Relation, _check_lists
from tests.problems import (
    CLOSE,
    DEVICE,
    EXACT,
    IMPLS,
    Problem,
    assert_matches,
    expected,
    make_bias,
    of_a_cpu,
    to,
    with_learned,
)
from tests.steps import run_steps

FORMS = ("bucket", "projected", "dense")
KINDS = ("scattered", "hub", "band", "blocks", "one", "full")


def present(kind, S, M, N):
    """Which pairs exist: bool [S, M, N]."""
    if kind == "scattered":  # some rows and some columns of none
        pairs = torch.rand(S, M, N) < 0.15
        pairs[:, 0] = False
        pairs[:, :, N // 2] = False
    elif kind == "hub":  # a row of all columns, a column of all rows
        pairs = torch.rand(S, M, N) < 0.05
        pairs[:, M // 2] = True
        pairs[:, :, 0] = True
    elif kind == "band":  # of one side only
        away = torch.arange(N) - torch.arange(M)[:, None]
        pairs = ((away >= 0) & (away < 3)).expand(S, M, N).clone()
    elif kind == "blocks":  # rows of the same columns, one after another
        pairs = (torch.rand(S, M // 5 + 1, N // 6 + 1) < 0.5).repeat_interleave(5, dim=1)
        pairs = pairs.repeat_interleave(6, dim=2)[:, :M, :N].clone()
    elif kind == "one":
        pairs = torch.zeros(S, M, N, dtype=torch.bool)
        pairs[-1, -1, 0] = True
    else:
        pairs = torch.ones(S, M, N, dtype=torch.bool)
        if kind != "full":  # all but this column, or the next one, in turns
            pairs[:, torch.arange(M), kind + torch.arange(M) % 2] = False
    return pairs


def csr(values, pairs):
    """Values [S, M, N, ...] of the pairs as CSR tensors, one a sequence."""
    found = []
    for of_sequence, exists in zip(values, pairs, strict=True):
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), exists.sum(dim=1).cumsum(0)])
        columns, size = exists.nonzero()[:, 1], (*exists.shape, *of_sequence.shape[2:])
        found.append(torch.sparse_csr_tensor(starts, columns, of_sequence[exists], size=size))
    return found if len(found) > 1 else found[0]


def sparse(bias, pairs):
    """A bias with data for these pairs only; every other one must be masked in the one given."""
    if bias.form == "dense":
        return DenseBias(csr(bias.values.movedim(1, 3), pairs))
    if bias.form == "bucket":
        return BucketBias(csr(bias.index, pairs), bias.table)
    return ProjectedBias(csr(bias.channels.movedim(1, 3), pairs), bias.weight)


def problem(form, kind, *, S=2, B=2, H=3, M=23, N=31, D=5, dtype=EXACT, dropout_p=0.0, padded=True):
    """The problem with a dense bias, and with a sparse one."""
    torch.manual_seed(M + N + D)
    pairs = present(kind, S, M, N)
    bias = make_bias(form, S, H, M, N, dtype, ~pairs)
    q, k, v, d_out = (torch.randn(B, H, n, D, dtype=dtype) for n in (M, N, N, M))
    whole = Problem(
        q=q,
        k=k,
        v=v,
        bias=bias,
        padding=torch.rand(B, N) < 0.2 if padded else None,
        dropout_p=dropout_p,
        dropout_key=torch.randint(-(2**31), 2**31, (B,), dtype=torch.int32) if dropout_p else None,
        d_out=d_out,
        d_lse=torch.randn(B, H, M, dtype=torch.promote_types(dtype, torch.float32)),
    )
    return to(whole, DEVICE), to(replace(whole, bias=sparse(bias, pairs)), DEVICE), pairs


def of_pairs(results, form, pairs):
    """Results by a dense bias as those by a sparse one: of dense values, the gradient of the pairs."""
    if form != "dense":
        return results
    d_values = results["d_learned"].expand(len(pairs), -1, -1, -1).movedim(1, 3)
    return results | {"d_learned": d_values[pairs]}


def run(given, impl):
    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        options = dict(key_padding_mask=padding, dropout_p=dropout_p, dropout_key=dropout_key)
        return mg.biased_attention(q, k, v, bias, **options, return_lse=True, impl=impl)

    return expected(given, attend)


def assert_is(got, dense, given, pairs):
    """To the last digits where there are fp64 kernels, else as near as fp32 comes."""
    if given.q.dtype == torch.float64:
        assert_equal(got, of_pairs(expected(dense), given.bias.form, pairs))
    else:
        assert_matches(got, given)


def assert_equal(got, want, tolerance=CLOSE):
    assert got.keys() == want.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, want[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("form", "kind"), [*itertools.product(FORMS, KINDS)])
def test_values_and_gradients_are_those_of_masked_pairs(form, kind, dropout_p, impl):
    dense, given, pairs = problem(form, kind, dropout_p=dropout_p)
    assert_is(run(given, impl), dense, given, pairs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (8, 1, 65, 16), (9, 70, 3, 4), (5, 40, 40, 33), (2, 9, 70, 256)])
@pytest.mark.parametrize(("form", "kind"), [*itertools.product(FORMS, ("hub", "blocks"))])
def test_odd_sizes(form, kind, sizes, impl):
    H, M, N, D = sizes
    dense, given, pairs = problem(form, kind, H=H, M=M, N=N, D=D, dropout_p=0.2)
    assert_is(run(given, impl), dense, given, pairs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("at", [0, 31, 32, 68])
def test_lists_of_one_length_that_differ_in_one_place(at, impl):
    dense, given, pairs = problem("bucket", at, M=9, N=70, padded=False)
    assert_is(run(given, impl), dense, given, pairs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
def test_one_relation_for_several_sequences(form, impl):
    dense, given, pairs = problem(form, "scattered", S=1, B=3, dropout_p=0.2)
    assert_is(run(given, impl), dense, given, pairs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("S", "padded"), [*itertools.product([1, 2], [True, False])])
@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form, S, padded, impl):
    """Of a rank that reads nothing out: rows do not tell how many relations there are."""
    given = problem(form, "scattered", S=S, dropout_p=0.2, padded=padded)[1]
    rows = {name: getattr(given, name)[:, :, :0] for name in ("q", "d_out", "d_lse")}
    none = replace(given, bias=given.bias.rows(slice(0)), **rows)
    halves = [(torch.arange(16), [(0, 0, 16)]), (torch.arange(16, 31), [(0, 16, 15)])]
    for got in (run(none, impl), run_steps(none, halves, name=impl)):
        assert got["out"].shape == none.q.shape and got["dk"].shape == none.k.shape
        assert not any(x.any() for x in got.values())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(  # heads that fill a program, or not
    ("dtype", "sizes"),
    [(torch.float32, (3, 40)), (torch.bfloat16, (8, 16)), (torch.bfloat16, (20, 3)), (torch.float16, (3, 40))],
)
@pytest.mark.parametrize("form", FORMS)
def test_other_dtypes_are_as_good_as_eager(form, dtype, sizes, impl):
    given = problem(form, "hub", H=sizes[0], M=40, N=70, D=sizes[1], dtype=dtype, dropout_p=0.2)[1]
    assert_matches(run(given, impl), given)


@of_a_cpu
def test_long_rows_lose_no_digits():
    """A hub of 20,000 keys, scores that rise and fall: sums are of short sums."""
    given = problem("bucket", "hub", S=1, B=1, H=8, M=3, N=20_000, D=4, dtype=torch.float32, padded=False)[1]
    assert_matches(run(given, "blocked"), given)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("segments", ["halves", "crossed", "no regular rows"])
def test_steps_with_carried_state(form, segments, impl):
    """Steps as a ring takes them: visiting blocks, some of two segments, gradients that add up."""
    dense, given, pairs = problem(form, "scattered", M=31, dropout_p=0.3)
    if segments == "halves":
        steps = [(torch.arange(16), [(0, 0, 16)]), (torch.arange(16, 31), [(0, 16, 15)])]
    elif segments == "no regular rows":
        steps = [(torch.arange(28, 31), [(0, 28, 0), (0, 28, 3)]), (torch.arange(28), [(0, 0, 28)])]
    else:
        first = torch.cat([torch.arange(20, 31), torch.arange(0, 7)])
        steps = [(first, [(0, 20, 11), (11, 0, 7)]), (torch.arange(7, 20), [(0, 7, 13)])]
    got = run_steps(given, steps, name=impl, row_ids=torch.arange(31, device=DEVICE))
    assert_is(got, dense, given, pairs)


@pytest.mark.parametrize("form", FORMS)
def test_two_runs_of_the_kernels_give_the_same_bits(form):
    given = problem(form, "hub", H=8, D=16, dtype=torch.float16, dropout_p=0.1)[1]
    first, second = run(given, "triton"), run(given, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("form", FORMS)
def test_strides_of_any_kind(form):
    """Heads cut out of one tensor of wider rows, the head dim not the fastest axis of d_out."""
    dense, given, pairs = problem(form, "scattered", N=23, dropout_p=0.2)
    fused = torch.empty(2, 24, 3, 3, 8, dtype=EXACT, device=DEVICE)
    cut = [fused[:, 1:, i, :, :5].transpose(1, 2) for i in range(3)]
    for place, x in zip(cut, (given.q, given.k, given.v), strict=True):
        place.copy_(x)
    d_out = given.d_out.transpose(2, 3).contiguous().transpose(2, 3)
    got = run_steps(replace(given, q=cut[0], k=cut[1], v=cut[2], d_out=d_out), name="triton")
    assert_is(got, dense, given, pairs)


@of_a_cpu
@pytest.mark.parametrize("form", FORMS)
def test_threads_give_the_same_bits_twice(form):
    threads = torch.get_num_threads()
    given = problem(form, "hub", S=1, B=1, H=8, M=400, N=400, D=8, dtype=torch.float32, dropout_p=0.1)[1]
    one = run(given, "blocked")
    torch.set_num_threads(3)
    try:
        first, second = run(given, "blocked"), run(given, "blocked")
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_equal(first, one, 1e-4)


@of_a_cpu
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_and_opcheck(form, impl):
    given = problem(form, "scattered", H=2, M=5, N=6, D=3, padded=False)[1]
    inputs = [x.detach().requires_grad_() for x in given.inputs]

    def attend(q, k, v, learned):
        return mg.biased_attention(q, k, v, with_learned(given.bias, learned), return_lse=False, impl=impl)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=impl == "triton")
    step = make_step(given.q, given.bias, None, None, 0.0, None, impl, False).but(segments=[(0, 0, 6)])
    torch.library.opcheck(_attention, (given.q.requires_grad_(), given.k, given.v, *step.flat()))


def test_a_layer_takes_the_pairs_of_another():
    given = problem("bucket", "scattered")[1]
    table = torch.randn_like(given.bias.table)
    other = replace(given.bias, table=table)
    assert other.relation is given.bias.relation and other.index is given.bias.index
    assert other.shape == given.bias.shape == (2, 3, 23, 31)
    out = mg.biased_attention(given.q, given.k, given.v, other)
    torch.testing.assert_close(out, mg.biased_attention(given.q, given.k, given.v, other, impl="reference"))


def test_where_it_is_already_a_bias_stays_itself():
    """ "cuda" may be "cuda:0": what is known of a relation, and halo plans, would be made anew."""
    relation = problem("bucket", "scattered")[1].bias.relation
    assert relation.to(f"{relation.columns.device.type}:0") is relation


def test_edges_of_torch_geometric_are_pairs():
    """``edge_index`` flows from keys to queries; its attributes are data of the pairs."""
    dense, given, pairs = problem("bucket", "scattered", S=1, M=31)
    queries, keys = pairs[0].nonzero(as_tuple=True)
    mixed = torch.randperm(len(queries))
    edge_index, edge_attr = torch.stack([keys, queries])[:, mixed], dense.bias.index[0][pairs[0]][mixed]
    index = to_torch_csr_tensor(edge_index.flip(0), edge_attr, size=(31, 31))
    bias = BucketBias(index.to(given.q.device), given.bias.table)
    assert torch.equal(bias.index, given.bias.index) and torch.equal(bias.relation.columns, given.bias.relation.columns)


def test_compiled_code_takes_a_bias_that_was_built_before():
    given = problem("bucket", "scattered", dtype=torch.float32)[1]
    index = csr(torch.zeros(2, 23, 31, dtype=torch.uint8), present("hub", 2, 23, 31))

    def attend(q, k, v, table):
        return mg.biased_attention(q, k, v, replace(given.bias, table=table))

    arguments = given.q, given.k, given.v, given.bias.table
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), attend(*arguments))
    with pytest.raises(Exception, match=r"build the bias outside|sparse"):
        torch.compile(lambda q: mg.biased_attention(q, q, q, BucketBias(index, given.bias.table)), fullgraph=True)(
            given.q
        )


def test_checks_of_a_sparse_bias_built_in_compiled_code_are_not_compiled():
    index = csr(torch.zeros(1, 23, 23, dtype=torch.uint8), present("hub", 1, 23, 23))
    q, table = torch.randn(1, 2, 23, 4), torch.randn(2, 7)

    def attend(q, index):
        return mg.biased_attention(q, q, q, BucketBias(index, table))

    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(q, index), attend(q, index))
    for function in (_check_lists, Relation._checked, Relation.of_rows):
        assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)


def with_lists(columns, starts=(0, 2, 3), size=(2, 4), values=None):
    values = torch.zeros(len(columns), dtype=torch.uint8) if values is None else values
    return torch.sparse_csr_tensor(
        torch.tensor(starts), torch.tensor(columns), values, size=size, check_invariants=False
    )


TABLE = torch.zeros(2, 7)
GOOD = with_lists([0, 2, 1])
BAD = {
    "not ascending": (lambda: BucketBias(with_lists([2, 0, 1]), TABLE), "ascending, distinct columns .* row 0"),
    "twice": (lambda: BucketBias(with_lists([1, 1, 1]), TABLE), "got 1 before 1 in row 0"),
    "beyond": (lambda: BucketBias(with_lists([0, 4, 1]), TABLE), r"columns in 0\.\.3, got 0\.\.4"),
    "negative": (lambda: BucketBias(with_lists([-1, 2, 1]), TABLE), r"got -1\.\.2"),
    "empty": (lambda: BucketBias(with_lists([], (0, 0, 0)), TABLE), "empty relation, in which nobody attends; list"),
    "no list": (lambda: BucketBias([], TABLE), "empty list"),
    "other starts": (lambda: BucketBias(with_lists([0, 2, 1], (0, 3, 2)), TABLE), "row starts that ascend"),
    "coo": (lambda: BucketBias(GOOD.to_sparse_coo(), TABLE), "got torch.sparse_coo"),
    "batch": (lambda: BucketBias(torch.ones(2, 3, 3, dtype=torch.uint8).to_sparse_csr(), TABLE), "pass a list of 2"),
    "two shapes": (lambda: BucketBias([GOOD, with_lists([0, 2, 1], size=(2, 5))], TABLE), "relations of one shape"),
    "dtype": (lambda: BucketBias(with_lists([0, 2, 1], values=torch.zeros(3)), TABLE), "must be torch.uint8, or"),
    "no number": (lambda: ProjectedBias(with_lists([0, 2, 1], values=torch.zeros(3)), TABLE), r"\[P = 3, C\]"),
    "mask": (
        lambda: ProjectedBias(with_lists([0, 2, 1], size=(2, 4, 7), values=torch.zeros(3, 7)), TABLE, torch.zeros(1)),
        "leave out pairs",
    ),
    "heads": (
        lambda: mg.biased_attention(*(torch.zeros(1, 3, n, 4) for n in (2, 4, 4)), BucketBias(GOOD, TABLE)),
        r"bias must have shape .* got \[1, 2, 2, 4\]; pass 3 heads",
    ),
    "sequences": (
        lambda: mg.biased_attention(*(torch.zeros(3, 2, n, 4) for n in (2, 4, 4)), BucketBias([GOOD, GOOD], TABLE)),
        r"got \[2, 2, 2, 4\]; pass data of every sequence, or of one",
    ),
    "one head for all": (
        lambda: mg.biased_attention(
            *(torch.zeros(1, 2, n, 4) for n in (2, 4, 4)),
            DenseBias(with_lists([0, 2, 1], size=(2, 4, 1), values=torch.zeros(3, 1))),
        ),
        r"\[1 or 1, 2, 2, 4\], got \[1, 1, 2, 4\]",
    ),
    "bucket": (
        lambda: mg.biased_attention(
            *(torch.zeros(1, 2, n, 4) for n in (2, 4, 4)),
            BucketBias(with_lists([0, 2, 1], values=torch.tensor([0, 9, 0], dtype=torch.uint8)), TABLE),
        ),
        "below the table's 7 buckets",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    make, message = BAD[case]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        make()


@pytest.mark.parametrize(
    ("name", "value"),
    [("columns", 9), ("columns", -1), ("key_rows", 99), ("key_pairs", -7), ("row_starts", 10**9), ("key_starts", -1)],
)
def test_an_operator_addresses_no_list_that_was_changed(name, value):
    bias = BucketBias(GOOD, TABLE)
    q, k = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 4, 4)
    mg.biased_attention(q, k, k, bias)
    getattr(bias.relation, name)[-1] = value
    with pytest.raises(ValueError, match=f"{name} must be in"):
        mg.biased_attention(q, k, k, bias)


def test_the_lists_are_those_of_the_pairs():
    pairs = present("scattered", 2, 9, 11)
    relation, values = Relation.from_csr("index", csr(torch.arange(198).view(2, 9, 11), pairs))
    sequence, row, column = pairs.nonzero(as_tuple=True)
    assert torch.equal(values, sequence * 99 + row * 11 + column) and relation.shape == (2, 9, 11)
    assert torch.equal(relation.columns.long(), column) and torch.equal(relation.rows(), sequence * 9 + row)
    by_key = sorted(range(len(row)), key=lambda p: (int(sequence[p]), int(column[p]), int(row[p])))
    assert relation.key_pairs.tolist() == by_key
    assert relation.key_rows.tolist() == row[by_key].tolist()


@pytest.mark.parametrize(
    "index", [slice(1, 20, 3), slice(0, 0), torch.tensor([22, 3, 3, 0]), torch.tensor([-1, 2]), torch.arange(23) > 9]
)
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_dense_bias(form, index):
    dense, given, _ = problem(form, "hub")
    some = given.bias.rows(index)
    assert torch.equal(some.materialize(), dense.bias.rows(index).materialize())
    assert some.relation.shape == (2, len(torch.arange(23)[index]), 31)
    whole = given.bias.rows(slice(0, 23))
    assert whole.relation is not given.bias.relation  # as on ranks that take fewer rows, with which this one plans
    kept = zip(whole.relation.lists.values(), given.bias.relation.lists.values(), strict=True)
    assert whole.data is given.bias.data and whole.learned is given.bias.learned and all(x is y for x, y in kept)


def test_a_row_that_is_none_is_empty():
    _, given, pairs = problem("bucket", "hub")
    taken, of_pairs = given.bias.relation.take(torch.tensor([11, -1, 0]))
    lengths = pairs.sum(dim=2)
    assert taken.row_starts.diff().view(2, 3).tolist() == [[int(n[11]), 0, int(n[0])] for n in lengths]
    assert len(of_pairs) == len(taken.columns) and taken.shape == (2, 3, 31)


def bordered(num_super, *, B=1, H=3, regular=21, D=5, dropout_p=0.0, dtype=torch.float64):
    """The problem with a dense bias, and with one of listed pairs and super nodes; some keys are padding."""
    N = regular + num_super
    torch.manual_seed(N)
    pairs = torch.ones(1, N, N, dtype=torch.bool)
    pairs[:, :regular, :regular] = present("scattered", 1, regular, regular)
    pairs[:, 1, regular:] = False  # a row of nobody but listed pairs
    bias = make_bias("bucket", 1, H, N, N, dtype, ~pairs)
    q, k, v, d_out = (torch.randn(B, H, N, D, dtype=dtype) for _ in range(4))
    padding = torch.rand(B, N) < 0.2
    key = torch.randint(-(2**31), 2**31, (B,), dtype=torch.int32) if dropout_p else None
    whole = Problem(q, k, v, bias, padding, dropout_p, key, d_out, torch.randn(B, H, N, dtype=dtype))
    among = BucketBias(csr(bias.index[:, :regular, :regular], pairs[:, :regular, :regular]), bias.table)
    data = BorderedData(
        among.relation,
        among.index,
        bias.index[:, :regular, regular:].contiguous(),
        bias.index[:, regular:].contiguous(),
    )
    return whole, data


@of_a_cpu
@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
@pytest.mark.parametrize(("num_super", "B", "dropout_p"), [(1, 1, 0.0), (4, 1, 0.3), (17, 2, 0.3)])
def test_super_nodes_see_and_are_seen_by_all(impl, num_super, B, dropout_p):
    whole, data = bordered(num_super, B=B, dropout_p=dropout_p)
    layout = NodeLayout(21, num_super)

    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        options = dict(key_padding_mask=padding, dropout_p=dropout_p, dropout_key=dropout_key, return_lse=True)
        return mg.ring_attention(q, k, v, data.bias(bias.table), layout=layout, **options, impl=impl)

    assert_equal(expected(whole, attend), expected(whole))


def test_regular_rows_alone():
    whole, data = bordered(4, dropout_p=0.3)
    want = expected(
        replace(
            whole,
            q=whole.q[:, :, :21],
            bias=whole.bias.rows(slice(21)),
            d_out=whole.d_out[:, :, :21],
            d_lse=whole.d_lse[:, :, :21],
        )
    )

    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        options = dict(key_padding_mask=padding, dropout_p=dropout_p, dropout_key=dropout_key, return_lse=True)
        return mg.ring_attention(q, k, v, data.bias(bias.table).rows(slice(21)), layout=NodeLayout(21, 4), **options)

    some = replace(whole, q=whole.q[:, :, :21], d_out=whole.d_out[:, :, :21], d_lse=whole.d_lse[:, :, :21])
    assert_equal(expected(some, attend), want)
    with pytest.raises(ValueError, match=r"all 25, or the first 21, got slice"):
        data.bias(whole.bias.table).rows(slice(20))
    with pytest.raises(ValueError, match="must be all 25"):
        data.bias(whole.bias.table).rows(slice(None, None, 2))
