"""Batches of an epoch, built in worker processes, the same for any number of them."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megagraph.data.batch import WHOLE, Batch, Share
from megagraph.data.build import Builder

PREFETCH_BATCHES = 4  # of a worker, at most
PREFETCH_BYTES = 2**30  # of all workers of a loader together, but for one batch


class Loader:
    """Epochs of batches that depend on the seed and the epoch only.

    The random state of batch i of epoch e derives from (seed, e, i), so neither the number of workers nor a
    restart in between changes a batch. Without ``shuffle`` all batches have one state: what is drawn for a node does
    not depend on who else is asked for.

    Args:
        nodes: node ids whose labels count. Ego batches have these as targets, cluster batches all nodes.
        batch_size: targets (ego) or sequences (cluster) in a batch; the last batch may hold fewer.
        shuffle: a new order, or packing, every epoch.
        num_workers: at most so many processes; fewer, and fewer batches ahead, where PREFETCH_BYTES would be exceeded.
        share: the part of every batch to build; the batches themselves do not depend on it.
    """

    def __init__(
        self,
        builder: Builder,
        nodes: np.ndarray,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        num_workers: int = 0,
        share: Share = WHOLE,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"expected batch_size >= 1, got {batch_size}")
        if len(nodes) == 0:
            raise ValueError("expected node ids to load, got none; check the split")
        if nodes.min() < 0 or nodes.max() >= builder.graph.num_nodes:
            raise ValueError(
                f"expected node ids in 0..{builder.graph.num_nodes - 1}, got {nodes.min()}..{nodes.max()}; "
                "take the split of this graph"
            )
        self._builder, self._nodes, self._batch_size = builder, nodes, batch_size
        self._seed, self._shuffle = seed, shuffle
        self._items: list[tuple[np.ndarray, np.random.SeedSequence]] = []  # what the current epoch is built from
        ahead = max(1, PREFETCH_BYTES // builder.num_bytes(min(batch_size, builder.most(nodes)), share))  # batches
        num_workers = min(num_workers, ahead)
        self._loader = DataLoader(
            _Batches(builder, nodes, share),
            batch_size=None,
            sampler=self._items,
            num_workers=num_workers,
            prefetch_factor=min(PREFETCH_BATCHES, ahead // num_workers) if num_workers else None,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_initialized(),  # batches go to a GPU
            # a generator of its own, or every epoch would draw from the model's random numbers
            generator=torch.Generator().manual_seed(seed),
        )
        if num_workers:  # they start now: a fork beside the threads of a save or a step may deadlock
            iter(self._loader)

    @property
    def num_nodes(self) -> int:
        """V, nodes of the whole graph."""
        return self._builder.graph.num_nodes

    def epoch(self, epoch: int, start: int = 0) -> DataLoader:
        """The batches of an epoch, with a length; iterate over them before asking for the next epoch.

        Args:
            start: leave out the batches before this one, without building them; the others stay as they are.
        """
        seeds = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        rng = np.random.default_rng(seeds) if self._shuffle else None
        plan = self._builder.plan(self._nodes, self._batch_size, rng)
        if not 0 <= start <= len(plan):
            raise ValueError(f"expected start in 0..{len(plan)}, the batches of an epoch, got {start}")
        states = seeds.spawn(len(plan)) if self._shuffle else [seeds] * len(plan)
        self._items[:] = list(zip(plan, states, strict=True))[start:]
        return self._loader


class _Batches(Dataset):
    def __init__(self, builder: Builder, nodes: np.ndarray, share: Share) -> None:
        self._builder = builder
        self._share = share
        self._label_mask = np.zeros(builder.graph.num_nodes, bool)
        self._label_mask[nodes] = True

    def __getitem__(self, item: tuple[np.ndarray, np.random.SeedSequence]) -> Batch:
        index, seeds = item
        return self._builder.build(index, self._label_mask, np.random.default_rng(seeds), self._share)
