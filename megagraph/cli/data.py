"""``megagraph data``: graph stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from megagraph.cli.job import Job
from megagraph.data.datasets import load_graph
from megagraph.data.generate import generate
from megagraph.data.header import describe
from megagraph.data.store import FeatureForm, verify_store, write_store


def import_data(
    dataset: tyro.conf.Positional[str], /, *, out: Path, root: Path | None = None, features: FeatureForm = "same"
) -> Job:
    """Make a graph store, a folder that is a --dataset of its own, from a data set.

    Args:
        dataset: what --dataset of megagraph train takes.
        out: folder of the store; a store that is there already is replaced once the new one is complete.
        root: folder of the named data sets.
        features: how to keep them; "same" is as they come.
    """

    def job() -> None:
        write_store(load_graph(dataset, root), out, features)
        print(describe(out))

    return Job(job)


def data_info(folder: tyro.conf.Positional[Path], /, verify: bool = False) -> Job:
    """Say what a graph store holds.

    Args:
        folder: of the store.
        verify: read all of it: checksums, ranges, order, and both directions of every edge.
    """

    def job() -> None:
        print(describe(folder))
        if verify:
            verify_store(folder)
            print("verified: checksums, ranges, order of neighbours, both directions of every edge")

    return Job(job)


def generate_data(*, nodes: int, edges: int, features: int, classes: int, out: Path, seed: int = 0) -> Job:
    """Make a synthetic graph of any size as a graph store, with hubs and with blocks that a partition can find.

    Args:
        nodes: of the graph.
        edges: undirected, none twice; exactly so many.
        features: of a node.
        classes: a class is a run of blocks of about 300 nodes.
        out: folder of the store; a store that is there already is replaced once the new one is complete.
        seed: the same one gives the same graph.
    """

    def job() -> None:
        generate(out, nodes=nodes, edges=edges, features=features, classes=classes, seed=seed)
        print(describe(out))

    return Job(job)


def data(
    job: tyro.conf.OmitSubcommandPrefixes[
        tyro.conf.OmitArgPrefixes[
            Annotated[Any, tyro.conf.subcommand("import", constructor=import_data)]
            | Annotated[Any, tyro.conf.subcommand("generate", constructor=generate_data)]
            | Annotated[Any, tyro.conf.subcommand("info", constructor=data_info)]
        ]
    ],
) -> Job:
    """Graph stores: graphs on disk, mapped into memory instead of read."""
    return job
