"""Sparse biases over ranks, all of them in this process: whatever the way, the numbers are those of dense attention."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megagraph as mg
from megagraph.attention.context_parallel import loopback_attention
from megagraph.attention.exchange import Loopback, StagedExchange
from megagraph.attention.halo import plan
from megagraph.attention.operator import make_step
from megagraph.attention.ways import Comm
from tests.attention.test_pairs import FORMS, assert_equal, bordered, of_pairs, problem
from tests.problems import expected, of_a_cpu

pytestmark = of_a_cpu
WAYS = get_args(Comm)
CUTS = {2: (0, 3, 17), 3: (0, 1, 10, 17), 4: (0, 8, 9, 12, 17)}


def heads(way, world_size):
    """Three, or two a rank where ranks share them out."""
    return 2 * world_size if way == "ulysses" else 3


def attend_by(bias_of=lambda bias: bias, **options):
    def attend(q, k, v, bias, padding, scale, dropout_p, dropout_key):
        given = dict(key_padding_mask=padding, dropout_p=dropout_p, dropout_key=dropout_key)
        return loopback_attention(q, k, v, bias_of(bias), **given, **options)

    return attend


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("form", "kind"), [*itertools.product(FORMS, ("scattered", "hub", "band", "one"))])
def test_listed_pairs(form, kind, way):
    dense, given, pairs = problem(form, kind, H=heads(way, 3), M=19, N=19, dropout_p=0.3)
    options = dict(num_super=2, world_size=3, comm=way, cuts=CUTS[3])
    assert_equal(expected(given, attend_by(**options)), of_pairs(expected(dense), form, pairs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("num_super", [0, 2])
def test_ranks_of_any_number_and_length(num_super, world_size, cut, way):
    sizes = dict(S=1, B=3, H=heads(way, world_size), M=17 + num_super, N=17 + num_super)
    dense, given, pairs = problem("bucket", "hub", **sizes, dropout_p=0.2)
    cuts = CUTS.get(world_size) if cut else None
    options = dict(num_super=num_super, world_size=world_size, comm=way, cuts=cuts)
    assert_equal(expected(given, attend_by(**options)), of_pairs(expected(dense), "bucket", pairs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world_size", "B", "num_super"), [(1, 1, 4), (2, 1, 1), (3, 2, 4), (4, 1, 17), (25, 1, 4)])
@pytest.mark.parametrize("cut", [False, True])
def test_super_nodes_see_and_are_seen_by_all(way, world_size, B, num_super, cut):
    whole, data = bordered(num_super, B=B, H=heads(way, world_size), regular=17, dropout_p=0.3)
    options = dict(num_super=num_super, world_size=world_size, comm=way, cuts=CUTS.get(world_size) if cut else None)
    assert_equal(expected(whole, attend_by(lambda bias: data.bias(bias.table), **options)), expected(whole))


@pytest.mark.parametrize(
    ("form", "way"),
    [
        pytest.param(form, way, marks=[] if way == "halo" or form in ("bucket", "bordered") else [pytest.mark.slow])
        for form in (*FORMS, "bordered")
        for way in WAYS
    ],
)
def test_kernels(form, way):
    options = dict(num_super=2, world_size=3, comm=way, cuts=CUTS[3], impl="triton")
    if form == "bordered":
        whole, data = bordered(2, B=2, H=heads(way, 3), regular=17, dropout_p=0.3)
        assert_equal(expected(whole, attend_by(lambda bias: data.bias(bias.table), **options)), expected(whole))
    else:
        dense, given, pairs = problem(form, "hub", H=heads(way, 3), M=19, N=19, dropout_p=0.3)
        assert_equal(expected(given, attend_by(**options)), of_pairs(expected(dense), form, pairs))


def test_a_halo_has_just_what_pairs_name():
    """A path of twelve nodes, and one pair of its ends: three ranks of four."""
    pairs = [(i, j) for i in range(12) for j in (i - 1, i, i + 1) if 0 <= j < 12] + [(0, 11)]
    index = torch.sparse_coo_tensor(torch.tensor(pairs).t(), torch.zeros(len(pairs), dtype=torch.uint8), (12, 12))
    bias = mg.BucketBias(index.coalesce().to_sparse_csr(), torch.zeros(2, 1))
    layouts = [mg.NodeLayout(12, 0, rank, 3) for rank in range(3)]
    relations = [bias.rows(layout.local_to_global).relation for layout in layouts]
    halos = plan(Loopback(), layouts, relations)
    assert [halo.column_ids[4:].tolist() for halo in halos] == [[4, 11], [3, 8], [7]]
    assert [halo.coming for halo in halos] == [[0, 1, 1], [1, 0, 1], [0, 1, 0]]
    assert [[rows.tolist() for rows in halo.rows.split(halo.going)] for halo in halos] == [
        [[], [3], []],
        [[0], [], [3]],
        [[3], [0], []],
    ]
    assert plan(Loopback(), layouts, relations) == halos  # made once


def test_copies_wait_for_who_had_the_memory_of_rows_that_arrive():
    """It is given away when its last use is queued, which a stream that does not wait for the queue would overwrite.

    The host sends what has been copied, and who asked for rows goes on when they have been copied, too.
    """
    mesh, events = Mock(), []
    mesh.get_local_rank.return_value, mesh.size.return_value = 0, 1
    exchange = StagedExchange(mesh, torch.device("cpu"))
    exchange._send = lambda to, of: events.append("send") or (lambda: events.append("arrived"))
    exchange.copies = Mock(wait_stream=lambda stream: events.append("wait"))
    exchange.streams = MagicMock()
    exchange.streams.Event.return_value.synchronize = lambda: events.append("synchronize")
    exchange.streams.current_stream.return_value.wait_stream = lambda stream: events.append(stream)

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            if "empty" in str(function):
                events.append(result.data_ptr())
            elif "copy_" in str(function):
                events.append("copy")
            return result

    rows = torch.randn(3, 2)
    with Noted():
        arriving = exchange.trade([rows], [[3]], [[3]])
        (received,) = arriving()
    assert torch.equal(received, rows)
    assert events.index(received.data_ptr()) < events.index("wait")
    own = "copy"  # of what a rank has itself
    told = [event for event in events if not isinstance(event, int)]
    assert told == ["wait", "copy", "synchronize", own, "send", "arrived", "copy", exchange.copies]


def test_data_are_put_in_order_once_and_anew_after_a_change():
    _, given, _ = problem("bucket", "hub", S=1, B=1, M=17, N=17)
    layouts = [mg.NodeLayout(17, 0, rank, 2) for rank in range(2)]
    parts = [given.bias.rows(layout.local_to_global) for layout in layouts]
    halo = plan(Loopback(), layouts, [part.relation for part in parts])[0]
    step = make_step(given.q[:, :, :9], parts[0], None, None, 0.0, None, "blocked", False)
    ordered = halo.step(step).data
    assert torch.equal(ordered, step.data[halo.pairs]) and halo.step(step).data is ordered
    step.data.bitwise_xor_(1)
    assert torch.equal(halo.step(step).data, step.data[halo.pairs]) and not torch.equal(ordered, halo.step(step).data)


@pytest.mark.parametrize(
    ("form", "way", "name"),
    [
        *itertools.product(["bucket"], ["ring", "allgather", "ulysses"], ["padding", "key"]),
        ("bucket", "halo", "key"),  # which copies the padding
        *itertools.product(["bordered"], ["ring", "halo"], ["super rows", "key"]),
    ],
)
def test_what_changes_in_place_before_backward_is_refused(form, way, name):
    _, given, _ = problem("bucket", "hub", M=19, N=19, dropout_p=0.3)
    parts, bias = {"padding": given.padding, "key": given.dropout_key}, given.bias
    if form == "bordered":
        whole, data = bordered(2, regular=17)
        parts["super rows"], bias = data.super_rows, data.bias(whole.bias.table)
    options = dict(num_super=2, world_size=1, comm=way, key_padding_mask=given.padding)
    out, _ = loopback_attention(
        given.q.requires_grad_(), given.k, given.v, bias, **options, dropout_p=0.3, dropout_key=given.dropout_key
    )
    parts[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_training_takes_what_inference_has_found():
    """What is put in order there is kept; data that were made there have no version."""
    whole, data = bordered(2, regular=17)
    table = whole.bias.table.requires_grad_()

    def attend(data):
        options = dict(num_super=2, world_size=1, comm="halo")
        return loopback_attention(whole.q, whole.k, whole.v, data.bias(table), **options)[0]

    with torch.inference_mode():
        want = attend(data)
        assert torch.equal(attend(replace(data, index=data.index.clone())), want)
        moved = data.to("meta")
    out = attend(data)
    assert torch.equal(out, want)
    out.sum().backward()
    assert not any(x.is_inference() for x in (moved.index, moved.super_rows, *moved.relation.lists.values()))


BAD = {
    "dense bias": (
        dict(comm="halo", bias=torch.zeros(6, 6)),
        "comm must be 'ring', 'allgather' or 'ulysses' where all pairs attend, got 'halo'; pass a sparse bias",
    ),
    "no bias": (dict(comm="halo", bias=None), "pass a sparse bias"),
    "no mesh": (dict(comm="halo"), "comm must be 'ring' without a mesh, got 'halo'; pass the mesh"),
    "no such way": (dict(comm="shards"), "comm must be 'ring', 'allgather', 'halo' or 'ulysses', got 'shards'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    given, message = BAD[case]
    index = torch.eye(6, dtype=torch.uint8).to_sparse_csr()
    options = dict(bias=mg.BucketBias(index, torch.zeros(2, 2))) | given
    with pytest.raises(ValueError, match=message):
        mg.ring_attention(*torch.zeros(3, 1, 2, 6, 4), layout=mg.NodeLayout(6, 0), **options)


@pytest.mark.parametrize("cuts", [(0, 3), (0, 2, 6, 7), (0, 4, 4, 7), (1, 2, 4, 7), (0, 5, 3, 7)])
def test_cuts_that_give_some_rank_no_node(cuts):
    with pytest.raises(ValueError, match=r"cuts must be world_size \+ 1 = 4 ascending numbers from 0 to num_nodes = 7"):
        mg.NodeLayout(7, 1, 0, 3, cuts if cuts != (0, 2, 6, 7) else (0, 2, 6, 8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["halo", "ulysses"])
def test_another_default_device(form, way):
    dense, given, pairs = problem(form, "hub", H=6, M=19, N=19, dropout_p=0.3)
    with torch.device("meta"):
        got = expected(given, attend_by(num_super=2, world_size=3, comm=way))
    assert_equal(got, of_pairs(expected(dense), form, pairs))
