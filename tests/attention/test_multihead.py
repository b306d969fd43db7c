"""In place of ``nn.MultiheadAttention``: same weights, same results, in what asks for one."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, GPSConv

import megagraph as mg
from megagraph.attention.packing import Packing
from tests.problems import of_a_cpu

# torch's own would rather have both masks of one dtype
pytestmark = [of_a_cpu, pytest.mark.filterwarnings("ignore:Support for mismatched")]
B, N, E, H = 2, 27, 32, 4


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def inputs(M=N):
    torch.manual_seed(0)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 20:] = True
    return torch.randn(B, M, E), torch.randn(B, N, E), padding, torch.randn(M, N)


def made(**options):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(E, H, **options)
    for x in theirs.parameters():
        nn.init.normal_(x, std=0.2)  # biases are zero
    return theirs, mg.MultiheadAttention.from_multihead_attention(theirs)


def of_mask(mask, kind):
    if kind == "bool":
        return mask > 1.0
    return mask.expand(B * H, -1, -1) + torch.arange(B * H)[:, None, None] if kind == "heads" else mask


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("batch_first", "bias", "mask", "padded"),
    [
        *itertools.product([True, False], [True, False], [None, "float"], [True]),
        (True, True, "bool", False),
        (False, True, "heads", True),
    ],
)
def test_results_and_gradients(batch_first, bias, mask, padded, train):
    query, keys, padding, plane = inputs(M=11)
    theirs, ours = (x.train(train) for x in made(batch_first=batch_first, bias=bias))
    assert isinstance(ours, nn.MultiheadAttention) and ours.training == train
    given = dict(key_padding_mask=padding if padded else None, need_weights=False)
    given["attn_mask"] = None if mask is None else of_mask(plane, mask)
    results = []
    for module in (theirs, ours):
        q, k = query.clone().requires_grad_(), keys.clone().requires_grad_()
        q_in, k_in = (q, k) if batch_first else (q.transpose(0, 1), k.transpose(0, 1))
        out, weights = module(q_in, k_in, k_in, **given)
        assert weights is None
        results.append([out, *torch.autograd.grad(out.sin().sum(), [q, k, *theirs.parameters()])])
    for got, want in zip(results[1], results[0], strict=True):
        close(got, want)


def test_a_sequence_without_batch_and_padding_in_numbers():
    query, keys, padding, _ = inputs()
    theirs, ours = made(batch_first=True)
    close(ours(query[0], keys[0], keys[0])[0], theirs(query[0], keys[0], keys[0], need_weights=False)[0])
    numbers = torch.zeros(B, N).masked_fill(padding, -torch.inf)
    want = theirs(query, keys, keys, key_padding_mask=padding, need_weights=False)[0]
    close(ours(query, keys, keys, key_padding_mask=numbers)[0], want)


@pytest.mark.parametrize("exported", [False, True])
def test_compiled_padding_in_numbers_is_checked_too(exported):
    query, keys, padding, _ = inputs()
    _, ours = made(batch_first=True)
    given, numbers = (query, keys, keys), torch.zeros(B, N).masked_fill(padding, -torch.inf)
    module = torch.compile(ours, fullgraph=True, backend="aot_eager")
    if exported:
        module = torch.export.export(ours, (*given, numbers)).module()
    close(module(*given, numbers)[0], ours(*given, numbers)[0])
    with pytest.raises(RuntimeError, match="key_padding_mask must be bool, or 0 and -inf"):
        module(*given, numbers.clamp(min=-1e9))


def test_the_bias_is_a_mask_of_numbers_and_adds_to_one():
    query, keys, _, plane = inputs()
    theirs, ours = made(batch_first=True)
    index, table = torch.randint(5, (1, N, N), dtype=torch.uint8), torch.randn(H, 5, requires_grad=True)
    ours.attn_bias = mg.BucketBias(index, table)
    dense = table[:, index[0].long()].repeat(B, 1, 1)
    out = ours(query, keys, keys)[0]
    close(out, theirs(query, keys, keys, attn_mask=dense, need_weights=False)[0])
    assert torch.autograd.grad(out.sum(), table)[0].abs().sum() > 0
    ours.attn_bias = plane
    want = theirs(query, keys, keys, attn_mask=2 * plane, need_weights=False)[0]
    close(ours(query, keys, keys, attn_mask=plane)[0], want)


def test_a_parameter_is_wrapped_and_another_bias_takes_its_place():
    x = inputs()[0]
    _, ours = made(batch_first=True)
    names, parameter = ours.state_dict().keys(), nn.Parameter(torch.randn(H, N, N))
    with pytest.raises(ValueError, match=r"mg\.DenseBias\(parameter\)"):
        ours.attn_bias = parameter
    assert ours.attn_bias is None and ours.state_dict().keys() == names

    def attend(x):
        ours.attn_bias = mg.DenseBias(parameter[None])
        return ours(x, x, x)[0]

    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(x)
    close(out, attend(x))
    assert torch.autograd.grad(out.sum(), parameter)[0].abs().sum() > 0
    ours.attn_bias = BUCKETS


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_of_torch_takes_it(norm_first, train, monkeypatch):
    x, _, padding, plane = inputs()
    torch.manual_seed(2)
    theirs = nn.TransformerEncoderLayer(E, H, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    ours = copy.deepcopy(theirs)
    ours.self_attn = mg.MultiheadAttention.from_multihead_attention(ours.self_attn)
    theirs.train(train), ours.train(train)
    ours.self_attn.attn_bias = plane
    with torch.set_grad_enabled(train):  # without gradients torch has a path that would go around ours
        got = ours(x, src_key_padding_mask=padding)
        monkeypatch.setattr("torch.backends.mha.get_fastpath_enabled", lambda: False)  # it gives NaN for this mask
        want = theirs(x, src_mask=plane, src_key_padding_mask=padding)
    close(got[~padding], want[~padding])
    stack = nn.TransformerEncoder(ours, 2, enable_nested_tensor=False).train(train)
    assert stack(x, src_key_padding_mask=padding).isfinite().all()


@pytest.mark.parametrize("train", [False, True])
def test_gps_takes_it_and_its_bias(train):
    torch.manual_seed(3)
    x, edges = torch.randn(N + 9, E), torch.randint(N, (2, 60))
    batch = torch.tensor([0] * N + [1] * 9)
    theirs = GPSConv(E, GCNConv(E, E), heads=H).train(train)
    ours = copy.deepcopy(theirs)
    ours.attn = mg.MultiheadAttention.from_multihead_attention(ours.attn)
    for module in (theirs, ours):
        torch.manual_seed(4)
        module.reset_parameters()
    close(ours(x, edges, batch), theirs(x, edges, batch))
    before = ours(x, edges, batch)
    ours.attn.attn_bias = mg.BucketBias(torch.randint(5, (2, N, N), dtype=torch.uint8), torch.randn(H, 5))
    assert not torch.allclose(ours(x, edges, batch), before)


def test_parameters_are_shared_and_state_dicts_are_the_same():
    theirs, ours = made(batch_first=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    again = copy.deepcopy(ours)
    again.load_state_dict(theirs.state_dict())
    x = inputs()[0]
    close(again(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("bias", [False, True])
def test_the_module_of_rings_has_copies_and_loads_its_state_dict(bias):
    x, _, padding, plane = inputs()
    theirs, _ = made(bias=bias)
    ours = mg.BiasedRingAttention.from_multihead_attention(theirs.eval())
    loaded = mg.BiasedRingAttention(E, H, bias=bias)
    loaded.load_state_dict(theirs.state_dict())
    turned = x.transpose(0, 1)
    want = theirs(turned, turned, turned, key_padding_mask=padding, attn_mask=plane, need_weights=False)[0]
    for module in (ours, loaded):
        close(module(x, plane, key_padding_mask=padding), want.transpose(0, 1))
    assert not ours.training and ours.q_proj.weight.data_ptr() != theirs.in_proj_weight.data_ptr()
    nested = nn.ModuleDict({"attn": mg.BiasedRingAttention(E, H, bias=bias)})
    nested.load_state_dict({f"attn.{name}": x for name, x in theirs.state_dict().items()})


def test_what_is_frozen_stays_so():
    theirs, _ = made()
    for x in (theirs.in_proj_weight, theirs.out_proj.bias):
        x.requires_grad_(False)
    ours = mg.BiasedRingAttention.from_multihead_attention(theirs)
    learned = {name for name, x in ours.named_parameters() if x.requires_grad}
    assert learned == {"q_proj.bias", "v_proj.bias", "out_proj.weight"}


def half_of_heads(module, rank):
    """What tensor parallelism leaves of it on one of two ranks, whose results add up."""
    half = copy.deepcopy(module)
    for layer, dim in ((half.q_proj, 0), (half.k_proj, 0), (half.v_proj, 0), (half.out_proj, 1)):
        layer.weight = nn.Parameter(layer.weight.chunk(2, dim)[rank])
    return half


@pytest.mark.parametrize("packed", [False, True])
def test_projections_with_some_of_the_heads(packed):
    x, _, padding, _ = inputs()
    module, index = mg.BiasedRingAttention(E, H, bias=False), torch.randint(5, (1, N, N), dtype=torch.uint8)
    table, halves = torch.randn(H, 5), [half_of_heads(module, rank) for rank in range(2)]
    given, options = (Packing(padding).pack(x), {"packing": Packing(padding)}) if packed else (x, {})
    parts = [
        half(given, mg.BucketBias(index, own), **options) for half, own in zip(halves, table.chunk(2), strict=True)
    ]
    close(sum(parts), module(given, mg.BucketBias(index, table), **options))
    with pytest.raises(ValueError, match=r"bias must have .*, 2, 27, 27.*got .1, 4, 27, 27"):
        halves[0](given, mg.BucketBias(index, table), **options)


def call(attn_bias=None, **arguments):
    _, ours = made(batch_first=True)
    ours.attn_bias = attn_bias
    x = torch.zeros(B, N, E)
    return lambda: ours(x, x, x, **arguments)


def of_ring(**arguments):
    return lambda: mg.BiasedRingAttention(E, H)(torch.zeros(B, N, E), **arguments)


@torch.no_grad()
def encode_nested():
    layer = nn.TransformerEncoderLayer(E, H, 64, batch_first=True)
    layer.self_attn = mg.MultiheadAttention.from_multihead_attention(layer.self_attn)
    x, _, padding, _ = inputs()
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    encoder.use_nested_tensor = True  # as it is where the layer gets ours later
    encoder(x, src_key_padding_mask=padding)


def converted(**options):
    return lambda: mg.MultiheadAttention.from_multihead_attention(nn.MultiheadAttention(E, H, **options))


def converted_with_norm(kind):
    return lambda: kind.from_multihead_attention(nn.utils.parametrizations.spectral_norm(made()[0], "in_proj_weight"))


BUCKETS = mg.BucketBias(torch.zeros(1, N, N, dtype=torch.uint8), torch.zeros(H, 5))
BAD = {
    "weights": (call(need_weights=True), "need_weights must be False, got True"),
    "causal without mask": (call(is_causal=True), "attn_mask must be there"),
    "mask of one dimension": (call(attn_mask=torch.zeros(N)), r"attn_mask must have shape \[M, N\] or .*B \* H = 8"),
    "mask of other heads": (call(attn_mask=torch.zeros(3, N, N)), r"got \[3, 27, 27\]"),
    "mask beside buckets": (call(BUCKETS, attn_mask=torch.zeros(N, N)), "must be None beside a BucketBias"),
    "padding in numbers": (call(key_padding_mask=torch.full((B, N), 0.5)), "key_padding_mask must be bool, or 0"),
    "a nested tensor": (encode_nested, "query must be a dense tensor, got a nested one; .*enable_nested_tensor=False"),
    "bias of other nodes": (call(torch.zeros(N + 1, N)), r"attn_bias was set for other .*anew: .*\[1, 1, 28, 27\]"),
    "buckets of other nodes": (call(BUCKETS.rows(slice(3))), r"attn_bias was .* got \[1, 4, 3, 27\]"),
    "other nodes, and a mask": (call(torch.zeros(3, N), attn_mask=torch.zeros(N, N)), "attn_bias was set for other"),
    "width of keys": (converted(kdim=16), "keys and values must be as wide as queries, 32, got 16 and 32"),
    "key of its own": (converted(add_bias_kv=True), "add_bias_kv and add_zero_attn must be off"),
    "a computed weight": (
        converted_with_norm(mg.MultiheadAttention),
        "in_proj_weight must be a parameter, got one that",
    ),
    "a computed weight of a ring": (converted_with_norm(mg.BiasedRingAttention), "in_proj_weight must be a parameter"),
    "one sequence": (lambda: mg.BiasedRingAttention(E, H)(torch.zeros(N, E)), r"x must have shape \[B, S, E\], got"),
    "no heads": (
        lambda: mg.BiasedRingAttention(E, 0),
        "num_heads must be at least 1 and divide embed_dim = 32 >= 1, got 0",
    ),
    "no width": (lambda: mg.BiasedRingAttention(0, H), "divide embed_dim = 0 >= 1, got 4"),
    "no keys": (lambda: made()[1](torch.zeros(B, N, E), None, torch.zeros(B, N, E)), "key must be a tensor, got None"),
    "negative heads": (lambda: mg.BiasedRingAttention(E, -4), "num_heads must be at least 1 .* got -4"),
    "more queries than rows": (of_ring(num_queries=N + 1), r"num_queries must be in 0\.\.27, .* got 28"),
    "negative queries": (of_ring(num_queries=-1), r"num_queries must be in 0\.\.27, .* got -1"),
    "zero key": (converted(add_zero_attn=True), "add_bias_kv and add_zero_attn must be off"),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
