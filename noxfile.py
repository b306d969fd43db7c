"""What .ci/run does not try: other versions (nox -s short), and the guides as a newcomer types them (nox -s guides).

One environment at a time, removed when its session has ended: each takes 2 GB, and 7 where TORCH_INDEX is empty and
torch comes from PyPI, built for GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nox

nox.options.sessions = ["short"]
nox.options.default_venv_backend = "venv"

TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
# Python, torch, Triton, NumPy: oldest to newest of each
PAIRINGS = [
    ("3.10", "2.11", "3.6", "1.26"),
    ("3.11", "2.11", "3.6", "2"),
    ("3.12", "2.12", "3.7", "1.26"),
    ("3.12", "2.13", "3.7", "2"),
    ("3.13", "2.12", "3.7", "2"),
    ("3.13", "2.13", "3.7", "2"),
]
SHORT = [
    *("tests/test_package.py", "tests/test_flags.py", "tests/test_files.py", "tests/test_transforms.py"),
    *("tests/attention/test_sums.py", "tests/attention/test_multihead.py", "tests/attention/test_operator_input.py"),
    *(
        "tests/test_wrong_input.py",
        "tests/test_readme.py::test_the_ring_example_has_the_gradients_of_one_process_on_two",
    ),
    *("tests/models", "tests/data/test_tables.py", "tests/planner/test_plan.py", "tests/test_run.py"),
]


@nox.session
@nox.parametrize("python,torch,triton,numpy", PAIRINGS, ids=["-".join(names) for names in PAIRINGS])
def short(session: nox.Session, torch: str, triton: str, numpy: str) -> None:
    """A part of the tests, at most 6 minutes, on one pairing of versions."""
    try:
        versions = [f"torch=={torch}.*", f"numpy=={numpy}.*"]
        if TORCH_INDEX:  # torch for GPUs, from PyPI, names a Triton of its own
            versions.append(f"triton=={triton}.*")
            session.install(versions[0], "--index-url", TORCH_INDEX)
        session.install(*versions, "-e", ".[test]")
        session.run("pytest", "-q", "-n", "2", "--dist", "loadgroup", *(session.posargs or SHORT))
    finally:
        shutil.rmtree(session.virtualenv.location)


GUIDES = ("README", "docs/own-graph", "docs/training", "docs/processes", "docs/planning", "docs/reliability")
# several machines, and what .ci/run does
LEFT_OUT = ("--nnodes", "srun", "#SBATCH", "export TORCHELASTIC", "HEAD=", "pytest")
SMALLER = {"2_449_029": "2_000", "61_859_140": "8_000"}
# what the words in capitals of the guides stand for: a generated graph of 2,000 nodes
FILES = """
import numpy as np, scipy.sparse as sp
from pathlib import Path
from megagraph.data.datasets import synthetic_graph
from megagraph.data.store import write_store
from megagraph.data.tables import write_tables
graph = synthetic_graph()
write_tables(graph, Path())
for name in ("STORE", "BIG"):
    write_store(graph, Path(name))
square = (graph.num_nodes, graph.num_nodes)
parts = {"attr": sp.csr_array(graph.features)}
parts["adj"] = sp.csr_array((np.ones(len(graph.indices)), graph.indices, graph.indptr), shape=square)
names = ("data", "indices", "indptr", "shape")
arrays = {f"{key}_{name}": np.array(getattr(part, name)) for key, part in parts.items() for name in names}
np.savez("FILE.npz", labels=graph.labels, **arrays)
"""


def commands(page: str, checkout: Path, data: str | None) -> list[str]:
    """Commands of the blocks of a page, each on one line."""
    blocks = re.findall(r"```bash\n(.*?)```", Path(f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    text = re.sub(r'--8<-- "(.*)"', rf"bash {checkout}/\1", "".join(blocks)).replace("\\\n", " ")
    left_out = LEFT_OUT if data else (*LEFT_OUT, "--root DATA", "runs/citeseer")
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if not any(word in line for word in left_out)]


@nox.session
def guides(session: nox.Session) -> None:
    """Every command of README and of the guides, as they stand there, in the environment that README makes.

    Those with --root DATA need MEGAGRAPH_DATA, a folder of raw data sets. An argument: a page, as in docs/planning.
    """
    top, data = Path(session.create_tmp()).resolve(), os.environ.get("MEGAGRAPH_DATA")
    checkout = top / "megagraph"
    pages = {page: commands(page, checkout, data) for page in session.posargs or GUIDES}
    (install,) = (line for line in commands("README", checkout, data) if "pip install" in line)
    paths = [str(checkout / ".venv/bin"), session.virtualenv.bin, os.environ["PATH"]]
    env = {"PATH": os.pathsep.join(paths), "PYTHONPATH": ""}
    shutil.rmtree(top)
    top.mkdir()
    session.run("git", "clone", "-q", ".", str(checkout), external=True)
    failed = []
    try:
        with session.chdir(checkout):
            if TORCH_INDEX:  # as docs/gpu.md says for machines without a GPU
                session.run("python3", "-m", "venv", ".venv", env=env, external=True)
                session.run("pip", "install", "-q", "torch<2.14", "--index-url", TORCH_INDEX, env=env, external=True)
            session.run("bash", "-ec", install, env=env, external=True)
        for page, lines in pages.items():
            place = top / Path(page).name
            place.mkdir()
            if data:
                shutil.copytree(Path(data, "CiteSeer/raw"), place / "DATA/CiteSeer/raw")
            with session.chdir(place):
                python = str(checkout / ".venv/bin/python")  # not that of nox
                session.run(python, "-c", FILES, env=env, external=True)
                for line in (line for line in lines if line != install):
                    try:
                        session.run("bash", "-ec", line, env=env, external=True)
                    except nox.command.CommandFailed:
                        failed.append(f"{page}: {line}")
    finally:
        shutil.rmtree(top)
        shutil.rmtree(session.virtualenv.location)
    if failed:
        session.error("\n".join(failed))
