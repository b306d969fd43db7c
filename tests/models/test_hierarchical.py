"""HierarchicalGT against a plain eager ANS-GT, and what must not change its output."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import nn

import megagraph as mg
from bench.paper.epoch_time import EagerANSGT
from megagraph.data.datasets import synthetic_graph
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.models import transformer
from megagraph.objective import loss_sum
from tests.attention.test_convolution import neighbours_of

CONFIG = mg.ModelConfig(
    in_features=12, num_classes=4, layers=3, dim=16, ffn_dim=24, heads=2, global_tokens=2, bias_size=5
)


def logits(model, batch, dropout_key=None):
    return model(**batch.model_inputs(dropout_key))


@pytest.fixture(scope="module")
def batch():
    graph = synthetic_graph(num_nodes=60, num_classes=4, in_features=12, average_degree=3, seed=1)
    builder = prepare(graph, BatchOptions(sample_nodes=6, samples=2, global_tokens=2, channels=3))
    built = builder.build(np.arange(10), np.ones(60, bool), np.random.default_rng(0))
    assert built.key_padding_mask.any(), "no padding to test"
    return replace(built, features=built.features.double(), structure=built.structure.double())


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = mg.HierarchicalGT(CONFIG).double()
    with torch.no_grad():  # the initial weights are small; larger ones make every term count
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def test_equals_eager_ansgt(model, batch):
    eager = EagerANSGT(CONFIG).double()
    eager.take(model)
    model.eval(), eager.eval()
    losses = [loss_sum(scores, batch.labels) for scores in (logits(model, batch), eager(batch))]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
    for loss in losses:
        loss.backward()
    pairs = {
        "input_proj.weight": eager.input_proj.weight,
        "global_tokens": eager.global_tokens,
        "layers.0.bias_weight": eager.layers[0].bias.weight,
        "layers.2.bias_weight": eager.layers[2].bias.weight,
        "layers.1.attention.k_proj.weight": eager.layers[1].k.weight,
        "layers.2.attention.q_proj.bias": eager.layers[2].q.bias,
        "head.bias": eager.head.bias,
    }
    ours = dict(model.named_parameters())
    for name, other in pairs.items():
        torch.testing.assert_close(
            ours[name].grad, other.grad, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bf16_has_no_more_error_than_eager_ansgt(batch):
    """After 24 layers; its sum of what layers add is in fp32, as autocast makes of what its tokens are."""
    single = replace(batch, features=batch.features.float(), structure=batch.structure.float())
    errors: dict[str, list[float]] = {"ours": [], "eager": []}

    def gradient(model, batch, mixed):
        model.eval().zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            scores = model(batch) if isinstance(model, EagerANSGT) else logits(model, batch)
        loss_sum(scores, batch.labels).backward()
        return model.input_proj.weight.grad.clone()

    for seed in range(4):
        torch.manual_seed(seed)
        model = mg.HierarchicalGT(replace(CONFIG, layers=24, dim=32, ffn_dim=32))
        eager = EagerANSGT(model.config)
        eager.take(model)
        found = {"ours": gradient(model, single, True), "eager": gradient(eager, single, True)}
        want = gradient(eager.double(), batch, False)
        for name, got in found.items():
            errors[name].append(((got - want).abs().max() / want.abs().max()).item())
    assert np.mean(errors["ours"]) <= 1.25 * np.mean(errors["eager"]), errors


def test_reading_out_fewer_rows_changes_nothing(model, batch):
    model.eval()
    arguments = (batch.features, batch.node_index, batch.structure, batch.key_padding_mask)
    all_rows = model(*arguments, num_targets=batch.num_nodes)
    torch.testing.assert_close(model(*arguments, num_targets=1), all_rows[:, :1])
    assert model(*arguments, num_targets=0).shape == (20, 0, 4)


def test_padding_has_no_influence(model, batch):
    model.eval()
    structure = batch.structure.clone()
    structure[batch.key_padding_mask[:, None, None].expand_as(structure)] = 7.0
    node_index = batch.node_index.masked_fill(batch.key_padding_mask[:, :-2], 3)
    changed = replace(batch, structure=structure, node_index=node_index)
    torch.testing.assert_close(logits(model, changed), logits(model, batch))


@pytest.mark.parametrize("num_rows", [1, 37])
@pytest.mark.parametrize("nonzeros", [0, 1, 131])
def test_sparse_features_change_nothing(num_rows, nonzeros):
    config = replace(CONFIG, in_features=131)
    model = mg.HierarchicalGT(config).double()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_rows, 131, dtype=torch.float64, generator=generator)
    features *= torch.rand(features.shape, generator=generator).argsort(dim=1) < nonzeros  # of a row
    encoded = model.encode(features, None)
    assert ("SparseProduct" in str(encoded.grad_fn.next_functions)) == (nonzeros < 131)
    weight, bias = parameters = model.input_proj.weight, model.input_proj.bias
    expected = nn.functional.linear(features, weight, bias)
    torch.testing.assert_close(encoded, expected, rtol=1e-12, atol=1e-14)
    d_out = torch.randn_like(encoded)
    for got, want in zip(*(torch.autograd.grad(out, parameters, d_out) for out in (encoded, expected)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_targets", [1, 9])
@pytest.mark.parametrize("bias", ["projected", "bucket"])
def test_leaving_padding_out_changes_nothing(batch, bias, num_targets, monkeypatch):
    config = CONFIG
    if bias == "bucket":
        config = replace(CONFIG, bias="bucket", bias_size=3)
        batch = replace(batch, structure=batch.structure[:, 0].gt(0.2).to(torch.uint8))
    torch.manual_seed(0)
    model = mg.HierarchicalGT(config).double()
    inputs = batch.model_inputs(mg.dropout_keys(0, 5, batch.sequence_ids)) | {"num_targets": num_targets}
    results = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(transformer, "_PACKED_FROM", share)
        model.zero_grad()
        scores = model(**inputs)[~batch.key_padding_mask[:, :num_targets]]
        scores.square().sum().backward()
        results.append([scores, *(parameter.grad for parameter in model.parameters())])
    names = ["scores", *(name for name, _ in model.named_parameters())]
    for name, got, want in zip(names, *results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_dropout_is_on_in_training_only_and_follows_its_key(model, batch):
    key = mg.dropout_keys(0, 5, batch.sequence_ids)
    first, again = logits(model, batch, key), logits(model, batch, key)
    other = logits(model, batch, mg.dropout_keys(0, 6, batch.sequence_ids))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 1e-3
    some = slice(4, 9)  # a sequence is dropped the same in any batch
    part = model(
        batch.features,
        batch.node_index[some],
        batch.structure[some],
        batch.key_padding_mask[some],
        dropout_key=key[some],
    )
    torch.testing.assert_close(part, first[some])
    with pytest.raises(ValueError, match="dropout_key is needed in training"):
        logits(model, batch)
    model.eval()
    assert torch.equal(logits(model, batch, key), logits(model, batch))


def test_no_two_places_drop_alike(batch):
    """Where attention and FFN give ones everywhere, what a layer adds to its rows is what it has not dropped."""
    torch.manual_seed(0)
    model = mg.HierarchicalGT(replace(CONFIG, dropout=0.5)).double()
    rows = []
    for layer in model.layers.values():
        for last in (layer.attention.out_proj, layer.ffn[-1]):
            nn.init.zeros_(last.weight), nn.init.ones_(last.bias)
        layer.attention_norm.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0]))
        layer.ffn_norm.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0]))
    logits(model, batch, mg.dropout_keys(0, 5, batch.sequence_ids))
    kept = [(after - before).flatten() > 1 for before, after in pairwise(rows[: 2 * CONFIG.layers - 1])]
    for one in kept:
        assert 0.45 < one.float().mean() < 0.55
    for one, other in combinations(kept, 2):
        assert 0.45 < (one == other).float().mean() < 0.55


def test_gradient_reaches_every_parameter(model, batch):
    loss_sum(logits(model, batch, mg.dropout_keys(0, 0, batch.sequence_ids)), batch.labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("bias", ["projected", "bucket"])
def test_the_learned_part_of_a_bias_is_in_its_units(model, batch, bias):
    if bias == "bucket":
        batch = replace(batch, structure=(batch.structure[:, 0] * 4).to(torch.uint8))
    unit = (0.5, 2.0, 4.0, 0.25, 1.0)
    plain = mg.HierarchicalGT(replace(CONFIG, bias=bias)).double().eval()
    plain.load_state_dict(model.state_dict())
    in_units = mg.HierarchicalGT(replace(CONFIG, bias=bias, bias_unit=unit)).double().eval()
    state = model.state_dict()
    for name in state:
        if "bias_weight" in name:
            state[name] = state[name] * torch.tensor(unit)
    in_units.load_state_dict(state)
    scores = logits(plain, batch)
    torch.testing.assert_close(logits(in_units, batch), scores)
    for other in (plain, in_units):
        loss_sum(logits(other, batch), batch.labels).backward()
    for one, other in zip(plain.layers.values(), in_units.layers.values(), strict=True):
        torch.testing.assert_close(other.bias_weight.grad * torch.tensor(unit), one.bias_weight.grad)


def test_biases_start_where_the_data_says():
    start = (1.0, -2.0, 0.5, 0.0, 3.0)
    for layer in mg.HierarchicalGT(replace(CONFIG, bias_start=start)).layers.values():
        assert layer.bias_weight.tolist() == 2 * [[*start]]


def test_bucket_bias():
    graph = synthetic_graph(num_nodes=300, num_classes=4, in_features=12, seed=1)
    options = BatchOptions(batching="cluster", bias="bucket", sequence_nodes=128, super_nodes=8, max_distance=3)
    builder = prepare(graph, options)
    config = replace(CONFIG, bias="bucket", bias_size=builder.structure.size, global_tokens=1)
    built = builder.build(builder.plan(np.arange(300), 2, None)[0], np.ones(300, bool), np.random.default_rng(0))
    scores = logits(mg.HierarchicalGT(config).eval(), built)
    assert scores.shape == (2, 128, 4) and torch.isfinite(scores).all()


@pytest.mark.parametrize("init", ["small", "xavier"])
def test_initial_values(init):
    torch.manual_seed(0)
    model = mg.HierarchicalGT(replace(CONFIG, in_features=300, dim=64, ffn_dim=200, init=init))
    for name, x in model.named_parameters():
        small = init == "small" or name.endswith("bias_weight")
        if name == "global_tokens":
            expected = 0.02
        elif x.ndim == 2:
            expected = 0.02 / 3**0.5 if small else (2 / sum(x.shape)) ** 0.5
        else:
            expected = 1.0 if name.endswith("norm.weight") else 0.0
        assert x.square().mean().sqrt().item() == pytest.approx(expected, rel=0.5 if x.numel() < 99 else 0.2), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(heads=3), "heads must divide dim = 16, got 3"),
        (dict(bias="buckets"), "bias must be projected or bucket, got 'buckets'"),
        (dict(embedding="x"), "embedding must be features or learned, got 'x'"),
        (dict(layers=True), "layers must be int, got True"),
        (dict(init="zero"), "init must be small or xavier, got 'zero'"),
        (dict(layers=0), "layers must be at least 1, got 0"),
        (dict(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (dict(bias_unit=(1.0,)), r"bias_unit must be 5 finite numbers or none, got \(1.0,\)"),
        (dict(bias_start=5 * (float("nan"),)), "bias_start must be 5 finite numbers or none, got "),
        (dict(bias_unit=(1.0, 1.0, 0.0, 1.0, 1.0)), "bias_unit must be above 0, got "),
        (dict(global_tokens=-1), r"global_tokens must be 0 or more and below 2\^31, got -1"),
    ],
)
def test_bad_config(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize("key", [torch.zeros(1).int(), torch.zeros(19).int(), torch.zeros(20).long()])
def test_a_dropout_key_of_other_sequences(batch, key):
    """Where attention drops nothing, hidden states alone read it."""
    model = mg.HierarchicalGT(replace(CONFIG, attention_dropout=0.0)).double()
    got = rf"{key.dtype} \[{len(key)}\]"
    with pytest.raises(ValueError, match=rf"dropout_key must be torch.int32 \[B\] = \[20\], got {got}; make one"):
        logits(model, batch, key)


@pytest.mark.parametrize("change", ["short", "long", "numbers"])
def test_padding_that_does_not_fit_is_refused_where_rows_would_be_packed(batch, change):
    inputs, S = batch.model_inputs(None), batch.key_padding_mask.shape[1]
    columns = {"short": S - 1, "long": S + 1, "numbers": S}[change]
    hidden = torch.zeros(20, columns, dtype=torch.bool)
    hidden[:, 2:5] = True
    inputs |= dict(
        features=inputs["features"].float(),
        structure=torch.zeros(20, 5, columns, columns),
        key_padding_mask=hidden.float() if change == "numbers" else hidden,
        layout=None,
    )
    message = "key_padding_mask must be torch.bool" if change == "numbers" else r"k must have shape \[B, H, S, D\]"
    with pytest.raises(ValueError, match=message):
        mg.HierarchicalGT(CONFIG).eval()(**inputs)


def convolving(padding=0, batch=1):
    """A model with a convolution, and its inputs: 20 nodes, padding, two tokens."""
    torch.manual_seed(0)
    channels, matrix, features = torch.rand(1, 5, 22, 22), torch.rand(20, 20), torch.randn(20, 12)
    S = 22 + padding
    nodes, hidden = [*range(20), S - 2, S - 1], torch.ones(batch, S, dtype=torch.bool)
    structure = torch.zeros(1, 5, S, S)
    structure[:, :, torch.tensor(nodes)[:, None], nodes] = channels
    hidden[:, nodes] = False
    inputs = dict(
        features=features,
        node_index=nn.functional.pad(torch.arange(20), (0, padding)).expand(batch, -1),
        structure=structure,
        key_padding_mask=hidden,
        layout=mg.NodeLayout(20 + padding, 2),
        neighbours=neighbours_of(nn.functional.pad(matrix, 2 * (0, padding))),
        num_targets=20,
    )
    return mg.HierarchicalGT(replace(CONFIG, convolution=True)).eval(), inputs


def test_a_convolution_finds_its_nodes_beside_padding():
    found = []
    for padding in (0, 9):
        model, inputs = convolving(padding)
        scores = model(**inputs)
        scores.square().sum().backward()
        found.append((scores, model.layers["0"].convolution.weight.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("batch", "changes", "message"),
    [
        (2, {}, "a model with a convolution takes one sequence at a time, got 2"),
        (1, dict(neighbours=neighbours_of(torch.ones(30, 30))), "the 20 regular rows here .*, got 30 and 30"),
        (1, dict(neighbours=neighbours_of(torch.ones(20, 30))), "the 20 regular nodes of the layout, got 20 and 30"),
        (1, dict(layout=None), "the 22 regular nodes of the layout, got 20 and 20; pass those of this sequence, and"),
    ],
)
def test_neighbours_of_other_nodes(batch, changes, message):
    model, inputs = convolving(batch=batch)
    with pytest.raises(ValueError, match=message):
        model(**inputs | changes)


@pytest.mark.parametrize("kind", ["packed", "sparse features", "convolution"])
def test_a_second_derivative_is_refused(kind, batch):
    if kind == "convolution":
        model, inputs = convolving()
        model.double()
        inputs["features"], inputs["structure"] = inputs["features"].double(), inputs["structure"].double()
    else:
        model, inputs = mg.HierarchicalGT(CONFIG).eval(), batch.model_inputs(None)
        inputs["features"] = inputs["features"].float() * (kind == "packed")
        inputs["structure"] = inputs["structure"].float()
    weight = model.input_proj.weight if kind == "sparse features" else model.layers["0"].attention_norm.weight
    if kind == "convolution":  # it alone is asked about
        model.layers["0"].attention.register_forward_hook(lambda module, given, out: torch.zeros_like(out))
    (gradient,) = torch.autograd.grad(model(**inputs).square().sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad((gradient + weight).square().sum(), weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_the_whole_model_compiles(model, batch):
    key = mg.dropout_keys(0, 5, batch.sequence_ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, batch, key), logits(model, batch, key))
