"""Profile -> Model -> Search: how the processes of a run share a model and its batches, found by measuring."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
