"""Graphormer against the tested layers with its table as channels, and its degree codes against their definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import megagraph as mg
from megagraph.data.datasets import synthetic_graph
from megagraph.data.options import BatchOptions, num_buckets
from megagraph.data.prepare import prepare
from megagraph.models.layers import Context
from megagraph.objective import loss_sum

MAX_DEGREE = 4


@pytest.fixture(scope="module")
def batch():
    graph = synthetic_graph(num_nodes=60, num_classes=4, in_features=12, average_degree=3, seed=1)
    builder = prepare(graph, BatchOptions(bias="bucket", sample_nodes=6, samples=2, global_tokens=2, max_distance=3))
    built = builder.build(np.arange(10), np.ones(60, bool), np.random.default_rng(0))
    assert built.key_padding_mask.any(), "no padding to test"
    return replace(built, features=built.features.double())


CONFIG = mg.ModelConfig(
    in_features=12,
    num_classes=4,
    layers=3,
    dim=16,
    ffn_dim=24,
    heads=2,
    global_tokens=2,
    bias="bucket",
    bias_size=num_buckets(3),
    max_degree=MAX_DEGREE,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = mg.Graphormer(CONFIG).double()
    with torch.no_grad():  # the initial weights are small; larger ones make every term count
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def test_without_degrees_it_is_the_hierarchical_model_with_a_channel_per_bucket(model, batch):
    other = mg.HierarchicalGT(replace(CONFIG, bias="projected")).double().eval()
    assert other.load_state_dict(model.state_dict(), strict=False).unexpected_keys == ["degree_table"]
    torch.nn.init.zeros_(model.degree_table)
    padding = batch.structure == 255
    channels = torch.nn.functional.one_hot(batch.structure.masked_fill(padding, 0).long(), CONFIG.bias_size)
    as_channels = replace(batch, structure=channels.movedim(-1, 1).double())
    scores = model(**batch.model_inputs()), other(**as_channels.model_inputs())
    torch.testing.assert_close(*scores, rtol=1e-10, atol=1e-12)
    assert scores[0].std() > 0.1


def test_rows_are_features_and_the_code_of_their_degree(model, batch):
    context = Context(
        structure=batch.structure,
        key_padding_mask=batch.key_padding_mask,
        layout=mg.NodeLayout(batch.num_nodes, 0),
    )
    x = model.embed(batch.features, batch.degrees, batch.node_index, context)
    degrees = []
    for sequence, slot in ((0, 0), (0, 2), (5, 1), (19, -1)):
        row = batch.node_index[sequence, slot]
        degrees.append(int(batch.degrees[row]))
        expected = model.input_proj(batch.features[row]) + model.degree_table[min(degrees[-1], MAX_DEGREE)]
        torch.testing.assert_close(x[sequence, slot if slot >= 0 else -3], expected)
    assert min(degrees) < MAX_DEGREE < max(degrees), "no degree to clamp"
    assert torch.equal(x[:, -2:], model.global_tokens.expand(20, -1, -1))


def test_gradient_reaches_every_parameter(model, batch):
    model.train()
    scores = model(**batch.model_inputs(mg.dropout_keys(0, 0, batch.sequence_ids)))
    loss_sum(scores, batch.labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_initial_values():
    model = mg.Graphormer(replace(CONFIG, dim=64, max_degree=99))
    assert model.degree_table.shape == (100, 64)
    assert model.degree_table.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.input_proj.weight.std().item() == pytest.approx(0.02 / 3**0.5, rel=0.1)


def test_errors(model, batch):
    with pytest.raises(ValueError, match="needs a bias of 'bucket', its hop distances, got 'projected'"):
        mg.Graphormer(replace(CONFIG, bias="projected"))
    with pytest.raises(ValueError, match=r"degrees is needed by Graphormer: int64 \[U\]"):
        model(**batch.model_inputs() | dict(degrees=None))
    with pytest.raises(ValueError, match=rf"degrees must be int64 \[U\] = \[{len(batch.features)}\], .* got \[1\]"):
        model(**batch.model_inputs() | dict(degrees=batch.degrees[:1]))
    with pytest.raises(ValueError, match="max_degree must be at least 1, got 0"):
        replace(CONFIG, max_degree=0)
