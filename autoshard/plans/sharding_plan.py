"""`ShardingPlan`: the decisions made for one model on one mesh, and their reasons."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import PlanError
from autoshard.plans import plan_data
from autoshard.plans.alternative import Alternative, Replans, forgotten_error
from autoshard.plans.expenses import Expenses
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_explanation import explanation
from autoshard.plans.plan_report import plan_report
from autoshard.plans.step_trace import StepTasks, trace
from autoshard.report import HasReport, Report
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan(PlanContents, HasReport):
    """The placements of all parameters, inputs and outputs of a model on a mesh, and the strategies of its operators.

    A plan is data: it holds no tensor and no process group, compares by value, and round-trips through JSON.

    Attributes:
        mesh: the axes it is for.
        placements: parameter or buffer name -> torch placements, one per mesh axis.
        input_placements: input path -> placements.
        output_placements: output path -> placements.
        shapes: parameter or buffer name -> global shape.
        step_seconds: predicted time of one step, forward and backward, and of the optimizer's updates on the host.
        update_seconds: predicted time of the optimizer's update on the device, which follows it.
        host_update_seconds: the part of `step_seconds` of the optimizer's updates on the host.
        memory: bytes per device.
        device_memory: bytes that a device of the cluster has; 0 where it is not known.
        collectives: of one step.
        cost: value of the solver's objective, seconds.
        lower_bound: no plan in the space that was searched costs less than this.
        method: how the solver found it.
        timings: phase of planning -> seconds that it took.
        fingerprint: of the captured graph.
        cluster: name of the cluster it was priced on.
        versions: `"autoshard"` and `"torch"` -> version that made it.
        decisions: the choice of every node, as the planner records it (JSON data).
        choices: the same for people.
        hints: hint -> what it pinned, as text.
        options: planning options (JSON data).
        gathered: parameter name -> `"again"` if copies of it that the forward half gathers are freed, and made again
            in the backward half (ZeRO-3); `"once"` if they are kept for it, or if one half alone gathers it; parameters
            that are used as they lie are not listed.
        recomputed: names of the layers, or of single operators of the captured graph, that the backward half runs
            again, instead of keeping their activations.
        offloaded: names of the values of the captured graph that are moved to the host until the backward half reads
            them.
        hosted: names of the parameters whose optimizer state is on the host, and which are updated there.
        step_replay: the predicted step, call by call, for pages and traces; empty in the files of older versions.
        replanner: answers `why_not`; None where the plan does not remember how it was made. It holds the captured step,
            about 1 MB for each layer of a transformer, and no weights. It is no part of the plan's value, file or
            pickle.
    """

    replanner: Replans | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        peak, step = format_bytes(self.memory.peak), format_seconds(self.step_seconds)
        tensors = f"{len(self.placements)} parameters and buffers"
        late = "; the time limit ended the search" if self.ended_early else ""
        return f"ShardingPlan({tensors} on {self.mesh}, {peak} at {step} per step{late}; print it to see more)"

    def report(self, *, is_compared: bool = False) -> Report:
        """Return the plan as a tree: key figures, charts, and tables of all that it decides.

        Args:
            is_compared: True if the report is part of one that lists standard layouts beside the plan.
        """
        return plan_report(self, is_compared=is_compared)

    def __deepcopy__(self, memo: object) -> ShardingPlan:
        # A plan never changes: a copy of a module shares it.
        return self

    def explain(self, path_glob: str) -> str:
        """Return the reasons for the placements of the parameters and modules that a glob matches.

        Args:
            path_glob: glob over parameter names and module paths; it covers what lies below a matching module.

        Returns:
            Text: their placements, the strategies of the operators there with their cost, and the collectives there.

        Raises:
            PlanError: nothing in the plan matches.
        """
        return str(self.explanation(path_glob))

    def explanation(self, path_glob: str) -> Report:
        """Return the report whose text is that of `explain`."""
        return explanation(self, path_glob)

    def expenses(self) -> Expenses:
        """Return what a step spends: seconds and bytes by mesh axis, kind and module; it prints as tables."""
        return Expenses(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step of one rank as a trace that Perfetto and chrome://tracing load.

        Raises:
            PlanError: the plan is from a file of an older version, which does not have the calls of the step.
        """
        step = StepTasks.of(self)
        Path(path).write_text(trace(step.tasks, step.starts, step.ends, [step.memory]), "utf-8")

    def why_not(self, asked: Mapping[str, Any]) -> Alternative[ShardingPlan]:
        """Find the best plan that has what is asked for, and what it costs in place of this one, term by term.

        It takes about as long as this plan took, without the capture. The options are those that this plan was made
        with; of its hints, those under the same globs are replaced.

        Args:
            asked: what the plan should have, as the option `hints` of `autoshard.plan` says it: glob -> placements or
                a primitive, such as `{"layers.*.up.weight": {"tp": Shard(0)}}` or `{"*": autoshard.replicate("dp")}`.

        Raises:
            PlanError: the plan was loaded from a file, or is of a parallelised module, so that it does not remember how
                it was made (`autoshard.why_not` takes the model); or the model exists no more.
            HintError: a hint names what the model or the mesh does not have.
        """
        if self.replanner is None:
            raise forgotten_error()
        return self.replanner(self, asked)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are of the value alone.
        return ShardingPlan._of_values, tuple(getattr(self, item.name) for item in fields(PlanContents))

    @staticmethod
    def _of_values(*values: Any) -> ShardingPlan:
        return ShardingPlan(**dict(zip((item.name for item in fields(PlanContents)), values, strict=True)))

    def to_json(self) -> str:
        """Return the plan as a JSON text with a checksum of its content."""
        return plan_data.encode(plan_data.to_data(self))

    @staticmethod
    def from_json(text: str, what: str = "the plan") -> ShardingPlan:
        """Return the plan that `to_json` wrote; `what` names the text in errors.

        Raises:
            PlanError: the text is cut short, was edited, is of another format or version, or is not a plan.
        """
        return ShardingPlan.from_data(plan_data.decode(text, what))

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> ShardingPlan:
        """Return the plan that `plan_data.to_data` wrote; `data` must follow the schema."""
        return ShardingPlan(**plan_data.fields_of(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json(), "utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ShardingPlan:
        """Return the plan that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or `from_json` refuses it.
        """
        return ShardingPlan.from_json(*plan_data.read(path))

    def check(self, mesh: MeshShape, fingerprint: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise an error unless the plan was made for this model on this mesh.

        Args:
            mesh: the mesh that the plan is to be applied on.
            fingerprint: of the graph captured from the model.
            shapes: parameter or buffer name -> global shape.

        Raises:
            PlanError: naming every difference found.
        """
        # All differences at once: a user who fixes one of them should not meet the next.
        differences = [] if mesh == self.mesh else [f"it was made for the mesh {self.mesh}; this mesh is {mesh}"]
        differences += [*self._parameter_differences(shapes), *self._share_differences(mesh)]
        # Other parameters or another mesh give another graph: its fingerprint says more only where these agree.
        if not differences and fingerprint != self.fingerprint:
            versions = ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "unknown versions"
            differences.append(
                f"the parameters agree, but the captured graph does not ({fingerprint[:12]} here, "
                f"{self.fingerprint[:12]} planned): other example inputs, `dynamic` dims or "
                f"`unread_outputs`, another mode of the model, or other versions (planned with {versions}; this is "
                f"torch {torch.__version__})"
            )
        if differences:
            listed = "".join(f"\n  - {difference}" for difference in differences)
            raise PlanError(
                f"this plan does not fit:{listed}\nMake a plan of this model on this mesh with autoshard.plan, "
                f"or apply it to what it was made for."
            )

    def _parameter_differences(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """Return one text for each kind of difference, naming the first few parameters that have it."""
        missing = [name for name in self.placements if name not in shapes]
        extra = [name for name in shapes if name not in self.placements]
        reshaped = [
            f"{name} (planned {shape}, here {tuple(shapes[name])})"
            for name, shape in self.shapes.items()
            if name in shapes and tuple(shapes[name]) != shape
        ]
        # A few names of each kind: a wrong model differs in all of them.
        kinds = (("the model lacks", missing), ("the plan lacks", extra), ("the shape differs of", reshaped))
        return [f"{kind} {_first(names)}" for kind, names in kinds if names]

    def _share_differences(self, mesh: MeshShape) -> list[str]:
        """Return texts of shares that the ranks of no axis can take, and of parts of dims without shares."""
        # Such a plan was edited by hand: the planner makes parts only together with shares.
        if self.parts and not self.shares:
            return ["it has dims in unequal parts, and no shares that say which rank takes what of them"]
        return [
            f"axis {axis!r} has shares for {len(shares)} ranks, and is not one of so many in {mesh}"
            for axis, shares in self.shares.items()
            if axis not in mesh.names or mesh.sizes[mesh.index(axis)] != len(shares)
        ]


def _first(names: Sequence[str], limit: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
