"""The table of a learned embedding in one process, against torch's; in several: test_layouts.py."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import torch
from torch import nn

import megagraph as mg
from megagraph.attention.dropout import dropout_keys
from megagraph.data.datasets import synthetic_graph
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.evaluate import make_loader, make_model
from megagraph.objective import loss_sum
from megagraph.parallel.embedding import _DRAWN_ROWS, NodeTable, _initial_rows
from megagraph.train_step import make_optimizers, make_pipeline, train_step

CONFIG = mg.TrainConfig(
    embedding="learned", layers=2, dim=16, ffn_dim=16, heads=2, dtype="fp64", device="cpu", clip_norm=0.01
)


def test_steps_are_those_of_an_embedding_inside_the_model():
    graph = synthetic_graph(num_nodes=90, num_classes=3, in_features=4, seed=0)
    builder = prepare(graph, BatchOptions(sample_nodes=5, samples=2))
    model_config = CONFIG.model_config(in_features=builder.num_rows, num_classes=3, bias_size=builder.structure.size)
    torch.manual_seed(0)
    model = make_model(CONFIG, model_config)
    pipeline = make_pipeline(model, mg.Plan(), None, torch.device("cpu"), CONFIG)
    pipeline.train()
    plain = copy.deepcopy(model)  # the pipeline's stage shares the parameters of the model
    embedding = nn.Embedding.from_pretrained(pipeline.table.weight.detach().clone(), freeze=False, sparse=True)
    start = embedding.weight.detach().clone()
    optimizers = make_optimizers(pipeline, CONFIG)
    biases = [p for name, p in plain.named_parameters() if "bias_weight" in name]
    weights = [p for name, p in plain.named_parameters() if "bias_weight" not in name]
    assert len(biases) == CONFIG.layers
    others = [
        torch.optim.AdamW(weights, lr=CONFIG.learning_rate, weight_decay=CONFIG.weight_decay),
        torch.optim.AdamW(biases, lr=CONFIG.learning_rate * CONFIG.bias_lr_scale, weight_decay=0.0),
        torch.optim.SparseAdam(embedding.parameters()),
    ]
    read = set()
    for step, batch in enumerate(list(make_loader(CONFIG, builder, np.arange(0, 90, 2)[:60]).epoch(0))[:3]):
        keys = dropout_keys(0, step, batch.sequence_ids)
        loss, norm = train_step(pipeline, optimizers, batch, keys, CONFIG.clip_norm)

        for optimizer in others:
            optimizer.zero_grad()
        scores = plain(**batch.model_inputs(keys) | dict(features=embedding(batch.node_ids)))
        expected = loss_sum(scores, batch.labels) / batch.num_targets
        expected.backward()
        gradients = [p.grad for p in (*plain.parameters(), embedding.weight)]
        expected_norm = sum(g.to_dense().square().sum() for g in gradients) ** 0.5
        assert expected_norm > CONFIG.clip_norm, "clipping is not active"
        for gradient in gradients:
            gradient.mul_(CONFIG.clip_norm / (expected_norm + 1e-6))
        for optimizer in others:
            optimizer.step()
        read |= set(batch.node_ids.tolist())
        np.testing.assert_allclose((loss, norm), (expected.item(), expected_norm.item()), rtol=1e-12)
    torch.testing.assert_close(pipeline.state_dict()["node_table"], embedding.weight.detach(), rtol=0, atol=1e-12)
    changed = (pipeline.table.weight != start).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) == read and 0 < len(read) < builder.num_rows


def test_rows_of_ids_in_any_order_repeated_or_missing():
    table = NodeTable(6, 2)
    with torch.no_grad():
        table.weight.copy_(torch.arange(12.0).view(6, 2))
    route = table.route(torch.tensor([5, -1, 0, 5, 3]))
    assert table(route).tolist() == [[10, 11], [0, 0], [0, 1], [10, 11], [6, 7]]
    for count in (1, 2):
        table.add_gradient(route, torch.tensor([[1.0, 2.0], [50, 50], [3, 4], [5, 6], [7, 8]]))
        gradient = table.weight.grad
        assert gradient.is_coalesced() and gradient.indices().tolist() == [[0, 3, 5]]
        assert (gradient.values() / count).tolist() == [[3, 4], [7, 8], [6, 8]]
    nothing = table.route(torch.tensor([-1, -1]))
    table.weight.grad = None
    table.add_gradient(nothing, torch.ones(2, 2))
    assert table(nothing).tolist() == [[0, 0], [0, 0]] and table.weight.grad._nnz() == 0


def test_initial_rows_do_not_depend_on_how_they_are_shared_out():
    rows = 2 * _DRAWN_ROWS + 10
    whole = _initial_rows(0, rows, 3, seed=1)
    cuts = [0, 100, _DRAWN_ROWS, _DRAWN_ROWS + 1, rows, rows]
    parts = [_initial_rows(start, stop, 3, seed=1) for start, stop in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole.unique(dim=0)) == rows and abs(whole.std().item() - 0.02) < 1e-3
    assert not torch.equal(whole, _initial_rows(0, rows, 3, seed=2))
