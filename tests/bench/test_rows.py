"""Rows name their sources and pages say what rows say; what does not is seen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import figures, halo, provenance, sparse_attention, stale
from bench.provenance import ROOT, rows_of

OLD = "cpu/real_plans/plans.json"  # from before rows named their sources


def test_rows_of_this_checkout():
    assert stale.faults() == []


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy whose rows and pages a test may spoil; its sources are links. It has a row of today."""
    large = shutil.ignore_patterns("*profile.json", "kernels.json", "*.svg", "*.png")
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results", ignore=large)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    for path in (*(ROOT / name for name in provenance.FOLDERS), *(ROOT / "bench").iterdir()):
        if path.name not in ("bench", "results"):
            (tmp_path / path.relative_to(ROOT)).symlink_to(path)
    monkeypatch.setattr(provenance, "RESULTS", tmp_path / "bench" / "results")
    monkeypatch.setattr(provenance, "provenance", lambda: dict(ORIGIN))
    monkeypatch.setattr(provenance, "_STARTED", float("inf"))
    provenance.write_rows("new", [{"value": 1.0}], folder="cpu")
    provenance.write_judgement(tmp_path / "bench/results/cpu/judgement.json", {"holds": True}, file(tmp_path, OLD))
    stale.write(tmp_path)
    return tmp_path


ORIGIN = {"device": "a CPU", "python": "3.11", "torch": "2.13", "commit": "abc1234", "date": "2026-11-26 12:00"}


def file(root: Path, name: str) -> Path:
    return root / "bench" / "results" / name


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.unlink()  # it may be a link
    path.write_text(text.replace(old, new, 1))


def orphan(root):
    file(root, "cpu/orphan.json").write_text(json.dumps([ORIGIN | {"value": 1.0}]))


def orphan_among_old_ones(root):
    rows = json.loads(file(root, OLD).read_text())
    file(root, OLD).write_text(json.dumps([*rows, rows[0]]))


def cut_line(root):
    path = file(root, "cpu/accuracy/cora.jsonl")
    path.write_text(path.read_text()[:-20])


SPOILT = {
    "orphan": (orphan, r"cpu/orphan.json: 1 rows name no sources"),
    "orphan among old ones": (orphan_among_old_ones, rf"{OLD}: 32 rows name no sources"),
    "digit of an old row": (lambda root: replace(file(root, OLD), "0.79", "0.78"), rf"{OLD}: 31 rows name no"),
    "dirty": (lambda root: replace(file(root, "cpu/new.json"), "abc1234", "abc1234-dirty"), r"new.json: a row of a ch"),
    "quick": (lambda root: replace(file(root, "cpu/new.json"), "1.0", '1.0, "quick": true'), r"new.json: a quick row"),
    "no device": (lambda root: replace(file(root, "cpu/new.json"), "a CPU", ""), r"cpu/new.json: a row lacks device"),
    "no list": (lambda root: shutil.rmtree(file(root, "sources")), r"cpu/new.json: expected its sources in"),
    "list of others": (
        lambda root: [replace(path, "  bench/", "  banch/") for path in file(root, "sources").iterdir()],
        r"cpu/new.json: expected its sources in",
    ),
    "list of no row": (lambda root: file(root, "sources/0.sha256").touch(), r"sources/0.sha256: no row names it"),
    "other rows judged": (
        lambda root: replace(file(root, OLD), "0.79", "0.78"),
        rf"cpu/judgement.json: made of other rows than {OLD} has now",
    ),
    "source changed": (
        lambda root: replace(root / "bench" / "provenance.py", "import json", "import json, os"),
        r"(?s)rows.md: run python -m bench.stale --write.*\| cpu/new.json \|[^\n]* changed since \|",
    ),
    "digit of results": (lambda root: replace(root / "docs/results.md", "0.877", "0.878"), r"results.md: run python"),
    "digit of a page": (lambda root: replace(root / "docs/plans.md", "4.8 %", "4.9 %"), r"plans.md: expected .*4.8 %"),
    "digit of a claim": (
        lambda root: replace(root / "docs/claims.md", "4.6 %", "4.7 %"),
        r"claims.md: expected .*4.6 %",
    ),
    "digit of a call": (lambda root: replace(root / "docs/speed.md", "1.0 to 1.5 ms", "0.8 to 1.5 ms"), r"1.0 to 1.5"),
    "digit of a power": (lambda root: replace(root / "docs/speed.md", "5e-7", "4e-7"), r"speed.md: expected .*5e-7"),
    "digit before one of README": (lambda root: replace(root / "README.md", "956 MB", "7956 MB"), r"README.*'956 MB"),
    "cut line": (cut_line, r"cpu/accuracy/cora.jsonl: cut, or no JSON"),
    "rows gone": (
        lambda root: file(root, "cpu/epoch_time/citeseer.json").unlink(),
        r"(?s)README.md: bench/results/cpu/epoch_time/citeseer.json is not as it needs it.*claims.md: bench/res",
    ),
    "too few rows": (
        lambda root: file(root, "cpu/package.json").write_text("[]"),
        r"README.md: bench/results/cpu/package.json is not as it needs it",
    ),
    "digit of README": (lambda root: replace(root / "README.md", "2.70 times", "2.80 times"), r"README.*2.70 times"),
}  # fmt: skip


