import os
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# a worker and the processes that it starts have one core: where there are more threads than cores, those of OpenMP
# that wait for each other take what the others need, and a training takes a hundred times as long
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests import shortcuts

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: the kernels run on CPU tensors
    with suppress(ImportError):  # it has wheels for Linux only
        from tests.interpreter import patch_once

        patch_once()


# an example may import a library, or wait for the machine
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_addoption(parser):
    parser.addoption(
        "--data-root",
        type=Path,
        default=os.environ.get("MEGAGRAPH_DATA"),
        help="folder of raw data sets as PyG lays them out (CiteSeer/raw/..., Computers/raw/...); "
        "default $MEGAGRAPH_DATA. Tests on real graphs are skipped without it.",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """One worker of xdist starts the processes of tests/ranks.py, and one makes what the tests of a module share."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if "ranks" in item.function.__code__.co_names:
            item.add_marker(pytest.mark.xdist_group("ranks"))
        elif any(found[-1].scope == "module" for found in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.fixture(scope="session", autouse=True)
def _parts(tmp_path_factory, worker_id):
    """The folder of ``tests.shortcuts``, one for all workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "parts"
    folder.mkdir(exist_ok=True)
    os.environ[shortcuts.FOLDER] = str(folder)


@pytest.fixture(autouse=True)
def _shortcuts():
    """From the second training of a process on: what trains is imported by who trains."""
    shortcuts.take()


@pytest.fixture(scope="session")
def data_root(request, tmp_path_factory) -> Path:
    """A writable copy of the raw data sets: PyG writes a processed/ folder beside each raw/."""
    root = request.config.getoption("--data-root")
    if root is None:
        pytest.skip("no real graphs: pass --data-root=FOLDER or set MEGAGRAPH_DATA")
    copy = tmp_path_factory.mktemp("data")
    shutil.copytree(Path(root), copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("processed"))
    return copy


_SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_RJEM_MALLOC_CONF")  # pytest, torch, polars


def _state() -> dict[str, object]:
    """What a test must leave as it was, as the next test of this process finds it."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in _SET_BY_OTHERS},
        "working directory": os.getcwd(),
        "signal handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "wakeup descriptor of signals": wakeup,
        "process group": dist.is_initialized(),
        "timeout of process groups": distributed_c10d.default_pg_timeout,
        "default dtype": torch.get_default_dtype(),
        "threads of torch": torch.get_num_threads(),
        "gradients on": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "numpy's errors": np.geterr(),
        "child processes": set(_kept_children()),
        "threads that are no daemons": [t.name for t in threading.enumerate() if not t.daemon],
    }


_SERVERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # they stay for the next test


def _kept_children() -> list[int]:
    """But for the servers: what the one for forks has started looks like it, and counts."""
    own = _children("self")
    forked = [child for server in own if _command(server) == _SERVERS[1] for child in _children(server)]
    return [child for child in own if _command(child) not in _SERVERS] + forked


def _children(pid: int | str) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found += map(int, task.read_text().split())
    return found


def _command(pid: int) -> str:
    """Which of the servers of multiprocessing it is, or its command line."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return _SERVERS[0]  # gone by now
    return next((server for server in _SERVERS if server in text), text)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    before = _state()
    yield
    after = _state()
    changed = [name for name, value in before.items() if after[name] != value]
    assert not changed, "left behind: " + "; ".join(f"{name} {before[name]} -> {after[name]}" for name in changed)
