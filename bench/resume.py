"""Rows of an earlier run that a bench goes on with, or leaves beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench import provenance
from bench.provenance import current, rows_of


def resumable(row: Mapping[str, Any]) -> bool:
    """Whether a row is of these sources, this device and these versions, and as full or quick as what runs."""
    here = provenance.provenance()
    same = all(row.get(name) == here[name] for name in ("device", "torch", "python"))
    return same and _marked_alike(row) and current(row)


def merged(name: str, rows: Iterable[Mapping[str, Any]], *by: str, folder: str | None = None) -> list[dict[str, Any]]:
    """Rows of a file of ``write_rows``, with ``rows`` in place of those that agree with one of them in ``by``.

    Those that name no sources are left out: written again, they would get those of today.
    """
    path = provenance.RESULTS / (folder or provenance.device_folder()) / f"{name}.json"
    before = rows_of(path) if path.exists() else []
    kept = [row for row in before if "sources" in row and _marked_alike(row)]
    return [*{tuple(row.get(field) for field in by): dict(row) for row in [*kept, *rows]}.values()]


def _marked_alike(row: Mapping[str, Any]) -> bool:
    marks = {"quick": provenance.QUICK, "generated": provenance.GENERATED}
    return all(row.get(name, False) == mark for name, mark in marks.items())
