"""`PipelineReplanner`: plans a call's pipeline again with other hints and options, to show their cost."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.errors import BudgetError, PipelineError, PlanError
from autoshard.options import Pipeline
from autoshard.options.placements import InfeasibleHintError
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.pipeline_devices import forward_fingerprint
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures
from autoshard.pipeline.schedule.schedule_search import names_to_try
from autoshard.planner import hints as hint_rules
from autoshard.planner.hints import HintValue
from autoshard.planner.progress_line import show_progress
from autoshard.planner.regions import hinted_paths
from autoshard.planner.replanner import check_asked, existing_module
from autoshard.plans.alternative import Alternative
from autoshard.specs.axes import MeshShape

_REQUESTS = ("schedule", "microbatches", "virtual")


@dataclass(frozen=True, slots=True)
class PipelineReplanner:
    """Finds the best pipeline of a call with requested properties.

    Graphs of pipelines hold the parameters of the model, so a plan only remembers them if these are on the meta device.
    Otherwise the call is captured again.

    Attributes:
        module: a weak reference to the module.
        args, kwargs: the arguments of the example call.
        grad: True if the call needs gradients.
        mesh: all axes.
        pipeline: the options of the pipeline, including its axis.
        target: the options of the questioned plan.
        captures: the captures of the call; None if they hold numbers.
    """

    module: weakref.ref[nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad: bool
    mesh: MeshShape
    pipeline: Pipeline
    target: Target
    captures: PipelineCaptures | None

    @staticmethod
    def of(captures: PipelineCaptures, mesh: MeshShape, pipeline: Pipeline, target: Target) -> PipelineReplanner:
        """Return the replanner of a captured call, with or without gradients as currently set in torch."""
        call = captures.call
        # An optimizer would keep the parameters alive. The settings contain its memory.
        target = replace(target, options=replace(target.options, optimizer=None))
        is_meta = all(tensor.is_meta for tensor in (*call.module.parameters(), *call.module.buffers()))
        return PipelineReplanner(
            module=weakref.ref(call.module),
            args=call.args,
            kwargs=call.kwargs,
            grad=torch.is_grad_enabled(),
            mesh=mesh,
            pipeline=pipeline,
            target=target,
            captures=captures if is_meta else None,
        )

    def remember(self, plan: PipelinePlan) -> PipelinePlan:
        """Return a plan that answers `why_not` with this replanner."""
        return replace(plan, replanner=self)

    def __call__(
        self, plan: PipelinePlan, asked: Mapping[str, HintValue], requests: Mapping[str, str | int]
    ) -> Alternative[PipelinePlan]:
        """Return the best plan with the requested properties, and the difference; as `PipelinePlan.why_not`.

        `requests` has the requested fields of `Pipeline`.
        """
        module = existing_module(self.module)
        if asked or not requests:
            check_asked(asked, self.mesh)
        if unknown := requests.keys() - _REQUESTS:
            raise PlanError(f"{min(unknown)!r} cannot be asked of a pipeline: ask for {', '.join(_REQUESTS)}.")
        pipeline = replace(self.pipeline, **requests)  # type: ignore[arg-type]  # it checks the numbers itself
        names_to_try(pipeline.schedule)
        target = replace(self.target, hints={**(self.target.hints or {}), **asked})
        wanted = replace(self, pipeline=pipeline, target=target)
        call = BatchCall(module, self.args, self.kwargs, self.pipeline.batch_dims)
        title = f"planning of {type(module).__name__} as a pipeline"
        with torch.set_grad_enabled(self.grad), show_progress(target.options.search.verbose, title):
            captures = self.captures or PipelineCaptures(call, self.target)
            step = (captures.with_dynamic_batch if plan.in_shares else captures).step(plan.microbatches)
            plan.check(self.mesh, forward_fingerprint(step))
            try:
                # Only primitives are part of the graphs, as marks.
                if _marks(module, target) != _marks(module, self.target):
                    captures = PipelineCaptures(call, target)
                    wanted = replace(wanted, captures=self.captures and captures)
                elif wanted._is_met_by(plan, module, step.joint.aliases):
                    return Alternative.same(plan)
                other = plan_pipeline(captures, self.mesh, pipeline, target)
            except (InfeasibleHintError, PipelineError, PlanError) as error:
                return Alternative.impossible(str(error))
            except BudgetError as error:
                return Alternative.too_large(target.settings.memory_limit or max(plan.capacities), error.peak)
        if _decide_alike(plan, other):
            return Alternative.same(plan)
        return Alternative.possible(plan, wanted.remember(other))

    def _is_met_by(self, plan: PipelinePlan, module: nn.Module, aliases: Mapping[str, tuple[str, ...]]) -> bool:
        """Return True if a plan has the requested schedule and numbers, and the placements pinned by hints."""
        options = self.pipeline
        if plan.schedule.name not in names_to_try(options.schedule):
            return False
        if options.microbatches not in ("auto", plan.microbatches) or options.virtual not in ("auto", plan.virtual):
            return False
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        modules = [name for name, _ in module.named_modules()]
        for stage in plan.stages:
            for name, pins in hint_rules.resolve(self.target.hints, shapes, aliases, modules, stage.mesh).items():
                placed = zip(pins, stage.placements.get(name, pins), strict=True)
                if not all(pin is None or pin == placement for pin, placement in placed):
                    return False
        return True


def _marks(module: nn.Module, target: Target) -> Mapping[str, object]:
    modules = [name for name, _ in module.named_modules()]
    hints = target.hints or {}
    regions = {glob: (str(hints[glob]), paths) for glob, paths in hinted_paths(hints, modules).items()}
    return {"task graphs": hint_rules.task_graphs(hints, modules), "regions": regions}


def _decide_alike(plan: PipelinePlan, other: PipelinePlan) -> bool:
    """Return True if two plans of one model run the same stages in the same order."""

    def decisions(plan: PipelinePlan) -> tuple[object, ...]:
        stages = [(stage.placements, stage.decisions, stage.shares) for stage in plan.stages]
        return plan.schedule, plan.stage_of, plan.recomputed, stages

    return decisions(plan) == decisions(other)
