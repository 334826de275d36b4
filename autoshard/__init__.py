"""autoshard: a PyTorch model written for one device, running on a mesh."""

from autoshard.alternatives import why_not
from autoshard.api import (
    frontier,
    full_state_dict,
    load_full_state_dict,
    load_safetensors,
    materialize,
    no_sync,
    parallelize,
    plan,
    register_forward_method,
    sampler_arguments,
    shard_dataloader,
)
from autoshard.capture.marks import replicate, set_default_strategy, shard, split
from autoshard.cluster.calibrate import calibrate
from autoshard.cluster.cluster import Cluster
from autoshard.compare.compare import compare
from autoshard.compare.comparison import Comparison
from autoshard.doctor.doctor import doctor
from autoshard.errors import (
    AutoshardError,
    BudgetError,
    CaptureError,
    HintError,
    InputError,
    MeshError,
    PipelineError,
    PlanError,
    RuleError,
    VerifyError,
)
from autoshard.options import Options, Pipeline, Search
from autoshard.options.mesh_context import use_mesh
from autoshard.patterns.registry import register_rule
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.plans.alternative import Alternative
from autoshard.plans.frontier import Frontier
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.adafactor import Adafactor
from autoshard.runtime.checkpoint import checkpointable
from autoshard.search.result import SearchResult
from autoshard.search.search import search
from autoshard.verify.report import VerifyReport
from autoshard.verify.verify import verify
from autoshard.version import __version__

__all__ = [
    "Adafactor",
    "Alternative",
    "AutoshardError",
    "BudgetError",
    "CaptureError",
    "Cluster",
    "Comparison",
    "Frontier",
    "HintError",
    "InputError",
    "MeshError",
    "Options",
    "Pipeline",
    "PipelineError",
    "PipelineModule",
    "PipelinePlan",
    "PlanError",
    "RuleError",
    "Search",
    "SearchResult",
    "ShardingPlan",
    "VerifyError",
    "VerifyReport",
    "__version__",
    "calibrate",
    "checkpointable",
    "compare",
    "doctor",
    "frontier",
    "full_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "materialize",
    "no_sync",
    "parallelize",
    "plan",
    "register_forward_method",
    "register_rule",
    "replicate",
    "sampler_arguments",
    "search",
    "set_default_strategy",
    "shard",
    "shard_dataloader",
    "split",
    "use_mesh",
    "verify",
    "why_not",
]
