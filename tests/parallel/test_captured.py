"""A step that is replayed is the step that would have been called."""

from __future__ import annotations

import json

import pytest
import torch

import megagraph as mg
from megagraph.attention.dropout import dropout_keys
from megagraph.data.batch import WHOLE
from megagraph.objective import loss_sum
from megagraph.parallel.captured import CapturedSteps, _rounded_up
from megagraph.parallel.pipeline import Pipeline, Stage
from tests.parallel.cases import NUM_LAYERS, batches_of, builder_of, config_of

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; bench/gpu.sh --check runs it")


def again(self, step):
    """What a graph does, by calling the step anew."""
    results = step()

    def replay():
        for held, new in zip(results, step(), strict=True):
            if held is not None:
                held.copy_(new)

    return results, replay


def pipelines(batching, dtype, device, **options):
    config = config_of(batching, dtype)
    builder = builder_of(batching)
    sizes = config.model_config(in_features=8, num_classes=builder.graph.num_classes, bias_size=builder.structure.size)
    for captured in (False, True):
        torch.manual_seed(0)
        model = mg.HierarchicalGT(sizes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        stage = Stage(model, range(NUM_LAYERS), autocast=dtype == "bf16", **options).to(device, config.parameter_dtype)
        pipeline = Pipeline([stage], [stage], mg.Plan(), captured=captured)
        pipeline.train()
        yield pipeline


def steps(pipeline, batches):
    """Loss and gradients of every step; some weights change in between, as an optimizer changes them."""
    for step, batch in enumerate(pipeline.receive(batches)):
        for parameter in pipeline.parameters():
            parameter.grad = None
        loss = pipeline.backward(batch, dropout_keys(3, step, batch.sequence_ids), loss_sum)
        gradients = [parameter.grad.clone() for parameter in pipeline.parameters()]
        yield loss.clone(), gradients
        with torch.no_grad():
            for parameter, gradient in zip(pipeline.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=1e-2)


@pytest.mark.parametrize("batching", ["ego", "cluster"])
def test_recorded_steps_are_those_that_are_called(batching, monkeypatch):
    monkeypatch.setattr(CapturedSteps, "_capture", again)
    batches = [*batches_of(batching, WHOLE), *batches_of(batching, WHOLE)]
    assert len({batch.batch_size for batch in batches}) > 1 and len({len(batch.features) for batch in batches}) > 1
    called, replayed = (list(steps(p, batches)) for p in pipelines(batching, "fp64", "cpu"))
    torch.testing.assert_close(replayed, called, rtol=1e-12, atol=1e-14)
    assert len({loss.item() for loss, _ in called}) == len(called)


def test_no_more_graphs_than_memory_is_kept_for(monkeypatch):
    monkeypatch.setattr(CapturedSteps, "_capture", again)
    weight = torch.nn.Parameter(torch.ones(3))
    recorded = CapturedSteps(lambda x: (weight * x).sum(), [weight])
    for _ in range(3):
        for length in range(1, 12):
            assert recorded(2, {"x": torch.full((length, 3), 4.0)}).item() == 6.0 * length
            assert weight.grad.tolist() == [2.0 * length] * 3
    assert sum(graph is not None for graph in recorded._graphs.values()) == 8


def test_sizes_are_few_and_hardly_larger():
    sizes = {length: _rounded_up(length) for length in range(1, 5000)}
    assert all(length <= size <= 1.125 * length + 1 for length, size in sizes.items())
    assert len({size for length, size in sizes.items() if length > 1024}) <= 20


@on_gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("batching", ["ego", "cluster"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_graphs_are_the_steps_that_are_called(batching, dtype, checkpoint):
    """Products of a few rows more may be summed in another order."""
    batches = [batch.pin_memory() for batch in (*batches_of(batching, WHOLE), *batches_of(batching, WHOLE))]
    called, replayed = (list(steps(p, batches)) for p in pipelines(batching, dtype, "cuda", checkpoint=checkpoint))
    close = 1e-4 if dtype == "fp32" else 3e-2
    for (loss, gradients), (loss_called, gradients_called) in zip(replayed, called, strict=True):
        torch.testing.assert_close(loss, loss_called, rtol=close, atol=0)
        for x, y in zip(gradients, gradients_called, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=close * y.abs().max().item())


@on_gpu
def test_training_by_graphs_is_the_same_training(tmp_path):
    options = dict(epochs=2, batch_size=64, layers=2, dim=32, ffn_dim=32, heads=4, samples=2, device="cuda")
    losses = []
    for graphs in (False, True):
        out = tmp_path / str(graphs)
        mg.Trainer(mg.TrainConfig(out=out, cuda_graphs=graphs, **options)).fit()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "step" in line])
    assert len(losses[0]) > 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
