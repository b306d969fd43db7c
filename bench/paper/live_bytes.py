"""Bytes of all tensors alive in a process, and a rank's part of a training, whose steps are counted so."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megagraph.attention.dropout import dropout_keys
from megagraph.config import TrainConfig
from megagraph.data.graph import Graph
from megagraph.evaluate import batches, make_loader
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.parallel.mesh import make_mesh
from megagraph.planner import Workload
from megagraph.train_step import make_optimizers, make_pipeline, own_share, train_step

CPU = torch.device("cpu")
TRACKED_STEPS = 2  # the first makes what stays
MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, and of those it is given, while they live."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}
        self._sizes: dict[int, int] = {}
        self._count(tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._count(tree_leaves(result))
        return result

    def _count(self, values) -> None:
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, DTensor):
                value = value._local_tensor
            if value.layout in (torch.sparse_csr, torch.sparse_csc):
                by_row = value.layout == torch.sparse_csr
                inside = (value.crow_indices, value.col_indices) if by_row else (value.ccol_indices, value.row_indices)
                self._count([part() for part in (*inside, value.values)])
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._resize(key, storage.nbytes())
            if self.live > self.peak:
                for key, known in self._known.items():  # gathered parameters are freed in place, without an operator
                    if (other := known()) is not None:
                        self._resize(key, other.nbytes())
                self.peak = max(self.peak, self.live)

    def _resize(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._known[key]


class Rank:
    """What a rank has of a training: its stages, optimizers and the first batch, of which it makes steps."""

    def __init__(
        self, config: TrainConfig, graph: Graph, nodes: np.ndarray | None = None, device: torch.device = CPU
    ) -> None:
        self.config, plan = config, config.parallel_plan()
        self.builder = builder = batches(config, graph)
        self.mesh = make_mesh(plan, device)
        torch.manual_seed(0)
        sizes = {"in_features": graph.in_features, "num_classes": graph.num_classes}
        model_config = config.model_config(**sizes, bias_size=builder.structure.size)
        model = HierarchicalGT(model_config, mesh=None if self.mesh is None else self.mesh["cp"])
        self.pipeline = make_pipeline(model, plan, self.mesh, device, config)
        self.pipeline.train()
        self.optimizers = make_optimizers(self.pipeline, config)
        nodes = np.arange(graph.num_nodes) if nodes is None else nodes
        loader = make_loader(config, builder, nodes, shuffle=True, share=own_share(plan, self.mesh))
        self.batch = next(iter(self.pipeline.receive(loader.epoch(0))))
        self.losses: list[float] = []

    def step(self) -> None:
        keys = dropout_keys(0, len(self.losses), self.batch.sequence_ids)
        self.losses.append(train_step(self.pipeline, self.optimizers, self.batch, keys, self.config.clip_norm)[0])

    def peak_bytes(self) -> int:
        """Most bytes of tensors alive, over the next TRACKED_STEPS steps."""
        with LiveBytes(*self.given(), *self.pipeline.parameters()) as counted:
            for _ in range(TRACKED_STEPS):
                self.step()
        return counted.peak

    def workload(self) -> Workload:
        """The workload of the batch, as the planner describes it."""
        batch, sequences = self.batch, self.batch.batch_size
        return Workload(
            batch_sequences=sequences,
            num_nodes=batch.layout.num_nodes,
            num_super=batch.layout.num_super,
            num_targets=batch.labels.shape[1],
            feature_rows=len(batch.features) / sequences,
            dtype=self.config.dtype,
        )

    def given(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        return self.batch.memory()
