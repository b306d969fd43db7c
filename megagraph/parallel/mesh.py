"""The processes of a run: their group, their mesh, and how they agree before they start to depend on each other."""

from __future__ import annotations

import builtins
import faulthandler
import os
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from megagraph.config import TrainConfig
from megagraph.flags import processes_here
from megagraph.parallel import failure
from megagraph.planner.plan import Plan
from megagraph.provenance import provenance

T = TypeVar("T")
_starts = count()
MEET_SECONDS = 0.02  # between two looks


def world_size() -> int:
    """Processes of this run: of the process group, or as torchrun says in the environment; 1 without both."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def process_group(timeout_seconds: float = TrainConfig.timeout) -> Iterator[None]:
    """The process group of a run that torchrun started; nothing to do for one process or inside a group.

    When a rank fails, all ranks print the first cause, and those that wait for it leave; see
    :mod:`megagraph.parallel.failure`.

    Args:
        timeout_seconds: how long a rank waits for the others in a collective of any group made inside.

    Raises:
        ValueError: the group around takes no tensors of the host.
    """
    if dist.is_initialized() and "cpu:" not in (backend := dist.get_backend_config()):
        raise ValueError(
            f"a process group must have a backend for the host, too, by which ranks agree, got {backend!r}; start it "
            'with init_process_group("cpu:gloo,cuda:nccl")'
        )
    if world_size() == 1 or dist.is_initialized():
        yield
        return
    timeout = timedelta(seconds=timeout_seconds)
    store, rank, size = _rendezvous()
    # a group that finds the addresses of an earlier one in the store waits for sockets that are closed
    prefix = f"megagraph/{meet(dist.PrefixStore(f'megagraph/{next(_starts)}', store), rank, size, timeout_seconds)}"
    own_connection = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    watch = failure.Watch(dist.PrefixStore(f"{prefix}/watch", own_connection), rank, size, timeout_seconds)
    default_timeout, distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_timeout, timeout
    store.set_timeout(timeout)
    leaving: SystemExit | None = None  # of all ranks, in order
    try:
        failure.phase("start")
        group_store = dist.PrefixStore(prefix, store)
        backend = backend_of_all(dist.PrefixStore(f"{prefix}/backend", store), rank, size)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=timeout)
        try:
            yield
        except SystemExit as error:
            leaving = error
        failure.phase("teardown")
        dist.barrier()  # gloo's teardown can wait for itself while a peer still talks
    except BaseException as error:
        watch.report(error)
        raise
    finally:
        distributed_c10d.default_pg_timeout = default_timeout  # else the groups of a mesh would wait for 30 minutes
    watch.close()
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)  # nobody waits for this rank any more
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    if leaving is not None:
        raise leaving


def meet(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """A name of this start, the same on all its ranks and on none of an earlier one, of which the store is full.

    Restarts are counted by each node for itself. So every rank shows a name of its own, rank 0 answers each that it
    sees with its own name, and is done when all ranks have read that. Those before cannot: they have ended by then.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    others, answered = range(1, size), set[bytes]()
    if rank > 0:
        store.set(f"rank/{rank}", own)
    while time.monotonic() < until:
        if rank > 0 and store.check([own]):
            name = store.get(own).decode()
            store.set(f"{name}/{rank}", "1")
            return name
        if rank == 0:
            for key in (f"rank/{other}" for other in others):
                if store.check([key]) and (seen := store.get(key)) not in answered:
                    store.set(seen.decode(), own)
                    answered.add(seen)
            if store.check([f"{own}/{other}" for other in others]):
                return own
        time.sleep(MEET_SECONDS)
    raise TimeoutError(f"rank {rank} has not met all of {size} ranks in {timeout_seconds:g} s (--timeout)")


def choose_backend() -> str:
    """gloo beside NCCL, as ranks must be able to talk before each has found its GPU; NCCL refuses ranks that share one,
    and gloo takes their messages through memory of the host."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= processes_here() else "gloo"


def backend_of_all(store: dist.Store, rank: int, size: int) -> str:
    """The backend that all ranks take: nodes may have other numbers of GPUs, and NCCL would wait for those on gloo."""
    store.set(str(rank), choose_backend())
    chosen = {store.get(str(other)).decode() for other in range(size)}
    return "gloo" if len(chosen) > 1 else chosen.pop()


@cache
def _rendezvous() -> tuple[dist.Store, int, int]:
    """The store that torchrun started, this rank, and the number of ranks."""
    return next(dist.rendezvous("env://"))


def own_device(config: TrainConfig) -> torch.device:
    """The device of this process, from now on the current one; the same kind on every rank. Collective."""
    device = on_every_rank(config.torch_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or events, synchronize() and bytes would be those of the first GPU
    check_equal("the device", {"type": device.type})
    if config.cuda_graphs and device.type != "cuda":
        raise ValueError(f"cuda_graphs is for a GPU, got device {device}; leave it out")
    return device


def make_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """A mesh with the dims pp, dp and cp, neighbours of a ring side by side; ``None`` for one process."""
    if plan.world_size == 1:
        return None
    ranks = torch.arange(plan.world_size).as_strided((plan.pp, plan.dp, plan.cp), plan.strides)
    return DeviceMesh(device.type, ranks.contiguous(), mesh_dim_names=("pp", "dp", "cp"))


def replicas_of(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The ranks that hold the same layers, dp x cp in one dim; ``None`` where that is one."""
    return None if mesh is None or mesh["dp", "cp"].size() == 1 else mesh["dp", "cp"]._flatten("dp_cp")


