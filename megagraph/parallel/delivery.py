"""How a batch comes to where it is used while the one before is trained on: from rank to rank, and to a GPU.

One rank of a node builds the batches of all pipeline stages there. Stages read the same structure, padding and labels;
only the first reads features. To sample and to look up the structure again in each would take as much CPU time as the
first one's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megagraph.data.batch import Batch
from megagraph.data.loader import Loader
from megagraph.parallel.mesh import ranks_of_nodes

_MOST_TOLD = 1 << 13  # bytes that describe a batch, pickled
_ALIGNED = 64  # bytes, where each tensor begins


def stages_of_node(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks of this node that hold other stages of the same pipeline, by stage; ``None`` where there are none."""
    if mesh is None or mesh["pp"].size() == 1:
        return None
    node_of = {rank: node for node, ranks in enumerate(ranks_of_nodes()) for rank in ranks}  # may be of unequal sizes
    of_stages = mesh.mesh.flatten(1).T.tolist()  # by pipeline and ring
    groups: list[list[int]] = []
    for ranks in of_stages:
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(node_of[rank], []).append(rank)
        groups += [on_node for on_node in by_node.values() if len(on_node) > 1]
    made = {tuple(ranks): dist.new_group(ranks, backend="gloo") for ranks in groups}  # by all ranks, in one order
    own = dist.get_rank()
    return next((group for ranks, group in made.items() if own in ranks), None)


def builds(group: dist.ProcessGroup) -> bool:
    """Whether this rank builds for its group."""
    return dist.get_rank(group) == 0


@dataclass(frozen=True)
class Epoch:
    """The batches of an epoch, in order."""

    batches: Any  # of the loader
    group: dist.ProcessGroup

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """The next batch is on its way when one is given."""
        coming: Callable[[], Batch] | None = None
        for batch in self.batches if builds(self.group) else repeat(None, len(self)):
            following = _receive(self.group) if batch is None else _send(batch, self.group)
            if coming is not None:
                yield coming()
            coming = following
        if coming is not None:
            yield coming()


class NodeLoader:
    """A loader of every stage of a node, of which the first one's is used."""

    def __init__(self, loader: Loader, group: dist.ProcessGroup) -> None:
        self._loader, self._group = loader, group

    @property
    def num_nodes(self) -> int:
        return self._loader.num_nodes

    def epoch(self, epoch: int, start: int = 0) -> Epoch:
        """An epoch as of :class:`Loader`; all ranks of the group iterate over it, and leave it after the same batch."""
        return Epoch(self._loader.epoch(epoch, start), self._group)


def copied_ahead(batches: Iterable[Batch], put: Callable[[Batch], Batch], device: torch.device) -> Iterator[Batch]:
    """The batches, each ``put`` on this GPU by a stream of its own while the one before is used.

    The first has nothing to hide behind, and so a full batch that is the only one of its epoch takes the usual stream.
    """
    stream, used, coming = torch.cuda.Stream(device), torch.cuda.current_stream(device), None
    for batch in batches:
        if coming is None:
            coming = put(batch)
            continue
        with torch.cuda.stream(stream):
            following = put(batch)
        there = stream.record_event()
        yield coming
        used.wait_event(there)
        for tensor in following.memory():  # or its memory would be free again before that stream has used it
            if tensor.is_cuda:
                tensor.record_stream(used)
        coming = following
    if coming is not None:
        yield coming


def _send(batch: Batch, group: dist.ProcessGroup) -> Callable[[], Batch]:
    for_others = batch.without_features()
    told = pickle.dumps(for_others.map(lambda x: x.to("meta")))
    assert len(told) < _MOST_TOLD, "what is said of a batch is of one size"
    header = torch.frombuffer(bytearray(told.ljust(_MOST_TOLD)), dtype=torch.uint8)
    dist.broadcast(header, group=group, group_src=0)
    memory = torch.empty(_num_bytes(for_others), dtype=torch.uint8)
    _lay_out(for_others, memory, lambda tensor, part: part.copy_(tensor))
    return _on_its_way(memory, batch, group)


def _receive(group: dist.ProcessGroup) -> Callable[[], Batch]:
    header = torch.empty(_MOST_TOLD, dtype=torch.uint8)
    dist.broadcast(header, group=group, group_src=0)
    described: Batch = pickle.loads(header.numpy().tobytes())
    memory = torch.empty(_num_bytes(described), dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
    return _on_its_way(memory, _lay_out(described, memory, lambda _, part: part), group)


def _room(tensor: Tensor) -> int:
    """Bytes from where a tensor begins to where the next one does."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _num_bytes(batch: Batch) -> int:
    return sum(_room(tensor) for tensor in batch.memory())


def _lay_out(batch: Batch, memory: Tensor, put: Callable[[Tensor, Tensor], Tensor]) -> Batch:
    """``put`` every tensor of a batch into its part of the memory, one behind the other; the batch of the results."""
    first = 0

    def place(tensor: Tensor) -> Tensor:
        nonlocal first
        part = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        first += _room(tensor)
        return put(tensor, part)

    return batch.map(place)


def _on_its_way(memory: Tensor, batch: Batch, group: dist.ProcessGroup) -> Callable[[], Batch]:
    """Start to send; gives ``batch`` when it is done."""
    work = dist.broadcast(memory, group=group, group_src=0, async_op=True)

    def there() -> Batch:
        work.wait()
        return batch

    return there
