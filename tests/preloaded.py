"""The last that the server of forks imports: a small training in a fork takes three quarters of the time."""

import gc

import tyro.extras  # noqa: F401
from numba.core.registry import cpu_target

import tests.attention.ring_cases
import tests.checkpoint_cases
import tests.parallel.cases  # noqa: F401
from megagraph import cli, train  # noqa: F401
from tests import shortcuts

# all that Numba knows, which the first compiled function would ask for
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
shortcuts.take()
gc.freeze()  # a collector that looks through the objects of its parent writes to them, so that each page is copied
