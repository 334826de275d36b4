"""The data of a sharding plan, which the modules that print and save plans read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import Placement

from autoshard.memory.footprint import Memory
from autoshard.specs.axes import MeshShape

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of one step at one place of the model.

    Attributes:
        kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"` or `"shift"`.
        axis: name of the mesh axis that it runs over.
        bytes: held by one device before one of them.
        count: of them in a step.
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
class PlanContents:
    """The fields of `ShardingPlan`, which documents them, and the figures that follow from them."""

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
        # An assertion: files are checked by `plan_file`, so that a wrong length here is a fault of the planner.
        for table in (self.placements, self.input_placements, self.output_placements):
            for name, placements in table.items():
                assert len(placements) == self.mesh.ndim, (
                    f"{name} has {len(placements)} placements on a mesh of {self.mesh.ndim} axes"
                )

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """Mesh axis -> the shares of the batch that its ranks take, as proportions; empty for equal shares."""
        return {axis: tuple(shares) for axis, shares in self.options.get("shares", {}).items()}

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The loops whose dims lie in shares, where these are not of the batch of dynamic inputs (`patterns.parts`)."""
        return tuple((name, factor) for name, factor in self.options.get("parts", ()))

    @property
    def gap(self) -> float:
        """Distance from the best plan, at most, relative to the cost; 0.0 if the plan is proved to be the best."""
        # Rounding may put the bound above the cost by a little.
        return max(0.0, (self.cost - self.lower_bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def capacity(self) -> int:
        """Bytes that the step may hold: the memory limit that the plan was made for, or the memory of a device."""
        # A user's limit leaves room for what plans do not count, so it comes before the device's memory.
        return self.options.get("memory_limit") or self.device_memory

    @property
    def fits(self) -> bool:
        """True if the peak is within the `capacity`, or the capacity is not known."""
        return not self.capacity or self.memory.peak <= self.capacity
