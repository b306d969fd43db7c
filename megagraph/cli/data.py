"""``megagraph data``: graph stores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megagraph.cli.job import Job
from megagraph.data.options import FeatureForm, Tables

if TYPE_CHECKING:
    from megagraph.data.graph import Graph

_NO_TABLES = Tables()


def import_data(
    dataset: tyro.conf.Positional[str | None] = None,
    /,
    *,
    out: Path,
    tables: tyro.conf.OmitArgPrefixes[Tables] = _NO_TABLES,
    like: Path | None = None,
    root: Path | None = None,
    features: FeatureForm = "same",
    seed: int = 0,
) -> Job:
    """Make a graph store, a folder that is a --dataset of its own, from a data set or from tables.

    Args:
        dataset: what --dataset of megagraph train takes; none for tables.
        out: folder of the store; a store that is there already is replaced once the new one is complete.
        tables: files of a graph.
        like: a store from tables: the same classes, and features made as there; to predict with what was trained on it.
        root: folder of the named data sets.
        features: how to keep them; "same" is as they come.
        seed: of the synthetic graph; of a data set with several splits of its own (ten, mostly), which one is kept.
    """
    if dataset is None and (root is not None or seed):
        raise ValueError("root and seed are of a data set, got them beside tables, which have neither; leave them out")
    if dataset is not None and (tables != _NO_TABLES or like is not None):
        raise ValueError(f"expected a data set or tables, got {dataset} and flags of tables")

    def job() -> None:
        from megagraph.data.datasets import load_graph
        from megagraph.data.header import describe
        from megagraph.data.store import write_store
        from megagraph.data.tables import read_tables

        if dataset is None:
            graph = read_tables(tables, None if like is None else _from_tables(like))
            graph = replace(graph, name=out.resolve().name)  # the file of edges is called alike for all
        else:
            graph = load_graph(dataset, root, seed)
        write_store(graph, out, features)
        print(describe(out))

    return Job(job)


def _from_tables(folder: Path) -> Graph:
    from megagraph.data.store import open_store

    graph = open_store(folder)
    if graph.names is None:
        raise ValueError(f"expected a store that was made from tables, got {folder}, which has no names of columns")
    return graph


def export_data(dataset: tyro.conf.Positional[str], /, *, out: Path, root: Path | None = None) -> Job:
    """Write a graph as tables, nodes.csv and edges.csv.

    Args:
        dataset: what --dataset of megagraph train takes.
        out: folder of the two files.
        root: folder of the named data sets.
    """

    def job() -> None:
        from megagraph.data.datasets import load_graph
        from megagraph.data.tables import write_tables

        print(*write_tables(load_graph(dataset, root), out), sep="\n")

    return Job(job)


def data_info(folder: tyro.conf.Positional[Path], /, verify: bool = False) -> Job:
    """Say what a graph store holds.

    Args:
        folder: of the store.
        verify: read all of it: checksums, ranges, order, and both directions of every edge.
    """

    def job() -> None:
        from megagraph.data.header import describe
        from megagraph.data.store import verify_store

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
        from megagraph.data.generate import generate
        from megagraph.data.header import describe

        generate(out, nodes=nodes, edges=edges, features=features, classes=classes, seed=seed)
        print(describe(out))

    return Job(job)


def data(
    job: tyro.conf.OmitSubcommandPrefixes[
        tyro.conf.OmitArgPrefixes[
            Annotated[Any, tyro.conf.subcommand("import", constructor=import_data)]
            | Annotated[Any, tyro.conf.subcommand("export", constructor=export_data)]
            | Annotated[Any, tyro.conf.subcommand("generate", constructor=generate_data)]
            | Annotated[Any, tyro.conf.subcommand("info", constructor=data_info)]
        ]
    ],
) -> Job:
    """Graph stores: graphs on disk, mapped into memory instead of read."""
    return job
