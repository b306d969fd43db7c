"""Which rows the code has left behind since: `python -m bench.stale`; with `--write` it lists all rows on docs/rows.md,
and makes docs/results.md of those of the paper's experiments.

A row is left behind where a source that it names is another file now. `faults` is what the tests ask: rows without
sources, but for those that the page lists from before there were any, rows of a changed checkout, a list of sources or
rows judged that are not there, a page that is not as it would be written, and figures in documents that are not their
rows'.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench import figures
from bench.paper.page import page as results_page
from bench.provenance import ROOT, changed, listing, rows_of, sha256

ASKED = ("device", "python", "torch", "commit", "date")  # of a row that was measured
BEFORE = "## Measured before rows named their sources"
PAGE = f"""# Rows

Every figure of these pages comes from a row under `bench/results/`. A row names the SHA-256 of each source that it
depends on, and this page, written by `python -m bench.stale --write`, says which rows the sources have left behind
since; without `--write` the command names the files that changed. A test holds the page to the rows, and the figures of
README and of the pages to theirs.

## Measured

{{measured}}

## Judged

What rows say, with the SHA-256 of their files; nothing was measured for it.

{{judged}}

{BEFORE}

By their device, commit and package, whose commits a later checkout may lack, and `-dirty` ones of sources that no
commit has. The list only gets shorter: it names the rows by SHA-256, and a row that is not among them has to name its
sources.

{{before}}
"""
FROZEN = re.compile(r"^\| (\S+) \|.*\| ([0-9a-f]{16}) \|$", re.MULTILINE)


def row_files(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by their file.

    Raises:
        SystemExit: files that cannot be read, a line each.
    """
    found, unread = {}, []
    for path in sorted(path for pattern in ("*.json", "*.jsonl") for path in results.rglob(pattern)):
        file = path.relative_to(results).as_posix()
        try:
            found[file] = rows_of(path)
        except ValueError as error:
            unread.append(f"{file}: cut, or no JSON: {error}")
    if unread:
        raise SystemExit("\n".join(unread))
    return found


def left_behind(files: dict[str, list[dict[str, Any]]], root: Path) -> dict[str, set[str]]:
    """The sources of each file of rows that are other files now, or their list, where it is not there."""
    named = {file: _one_of_each(_parts(rows)[0]) for file, rows in files.items()}
    lists = {row["sources"] for rows in named.values() for row in rows}
    results = root / "bench" / "results"
    others = {
        digest: changed({"sources": digest}, results, root)
        if (path := listing(results, digest)).exists()
        else [path.name]
        for digest in lists
    }
    return {file: {name for row in rows for name in others[row["sources"]]} for file, rows in named.items()}


def page(root: Path, frozen: dict[str, str] | None) -> str:
    """The page as it should be; ``frozen`` has the digests of rows from before, ``None`` takes all that there are."""
    lines: dict[str, list[str]] = {"measured": [], "judged": [], "before": []}
    files = row_files(root / "bench" / "results")
    behind = left_behind(files, root)
    for file, rows in files.items():
        named, bare = _parts(rows)
        state = "changed since" if behind[file] else "as they were"
        measured = [row for row in named if "device" in row]
        if measured:
            cells = [_each(measured, name) for name in ("device", "commit")]
            lines["measured"].append(_line(file, len(measured), *cells, max(row["date"] for row in measured), state))
        if len(measured) < len(named):
            lines["judged"].append(_line(file, _each(named, "from_rows"), state))
        if bare and (frozen is None or file in frozen):
            cells = [_each(bare, name) for name in ("device", "commit", "tree")]
            lines["before"].append(_line(file, len(bare), *cells, digest_of(bare) if frozen is None else frozen[file]))
    return PAGE.format(
        measured=_table("file", "rows", "device", "commit", "date", "sources", lines=lines["measured"]),
        judged=_table("file", "of", "sources", lines=lines["judged"]),
        before=_table("file", "rows", "device", "commit", "package", "SHA-256", lines=lines["before"]),
    )


