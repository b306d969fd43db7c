"""Every line of docs/claims.md has a verdict, and what it names as evidence is there."""

from __future__ import annotations

import re
import sys
from collections import Counter
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from bench.paper.__main__ import EXPERIMENTS
from bench.provenance import ROOT
from megagraph.cli import main

VERDICTS = {
    "reproduced", "goes further", "contradicted", "contradictory in the paper", "needs a GPU", "not shown yet",
    "out of scope",
}  # fmt: skip
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
LINES = {int(number): line for line, number in re.findall(r"^(\| (\d+) \|.*)$", PAGE, re.MULTILINE)}
CELLS = {number: [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]] for number, line in LINES.items()}


def verdict(number: int) -> str:
    return CELLS[number][2].strip("*")


def quoted(number: int) -> list[str]:
    return re.findall(r"`([^`]+)`", CELLS[number][3])


def test_every_claim_has_a_verdict_and_the_table_counts_them():
    assert list(CELLS) == list(range(1, 83)) and all(len(cells) == 4 and all(cells) for cells in CELLS.values())
    counted = dict(re.findall(r"^\| \*\*([\w ]+)\*\* \| (\d+) \|", PAGE, re.MULTILINE))
    assert set(counted) == VERDICTS
    assert {name: int(number) for name, number in counted.items()} == Counter(map(verdict, CELLS))


@pytest.mark.parametrize("number", CELLS)
def test_a_verdict_has_what_it_asks_for(number):
    """Rows, tests or commands; or what is missing."""
    found, text = quoted(number), CELLS[number][3]
    command = any(words.startswith(("python -m bench.", "megagraph ", "torchrun ")) for words in found)
    if verdict(number) == "contradicted":
        assert (command and ".json" in text) or "](#" in text  # or a block of the page, which runs
    elif verdict(number) == "needs a GPU":
        assert command or "line 4" in text
    elif verdict(number) == "not shown yet":
        assert "Missing: " in text
    elif verdict(number) in ("reproduced", "goes further"):
        assert found or "](" in text or "line " in text


@pytest.mark.parametrize("number", CELLS)
def test_what_a_line_names_is_there(number):
    file = None
    for words in quoted(number):
        if re.fullmatch(r"(cpu|h200|compile)/\S+\.jsonl?", words):
            assert (ROOT / "bench" / "results" / words).exists(), words
        elif match := re.fullmatch(r"(?:(tests/\S+\.py)::)?(test_\w+)", words):
            file = match[1] or file  # that of the test before
            assert f"\ndef {match[2]}(" in (ROOT / file).read_text(), words
        elif match := re.search(r"python -m (bench\S*)(.*)", words):
            is_of_bench(match[1], match[2].split())
        elif words.startswith(("bench/", "pytest ")):
            assert (ROOT / words.split()[-1 if words.startswith("pytest ") else 0]).exists(), words
        elif match := re.search(r"\bmegagraph (.+)", words):
            is_of_the_command_line(match[1].split())


def is_of_bench(module: str, words: list[str]) -> None:
    found = find_spec(module)
    assert found is not None, module
    if module == "bench.paper":
        names = words[: words.index("--root")] if "--root" in words else words
        assert names and set(names) <= set(EXPERIMENTS), words
        return
    source = Path(found.origin).read_text()
    for word in words:
        assert word.isupper() or word.isdigit() or word.lstrip("-") in source, (module, word)


@cache
def usage(*command: str) -> str:
    out = StringIO()
    words = ["megagraph", *command, "--help-all" if command == ("train",) else "--help"]
    with patch.object(sys, "argv", words), redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, command
    return out.getvalue()


def is_of_the_command_line(words: list[str]) -> None:
    depth = 2 if words[0] in ("plot", "data") else 1
    for i in range(depth):
        assert re.search(rf"• {words[i]}\b", usage(*words[:i])), words
    text = usage(*words[:depth])
    assert all(re.search(rf"{word}\b", text) for word in words if word.startswith("--")), words
