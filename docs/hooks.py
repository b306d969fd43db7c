"""Files outside docs/ that pages show or link to become part of the site, where they are: nothing is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
SHOWN = ("bench/results/**/*.svg", "bench/results/**/*.png", "examples/*.*", "C*.md", "LICENSE", "CITATION.cff")


def on_files(files: Files, config: Any) -> Files:
    """Pictures, examples and pages of the top folder; README is the first page."""
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link of a page of docs/ to what lies beside docs/, which is beside the page on the site."""
    return markdown.replace("](../", "](")