def on_every_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """``function()`` on every rank; where it fails on one rank, every rank raises the first rank's error.

    Without this a rank that stops alone would leave the others waiting in their next collective.

    Args:
        group: of all ranks, for a thread beside the main one.
    """
    if not dist.is_initialized():
        return function()
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
        failure.note(error)
    outcomes = all_gather(None if error is None else (_kind(error), str(error)), group)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not failed:
        return result  # type: ignore[return-value]
    kind, message = outcomes[failed[0]]
    if outcomes != [(kind, message)] * len(outcomes):
        message = f"rank {failed[0]}: {message}"
    try:
        raised = getattr(builtins, kind)(message)
    except (AttributeError, TypeError):  # of a library, or not made from one string
        raised = RuntimeError(f"{message} ({kind})")
    raise raised from error


def _kind(error: Exception) -> str:
    """The nearest built-in kind of an error, which every rank has; its own where that says nothing."""
    if failure.is_out_of_memory(error):
        return MemoryError.__name__  # a GPU's is a RuntimeError
    nearest = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return (type(error) if nearest is Exception else nearest).__name__


def on_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """``function()`` on rank 0; every rank gets its result, or raises its error."""
    return all_gather(on_every_rank(lambda: function() if rank() == 0 else None, group), group)[0]


def on_one_process_first(function: Callable[[], T]) -> T:
    """``on_every_rank``, but one process of each machine goes first: it writes files that the others then find."""
    goes_first = os.environ.get("LOCAL_RANK", str(rank())) == "0"
    result = on_every_rank(lambda: function() if goes_first else None)
    return on_every_rank(lambda: function() if result is None else result)


def ranks_of_nodes() -> list[list[int]]:
    """Ranks of every node of torchrun, or of every host without it; the same on all ranks. Collective."""
    nodes: dict[str, list[int]] = {}
    for rank, node in enumerate(all_gather(os.environ.get("GROUP_RANK", socket.gethostname()))):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())


def found_everywhere(path: Path) -> bool:
    """Whether every rank has a file, which a machine may have lost; the same answer on all of them."""
    return all(all_gather(on_every_rank(path.is_file)))


def check_equal(what: str, values: dict[str, Any]) -> None:
    """Raise the same ValueError on every rank unless all ranks hold equal ``values``."""
    everyone = all_gather(values)
    for name in dict.fromkeys(chain(*everyone)):
        expected = everyone[0].get(name)
        for rank, others in enumerate(everyone):
            if others.get(name) != expected:
                raise ValueError(
                    f"{what} must be the same on every rank, but {name} is {expected!r} on rank 0 "
                    f"and {others.get(name)!r} on rank {rank}"
                )


def check_same_run(config: TrainConfig) -> None:
    """Raise the same ValueError on every rank unless all run the same program on the same configuration."""
    here = provenance(torch.device("cpu"))
    check_equal("the program", {"sources": here["tree"], "torch": str(here["torch"])})
    check_equal("the configuration", config.shared_fields())


def checksums(arrays: Any, leave: Collection[str] = ()) -> dict[str, int]:
    """CRC-32 of every array of a dataclass, sparse ones, too, but for the fields to ``leave``; work that takes a while,
    and for one process is not needed."""
    if world_size() == 1:
        return {}
    values = {field.name: getattr(arrays, field.name) for field in fields(arrays) if field.name not in leave}
    return {name: _crc(value) for name, value in values.items() if isinstance(value, np.ndarray | sp.csr_array)}


def _crc(array: np.ndarray | sp.csr_array) -> int:
    value = 0
    for part in (array.data, array.indices, array.indptr) if isinstance(array, sp.csr_array) else (array,):
        value = zlib.crc32(np.ascontiguousarray(part).data, value)
    return value


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum x over a group, or all processes of the run, in place."""
    if dist.is_initialized():
        with record_function("all-reduce"):
            dist.all_reduce(x, group=group)
    return x


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The picklable ``value`` of every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values
