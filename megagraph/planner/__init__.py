"""Profile -> Model -> Search: how the processes of a run share a model and its batches, found by measuring."""

from megagraph.planner.split import NoFeasiblePlan, split_layers

__all__ = ["NoFeasiblePlan", "split_layers"]