def faults(root: Path = ROOT) -> list[str]:
    """What is wrong with the rows of a checkout, a line each."""
    results, written = root / "bench" / "results", (root / "docs" / "rows.md").read_text(encoding="utf-8")
    frozen, found, used, missing = _frozen(written), [], set(), False
    try:
        files = row_files(results)
    except SystemExit as unread:
        return str(unread).splitlines()
    for file, rows in files.items():
        named, bare = _parts(rows)
        if bare and frozen.get(file) != digest_of(bare):
            found.append(
                f"{file}: {len(bare)} rows name no sources, SHA-256 {digest_of(bare)}; measure them again with "
                f"bench.provenance, as docs/rows.md lists {frozen.get(file, 'no such rows of it')}"
            )
        for row in _one_of_each(named):
            used.add(row["sources"])
            path = listing(results, row["sources"])
            if not path.exists() or sha256(path)[:16] != row["sources"]:
                found.append(f"{file}: expected its sources in bench/results/sources/{path.name}, got none or others")
                missing = True
        for row in named:
            lacks = [name for name in ASKED if "from_rows" not in row and not row.get(name)]
            if lacks:
                found.append(f"{file}: a row lacks {', '.join(lacks)}")
            if row.get("quick"):
                found.append(f"{file}: a quick row, which says nothing of its figure; measure it in full")
            if row.get("commit", "").endswith("-dirty"):
                found.append(f"{file}: a row of a changed checkout, {row['commit']}; commit, then measure it again")
            for other, digest in row.get("from_rows", {}).items():
                if not (results / other).exists() or sha256(results / other) != digest:
                    found.append(f"{file}: made of other rows than {other} has now; make it again")
    unused = {path.stem for path in (results / "sources").glob("*")} - used
    found += [f"sources/{name}.sha256: no row names it; python -m bench.stale --write deletes it" for name in unused]
    if not missing and written != (expected := page(root, frozen)):
        other = sorted(set(expected.splitlines()) ^ set(written.splitlines()))
        found.append("\n".join(["docs/rows.md: run python -m bench.stale --write, as these lines differ:", *other]))
    if results_page(results, "../bench/results") != (root / "docs" / "results.md").read_text(encoding="utf-8"):
        found.append("docs/results.md: run python -m bench.stale --write, as its rows say something else")
    return list(dict.fromkeys(found)) + figures.wrong(root)


def digest_of(rows: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def _frozen(text: str) -> dict[str, str]:
    return dict(FROZEN.findall(text.partition(BEFORE)[2]))


def _parts(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those that name their sources, and the others."""
    return [row for row in rows if "sources" in row], [row for row in rows if "sources" not in row]


def _one_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({row["sources"]: row for row in rows}.values())


def _each(rows: list[dict[str, Any]], name: str) -> str:
    """The values of a field, or its keys; "-" for none."""
    found = [row.get(name) or "-" for row in rows]
    return "; ".join(sorted({text for value in found for text in ([value] if isinstance(value, str) else value)}))


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(*head: str, lines: list[str]) -> str:
    return "\n".join([_line(*head), _line(*["---"] * len(head)), *lines]) if lines else "None yet."


def write(root: Path) -> None:
    """docs/rows.md and results.md, and delete lists of sources that no row names."""
    results, path = root / "bench" / "results", root / "docs" / "rows.md"
    used = {row["sources"] for rows in row_files(results).values() for row in rows if "sources" in row}
    for listed in (results / "sources").glob("*"):
        if listed.stem not in used:
            listed.unlink()
    frozen = _frozen(path.read_text(encoding="utf-8")) if path.exists() else None
    path.write_text(page(root, frozen), encoding="utf-8")
    (root / "docs" / "results.md").write_text(results_page(results, "../bench/results"), encoding="utf-8")


def main(write_page: Annotated[bool, tyro.conf.arg(name="write")] = False) -> None:
    """Print which rows are left behind, and what is wrong.

    Args:
        write_page: docs/rows.md and results.md, and delete lists of sources that no row names.
    """
    if write_page:
        write(ROOT)
    files = row_files(ROOT / "bench" / "results")
    behind = left_behind(files, ROOT)
    for file, rows in files.items():
        if bare := _parts(rows)[1]:
            print(f"{file}: {len(bare)} of {len(rows)} rows name no sources")
        if behind[file]:
            print(f"{file}: changed since: {', '.join(sorted(behind[file]))}")
    if found := faults():
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    tyro.cli(main)
