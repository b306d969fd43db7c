"""Profile -> Model -> Search: how the processes of a run share a model and its batches, found by measuring."""

from megagraph.planner.cost import CostModel
from megagraph.planner.fitting import fit
from megagraph.planner.search import Candidate, SearchResult, search
from megagraph.planner.split import NoFeasiblePlan, split_layers
from megagraph.planner.workload import Workload

__all__ = [
    "Candidate",
    "CostModel",
    "NoFeasiblePlan",
    "SearchResult",
    "Workload",
    "fit",
    "search",
    "split_layers",
]
