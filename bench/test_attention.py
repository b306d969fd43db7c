"""Attention forward and forward + backward beside its peers: five shapes, and a sweep of N, D, H and the bias.

pytest bench/test_attention.py --rows FOLDER
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product

import pytest

from bench.measure import measure
from bench.peers import CONTENDERS
from bench.provenance import provenance
from bench.shapes import DEVICE, Case, cases

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]  # peers warn as they like

ON_CPU = ("eager", "sdpa_math", "sdpa_flash")
SWEPT = ("eager", "sdpa_efficient", "flex_attention", "flash_bias", "jax_cudnn")


def measurements(smoke: bool) -> Iterator[tuple[str, Case, str, str]]:
    """(series, case, direction, contender), all of a case together."""
    for series, case in cases(smoke):
        for name, direction in product(CONTENDERS, ("forward", "forward_backward")):
            if direction == "forward" and series not in ("shapes", "N"):
                continue
            if CONTENDERS[name].ours or name in _peers(series, case, smoke):
                yield series, case, direction, name


def _peers(series: str, case: Case, smoke: bool) -> Collection[str]:
    """All of them at the five shapes on a GPU; elsewhere that would take too long."""
    if smoke and (series, case.form) != ("shapes", "bucket"):
        return [name for name in CONTENDERS if not CONTENDERS[name].compiles]
    if DEVICE == "cpu" and not smoke:
        return ON_CPU
    if series == "shapes" or case.form == "none":
        return CONTENDERS
    return (*SWEPT, "eager_compiled") if series == "N" else SWEPT


def pytest_generate_tests(metafunc):
    chosen = list(measurements(metafunc.config.getoption("--smoke")))
    names = [f"{series}-{case}-{direction}-{contender}" for series, case, direction, contender in chosen]
    metafunc.parametrize(("series", "case", "direction", "contender"), chosen, ids=names)


def test_attention(series, case, direction, contender, pedantic, record, request):
    row = {"series": series} | measure(contender, case, direction, pedantic)
    record(row)
    if row["refusal"] is not None:
        wrong = CONTENDERS[contender].ours and row["refusal"].startswith("wrong values")
        (pytest.fail if wrong else pytest.skip)(row["refusal"])
    request.getfixturevalue("benchmark").extra_info.update(row | provenance())
