"""Plans from files: read, whatever kind they are of, and asked why they are not another one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack, overload

import torch
from torch import nn

from autoshard.capture.bound_call import BoundCall
from autoshard.errors import PlanError
from autoshard.options import Hints, OptionKeywords, collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.pipeline_plan import FORMAT as PIPELINE
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_replanner import PipelineReplanner
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures
from autoshard.pipeline.run.pipeline_module import resolve_pipeline
from autoshard.planner.hints import recorded_hints
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.replanner import Replanner
from autoshard.plans import plan_data
from autoshard.plans.alternative import Alternative
from autoshard.plans.frontier import FORMAT as FRONTIER
from autoshard.plans.frontier import Frontier
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.arguments import check_examples, check_module, check_plan

# The format is the first entry of a file, and a frontier's plans have formats of their own later.
_HEAD = re.compile(r'\A\s*\{\s*"format"\s*:\s*"(?P<format>[^"]*)"')


def load_plan(path: str | os.PathLike[str]) -> ShardingPlan | PipelinePlan | Frontier:
    """Read a file that a plan, the plan of a pipeline, or a frontier wrote by `save`, whichever it is.

    Args:
        path: of the file.

    Returns:
        An object of the class that wrote the file, equal to the one that was saved. It answers no `why_not` by itself:
        that needs the model, as `autoshard.why_not` takes it.

    Raises:
        PlanError: the file cannot be read, is cut short or edited, or is none of these.
    """
    text, what = plan_data.read(path)
    head = _HEAD.match(text)
    kind = head["format"] if head is not None else ""
    if kind == PIPELINE.name:
        return PipelinePlan.from_json(text, what)
    if kind == FRONTIER:
        return Frontier.load(path)
    return ShardingPlan.from_json(text, what)


@overload
def why_not(
    plan: ShardingPlan,
    asked: Hints,
    module: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    requests: Mapping[str, str | int] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Alternative[ShardingPlan]: ...
@overload
def why_not(
    plan: PipelinePlan,
    asked: Hints,
    module: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    requests: Mapping[str, str | int] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Alternative[PipelinePlan]: ...
def why_not(
    plan: ShardingPlan | PipelinePlan,
    asked: Hints,
    module: nn.Module,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    requests: Mapping[str, str | int] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Alternative[ShardingPlan] | Alternative[PipelinePlan]:
    """Find the best plan that has what is asked for, and what it costs in place of a plan that was loaded from a file.

    A plan that `autoshard.plan`, `frontier` or `search` returns answers by itself: `plan.why_not(asked)`.

    Args:
        plan: the plan, of one program or of a pipeline.
        asked: what it should have, as for `ShardingPlan.why_not`.
        module, example_args, example_kwargs: what the plan was made for, as for `autoshard.plan`.
        requests: of a pipeline, its `"schedule"`, `"microbatches"` or `"virtual"` that are asked for.
        **keywords: the options that the plan was made with. The cluster, the memory limit, the hints,
            `unread_outputs` and `output_placements="planned"` are by default those that the plan records.

    Raises:
        PlanError: the plan is of another model or of another cluster, or is asked for what it cannot have.
        CaptureError, HintError, InputError, PipelineError, TypeError: as for `autoshard.plan`.
    """
    check_module(module)
    args, kwargs = check_examples(example_args, example_kwargs)
    if isinstance(plan, PipelinePlan):
        recorded = _recorded_options(plan.stages[0], max(plan.capacities, default=None))
    elif isinstance(plan, ShardingPlan):
        recorded = _recorded_options(plan, plan.options.get("memory_limit"))
        recorded["inputs"] = plan.options.get("inputs", "global")
        recorded["output_placements"] = plan.options.get("output_placements")
        recorded["unread_outputs"] = tuple(plan.options.get("unread_outputs", ()))
    else:
        raise PlanError(f"why_not asks a ShardingPlan or a PipelinePlan, not a {type(plan).__name__}.")
    target = Target.of(collect_options("why_not", {**recorded, **keywords}), None)
    if target.cluster.name != plan.cluster:
        raise PlanError(
            f"the plan was made for the cluster {plan.cluster!r}, and the cluster is {target.cluster.name!r}: pass "
            "cluster= as the plan was made with."
        )
    options = target.options.pipeline
    if isinstance(plan, PipelinePlan):
        pipeline = resolve_pipeline(plan.mesh, replace(options, axis=plan.axis))
        assert pipeline is not None, "it has an axis"
        captures = PipelineCaptures(BatchCall(module, args, kwargs, pipeline.batch_dims), target)
        return PipelineReplanner.of(captures, plan.mesh, pipeline, target)(plan, asked, requests or {})
    if requests or options.requests or options.axis is not None:
        raise PlanError("the plan has no pipeline: leave out requests= and pipeline=.")
    check_plan(plan, module, plan.mesh)
    planner = ModulePlanner(module, plan.mesh, target)
    call = BoundCall.of(module, args, kwargs, torch.is_grad_enabled())
    captured = planner.capture(call, logits_room=planner.logits_room, by_layers=True).form_of(plan)
    plan.check(plan.mesh, captured.graph.fingerprint, plan.shapes)
    return Replanner.of(module, captured.graph, captured.seconds, plan.mesh, target)(plan, asked)


def _recorded_options(plan: ShardingPlan, memory_limit: int | None) -> dict[str, Any]:
    """Return the options that are recorded in a plan, or in that of the first stage of a pipeline."""
    return {"cluster": plan.cluster or None, "memory_limit": memory_limit, "hints": recorded_hints(plan.hints)}
