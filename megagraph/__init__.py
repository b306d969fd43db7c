"""MegaGraph: exact graph attention with a learnable structural bias, and Graph Transformers trained with it."""

import lazy_loader

# names are in __init__.pyi, and imported when they are used
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
