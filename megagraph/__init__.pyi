from . import planner as planner
from . import transforms as transforms
from .attention.bias import BucketBias as BucketBias
from .attention.bias import DenseBias as DenseBias
from .attention.bias import ProjectedBias as ProjectedBias
from .attention.context_parallel import ring_attention as ring_attention
from .attention.dropout import dropout_keys as dropout_keys
from .attention.layout import NodeLayout as NodeLayout
from .attention.module import BiasedRingAttention as BiasedRingAttention
from .attention.multihead import MultiheadAttention as MultiheadAttention
from .attention.operator import biased_attention as biased_attention
from .attention.sums import add_biases as add_biases
from .config import TrainConfig as TrainConfig
from .data.graph import Graph as Graph
from .evaluate import predict as predict
from .models.config import ModelConfig as ModelConfig
from .models.graphormer import Graphormer as Graphormer
from .models.hierarchical import HierarchicalGT as HierarchicalGT
from .planner.plan import Plan as Plan
from .train import Trainer as Trainer

__version__: str
