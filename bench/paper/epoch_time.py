"""Training epoch of HierarchicalGT beside a clean eager ANS-GT, same weights, same batches, one run.

    python -m bench.paper.epoch_time --dataset citeseer --root DATA

The eager model does what ANS-GT does: it projects the raw features of every occurrence of a node, holds dense scores
and probabilities [B, H, N, N] in every layer, and computes all rows of the last layer though one is read out. The loss
and the gradient of the input projection are compared first, without dropout; then epochs are timed with dropout on
(nn.Dropout in the eager model), the two interleaved batch by batch.

Fixed: ANS-GT's configuration, seed 0, random 60/20/20 split, batches of 32 targets (256 sequences), AdamW, fp32,
3 epochs after 5 warm-up steps; the loader's time counts for both and is paid once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from bench.provenance import sized, write_rows
from megagraph.attention.dropout import dropout_keys
from megagraph.config import TrainConfig
from megagraph.data.batch import Batch
from megagraph.data.datasets import load_graph
from megagraph.data.loader import Loader
from megagraph.evaluate import batches, choose_split
from megagraph.models.config import ModelConfig
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.objective import loss_sum

ANS_GT = dict(layers=4, dim=128, ffn_dim=128, heads=8, sample_nodes=14, samples=8, global_tokens=1, channels=6)
SEED, BATCH_SIZE, WARMUP_STEPS = 0, 32, 5
EPOCHS, STEPS = sized((3, None), quick=(1, 8))  # of an epoch; None: all


class EagerLayer(nn.Module):
    """Pre-LN layer with dense scores; takes the weights of a ``GraphTransformerLayer``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.q, self.v, self.out = (nn.Linear(config.dim, config.dim) for _ in range(3))
        self.k = nn.Linear(config.dim, config.dim, bias=False)
        self.bias = nn.Linear(config.bias_size, config.heads, bias=False)
        self.ffn = nn.Sequential(
            nn.Linear(config.dim, config.ffn_dim), nn.GELU(), nn.Linear(config.ffn_dim, config.dim)
        )
        self.drop, self.attention_drop = nn.Dropout(config.dropout), nn.Dropout(config.attention_dropout)

    def forward(self, x: Tensor, channels: Tensor, padding: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (proj(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + self.bias(channels).permute(0, 3, 1, 2)
        p = self.attention_drop(scores.masked_fill(padding[:, None, None], -torch.inf).softmax(dim=-1))
        x = x + self.drop(self.out((p @ v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.ffn(self.ffn_norm(x)))

    def take(self, layer: nn.Module) -> None:
        attention = layer.attention
        pairs = [
            (self.attention_norm, layer.attention_norm),
            (self.ffn_norm, layer.ffn_norm),
            (self.ffn, layer.ffn),
            (self.q, attention.q_proj),
            (self.k, attention.k_proj),
            (self.v, attention.v_proj),
            (self.out, attention.out_proj),
        ]
        for mine, other in pairs:
            mine.load_state_dict(other.state_dict())
        self.bias.weight.data.copy_(layer.bias_weight)


class EagerANSGT(nn.Module):
    """ANS-GT's model in plain PyTorch."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(config.in_features, config.dim)
        self.global_tokens = nn.Parameter(torch.empty(config.global_tokens, config.dim))
        self.input_drop = nn.Dropout(config.input_dropout)
        self.layers = nn.ModuleList(EagerLayer(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.num_classes)

    def forward(self, batch: Batch) -> Tensor:
        x = self.input_proj(batch.features[batch.node_index])  # [B, N - G, d_in]: one row per occurrence
        x = self.input_drop(torch.cat([x, self.global_tokens.expand(len(x), -1, -1)], dim=1))
        channels = batch.structure.permute(0, 2, 3, 1).contiguous()  # [B, N, N, C], as its collator delivers them
        for layer in self.layers:
            x = layer(x, channels, batch.key_padding_mask)
        return self.head(self.final_norm(x)[:, :1])

    def take(self, model: HierarchicalGT) -> None:
        """Copy the weights of our model."""
        for name in ("input_proj", "final_norm", "head"):
            getattr(self, name).load_state_dict(getattr(model, name).state_dict())
        self.global_tokens.data.copy_(model.global_tokens)
        for mine, other in zip(self.layers, model.layers.values(), strict=True):
            mine.take(other)


class Contender:
    """A model with its optimizer, trained step by step, with the time of every step."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01, fused=True)
        self.seconds: list[float] = []

    def scores(self, batch: Batch, step: int) -> Tensor:
        if isinstance(self.model, EagerANSGT):
            return self.model(batch)
        return self.model(**batch.model_inputs(dropout_keys(SEED, step, batch.sequence_ids)))

    def loss(self, batch: Batch, step: int) -> Tensor:
        return loss_sum(self.scores(batch, step), batch.labels) / batch.num_targets

    def gradients(self, batch: Batch, step: int) -> Tensor:
        """Make the gradients of the loss, which is returned."""
        loss = self.loss(batch, step)
        loss.backward()
        return loss

    def train_step(self, batch: Batch, step: int) -> None:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.gradients(batch, step)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss.item()
        self.seconds.append(time.perf_counter() - started)


def compare(ours: Contender, eager: Contender, batch: Batch) -> float:
    """Largest difference of loss and input gradient, relative; both without dropout."""
    results = []
    for contender in (ours, eager):
        contender.model.eval()
        contender.model.zero_grad()
        loss = contender.loss(batch, 0)
        loss.backward()
        results.append((loss.detach(), contender.model.input_proj.weight.grad.clone()))
        contender.model.train()
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True))


def in_turn(
    pair: tuple[Contender, Contender],
    loader: Loader,
    train: Callable[[Contender, Batch, int], None] = Contender.train_step,
) -> Iterator[tuple[list[float], float]]:
    """Seconds of each epoch of the two, who take turns batch by batch after steps to warm up, and of loading, which are
    in both."""
    step = 0

    def take(batches: Iterable[Batch]) -> float:
        nonlocal step
        for contender in pair:
            contender.seconds.clear()
        loading, waiting = 0.0, time.perf_counter()
        for batch in batches:
            loading += time.perf_counter() - waiting
            for contender in pair if step % 2 else reversed(pair):
                train(contender, batch, step)
            step += 1
            waiting = time.perf_counter()
        return loading

    take(islice(loader.epoch(0), WARMUP_STEPS))
    for epoch in range(EPOCHS):
        loading = take(islice(loader.epoch(epoch), STEPS))
        yield [sum(contender.seconds) + loading for contender in pair], loading


def main(dataset: Literal["citeseer", "cora", "computers"], root: Path) -> None:
    """Print and write the row bench/results/DEVICE/epoch_time/DATASET.json."""
    config = TrainConfig(dataset=dataset, root=root, seed=SEED, batch_size=BATCH_SIZE, **ANS_GT)
    graph = load_graph(dataset, root)
    builder = batches(config, graph)
    model_config = ModelConfig(
        in_features=graph.in_features,
        num_classes=graph.num_classes,
        bias_size=builder.structure.size,
        dropout=0.1,
        input_dropout=0.1,
    )
    torch.manual_seed(SEED)
    ours, eager = Contender("megagraph", HierarchicalGT(model_config)), Contender("eager", EagerANSGT(model_config))
    eager.model.take(ours.model)
    nodes = choose_split(graph, config).train
    loader = Loader(builder, nodes, batch_size=BATCH_SIZE, seed=SEED, shuffle=True)

    difference = compare(ours, eager, next(iter(loader.epoch(0))))
    print(f"relative difference of loss and gradient: {difference:.1e}")
    assert difference < 1e-4, "the two models do not compute the same"

    epochs, loading = [], []
    for seconds, waited in in_turn((ours, eager), loader):
        epochs.append(seconds)
        loading.append(waited)
        print(f"epoch {len(epochs)}: ours {seconds[0]:.2f} s, eager {seconds[1]:.2f} s, loading {waited:.2f} s")
    ratios = [slow / fast for fast, slow in epochs]
    row = {
        "dataset": dataset,
        "unit": "s",
        "ours_epoch_seconds": [fast for fast, _ in epochs],
        "eager_epoch_seconds": [slow for _, slow in epochs],
        "loading_seconds": loading,
        "ratio_median": float(np.median(ratios)),
        "ratio_range": [min(ratios), max(ratios)],
        "relative_difference": difference,
        "dtype": "fp32",
    }
    print(f"{dataset}: {row['ratio_median']:.2f}x faster ({min(ratios):.2f} to {max(ratios):.2f})")
    print(write_rows(f"epoch_time/{dataset}", [row]))


if __name__ == "__main__":
    tyro.cli(main)
