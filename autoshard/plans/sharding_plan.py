"""`ShardingPlan`: what was decided for one model on one mesh, and why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Placement

from autoshard.errors import PlanError
from autoshard.memory.footprint import Memory
from autoshard.plans import plan_file, plan_text
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes, format_seconds

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of one step at one place of the model.

    Attributes:
        kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"` or `"shift"`.
        axis: name of the mesh axis that it runs over.
        bytes: what one device holds before one of them.
        count: how many of them a step runs.
        module: path of the module that they belong to, `""` for the root.
        phase: `"forward"` or `"backward"`.
        seconds: predicted time of one of them.
    """

    kind: str
    axis: str
    bytes: int
    count: int
    module: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The strategy chosen for one operator, for people.

    Attributes:
        node: name of the operator's node in the captured graph.
        operator: such as `"aten.mm"`.
        module: path of the module that it comes from, `""` for the root.
        phase: `"forward"` or `"backward"`.
        strategy: the specs of its operands and results, in words.
        seconds: predicted time of its compute and of the collectives of the strategy.
    """

    node: str
    operator: str
    module: str
    phase: str
    strategy: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """Where every parameter, input and output of a model lies on a mesh, and how its operators are sharded.

    A plan is data: it holds no tensor and no process group, compares by value, and round-trips through JSON.

    Attributes:
        mesh: the axes it is for.
        placements: parameter or buffer name -> torch placements, one per mesh axis.
        input_placements: input path -> placements.
        output_placements: output path -> placements.
        shapes: parameter or buffer name -> global shape.
        step_seconds: predicted time of one step, forward and backward.
        update_seconds: predicted time of the optimizer's update, which follows it.
        memory: bytes per device.
        device_memory: bytes that a device of the cluster has; 0 where it is not known.
        collectives: what a step sends.
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
        recomputed: names of the layers that the backward half runs again, instead of keeping what they made.
    """

    mesh: MeshShape
    placements: dict[str, Placements]
    input_placements: dict[str, Placements] = field(default_factory=dict)
    output_placements: dict[str, Placements] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    memory: Memory = field(default_factory=Memory)
    device_memory: int = 0
    collectives: tuple[Collective, ...] = ()
    cost: float = 0.0
    lower_bound: float = 0.0
    method: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    fingerprint: str = ""
    cluster: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, Any] = field(default_factory=dict)
    choices: tuple[Decision, ...] = ()
    hints: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gathered: dict[str, str] = field(default_factory=dict)
    recomputed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for table in (self.placements, self.input_placements, self.output_placements):
            for name, placements in table.items():
                assert len(placements) == self.mesh.ndim, (
                    f"{name} has {len(placements)} placements on a mesh of {self.mesh.ndim} axes"
                )

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """What the ranks of a mesh axis take of the batch, in proportion to one another; empty for equal shares."""
        return {axis: tuple(taken) for axis, taken in self.options.get("shares", {}).items()}

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The loops whose dims lie in shares, where these are not of the batch of dynamic inputs (`patterns.parts`)."""
        return tuple((name, factor) for name, factor in self.options.get("parts", ()))

    @property
    def gap(self) -> float:
        """How far, relative to its cost, the plan may be from the best one; 0.0 if it is proved to be the best."""
        return max(0.0, (self.cost - self.lower_bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def capacity(self) -> int:
        """Bytes that the step may hold: the memory limit that the plan was made for, or what a device has."""
        return self.options.get("memory_limit") or self.device_memory

    @property
    def fits(self) -> bool:
        """Whether the peak is within the `capacity`; True where that is not known."""
        return not self.capacity or self.memory.peak <= self.capacity

    def __repr__(self) -> str:
        peak, step = format_bytes(self.memory.peak), format_seconds(self.step_seconds)
        held = f"{len(self.placements)} parameters and buffers"
        return f"ShardingPlan({held} on {self.mesh}, {peak} at {step} per step; print it to see more)"

    def __str__(self) -> str:
        return plan_text.render(self)

    def explain(self, path_glob: str) -> str:
        """Why the parameters and modules that a glob matches lie as they do.

        Args:
            path_glob: glob over parameter names and module paths; what lies below a matching module belongs to it.

        Returns:
            Text: their placements, the strategies of the operators there with their cost, and the collectives there.

        Raises:
            PlanError: nothing in the plan matches.
        """
        return plan_text.explain(self, path_glob)

    def to_json(self) -> str:
        """The plan as a JSON text with a checksum of its content."""
        return plan_file.encode(plan_file.to_data(self))

    @staticmethod
    def from_json(text: str, what: str = "the plan") -> ShardingPlan:
        """The plan that `to_json` wrote; `what` names the text in errors.

        Raises:
            PlanError: the text is cut short, was edited, is of another format or version, or is no plan.
        """
        return ShardingPlan.from_data(plan_file.decode(text, what))

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> ShardingPlan:
        """The plan that `plan_file.to_data` made data of, which follows the schema."""
        return ShardingPlan(
            **dict(data)
            | {
                "mesh": MeshShape.of(data["mesh"]),
                "placements": plan_file.placements_of(data["placements"]),
                "input_placements": plan_file.placements_of(data["input_placements"]),
                "output_placements": plan_file.placements_of(data["output_placements"]),
                "shapes": {name: tuple(shape) for name, shape in data["shapes"].items()},
                "memory": Memory.from_data(data["memory"]),
                "recomputed": tuple(data["recomputed"]),
                "collectives": tuple(Collective(**record) for record in data["collectives"]),
                "choices": tuple(Decision(**record) for record in data["choices"]),
            }
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json(), "utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ShardingPlan:
        """The plan that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or `from_json` refuses it.
        """
        return ShardingPlan.from_json(*plan_file.read(path))

    def check(self, mesh: MeshShape, fingerprint: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make sure that the plan was made for this model on this mesh.

        Args:
            mesh: the mesh that it is to be applied on.
            fingerprint: of the graph captured from the model.
            shapes: parameter or buffer name -> global shape.

        Raises:
            PlanError: naming every difference found.
        """
        differences = [
            *self._mesh_differences(mesh),
            *self._parameter_differences(shapes),
            *self._share_differences(mesh),
        ]
        if not differences and fingerprint != self.fingerprint:
            differences.append(self._graph_difference(fingerprint))
        if differences:
            listed = "".join(f"\n  - {difference}" for difference in differences)
            raise PlanError(
                f"this plan does not fit:{listed}\nMake a plan of this model on this mesh with autoshard.plan, "
                f"or apply it to what it was made for."
            )

    def _mesh_differences(self, mesh: MeshShape) -> list[str]:
        return [] if mesh == self.mesh else [f"it was made for the mesh {self.mesh}; this mesh is {mesh}"]

    def _parameter_differences(self, shapes: Mapping[str, Sequence[int]]) -> list[str]:
        """One text for each kind of difference, naming the first few parameters that have it."""
        missing = [name for name in self.placements if name not in shapes]
        extra = [name for name in shapes if name not in self.placements]
        other = [
            f"{name} (planned {shape}, here {tuple(shapes[name])})"
            for name, shape in self.shapes.items()
            if name in shapes and tuple(shapes[name]) != shape
        ]
        named = (("the model lacks", missing), ("the plan lacks", extra), ("the shape differs of", other))
        return [f"{what} {_first(names)}" for what, names in named if names]

    def _share_differences(self, mesh: MeshShape) -> list[str]:
        """Shares that the ranks of no axis can take, and parts of dims without shares."""
        if self.parts and not self.shares:
            return ["it has dims in unequal parts, and no shares that say which rank takes what of them"]
        return [
            f"axis {axis!r} has shares for {len(taken)} ranks, and is not one of so many in {mesh}"
            for axis, taken in self.shares.items()
            if axis not in mesh.names or mesh.sizes[mesh.index(axis)] != len(taken)
        ]

    def _graph_difference(self, fingerprint: str) -> str:
        made = ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "unknown versions"
        return (
            f"the parameters agree, but the captured graph does not ({fingerprint[:12]} here, {self.fingerprint[:12]} "
            f"planned): other example inputs or `dynamic` dims, another mode of the model, or other versions (planned "
            f"with {made}; this is torch {torch.__version__})"
        )


def _first(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
