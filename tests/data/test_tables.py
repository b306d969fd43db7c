"""Graphs from tables: ids, columns and classes are those of the files, and what cannot be read is said."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars
import pytest

import megagraph as mg
from megagraph import files
from megagraph.cli import main
from megagraph.data.columns import MAX_CATEGORIES
from megagraph.data.datasets import synthetic_graph
from megagraph.data.header import describe
from megagraph.data.store import open_store, write_store
from megagraph.data.tables import Tables, read_tables, write_tables

NODES = """name,age,city,member,label,split
007,3,rome,true,red,train
7,,paris,false,blue,val
x y,5,,true,,
"z,1",1,rome,true,red,TEST
"""
EDGES = 'from,to\n007,7\nx y,"z,1"\n"z,1",007\n7,007\n7,7\n'
IDS = ["007", "7", "x y", "z,1"]
BARE = 'id,x\n007,1\n7,2\nx y,2\n"z,1",3\n'
SEVERAL = 'id,x,a,label:b,b c\n007,1,1,true,0\n7,2,,FALSE,1\nx y,2,,,\n"z,1",3,0,True,1\n'
LABELS = [[1, 1, 0], [-1, 0, 1], [-1, -1, -1], [0, 1, 1]]


def write(folder, **contents):
    """NAME_SUFFIX=text."""
    paths = {}
    for name, text in contents.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        paths[name.split("_")[0]] = path
    return Tables(**paths)


def ids_of(graph):
    return [graph.names.ids[node] for node in range(graph.num_nodes)]


def test_ids_columns_classes_and_split(tmp_path):
    graph = read_tables(write(tmp_path, nodes_csv=NODES, edges_csv=EDGES))
    assert ids_of(graph) == IDS  # as they stand there, not numbers
    assert graph.indptr.tolist() == [0, 2, 3, 4, 6] and graph.indices.tolist() == [1, 3, 0, 3, 0, 2]
    assert graph.names.classes == ("blue", "red") and graph.num_classes == 2
    assert graph.labels.tolist() == [1, 0, -1, 1]
    assert [part.tolist() for part in (graph.split.train, graph.split.val, graph.split.test)] == [[0], [1], [3]]
    spread = (8 / 3) ** 0.5  # of 3, 5, 1
    expected = np.array(
        # age and whether it is missing; paris, rome, missing; member, three of four
        [
            [0, 0, 0, 1, 0, 1 / 3**0.5],
            [0, 1, 1, 0, 0, -(3**0.5)],
            [2 / spread, 0, 0, 0, 1, 1 / 3**0.5],
            [-2 / spread, 0, 0, 1, 0, 1 / 3**0.5],
        ]
    )
    np.testing.assert_allclose(graph.features, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["csv_gz", "tsv", "tsv_gz", "parquet"])
def test_every_kind_of_file_gives_the_same_graph(tmp_path, kind):
    want = read_tables(write(tmp_path, nodes_csv=NODES, edges_csv=EDGES))
    if kind == "parquet":
        given = {}
        for name, text in (("nodes", NODES), ("edges", EDGES)):
            given[name] = tmp_path / f"{name}.parquet"
            words = {"name": polars.String} if name == "nodes" else {"from": polars.String, "to": polars.String}
            polars.read_csv(text.encode(), schema_overrides=words).write_parquet(given[name])
        tables = Tables(**given)
    else:
        separator = "," if kind.startswith("csv") else "\t"
        rows = {"nodes": NODES, "edges": EDGES}
        texts = {
            f"{name}_{kind}": polars.read_csv(text.encode(), infer_schema=False).write_csv(separator=separator)
            for name, text in rows.items()
        }
        tables = write(tmp_path, **texts)
    assert_same(read_tables(tables), want)


def assert_same(got, want):
    assert ids_of(got) == ids_of(want) and got.names.classes == want.names.classes
    assert got.names.columns == want.names.columns
    for name in ("indptr", "indices", "features", "labels"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_edges_alone_and_labels_of_their_own(tmp_path):
    edges = "a,b\nn2,n10\nn10,n3\n"
    graph = read_tables(write(tmp_path, edges_csv=edges, labels_csv="who,what\nn3,10\nn2,9\n"))
    assert ids_of(graph) == ["n10", "n2", "n3"] and graph.features.shape == (3, 0)
    assert graph.names.classes == ("9", "10")  # numbers in the order of their values
    assert graph.labels.tolist() == [-1, 0, 1]
    unlabelled = read_tables(write(tmp_path, edges_csv=edges, nodes_csv="id,x\nn2,1\nn10,2\nn3,4\n"))
    assert unlabelled.num_classes == 0 and unlabelled.labels.tolist() == [-1] * 3


def test_integers_in_parquet_are_ids_and_number_columns(tmp_path):
    polars.DataFrame({"id": [5, 3], "x": [1.0, 2.0]}).write_parquet(tmp_path / "nodes.parquet")
    polars.DataFrame({"a": [3], "b": [5], "w": [1]}).write_parquet(tmp_path / "edges.parquet")
    graph = read_tables(Tables(nodes=tmp_path / "nodes.parquet", edges=tmp_path / "edges.parquet"))
    assert ids_of(graph) == ["5", "3"] and graph.features.tolist() == [[-1.0], [1.0]]


def test_another_graph_gets_the_columns_and_classes_of_the_first(tmp_path):
    first = read_tables(write(tmp_path, nodes_csv=NODES, edges_csv=EDGES))
    other = "name,member,city,age\nq,true,rome,7\n007,false,oslo,3\n"
    graph = read_tables(write(tmp_path, nodes_csv=other, edges_csv="a,b\nq,007\n"), like=first)
    spread = (8 / 3) ** 0.5
    expected = [[4 / spread, 0, 0, 1, 0, 1 / 3**0.5], [0, 0, 0, 0, 1, -(3**0.5)]]  # oslo is none of the values
    np.testing.assert_allclose(graph.features, expected, rtol=1e-6)
    assert graph.names.classes == ("blue", "red") and graph.num_classes == 2


@pytest.mark.parametrize(
    ("given", "other", "features", "labels"),
    [
        # words stay words where all that is left of them are numbers, or true and false
        ("01,n/k,02", "02,01,01", [[0, 1, 0], [1, 0, 0], [1, 0, 0]], None),
        ("True,False,perhaps", "False,True,False", [[1, 0, 0], [0, 1, 0], [1, 0, 0]], None),
        ("1,2,two", "1,2.5,1", [[1, 0, 0], [0, 0, 0], [1, 0, 0]], None),
        # so do classes, which may be spelled otherwise
        ("01,02,none", "02,01,", None, [1, 0, -1]),
        ("1,2,2", "1.0,,2", None, [0, -1, 1]),
        ("1.0,,2", "2,01,1", None, [1, 0, 0]),
        ("True,False,true", "False,TRUE,false", None, [0, 1, 0]),
    ],
)
def test_words_of_the_first_graph_are_words_in_another(tmp_path, given, other, features, labels):
    name = "label" if labels else "zip"

    def read(values, like=None):
        rows = "".join(f"{i},{value}\n" for i, value in enumerate(values.split(",")))
        return read_tables(write(tmp_path, nodes_csv=f"id,{name}\n{rows}", edges_csv="a,b\n0,1\n1,2\n"), like)

    graph = read(other, read(given))
    assert graph.labels.tolist() == (labels or [-1] * 3) and graph.features.tolist() == (features or [[]] * 3)


def test_features_of_numbers_of_any_size(tmp_path):
    def read(*values, like=None):
        rows = "".join(f"{i},{value}\n" for i, value in enumerate(values))
        return read_tables(write(tmp_path, nodes_csv=f"id,f\n{rows}", edges_csv="a,b\n0,1\n1,2\n"), like)

    constant = read(0.1, 0.1, 0.1)  # whose mean is not quite 0.1
    assert constant.features.ravel().tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(read(0.1, 0.2, 0.1, like=constant).features.ravel(), [0, 0.1, 0], atol=1e-8)
    want = read(1, -1, 0.5).features
    for size in (1e-200, 1e200, 1e308):
        np.testing.assert_allclose(read(size, -size, size / 2).features, want, rtol=1e-6)
    with pytest.raises(ValueError, match=r"finite numbers in column f of .*, got -1e\+100 in row 3, .*scale the"):
        read(1, -1e100, 2, like=constant)


def test_a_store_keeps_names_and_exports_them(tmp_path):
    graph = read_tables(write(tmp_path, nodes_csv=NODES, edges_csv=EDGES))
    write_store(graph, tmp_path / "store")
    stored = open_store(tmp_path / "store")
    assert_same(stored, graph)
    nodes, edges = write_tables(stored, tmp_path / "tables")
    again = read_tables(Tables(nodes=nodes, edges=edges))
    assert ids_of(again) == IDS and again.names.classes == graph.names.classes
    np.testing.assert_array_equal(again.labels, graph.labels)
    np.testing.assert_array_equal(again.indices, graph.indices)
    np.testing.assert_array_equal(again.split.test, graph.split.test)
    assert edges.read_text().count("\n") == 1 + graph.num_edges // 2


def test_several_columns_are_several_labels(tmp_path):
    tables = replace(write(tmp_path, nodes_csv=SEVERAL, edges_csv=EDGES), label=("a", "label:b", "b c"))
    graph = read_tables(tables)
    assert graph.multi_label and graph.names.classes == ("a", "b", "b c") and graph.num_classes == 3
    assert graph.labels.tolist() == LABELS and graph.labels.dtype == np.int8
    assert [column.name for column in graph.names.columns] == ["x"]
    write_store(graph, tmp_path / "store")
    stored = open_store(tmp_path / "store")
    assert_same(stored, graph)
    said = describe(tmp_path / "store")
    assert "1 features (float32), 3 labels, several a node, no split" in said
    assert "\nlabels: a, b, b c\n" in said
    nodes, edges = write_tables(stored, tmp_path / "tables")
    assert nodes.read_text().splitlines()[0] == "id,label:a,label:b,label:b c,x0"
    again = read_tables(Tables(nodes=nodes, edges=edges))  # no flags: columns that are called label:NAME
    assert again.names.classes == graph.names.classes and again.labels.tolist() == LABELS
    other = read_tables(replace(tables, label=("b c", "a", "label:b")), like=graph)
    assert other.names.classes == ("a", "b", "b c") and other.labels.tolist() == LABELS


def test_several_rows_of_an_id_are_several_labels(tmp_path):
    given = dict(nodes_csv=BARE, edges_csv=EDGES)
    graph = read_tables(write(tmp_path, **given, labels_csv='id,l\n7,10\n007,9\n7,9\n"z,1",\n'))
    assert graph.multi_label and graph.names.classes == ("9", "10")  # numbers in the order of their values
    assert graph.labels.tolist() == [[1, 0], [1, 1], [-1, -1], [-1, -1]]
    once = write(tmp_path, **given, labels_csv="id,l\n7,10\n")
    assert read_tables(once).labels.tolist() == [-1, 0, -1, -1]  # one class a node
    assert read_tables(once, like=graph).labels.tolist() == [[-1, -1], [0, 1], [-1, -1], [-1, -1]]
    bare = read_tables(write(tmp_path, **given), like=graph)
    assert bare.labels.tolist() == [[-1, -1]] * 4 and bare.names.classes == ("9", "10")  # to predict


@pytest.mark.parametrize(
    ("changes", "label", "message"),
    [
        (dict(nodes_csv=SEVERAL), ("a", "b c"), "expected the labels a, b, b c in column a, b c of .*, got a, b c"),
        (dict(nodes_csv=SEVERAL), ("a",), "expected several labels a node in column a of .*, as in .*, got one class"),
        (dict(labels_csv="id,l\n7,d\n"), (), r"expected the classes a, b, b c in .*labels\.csv, got also d"),
    ],
)
def test_other_labels_than_those_of_the_first_graph(tmp_path, changes, label, message):
    first = replace(write(tmp_path, nodes_csv=SEVERAL, edges_csv=EDGES), label=("a", "label:b", "b c"))
    graph = read_tables(first)
    tables = write(tmp_path, **dict(nodes_csv=BARE, edges_csv=EDGES) | changes)
    with pytest.raises(ValueError, match=message):
        read_tables(replace(tables, label=label), like=graph)


def test_several_labels_where_the_first_graph_has_one(tmp_path):
    first = read_tables(write(tmp_path, nodes_csv=NODES, edges_csv=EDGES))
    tables = write(tmp_path, nodes_csv=BARE, edges_csv=EDGES, labels_csv="id,l\n7,red\n7,blue\n")
    with pytest.raises(ValueError, match=r"expected one class a node in .*labels\.csv, as in .*, got several labels"):
        read_tables(tables, like=first)


def test_quotes_in_the_name_of_a_column(tmp_path):
    nodes = '"an ""id""",x,"label:""hot""","so ""cold"""\n007,1,1,0\n7,2,0,1\nx y,2,,0\n"z,1",3,1,1\n'
    given = replace(write(tmp_path, nodes_csv=nodes, edges_csv=EDGES), id='an "id"', label=('label:"hot"', 'so "cold"'))
    graph = read_tables(given)
    assert ids_of(graph) == IDS and graph.names.classes == ('"hot"', 'so "cold"')


