"""Shares of attention, against weights that are computed one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import megagraph as mg
from megagraph.attention.bias import BorderedData
from megagraph.cli import main
from megagraph.data.datasets import synthetic_graph
from megagraph.evaluate import batches, choose_split, make_loader, make_model
from megagraph.focus import attention_focus
from megagraph.run import Run
from tests.data.test_full import dense_index

SMALL = dict(layers=2, dim=16, ffn_dim=16, heads=2, epochs=1, learning_rate=1e-2, batch_size=16)
RUNS = {
    "ego": dict(samples=2, sample_nodes=5, channels=3, super_nodes=3),
    "buckets": dict(samples=2, sample_nodes=5, bias="bucket", super_nodes=3),
    "cluster": dict(batching="cluster", sequence_nodes=128, super_nodes=5, batch_size=2),
    "full": dict(batching="full", super_nodes=4, top=4),
}


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=150, num_classes=3, in_features=16)


def kinds_of(batch, channels) -> np.ndarray:
    """What every pair of a batch is, [B, N, N]: a bucket, or the least power that is not zero."""
    if isinstance(batch.structure, BorderedData):
        return dense_index(batch.structure)[None]
    if batch.structure.dtype == torch.uint8:
        return batch.structure.numpy()
    kinds = np.full((batch.batch_size, batch.num_nodes, batch.num_nodes), channels + 1)
    for power in range(channels, 0, -1):
        kinds[batch.structure[:, power - 1].numpy() != 0] = power
    kinds[:, range(batch.num_nodes), range(batch.num_nodes)] = 0
    for first, kind in ((batch.layout.num_nodes, channels + 2), (batch.num_nodes - 1, channels + 3)):
        kinds[:, first:] = kinds[:, :, first:] = kind
    return kinds


@pytest.mark.parametrize("name", RUNS)
def test_shares_are_those_of_a_softmax(name, graph, tmp_path):
    config = mg.TrainConfig(**SMALL | RUNS[name], out=tmp_path / "run")
    mg.Trainer(config).fit(graph)
    run, focus = Run.open(config.out), attention_focus(config.out, graph, most_batches=1)
    split = choose_split(graph, config)
    nodes = np.concatenate([split.val, split.test])
    batch = next(iter(make_loader(config, batches(config, graph), nodes).epoch(0)))
    model = make_model(config, run.model_config).eval()
    model.load_state_dict(run.weights())
    seen = []
    for layer in model.layers.values():
        layer.attention.register_forward_pre_hook(lambda *call: seen.append(call), with_kwargs=True)
    with torch.no_grad():
        model(**batch.model_inputs())
        kinds = kinds_of(batch, config.channels)
        for (module, (x, bias), options), shares in zip(seen, focus.shares, strict=True):
            x = x if options["packing"] is None else options["packing"].unpack(x)
            q, k = (f(x).unflatten(2, (2, 8)).transpose(1, 2).double() for f in (module.q_proj, module.k_proj))
            q = q[:, :, : options["num_queries"]]
            scores = q @ k.mT / 8**0.5 + bias.materialize().double()
            scores = scores.masked_fill(batch.key_padding_mask[:, None, None], -torch.inf)
            p = scores.softmax(dim=-1).numpy()  # [B, H, M, N]
            real = ~batch.key_padding_mask[:, : q.shape[2]].numpy()
            for kind in range(len(focus.kinds)):
                of_kind = np.where((kinds[:, : q.shape[2]] == kind)[:, None], p, 0).sum(axis=3)
                want = of_kind.transpose(0, 2, 1)[real].mean(axis=0)
                np.testing.assert_allclose(shares[:, kind], want, atol=1e-5, err_msg=focus.kinds[kind])
            np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)


def test_command_line(graph, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    mg.Trainer(mg.TrainConfig(**SMALL | RUNS["full"], out=run)).fit(None)
    monkeypatch.setattr("sys.argv", ["megagraph", "plot", "attention", str(run)])
    main()
    assert (
        capsys.readouterr().out.strip() == str(run / "attention.png") and (run / "attention.png").stat().st_size > 5000
    )
