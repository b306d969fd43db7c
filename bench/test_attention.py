"""Attention forward and forward + backward beside its peers: five shapes, and a sweep of N, D, H and the bias.

pytest bench/test_attention.py --rows FOLDER
"""

from __future__ import annotations

from itertools import product

import pytest

from bench.measure import measure
from bench.peers import CONTENDERS
from bench.shapes import DEVICE, cases

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]  # peers warn as they like

# elsewhere a sweep takes too long with all of them
SWEPT = ("eager", "eager_compiled", "sdpa_efficient", "flex_attention", "flash_bias", "jax_cudnn")
ON_CPU = ("eager", "sdpa_math", "sdpa_flash")


def measurements(smoke: bool):
    """(series, case, direction, contender), all of a case together."""
    for series, case in cases(smoke):
        for name, direction in product(CONTENDERS, ("forward", "forward_backward")):
            peer = not CONTENDERS[name].ours
            if peer and smoke and CONTENDERS[name].compiles and (series, case.form) != ("shapes", "bucket"):
                continue  # seconds each
            if peer and not smoke and DEVICE == "cpu" and name not in ON_CPU:
                continue
            if series != "shapes" and peer and name not in SWEPT + ON_CPU * (DEVICE == "cpu"):
                continue
            if series in ("D", "H", "form") and direction == "forward":
                continue
            yield series, case, direction, name


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
    request.getfixturevalue("benchmark").extra_info.update(row)