def test_lists_in_a_column_are_no_class(tmp_path):
    polars.DataFrame({"id": ["7", "8"], "label": [["a"], ["a", "b"]]}).write_parquet(tmp_path / "nodes.parquet")
    tables = replace(write(tmp_path, edges_csv="a,b\n7,8\n"), nodes=tmp_path / "nodes.parquet")
    with pytest.raises(ValueError, match=r"expected a class in every row of column label .*, got List\(String\): sev"):
        read_tables(tables)


def test_numbers_are_exported_as_they_are(tmp_path):
    graph = synthetic_graph(num_nodes=50, in_features=3, seed=0)
    nodes, _ = write_tables(graph, tmp_path)
    table = polars.read_csv(nodes)
    np.testing.assert_array_equal(table["label"].to_numpy(), graph.labels)
    got = table.select("x0", "x1", "x2").to_numpy()
    np.testing.assert_allclose(got, graph.features, rtol=1e-6)


@pytest.mark.parametrize("change", ["classes", "columns", "ids", "array"])
def test_a_store_whose_names_are_not_those_of_its_graph(tmp_path, change):
    write_store(read_tables(write(tmp_path, nodes_csv=NODES, edges_csv=EDGES)), tmp_path / "store")
    path = tmp_path / "store/header.json"
    header = json.loads(path.read_text())
    if change == "ids":
        header["arrays"]["ids_indptr"]["shape"] = [4]
    elif change == "array":
        del header["arrays"]["ids"]
    else:
        header["names"][change] = header["names"][change][:1]
    header.pop("checksum", None)
    files.write_json(path, header)
    with pytest.raises(ValueError, match="import the graph again"):
        open_store(tmp_path / "store")


