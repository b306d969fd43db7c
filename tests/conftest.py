import os
import shutil
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: the kernels run on CPU tensors


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
    for item in items:
        if "ranks" in item.function.__code__.co_names:  # one worker of xdist starts the processes of tests/ranks.py
            item.add_marker(pytest.mark.xdist_group("ranks"))
            item.add_marker(pytest.mark.timeout(900))  # the first of them waits for all cases of its world size


@pytest.fixture(scope="session")
def data_root(request, tmp_path_factory) -> Path:
    """A writable copy of the raw data sets: PyG writes a processed/ folder beside each raw/."""
    root = request.config.getoption("--data-root")
    if root is None:
        pytest.skip("no real graphs: pass --data-root=FOLDER or set MEGAGRAPH_DATA")
    copy = tmp_path_factory.mktemp("data")
    shutil.copytree(Path(root), copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("processed"))
    return copy
