"""METIS (Karypis & Kumar 1998), in a process of its own: this file is also the program that runs there.

In our process it would hold the GIL for as long as it takes, and a SIGTERM meanwhile, which it takes for an error of
its own, would make it deadlock or return parts of no meaning. A fork would not do: beside other threads it may deadlock
(before Python 3.12 in the interpreter itself, https://github.com/python/cpython/issues/112275).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def metis(
    num_parts: int,
    indptr: np.ndarray,
    indices: np.ndarray,
    sizes: np.ndarray | None = None,
    edge_weights: np.ndarray | None = None,
    *,
    nested: bool = False,
) -> np.ndarray:
    """At most ``num_parts`` parts with few edges between -> int32 [V], none empty.

    Args:
        indptr, indices: CSR of the graph, [V + 1] and [E].
        sizes: of the nodes, int [V], which the parts balance; 1 each by default.
        edge_weights: int [E]; 1 each by default.
        nested: by bisection of bisections, numbered so that every half, quarter, ... of the parts is one of them.

    Raises:
        ChildProcessError: it failed or was killed.
    """
    # no pipes: another child may hold their other end
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as found, tempfile.TemporaryFile() as said:
        for array in (indptr, indices, sizes, edge_weights):
            np.save(given, np.empty(0, np.int64) if array is None else array)
        given.seek(0)
        command = [sys.executable, "-I", __file__, str(os.getpid()), str(num_parts), str(int(nested)), *sys.path]
        with _signals_blocked():  # there, too, from its first thread on: they are for us, who kill it
            process = subprocess.Popen(command, stdin=given, stdout=found, stderr=said)
        try:
            process.wait()
        finally:
            process.kill()  # where an interrupt ended the wait
            process.wait()
        said.seek(0)
        found.seek(0)
        if process.returncode != 0:
            lines = said.read().decode(errors="replace").strip().splitlines()
            code = f"its process ended with exit code {process.returncode}, -9 where memory ran out"
            what = lines[-1] if process.returncode == 1 and lines else code
            raise ChildProcessError(f"METIS failed: {what}; method 'propagation' takes less memory")
        parts = np.load(found, allow_pickle=False)
    # METIS may leave parts empty, above all where there are hardly more nodes than parts
    return np.unique(parts, return_inverse=True)[1].astype(np.int32)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main(parent: int, num_parts: int, nested: bool) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
        if os.getppid() != parent:
            raise SystemExit(2)
    with os.fdopen(os.dup(1), "wb") as found:
        os.dup2(2, 1)  # for what METIS prints
        import pymetis

        arrays = [np.load(sys.stdin.buffer, allow_pickle=False) for _ in range(4)]
        dtype = pymetis.zero_copy_dtype()
        indptr, indices = (x.astype(dtype, copy=False) for x in arrays[:2])
        sizes, edge_weights = (x if len(x) else None for x in arrays[2:])
        adjacency = pymetis.CSRAdjacency(indptr, indices)
        options = pymetis.Options(seed=0)
        recursive = True if nested else None  # None: for up to eight parts
        _, parts = pymetis.part_graph(
            num_parts,
            adjacency=adjacency,
            vweights=sizes,
            eweights=edge_weights,
            recursive=recursive,
            options=options,
        )
        if len(parts) != len(indptr) - 1:
            raise RuntimeError(f"expected the parts of {len(indptr) - 1} nodes, got {len(parts)}")
        np.save(found, np.asarray(parts, np.int32))


if __name__ == "__main__":
    sys.path[:] = sys.argv[4:]
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
