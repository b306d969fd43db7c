"""What a rank of a pipeline keeps: of a batch, of schedules, and of a layer that is computed twice."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

import megagraph as mg
from megagraph.attention.dropout import dropout_keys
from megagraph.data.batch import WHOLE
from megagraph.parallel import pipeline as pipeline_module
from megagraph.parallel.pipeline import Pipeline, Stage
from tests.parallel.cases import NUM_LAYERS, batches_of, builder_of, config_of


def make_stage(layers: range = range(NUM_LAYERS), **options) -> Stage:
    torch.manual_seed(0)
    bias_size = builder_of("cluster").structure.size
    config = config_of("cluster", "fp32").model_config(in_features=8, num_classes=3, bias_size=bias_size)
    return Stage(mg.HierarchicalGT(config), layers, **options)


def test_a_stage_leaves_the_model_as_it_is():
    stage = make_stage(range(1, 2))
    assert not stage.first and not stage.last
    assert {name.split(".")[1] for name, _ in stage.model.named_parameters()} == {"1"}
    model = mg.HierarchicalGT(stage.model.config)
    names = set(model.state_dict())
    parts = [Stage(model, layers).model.state_dict(keep_vars=True) for layers in (range(1), range(1, 3))]
    assert parts[0].keys() | parts[1].keys() == set(model.state_dict()) == names
    assert not parts[0].keys() & parts[1].keys()
    assert all(part[name] is model.get_parameter(name) for part in parts for name in part)


@pytest.mark.parametrize(
    ("layers", "moved"),
    [
        (range(1), {"features", "degrees", "node_ids", "node_index"}),
        (range(1, 2), set()),
        (range(2, 3), {"labels", "target_nodes"}),
        (range(3), {"features", "degrees", "node_ids", "node_index", "labels", "target_nodes"}),
    ],
)
def test_a_rank_moves_what_its_stages_read(layers, moved):
    stage = make_stage(layers).to("meta")
    (batch,) = Pipeline([stage], [stage], mg.Plan()).receive(batches_of("cluster", WHOLE)[:1])
    names = ("features", "degrees", "node_ids", "node_index", "labels", "target_nodes")
    assert {name for name in names if getattr(batch, name).is_meta} == moved
    assert batch.structure.is_meta and batch.key_padding_mask.is_meta and batch.sequence_ids.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; bench/gpu.sh --check runs it")
def test_a_batch_is_whole_that_was_copied_while_the_one_before_was_used():
    stage = make_stage(range(3)).to("cuda")
    given = [batch.pin_memory() for batch in batches_of("cluster", WHOLE)[:3] * 4]
    copied = 0

    def built():
        nonlocal copied
        for batch in given:
            copied += 1
            yield batch

    received, kept = Pipeline([stage], [stage], mg.Plan()).receive(built()), []
    for i, batch in enumerate(received):
        assert copied == min(i + 2, len(given))
        torch.cuda._sleep(10_000_000)  # the device is behind the host, and the memory of this batch is soon free
        kept.append([tensor.clone() for tensor in batch.memory()])
    torch.cuda.synchronize()
    for batch, tensors in zip(given, kept, strict=True):
        torch.testing.assert_close([tensor.cpu() for tensor in tensors], batch.memory(), rtol=0, atol=0)


def test_schedules_not_used_for_longest_are_given_up(monkeypatch):
    monkeypatch.setattr(pipeline_module, "_MAX_SCHEDULES", 2)
    stage, made = make_stage(), []
    pipeline = Pipeline([stage], [stage], mg.Plan())
    monkeypatch.setattr(pipeline, "_make_schedule", lambda batch, inputs, training: made.append(batch) or (batch, []))
    full, *_, ragged = batches_of("cluster", WHOLE)
    assert full.batch_size != ragged.batch_size
    for batch, training in [(full, True), (ragged, True), (full, True), (full, False), (full, True), (ragged, True)]:
        assert pipeline._schedule(batch, {}, training=training)[0].batch_size == batch.batch_size
    assert made == [full, ragged, full, ragged]


def test_checkpointing_keeps_the_inputs_of_layers_only():
    batch = batches_of("cluster", WHOLE)[0]
    keys = dropout_keys(0, 0, batch.sequence_ids)
    kept, gradients = [], []
    for checkpoint in (False, True):
        stage = make_stage(checkpoint=checkpoint)
        inputs = Pipeline([stage], [stage], mg.Plan())._inputs(batch, keys)
        with MemTracker() as tracker:
            scores = stage(**inputs)
        kept.append(sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot().values()))
        scores.sum().backward()
        gradients.append([parameter.grad for parameter in stage.parameters()])
    assert kept[1] < kept[0] / 3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
