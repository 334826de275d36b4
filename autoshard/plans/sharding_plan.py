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
        mesh: the axes of the mesh.
        placements: parameter or buffer name -> torch placements, one per mesh axis.
        input_placements: input path -> placements.
        output_placements: output path -> placements.
        shapes: parameter or buffer name -> global shape.
        step_seconds: predicted time of one step, forward and backward, including the optimizer's updates on the host.
        update_seconds: predicted time of the optimizer's update on the device after the step.
        host_update_seconds: the part of `step_seconds` for the optimizer's updates on the host.
        memory: the memory account, in bytes per device.
        device_memory: bytes of memory of a device of the cluster; 0 if unknown.
        collectives: the collectives of one step.
        cost: value of the solver's objective, in seconds.
        lower_bound: a lower bound of the cost of all plans in the searched space.
        method: how the solver found the plan.
        timings: phase of planning -> its seconds.
        fingerprint: the fingerprint of the captured graph.
        cluster: name of the cluster whose prices were used.
        versions: `"autoshard"` and `"torch"` -> the version that made the plan.
        decisions: the choice of every node, as the planner records it (JSON data).
        choices: the same in readable form.
        hints: hint -> what it pinned, as text.
        options: planning options (JSON data).
        gathered: parameter name -> `"again"` if gathered copies in the forward half are freed, and gathered again in
            the backward half (ZeRO-3); `"once"` if they are kept for it, or if only one half gathers the parameter;
            parameters that are used without gathering are not listed.
        recomputed: names of the layers, or of single operators of the captured graph, that the backward half recomputes
            instead of keeping their activations.
        offloaded: names of the values of the captured graph that are moved to the host until the backward half reads
            them.
        hosted: names of the parameters whose optimizer state, and update, is on the host.
        step_replay: the predicted step, call by call, for pages and traces; empty in files of older versions.
        replanner: answers `why_not`; None if the plan does not remember how it was made. It holds the captured step,
            about 1 MB per transformer layer, and no weights. It is not part of the plan's value, file or pickle.
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
        # A plan is immutable, so a copy of a module shares it.
        return self

    def explain(self, path_glob: str) -> str:
        """Return the reasons for the placements of the parameters and modules that a glob matches.

        Args:
            path_glob: glob over parameter names and module paths; it includes everything below a matching module.

        Returns:
            Text: their placements, the strategies of their operators with costs, and their collectives.

        Raises:
            PlanError: nothing in the plan matches.
        """
        return str(self.explanation(path_glob))

    def explanation(self, path_glob: str) -> Report:
        """Return the report that `explain` prints."""
        return explanation(self, path_glob)

    def expenses(self) -> Expenses:
        """Return the expenses of a step: seconds and bytes by mesh axis, kind and module; it prints as tables."""
        return Expenses(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step of one rank as a trace for Perfetto and chrome://tracing.

        Raises:
            PlanError: the plan is from a file of an older version, which lacks the calls of the step.
        """
        step = StepTasks.of(self)
        Path(path).write_text(trace(step.tasks, step.starts, step.ends, [step.memory]), "utf-8")

    def why_not(self, asked: Mapping[str, Any]) -> Alternative[ShardingPlan]:
        """Find the best plan with requested properties, and its cost compared to this plan, term by term.

        It takes about as long as this plan took, without the capture. The options are those of this plan, except that
        hints with the same globs are replaced.

        Args:
            asked: the requested properties, in the form of the option `hints` of `autoshard.plan`: glob -> placements
                or a primitive, such as `{"layers.*.up.weight": {"tp": Shard(0)}}` or `{"*":
                autoshard.replicate("dp")}`.

        Raises:
            PlanError: the plan was loaded from a file, or belongs to a parallelised module, so that it does not
                remember how it was made (`autoshard.why_not` takes the model); or the model no longer exists.
            HintError: a hint names something that the model or the mesh does not have.
        """
        if self.replanner is None:
            raise forgotten_error()
        return self.replanner(self, asked)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles contain only the value.
        return ShardingPlan._of_values, tuple(getattr(self, item.name) for item in fields(PlanContents))

    @staticmethod
    def _of_values(*values: Any) -> ShardingPlan:
        return ShardingPlan(**dict(zip((item.name for item in fields(PlanContents)), values, strict=True)))

    def to_json(self) -> str:
        """Return the plan as a JSON text with a checksum of its content."""
        return plan_data.encode(plan_data.to_data(self))

    @staticmethod
    def from_json(text: str, what: str = "the plan") -> ShardingPlan:
        """Return the plan from a text of `to_json`; `what` names the text in errors.

        Raises:
            PlanError: the text is truncated, edited, of another format or version, or not a plan.
        """
        return ShardingPlan.from_data(plan_data.decode(text, what))

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> ShardingPlan:
        """Return the plan from data of `plan_data.to_data`, which must satisfy the schema."""
        return ShardingPlan(**plan_data.fields_of(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json(), "utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ShardingPlan:
        """Return the plan in a file of `save`.

        Raises:
            PlanError: the file cannot be read, or `from_json` refuses it.
        """
        return ShardingPlan.from_json(*plan_data.read(path))

    def check(self, mesh: MeshShape, fingerprint: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise an error unless the plan was made for this model on this mesh.

        Args:
            mesh: the mesh to apply the plan to.
            fingerprint: the fingerprint of the model's captured graph.
            shapes: parameter or buffer name -> global shape.

        Raises:
            PlanError: the plan does not fit; the message names every difference.
        """
        # All differences at once, so that a user who fixes one does not run into the next.
        differences = [] if mesh == self.mesh else [f"it was made for the mesh {self.mesh}; this mesh is {mesh}"]
        differences += [*self._parameter_differences(shapes), *self._share_differences(mesh)]
        # Other parameters or another mesh change the graph, so its fingerprint is only informative if these agree.
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
        """Return one text for each kind of difference, with the first few parameters."""
        missing = [name for name in self.placements if name not in shapes]
        extra = [name for name in shapes if name not in self.placements]
        reshaped = [
            f"{name} (planned {shape}, here {tuple(shapes[name])})"
            for name, shape in self.shapes.items()
            if name in shapes and tuple(shapes[name]) != shape
        ]
        # A few names of each kind: with a wrong model, all parameters differ.
        kinds = (("the model lacks", missing), ("the plan lacks", extra), ("the shape differs of", reshaped))
        return [f"{kind} {_first(names)}" for kind, names in kinds if names]

    def _share_differences(self, mesh: MeshShape) -> list[str]:
        """Return texts about shares that the ranks of no axis can take, and about parts of dims without shares."""
        # Such a plan was edited by hand: the planner only makes parts together with shares.
        if self.parts and not self.shares:
            return ["it has dims in unequal parts, and no shares that say which rank takes what of them"]
        return [
            f"axis {axis!r} has shares for {len(shares)} ranks, and is not one of so many in {mesh}"
            for axis, shares in self.shares.items()
            if axis not in mesh.names or mesh.sizes[mesh.index(axis)] != len(shares)
        ]


def _first(names: Sequence[str], limit: int = 3) -> str:
    """Return the first few names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