def test_what_counts_as_no_label_in_parquet_is_that_of_csv(tmp_path):
    tables = write(tmp_path, edges_csv=EDGES)
    ids = {"id": IDS}

    def read(name, columns, **changes):
        polars.DataFrame(columns).write_parquet(tmp_path / f"{name}.parquet")
        return read_tables(replace(tables, **{name: tmp_path / f"{name}.parquet"}, **changes))

    numbers, words = [0.0, 1.0, float("nan"), 1.0], ["a", "", "NA", "b"]
    for given, labels, classes in (
        (numbers, [0, 1, -1, 1], ("0.0", "1.0")),
        (words, [0, -1, -1, 1], ("a", "b")),
    ):
        for graph in (read("nodes", ids | {"label": given}), read("labels", ids | {"l": given})):
            own = [graph.labels[ids_of(graph).index(name)] for name in IDS]
            assert graph.names.classes == classes and own == labels
    several = read("nodes", ids | {"a": ["1", "", "NA", "0"], "b": numbers}, label=("a", "b"))
    assert several.labels.tolist() == [[1, 0], [-1, 1], [-1, -1], [0, 1]]


def test_names_of_columns_in_parquet_may_be_those_of_nodes(tmp_path):
    polars.DataFrame({"0": [0, 1], "1": [1, 2]}).write_parquet(tmp_path / "edges.parquet")
    assert read_tables(Tables(edges=tmp_path / "edges.parquet")).num_edges == 4


