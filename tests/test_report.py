"""The page about runs: all in one file, from the files of the runs, as text."""

from __future__ import annotations

import base64
import re
import shutil
from html.parser import HTMLParser

import pytest

import megagraph as mg
from megagraph import files
from megagraph.report import report
from megagraph.run import Run
from tests.checkpoint_cases import config, graph, stop_at
from tests.processes import Command

EVIL = '<script>alert("&")</script>'


class Page(HTMLParser):
    """Words, tags, addresses and rows of tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.images: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        assert not any(name.startswith("on") or name in ("href", "srcset") for name in given)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if "src" in given:
            self.images.append(given["src"])

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        self.words.append(data)
        if self.rows and self.rows[-1] and self.tags[-1] in ("td", "th"):
            self.rows[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    finished, stopped = folder / "first", folder / "<i>second & $last$"
    mg.Trainer(config(finished, trace=True, evaluate_every=2)).fit(graph())
    with stop_at(8):
        mg.Trainer(config(stopped, seed=1, learning_rate=1e-3)).fit(graph())
    return finished, stopped


def test_a_page_about_a_run(runs, tmp_path):
    report([runs[0]], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page, run = Page(text), Run.open(runs[0])
    summary = run.summary
    assert "script" not in page.tags and not re.search(r"https?://|url\(|@import", text)
    assert (
        f"hierarchical, 3 layers of width 16, ego batches, 2 heads, projected bias, {summary['parameters']:,} "
        in page.text
    )
    assert (
        f"synthetic: 100 nodes, {graph().num_edges // 2} edges, 8 features, 3 classes; 60 nodes to train" in page.text
    )
    assert f"Finished: {summary['epochs']} epochs, {summary['steps']} steps." in page.text
    assert len([line for line in run.metrics() if "epoch" in line]) < summary["epochs"]
    shares = (f"{summary[name]:.4f}" for name in ("test_accuracy", "best_val_accuracy", "majority_accuracy"))
    assert ["accuracy", *shares, str(summary["best_epoch"])] in page.rows
    assert ["--dim", "16", "128"] in page.rows and ["--seed", "0"] in page.rows
    assert not any(row[0] in ("--out", "--resume") for row in page.rows if row)
    assert ["", "a step", "-", f"{summary['measured_step_seconds']:.3g} s"] == ["", *page.rows[_at(page, "a step")][1:]]
    (start,) = run.starts
    for name in ("torch", "commit", "device", "tree"):
        assert [name, start[name]] in page.rows
    assert ["fingerprint of the graph", graph().fingerprint()] in page.rows
    assert len(page.images) == 4  # curves for a desktop and a phone, bias, timeline
    for image in page.images:
        kind, data = image.split(",")
        assert kind == "data:image/png;base64" and base64.b64decode(data)[:8] == b"\x89PNG\r\n\x1a\n"
    assert page.tags.count("table") == page.tags.count("/table")


def _put(path, part, value):
    """Change a value in a file of ours."""
    values = files.read_json(path, "a file", by_hand=True)
    place = values
    for key in part[:-1]:
        place = place[key]
    place[part[-1]] = value
    files.write_json(path, values)


def _at(page, word):
    return next(i for i, row in enumerate(page.rows) if word in row)


def test_a_page_about_several_says_what_differs(runs, tmp_path):
    report(runs, tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text())
    assert "i" not in page.tags and "<i>second & $last$" in page.text
    differ = [row for row in page.rows if row and row[0] in ("--seed", "--learning-rate", "--trace")]
    assert sorted(differ) == [["--learning-rate", "0.01", "0.001"], ["--seed", "0", "1"], ["--trace", "True", "False"]]
    assert "Not finished; so far: 1 epochs, 8 steps." in page.text
    assert len(page.images) == 5  # no timeline of the second


def test_what_comes_from_files_is_text(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    for name, part in (("config.json", ("dataset",)), ("provenance.json", ("starts", 0, "command"))):
        _put(run / name, part, EVIL)
    report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text and ["command", EVIL] in Page(text).rows


ODD = {
    "no sizes": ("provenance.json", ("starts", 0, "data"), {}),
    "sizes that are words": ("provenance.json", ("starts", 0, "data", "val_nodes"), "x"),
    "a list for a graph": ("provenance.json", ("starts", 0, "data"), [1]),
    "a summary of nothing": ("summary.json", ("parameters",), None),
    "other layers": ("model.json", ("layers",), 9),
    "no plan": ("plan.json", ("pp",), "many"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_not_as_we_write_it_is_one_error(runs, tmp_path, case):
    name, part, value = ODD[case]
    shutil.copytree(runs[0], tmp_path / "run")
    _put(tmp_path / "run" / name, part, value)
    with pytest.raises(ValueError, match=r"(expected|must) .*got"):
        report([tmp_path / "run"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_resumed_runs(runs, tmp_path):
    run = tmp_path / "run"
    with stop_at(2):
        mg.Trainer(config(run)).fit(graph())
    report([run], tmp_path / "report.html")
    assert "no epoch has ended yet" in Page((tmp_path / "report.html").read_text()).text
    mg.Trainer.resume(run).fit(graph())
    report([run], tmp_path / "report.html")
    assert "run was resumed:" in Page((tmp_path / "report.html").read_text()).text


def test_the_command(runs, tmp_path):
    done = Command("report", *runs, "--out", tmp_path / "r.html").finish()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'r.html'}\n", "")
    for arguments, message in (
        ((tmp_path,), "must be the folder of a run"),
        ((runs[0], "--out", runs[0] / "config.json"), "out must end in .html"),
        ((runs[0], "--out", tmp_path / "no" / "r.html"), "which is none; make it before"),
    ):
        done = Command("report", *arguments).finish()
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
