from .cost import CostModel as CostModel
from .fitting import fit as fit
from .searching import Candidate as Candidate
from .searching import SearchResult as SearchResult
from .searching import search as search
from .split import NoFeasiblePlan as NoFeasiblePlan
from .split import split_layers as split_layers
from .workload import Workload as Workload
