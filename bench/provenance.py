"""Where rows go, with where they come from: device, versions, commit, and SHA-256 of every source they depend on.

Sources are the files of this checkout that the process has imported, and the data that those read. Their list lies
beside the rows as `sources/DIGEST.sha256`, which `sha256sum -c` reads, and a row names the digest. They say on a
checkout without history what a commit says on one with it; `python -m bench.stale` tells which rows they have left
behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from megagraph.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
QUICK = "MEGAGRAPH_BENCH_QUICK" in os.environ  # python -m bench.paper --quick sets these three
GENERATED = "MEGAGRAPH_BENCH_GENERATED" in os.environ  # graphs are not the real ones
RESULTS = Path(os.environ.get("MEGAGRAPH_BENCH_ROWS", Path(__file__).parent / "results"))
PACKAGE = ("kernels", "megagraph")
FOLDERS = (*PACKAGE, "bench", "examples", "tests")
READ = {"kernels/tiles.py": "kernels/tiles.json"}
_STARTED = time.time()
T = TypeVar("T")


def sized(full: T, quick: T) -> T:
    """A setting of a bench; ``quick`` where all that is asked is whether every path of it runs."""
    return quick if QUICK else full


def device_folder() -> str:
    """Of rows that are measured here: cpu, nvidia-h200, ..."""
    return torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"


def write_rows(
    name: str, rows: Iterable[Mapping[str, Any]], folder: str | None = None, children: Collection[str] = ()
) -> Path:
    """Write rows to bench/results/FOLDER/NAME.json, each with its origin; those that have one keep it.

    Args:
        folder: by default the device's, which is cpu, nvidia-h200, ...
        children: folders whose programs ran in processes of their own, all of whose files count as sources.
    """
    path = RESULTS / (folder or device_folder()) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    own = origin(children)
    partial = path.with_suffix(".partial")  # what was measured survives whatever ends the run
    partial.write_text(json.dumps([with_origin(row, own) for row in rows], indent=1) + "\n")
    partial.replace(path)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Of a file: a list of rows, a row a line, a judgement, or a cost model with the origin of its rows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    found = json.loads(text)
    return found if isinstance(found, list) else [found.get("origin", {}) | found]


def append_row(name: str, row: Mapping[str, Any]) -> None:
    """Add a row to bench/results/cpu/NAME.jsonl, with its origin; several processes may do so at once."""
    path = RESULTS / "cpu" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(with_origin(row, origin())) + "\n"
    with path.open("a") as file:
        file.write(line)


def write_judgement(path: Path, found: Mapping[str, Any], *judged: Path) -> None:
    """Write what rows say, with SHA-256 of their files in place of an origin: nothing was measured now."""
    own = {"from_rows": from_rows(*judged), "sources": origin()["sources"]}
    path.write_text(json.dumps({**found, **own}, indent=1) + "\n")


def from_rows(*paths: Path) -> dict[str, str]:
    """SHA-256 of files of rows, for what is made of them."""
    return {path.relative_to(RESULTS).as_posix(): sha256(path) for path in paths}


def origin(children: Collection[str] = (), results: Path | None = None) -> dict[str, Any]:
    """Where a row that was measured now comes from; the list of its sources is written below ``results``."""
    paths = imported(children)
    text = "".join(f"{sha256(path)}  {path.relative_to(ROOT).as_posix()}\n" for path in paths)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = listing(results or RESULTS, digest)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = provenance()
    if any(path.stat().st_mtime > _STARTED for path in paths):  # another file than the one that ran
        found["commit"] = found["commit"].removesuffix("-dirty") + "-dirty"
    marks = {name: True for name, holds in (("quick", QUICK), ("generated", GENERATED)) if holds}
    return found | {"sources": digest} | marks


def with_origin(row: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The row, with what it lacks of an origin."""
    if "sources" in row:
        return dict(row)
    return {**own, **row} if "commit" in row else {**row, **own}


def imported(children: Collection[str] = ()) -> list[Path]:
    """Files of this checkout that the process has imported, what those read, and all Python files of ``children``.

    Raises:
        RuntimeError: the package is that of another checkout.
    """
    names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    found = {path for name in names if name and (path := _source(name, ROOT)) is not None}
    if ROOT / "megagraph" / "provenance.py" not in found:
        other = sys.modules["megagraph"].__file__
        raise RuntimeError(f"expected the package of {ROOT}, whose sources rows name, got {other}; set PYTHONPATH")
    found |= {path.resolve() for folder in children for path in (ROOT / folder).rglob("*.py")}
    return sorted(found | {ROOT / data for reader, data in READ.items() if ROOT / reader in found})


@cache
def _source(name: str, root: Path) -> Path | None:
    """The file of a module, where it is one of the checkout's; processes have thousands of others."""
    path = Path(name).resolve()
    return path if path.is_relative_to(root) and path.relative_to(root).parts[0] in FOLDERS else None


def listing(results: Path, digest: str) -> Path:
    return results / "sources" / f"{digest}.sha256"


def changed(row: Mapping[str, Any], results: Path | None = None, root: Path = ROOT) -> list[str]:
    """Sources of a row whose files are others now, or gone.

    Raises:
        FileNotFoundError: the list of its sources is not there.
    """
    lines = listing(results or RESULTS, row["sources"]).read_text().splitlines()
    sources = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return [name for name, digest in sources.items() if not (root / name).exists() or sha256(root / name) != digest]


def current(row: Mapping[str, Any]) -> bool:
    """Whether a row names its sources, and they are as they were."""
    return "sources" in row and not changed(row)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
