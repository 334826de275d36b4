"""autoshard: a PyTorch model written for one device, running on a mesh.

`import autoshard` loads nothing else: a name is imported when it is first used, and with it what it needs.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoshard.version import __version__

if TYPE_CHECKING:
    from autoshard.api import (
        check_options,
        frontier,
        full_state_dict,
        full_tensor,
        load_full_state_dict,
        load_safetensors,
        materialize,
        no_sync,
        parallelize,
        plan,
        plan_of,
        register_forward_method,
        sampler_arguments,
        shard_dataloader,
    )
    from autoshard.capture.marks import keep, offload, recompute, replicate, set_default_strategy, shard, split
    from autoshard.cluster.calibrate import calibrate
    from autoshard.cluster.cluster import Cluster
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
    from autoshard.planner.hints import hint_text, parse_hint
    from autoshard.plans.alternative import Alternative
    from autoshard.plans.expenses import Expenses
    from autoshard.plans.frontier import Frontier
    from autoshard.plans.plan_difference import PlanDifference
    from autoshard.plans.sharding_plan import ShardingPlan
    from autoshard.runtime.adafactor import Adafactor
    from autoshard.runtime.checkpoint import checkpointable
    from autoshard.saved_plans import load_plan, why_not
    from autoshard.search.result import SearchResult
    from autoshard.search.search import search
    from autoshard.specs.axes import MeshShape
    from autoshard.tools.compare.compare import compare
    from autoshard.tools.compare.comparison import Comparison
    from autoshard.tools.doctor.doctor import doctor
    from autoshard.tools.verify.report import VerifyReport
    from autoshard.tools.verify.verify import verify

__all__ = [
    "Adafactor",
    "Alternative",
    "AutoshardError",
    "BudgetError",
    "CaptureError",
    "Cluster",
    "Comparison",
    "Expenses",
    "Frontier",
    "HintError",
    "InputError",
    "MeshError",
    "MeshShape",
    "Options",
    "Pipeline",
    "PipelineError",
    "PipelineModule",
    "PipelinePlan",
    "PlanDifference",
    "PlanError",
    "RuleError",
    "Search",
    "SearchResult",
    "ShardingPlan",
    "VerifyError",
    "VerifyReport",
    "__version__",
    "calibrate",
    "check_options",
    "checkpointable",
    "compare",
    "doctor",
    "frontier",
    "full_state_dict",
    "full_tensor",
    "hint_text",
    "keep",
    "load_full_state_dict",
    "load_plan",
    "load_safetensors",
    "materialize",
    "no_sync",
    "offload",
    "parallelize",
    "parse_hint",
    "plan",
    "plan_of",
    "recompute",
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

_NAMES = {
    "autoshard.api": (
        "check_options",
        "frontier",
        "full_state_dict",
        "full_tensor",
        "load_full_state_dict",
        "load_safetensors",
        "materialize",
        "no_sync",
        "parallelize",
        "plan",
        "plan_of",
        "register_forward_method",
        "sampler_arguments",
        "shard_dataloader",
    ),
    "autoshard.capture.marks": ("keep", "offload", "recompute", "replicate", "set_default_strategy", "shard", "split"),
    "autoshard.cluster.calibrate": ("calibrate",),
    "autoshard.cluster.cluster": ("Cluster",),
    "autoshard.tools.compare.compare": ("compare",),
    "autoshard.tools.compare.comparison": ("Comparison",),
    "autoshard.tools.doctor.doctor": ("doctor",),
    "autoshard.errors": (
        "AutoshardError",
        "BudgetError",
        "CaptureError",
        "HintError",
        "InputError",
        "MeshError",
        "PipelineError",
        "PlanError",
        "RuleError",
        "VerifyError",
    ),
    "autoshard.options": ("Options", "Pipeline", "Search"),
    "autoshard.options.mesh_context": ("use_mesh",),
    "autoshard.patterns.registry": ("register_rule",),
    "autoshard.pipeline.plan.pipeline_plan": ("PipelinePlan",),
    "autoshard.pipeline.run.pipeline_module": ("PipelineModule",),
    "autoshard.planner.hints": ("hint_text", "parse_hint"),
    "autoshard.plans.alternative": ("Alternative",),
    "autoshard.plans.expenses": ("Expenses",),
    "autoshard.plans.frontier": ("Frontier",),
    "autoshard.plans.plan_difference": ("PlanDifference",),
    "autoshard.plans.sharding_plan": ("ShardingPlan",),
    "autoshard.runtime.adafactor": ("Adafactor",),
    "autoshard.runtime.checkpoint": ("checkpointable",),
    "autoshard.saved_plans": ("load_plan", "why_not"),
    "autoshard.search.result": ("SearchResult",),
    "autoshard.search.search": ("search",),
    "autoshard.specs.axes": ("MeshShape",),
    "autoshard.tools.verify.report": ("VerifyReport",),
    "autoshard.tools.verify.verify": ("verify",),
}
"""Module -> the public names that it defines."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}


class _Package(ModuleType):
    """The package, whose public names are imported when they are first used."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule sets it as an attribute of the package; `compare` and `search` must remain functions.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Package