def test_nothing_is_wrong_with_what_is_not_spoilt(checkout):
    assert stale.faults(checkout) == []


@pytest.mark.parametrize(("spoil", "fault"), SPOILT.values(), ids=SPOILT)
def test_what_is_wrong_is_seen(spoil, fault, checkout):
    spoil(checkout)
    assert re.search(fault, "\n".join(stale.faults(checkout))), stale.faults(checkout)


def test_a_page_can_be_written_without_lists_of_sources(checkout):
    shutil.rmtree(file(checkout, "sources"))
    stale.write(checkout)
    assert re.search(r"\| cpu/new.json \|[^\n]* changed since \|", (checkout / "docs" / "rows.md").read_text())


def test_the_list_of_old_rows_gets_no_longer(checkout):
    orphan(checkout)
    stale.write(checkout)
    assert "orphan" not in (checkout / "docs" / "rows.md").read_text() and len(stale.faults(checkout)) == 1
    file(checkout, "cpu/orphan.json").unlink()
    provenance.write_rows("real_plans/plans", [{"value": 1.0}], folder="cpu")
    stale.write(checkout)
    frozen = (checkout / "docs" / "rows.md").read_text().partition(stale.BEFORE)[2]
    assert OLD not in frozen and "cpu/saves.json" in frozen


def test_a_list_of_sources_is_one_of_sha256sum(checkout):
    row = json.loads(file(checkout, "cpu/new.json").read_text())[0]
    listed = file(checkout, f"sources/{row['sources']}.sha256")
    names = {line.partition("  ")[2] for line in listed.read_text().splitlines()}
    assert {"bench/provenance.py", "bench/stale.py", "megagraph/provenance.py", "tests/bench/test_rows.py"} <= names
    assert subprocess.run(["sha256sum", "--check", "--quiet", listed], cwd=ROOT).returncode == 0
    assert provenance.current(row) and not provenance.current({})


def test_what_runs_elsewhere_counts_and_so_do_data(checkout):
    (row,) = json.loads(provenance.write_rows("new", [{}], folder="cpu", children=provenance.PACKAGE).read_text())
    names = {
        line.partition("  ")[2] for line in file(checkout, f"sources/{row['sources']}.sha256").read_text().splitlines()
    }
    every = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.py")}
    assert every | {"kernels/tiles.json", "megagraph/cli/data.py"} <= names


def test_rows_keep_their_origin(checkout, monkeypatch):
    """A file that is written again with more rows, and rows of ``megagraph profile``, which lack sources only."""
    old = json.loads(file(checkout, "cpu/new.json").read_text())
    monkeypatch.setattr(provenance, "provenance", lambda: ORIGIN | {"commit": "def5678", "device": "another"})
    profiled = {"commit": "abc1234", "device": "a profile's"}
    kept, own, new = json.loads(provenance.write_rows("new", [*old, profiled, {"value": 2.0}], "cpu").read_text())
    assert kept == old[0] and own.items() > profiled.items() and own["sources"] == new["sources"]
    assert (new["commit"], new["device"]) == ("def5678", "another")


@pytest.mark.parametrize(
    ("module", "made", "name"),
    [(halo, "counts", "halo/b"), (sparse_attention, "measure", "sparse_attention")],
    ids=["halo", "sparse"],
)
def test_rows_of_what_was_not_asked_for_stay(module, made, name, tmp_path, monkeypatch, capsys):
    """But for those without sources, which would get today's, and quick ones."""
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    own = {"set": "b", "pairs": 1, "nodes": 1}
    ratio = dict.fromkeys(("seconds", "median", "peak_bytes"), 1.0) | {"range": [1.0, 1.0], "to": "eager"}
    own |= {key: ratio for key in (*sparse_attention.CONTENDERS, "ratio")} | {"peak_ratio": 1.0}
    own |= {f"ranks_{ranks}": {"halo": [1.0], "ring": 0.5, "work": 1.0} for ranks in halo.RANKS}
    other = {"set": "b", "ranks": 2, "kind": "pairs"} if module is halo else {"set": "a"}
    path = provenance.write_rows(name, [own, other, other | {"kind": "quick", "set": "c", "quick": True}], folder="cpu")
    before = rows_of(path)
    path.write_text(json.dumps([*before, {"set": "d", "ranks": 9}]))
    monkeypatch.setattr(module, made, lambda name, root: own | {"pairs": 2})
    given = {"sets": ("b",)} if module is halo else {"only": ("b",)}
    module.main(root=tmp_path, **given)
    new, kept = rows_of(path)
    assert new["pairs"] == 2 and kept == before[1]


def test_sources_that_changed_while_they_ran_make_a_dirty_row(checkout, monkeypatch):
    monkeypatch.setattr(provenance, "_STARTED", 0.0)
    assert provenance.origin()["commit"] == "abc1234-dirty"


def test_the_package_of_another_checkout_is_refused(checkout, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", checkout)
    with pytest.raises(RuntimeError, match="expected the package of"):
        provenance.origin()


def test_every_piece_of_a_page_has_a_figure():
    pieces = [piece for page in figures.PAGES.values() for piece in page(figures.reader(ROOT))]
    assert len(pieces) > 80 and all(any(map(str.isdigit, piece)) for piece in pieces)