def test_a_column_may_be_called_as_its_class(tmp_path):
    labels = "id,fraud\n007,fraud\n7,fine\n"
    graph = read_tables(write(tmp_path, nodes_csv=BARE, edges_csv=EDGES, labels_csv=labels))
    assert graph.names.classes == ("fine", "fraud") and graph.labels.tolist() == [1, 0, -1, -1]


BAD = {
    "edges without a line of names": (
        dict(edges_csv=EDGES.partition("\n")[2]),
        {},
        r"expected a first line of names in .*edges\.csv, got 007,7, which reads like all others; add one",
    ),
    "edges alone without a line of names": (
        dict(edges_csv="1,2\n2,3\n3,1\n"),
        {"nodes": None},
        r"expected a first line of names in .*edges\.csv, got 1,2, which reads like all others",
    ),
    "labels without a line of names": (
        dict(nodes_csv=BARE, labels_csv="007,a\n7,a\nx y,b\n"),
        {},
        r"expected a first line of names in .*labels\.csv, got 007,a, which .*; add one, such as id,class, or",
    ),
    "a class that is infinite": (
        dict(nodes_csv="id,label\n007,0\n7,inf\nx y,1\n", edges_csv="a,b\n7,007\n"),
        {},
        r"expected classes in column label of .*nodes\.csv, got numbers such as inf: regression",
    ),
    "an id that no node has": (
        dict(edges_csv=EDGES + "7,8\n"),
        {},
        r"expected ids of nodes in .*edges\.csv, got 1 that no node has, the first '8' in row 7; add these nodes",
    ),
    "an end that is missing": (
        dict(edges_csv=EDGES + "7,\n"),
        {},
        r"expected both ends of every edge in .*edges\.csv, got 1 without to, the first in row 7",
    ),
    "weights": (
        dict(edges_csv="a,b,w\n7,007,1\n007,x y,2\n"),
        {},
        r"expected an unweighted graph, got column w of .*edges\.csv with values of 1\.\.2",
    ),
    "kinds of edges": (
        dict(edges_csv="a,b,w\n7,007,likes\n007,x y,knows\n"),
        {},
        r"expected two columns in .*edges\.csv, got also w",
    ),
    "one column": (
        dict(edges_csv="a\n7\n"),
        {},
        r"expected a table with a line of names, got .*edges\.csv, which has no columns but 'a'; begin with names",
    ),
    "semicolons": (dict(edges_csv="a;b\n7;007\n"), {}, r"no columns but 'a;b'; .* commas, or by tabs in .* \.tsv"),
    "remarks": (dict(edges_csv="# edges\n# a\tb\n7\t007\n"), {}, "no columns but '# edges'; .* not with remarks"),
    "tabs in a .csv": (dict(nodes_csv=BARE.replace(",", "\t")), {}, r"got .*nodes\.csv, .* but 'id\\tx'; .* by tabs"),
    "no edges": (dict(edges_csv="a,b\n"), {}, "expected a graph with edges, got none"),
    "an empty file": (dict(edges_csv=""), {}, r"expected a table with a line of names, got .*edges\.csv"),
    "no such file": ({}, {"edges": "nowhere.csv"}, "expected a CSV or Parquet file, got nowhere.csv"),
    "an id twice": (
        dict(nodes_csv=NODES + "7,1,rome,true,red,train\n"),
        {},
        r"expected every id once in column name of .*nodes\.csv, got '7' again, first in row 3; name another",
    ),
    "no id": (
        dict(nodes_csv=NODES + ",1,rome,true,red,train\n"),
        {},
        r"expected an id in every row of .*nodes\.csv, got 1 without, the first in row 6",
    ),
    "no such id column": ({}, {"id": "Name"}, r"expected a column Name in .*nodes\.csv, got name, age, city"),
    "no such label": ({}, {"label": ("target",)}, r"expected a column target in .*nodes\.csv, got age, city"),
    "no such column to drop": ({}, {"drop": ("town",)}, r"expected a column town in .*nodes\.csv"),
    "a text": (
        dict(nodes_csv="id,note\n" + "".join(f"{i},text {i}\n" for i in range(102)), edges_csv="a,b\n1,2\n"),
        {},
        rf"expected at most {MAX_CATEGORIES} values of words in column note of .*, got 102, such as .*--drop note",
    ),
    "infinity": (
        dict(nodes_csv='id,x\n007,1\n7,inf\nx y,2\n"z,1",3\n'),
        {},
        r"expected finite numbers in column x of .*nodes\.csv, got inf in row 3",
    ),
    "regression": ({}, {"label": ("age",)}, None),
    "fractions": (
        dict(nodes_csv='id,label\n007,1.5\n7,2\nx y,2\n"z,1",3\n'),
        {},
        r"expected classes in column label of .*nodes\.csv, got numbers such as 1\.5: regression is not supported",
    ),
    "the same label twice": (
        dict(nodes_csv=BARE, labels_csv="id,l\n7,a\n007,b\n7,b\n7,a\n"),
        {},
        r"expected one class a node in .*labels\.csv, or several, .* got the same one again for '7', first in row 2",
    ),
    "a label and none": (
        dict(nodes_csv=BARE, labels_csv="id,l\n7,a\n007,b\n7,\n"),
        {},
        r"expected one class a node in .*labels\.csv, or several, .* got a row without one for '7', first in row 4",
    ),
    "numbers in several labels": (
        dict(nodes_csv='id,a,b\n007,1,0.5\n7,0,1\nx y,1,\n"z,1",1,0\n'),
        {"label": ("a", "b")},
        r"expected 0 or 1, .* in column a, b of .*nodes\.csv, got '0\.5' in b in row 2: .* \(regression\) are not supp",
    ),
    "classes in several labels": (
        {},
        {"label": ("member", "label")},
        r"expected 0 or 1, true or false, or nothing in .*, got 'red' in label in row 2: .* Classes are one column",
    ),
    "a column of classes and parts": (
        {},
        {"label": ("split",), "split": "split"},
        "expected a column of nodes for one of --label and --split, got split for both",
    ),
    "a column of ids and classes": ({}, {"id": "name", "label": ("name",)}, "one of --id and --label, got name for"),
    "a column of classes that is dropped": (
        {},
        {"label": ("age",), "drop": ("city", "age")},
        "one of --label and --drop, got age for both",
    ),
    "a label column twice": (
        {},
        {"label": ("member", "member")},
        "expected every column of labels once, got member, m",
    ),
    "one label and several": (
        dict(nodes_csv=NODES.replace("member", "label:member")),
        {},
        r"expected a column label or columns label:NAME in .*nodes\.csv, got label and label:member; name",
    ),
    "labels twice": (
        dict(labels_csv="id,l\n7,a\n"),
        {},
        r"expected classes in one file, got .*labels\.csv and column label of .*nodes\.csv",
    ),
    "no part to test on": (
        dict(nodes_csv=NODES.replace("TEST", "val")),
        {},
        r"expected train, val and test in column split of .*nodes\.csv, got no test",
    ),
    "columns of nodes without nodes": (
        {},
        {"nodes": None, "id": "name"},
        r"expected a file of nodes \(--nodes\) for id",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_said(tmp_path, case):
    contents, changes, message = BAD[case]
    tables = write(tmp_path, **{"nodes_csv": NODES, "edges_csv": EDGES} | contents)
    changes = {name: Path(value) if name == "edges" else value for name, value in changes.items()}
    tables = replace(tables, **changes)
    if message is None:  # whole numbers are classes
        assert read_tables(tables).names.classes == ("1", "3", "5")
        return
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_tables(tables)


def test_a_column_has_one_purpose(tmp_path):
    """What is named for one is not taken by default for another."""
    tables = write(tmp_path, nodes_csv=NODES.replace("TEST", "test"), edges_csv=EDGES)
    graph = read_tables(replace(tables, label=("split",)))
    assert graph.split is None and graph.names.classes == ("test", "train", "val")
    assert [column.name for column in graph.names.columns] == ["age", "city", "member", "label"]
    parts = 'id,label\n007,train\n7,val\nx y,\n"z,1",test\n'
    graph = read_tables(replace(write(tmp_path, nodes_csv=parts, edges_csv=EDGES), split="label"))
    assert graph.names.classes == () and graph.split.test.tolist() == [3]


def test_a_packed_file_that_is_cut_short_is_named(tmp_path):
    tables = write(tmp_path, edges_csv_gz=EDGES)
    tables.edges.write_bytes(tables.edges.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"expected a whole table, got .*edges\.csv\.gz, which cannot be read: "):
        read_tables(tables)


def test_from_tables_to_predictions(tmp_path, monkeypatch, capsys):
    """A user imports, trains and predicts, with ids and classes in the file at the end."""
    graph = synthetic_graph(num_nodes=120, num_classes=3, in_features=4, seed=0)
    nodes, edges = write_tables(graph, tmp_path)
    text = nodes.read_text().splitlines()
    names = [f"node {line}" if i else line for i, line in enumerate(text)]
    nodes.write_text("\n".join(names) + "\n")
    lines = edges.read_text().splitlines()
    joined = [",".join(f"node {end}" for end in line.split(",")) if i else line for i, line in enumerate(lines)]
    edges.write_text("\n".join(joined) + "\n")

    def run(words):
        monkeypatch.setattr(sys, "argv", ["megagraph", *words.split()])
        main()

    monkeypatch.chdir(tmp_path)
    run("data import --nodes nodes.csv --edges edges.csv --out graph")
    said = capsys.readouterr()
    assert said.out.startswith("graph: 120 nodes") and "reading edges.csv\nreading nodes.csv\n120 nodes and" in said.err
    run("train --dataset graph --layers 1 --dim 8 --heads 2 --epochs 1 --max-steps 1 --out run")
    run("predict run --out predictions.csv")
    table = polars.read_csv("predictions.csv")
    assert table["node"].to_list() == [f"node {i}" for i in range(120)]
    assert table.columns == ["node", "class", "probability_0", "probability_1", "probability_2"]
    assert isinstance(mg.predict("run"), np.ndarray)
