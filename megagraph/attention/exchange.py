"""How a block of keys and values reaches the next rank, or all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Exchange(Protocol):
    """Moves the blocks of the ranks that live in this process to other ranks."""

    def shift(self, blocks: list[Tensor], into: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Start sending; the result waits for, and returns, what the previous ranks sent, which may lie in ``into``.

        Neither list may be written before, nor ``into`` be read.
        """

    def gather(self, blocks: list[Tensor]) -> list[Tensor]:
        """[P, ...] the blocks of all ranks, for every rank here."""

    def sum_home(self, parts: list[Tensor]) -> list[Tensor]:
        """From a part [P, ...] for each rank: the sum of what all ranks have for a rank here, in the order of ranks."""

    def trade(self, rows: list[Tensor], counts: list[list[int]], coming: list[list[int]]) -> Callable[[], list[Tensor]]:
        """Start sending rows [n, ...], the first ``counts[0]`` of them to rank 0, and so on.

        The result waits for, and returns, what the ranks sent: ``coming[0]`` rows of rank 0 first. No row may be
        written before.
        """


class GroupExchange:
    """One rank in this process, the others in a process group."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.rank = mesh.get_group(), mesh.get_local_rank()
        self.next = (self.rank + 1) % mesh.size()
        self.previous = (self.rank - 1) % mesh.size()

    def shift(self, blocks: list[Tensor], into: list[Tensor]) -> Callable[[], list[Tensor]]:
        (block,), (received,) = blocks, into
        done = self._send({self.next: block}, {self.previous: received})

        def wait() -> list[Tensor]:
            done()
            return [received]

        return wait

    def gather(self, blocks: list[Tensor]) -> list[Tensor]:
        (block,) = blocks
        ranks = self.group.size()
        gathered = block.new_empty(ranks, *block.shape)
        if block.device.type != "cpu":
            dist.all_gather(list(gathered), block, group=self.group)
            return [gathered]
        gathered[self.rank] = block
        for i in range(ranks - 1):  # gloo's own takes half as long again where links are slow, see _send
            going, coming = gathered[(self.rank - i) % ranks], gathered[(self.rank - i - 1) % ranks]
            self._send({self.next: going}, {self.previous: coming})()
        return [gathered]

    def sum_home(self, parts: list[Tensor]) -> list[Tensor]:
        (mine,) = parts
        received = torch.empty_like(mine)
        received[self.rank] = mine[self.rank]
        self._send(self._others(mine), self._others(received))()
        return [received.sum(dim=0)]

    def trade(self, rows: list[Tensor], counts: list[list[int]], coming: list[list[int]]) -> Callable[[], list[Tensor]]:
        (sent,), (to_ranks,), (of_ranks,) = rows, counts, coming
        received = sent.new_empty(sum(of_ranks), *sent.shape[1:])
        to, of = sent.split(to_ranks), received.split(of_ranks)
        of[self.rank].copy_(to[self.rank])
        done = self._send(self._others(to), self._others(of))

        def wait() -> list[Tensor]:
            done()
            return [received]

        return wait

    def _others(self, parts: Tensor | tuple[Tensor, ...]) -> dict[int, Tensor]:
        """Each part but this rank's own, by the rank whose it is; empty ones, too, as NCCL begins with all ranks."""
        return {i: part for i, part in enumerate(parts) if i != self.rank}

    def _send(self, to: dict[int, Tensor], of: dict[int, Tensor]) -> Callable[[], None]:
        """Start sending to some ranks and receiving of some; the result waits.

        One batch, as a blocking send before the receive would wait for itself around the ring. Receives first: over
        TCP a rank says that it is ready to receive on the way that its own data takes, and would say so behind it,
        which makes two ranks that trade blocks send one after the other.
        """
        operations = [dist.P2POp(dist.irecv, part, group=self.group, group_peer=i) for i, part in of.items()]
        operations += [dist.P2POp(dist.isend, part, group=self.group, group_peer=i) for i, part in to.items()]
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


class StagedExchange(GroupExchange):
    """For blocks that the group's backend cannot send from where they are: through (pinned) memory of the host.

    Copies run in a stream of their own, shared by the process: what has arrived comes in while a step computes.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(mesh)
        self.device, self.streams, self.copies = device, torch.get_device_module(device), _copy_stream(device)

    def shift(self, blocks: list[Tensor], into: list[Tensor]) -> Callable[[], list[Tensor]]:
        arriving = super().shift(self._to_host(blocks), [self._host_buffer(x) for x in into])
        return lambda: self._copy_into(into, arriving())

    def gather(self, blocks: list[Tensor]) -> list[Tensor]:
        return self._to_device(super().gather(self._to_host(blocks)))

    def sum_home(self, parts: list[Tensor]) -> list[Tensor]:
        return self._to_device(super().sum_home(self._to_host(parts)))

    def trade(self, rows: list[Tensor], counts: list[list[int]], coming: list[list[int]]) -> Callable[[], list[Tensor]]:
        # allocated before the copies wait: whose memory it was may still be read then
        into = [sent.new_empty(sum(of_ranks), *sent.shape[1:]) for sent, of_ranks in zip(rows, coming, strict=True)]
        arriving = super().trade(self._to_host(rows), counts, coming)
        return lambda: self._copy_into(into, arriving())

    def _host_buffer(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self.device.type == "cuda")

    def _to_host(self, blocks: list[Tensor]) -> list[Tensor]:
        # a block may still be computed, and what stands where the next one will come still be read
        self.copies.wait_stream(self.streams.current_stream(self.device))
        host = [self._host_buffer(block) for block in blocks]
        with self.streams.stream(self.copies):
            for x, block in zip(host, blocks, strict=True):
                x.copy_(block, non_blocking=True)
        copied = self.streams.Event()
        copied.record(self.copies)
        copied.synchronize()  # the host sends
        return host

    def _to_device(self, blocks: list[Tensor]) -> list[Tensor]:
        return self._copy_into([torch.empty_like(block, device=self.device) for block in blocks], blocks)

    def _copy_into(self, into: list[Tensor], blocks: list[Tensor]) -> list[Tensor]:
        with self.streams.stream(self.copies):
            for x, block in zip(into, blocks, strict=True):
                x.copy_(block, non_blocking=True)
        self.streams.current_stream(self.device).wait_stream(self.copies)
        return into


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def make_exchange(mesh: DeviceMesh, device: torch.device) -> Exchange:
    """The exchange of this rank for tensors on a device."""
    return StagedExchange(mesh, device) if travels_through_host(mesh, device) else GroupExchange(mesh)


def travels_through_host(mesh: DeviceMesh, device: torch.device) -> bool:
    """Whether tensors on a device have to be copied to be sent: gloo sends and receives in memory of the host only."""
    return device.type != "cpu" and f"{device.type}:gloo" in dist.get_backend_config(mesh.get_group()).split(",")


class Loopback:
    """All ranks in this process, in lockstep."""

    def shift(self, blocks: list[Tensor], into: list[Tensor]) -> Callable[[], list[Tensor]]:
        moved = [blocks[-1], *blocks[:-1]]
        return lambda: moved

    def gather(self, blocks: list[Tensor]) -> list[Tensor]:
        return [torch.stack(blocks)] * len(blocks)

    def sum_home(self, parts: list[Tensor]) -> list[Tensor]:
        return list(torch.stack(parts).sum(dim=0))

    def trade(self, rows: list[Tensor], counts: list[list[int]], coming: list[list[int]]) -> Callable[[], list[Tensor]]:
        by_rank = [sent.split(to_ranks) for sent, to_ranks in zip(rows, counts, strict=True)]
        received = [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
        return lambda: received
