"""Unequal parts of what is split along an axis: ranks that compute with 5 and 3 of 8 parts do what one device does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import BudgetError, PlanError
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.parts import unequal_loops, with_unequal_loops
from autoshard.planner import shares
from autoshard.planner.shares import candidate_totals
from autoshard.size import is_dynamic
from autoshard.specs.axes import MeshShape
from tests.models.common import fixed_seed
from tests.option_groups import grouped
from tests.training import (
    ONE_LAYER,
    TOLERANCE,
    Float64Mode,
    Trace,
    build,
    compare,
    default_float64,
    fast_links,
    outputs_of,
    train,
    unlike_devices,
)
from tests.workers import Workers

Inputs = dict[str, torch.Tensor]
SHARES = {"tp": (5, 3)}
QUICKLY: dict[str, Any] = {"cluster": fast_links(), "search": autoshard.Search(effort="fast")}


class Wide(nn.Module):
    """Two layers whose columns are split, and a head of many classes."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 24), nn.Linear(24, 6), nn.Linear(6, classes)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with autoshard.split(2):
            hidden = self.down(functional.gelu(self.up(x)))
        with autoshard.split(2):
            return functional.cross_entropy(self.head(hidden), target)


class Heads(nn.Module):
    """Attention whose heads are split."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        with autoshard.split(2):
            parts = self.qkv(x).view(rows, length, 3, 8, 4).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
            return self.out(functional.gelu(mixed.transpose(1, 2).reshape(rows, length, 32)))


class Square(nn.Module):
    """A square weight with a diagonal of its own, both of whose dims are in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = self.weight.clone()
        square.diagonal().add_(1.0)
        with autoshard.split(2):
            return self.out(x + (x @ square).relu()).square().mean()


class Told(nn.Module):
    """Operators that are told sizes of the batch, or sizes and places of other dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.table = nn.Linear(6, 24), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        moved = functional.pad(x + self.table.repeat(rows, 1, 1), (0, 0, 1, 0)).roll(2, 1)
        scores = functional.gelu(self.up(moved))
        return scores[torch.arange(rows), last].square().mean() + scores.new_full((rows,), 0.5).sum()


def told() -> tuple[nn.Module, Inputs]:
    with fixed_seed(torch.float64, 0):
        return Told(), {"x": torch.randn(16, 7, 6), "last": torch.randint(7, (16,))}


def wide(rows: int = 5) -> tuple[nn.Module, Inputs]:
    with fixed_seed(torch.float64, 0):
        return Wide(), {"x": torch.randn(rows, 6), "target": torch.randint(40, (rows,))}


def square() -> tuple[nn.Module, Inputs]:
    with fixed_seed(torch.float64, 0):
        return Square(), {"x": torch.randn(5, 8)}


def odd() -> tuple[nn.Module, Inputs]:
    """Of its classes no two ranks can hold unequal numbers of equal parts."""
    with fixed_seed(torch.float64, 0):
        return Wide(41), {"x": torch.randn(5, 6), "target": torch.randint(41, (5,))}


def heads() -> tuple[nn.Module, Inputs]:
    with fixed_seed(torch.float64, 0):
        return Heads(), {"x": torch.randn(3, 7, 32)}


class Activated(TorchDispatchMode):
    """While active, notes the shapes that this rank activates."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.gelu.default:
            self.shapes.add(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def check(
    made: Callable[[], tuple[nn.Module, Inputs]], *, evaluated: bool = False, **options: Any
) -> set[tuple[int, ...]]:
    """Three steps, and one without gradients if told, beside one device; the shapes that this rank activates."""
    (module, example), (alone, _) = made(), made()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with Float64Mode():
        autoshard.parallelize(module, mesh, (), example, **(QUICKLY | {"shares": SHARES} | options))
        expected = train(alone, example)
    seen = Activated()
    with default_float64(), seen:
        trained = train(module, example)
    assert compare(trained, expected).worst <= TOLERANCE
    if evaluated:
        with Float64Mode(), torch.no_grad():
            assert compare(train_nothing(module, example), train_nothing(alone, example)).worst <= TOLERANCE
    return seen.shapes


def train_nothing(module: nn.Module, example: Inputs) -> Trace:
    outputs = {name: [tensor.double()] for name, tensor in outputs_of(module(**example)).items()}
    return Trace({}, outputs, {}, {}, {}, {}, {})


def samples(made: Callable[[], tuple[nn.Module, Inputs]], shares: tuple[int, int]) -> set[tuple[int, ...]]:
    return check(made, shares={"tp": shares}, hints={"*": (Replicate(),)})


def test_samples_are_split_in_shares_whatever_is_told_of_them(two: Workers) -> None:
    assert two.run(samples, told, (5, 3)) == [{(10, 8, 24)}, {(6, 8, 24)}]


def test_columns_and_classes_are_split_in_shares(two: Workers) -> None:
    assert two.run(columns) == [{(5, 15)}, {(5, 9)}]


def columns() -> set[tuple[int, ...]]:
    return check(wide, evaluated=True)


def test_heads_are_split_in_shares(two: Workers) -> None:
    assert two.run(check, heads) == [{(3, 7, 20)}, {(3, 7, 12)}]


def test_language_models_are_split_in_shares(two: Workers) -> None:
    assert two.run(language_model, (3, 1), {"": autoshard.split("tp")}) == [{(12, 12, 144)}, {(12, 12, 48)}]


def language_model(shares: tuple[int, int], hints: dict[str, Any] | None = None) -> set[tuple[int, ...]]:
    return check(lambda: build(ONE_LAYER), shares={"tp": shares}, hints=hints)


def test_two_dims_of_a_tensor_lie_in_parts_of_one_number(two: Workers) -> None:
    """Samples and positions of the same size, which one range counts."""
    two.run(language_model, (2, 1))


def test_parameters_in_shards_of_another_axis_lie_in_parts_on_this_one() -> None:
    module, example = build("mlp")
    with Float64Mode():
        plan = autoshard.plan(module, {"dp": 2, "tp": 2}, (), example, shares={"dp": (3, 1)}, **QUICKLY)
    assert len(plan.parts) == 2


def test_dims_that_can_not_all_lie_in_parts_do_so_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that needs equal shares of two dims together is that of a deep network; here it is refused as such."""
    together, seconds = shares.UnequalParts.plan_parts, []

    def refused_together(parts: Any, loops: Sequence[Any], counts: Sequence[int]) -> Any:
        if len(loops) > 1:
            raise PlanError("a tensor of this plan needs equal shares")
        plan, planner = together(parts, loops, counts)
        seconds.append(plan.step_seconds)
        return plan, planner

    monkeypatch.setattr(shares.UnequalParts, "plan_parts", refused_together)
    module, example = build("mlp")
    options = {"shares": {"dp": (3, 1)}, "cluster": fast_links(), "effort": "fast"}
    with Float64Mode():
        plan = autoshard.plan(module, {"dp": 2, "tp": 2}, (), example, **grouped(options))
    assert len(plan.parts) == 1
    assert len(seconds) == 2
    assert plan.step_seconds == min(seconds)


def test_a_diagonal_lies_in_parts_as_its_matrix_does(two: Workers) -> None:
    module, inputs = square()
    plan = autoshard.plan(module, {"tp": 2}, (), inputs, shares=SHARES, **QUICKLY)
    assert len(plan.parts) == 1
    two.run(check, square)


def test_the_limit_that_an_error_names_is_enough() -> None:
    module, inputs = wide()
    options: dict[str, Any] = {"cluster": fast_links(), "shares": SHARES, "effort": "fast"}
    with pytest.raises(BudgetError) as raised:
        autoshard.plan(module, {"tp": 2}, (), inputs, memory_limit=1, **grouped(options))
    plan = autoshard.plan(module, {"tp": 2}, (), inputs, memory_limit=raised.value.peak, **grouped(options))
    assert plan.shares == SHARES


def test_parts_beside_an_axis_that_splits_the_batch(four: Workers) -> None:
    for shapes in four.run(beside_data_parallelism):
        assert shapes <= {(3, 18), (3, 6)}


def beside_data_parallelism() -> set[tuple[int, ...]]:
    (module, example), (alone, _) = wide(6), wide(6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options = {"shares": {"tp": (3, 1)}, "hints": {"": autoshard.split("tp")}} | QUICKLY
    with Float64Mode():
        autoshard.parallelize(module, mesh, (), example, **options)
        expected = train(alone, example)
    seen = Activated()
    with default_float64(), seen:
        trained = train(module, example)
    assert compare(trained, expected).worst <= TOLERANCE
    assert len(seen.shapes) == 1
    return seen.shapes


def test_devices_of_two_kinds_compute_parts_by_themselves(two: Workers) -> None:
    """15.7 and 10.6 TFLOP/s: 5 and 3 of 8 parts are done sooner than 4 and 4."""
    assert two.run(by_speed) == [{(5, 15)}, {(5, 9)}]


def by_speed(made: Callable[[], tuple[nn.Module, Inputs]] = wide) -> set[tuple[int, ...]]:
    return check(made, shares="auto", cluster=unlike_devices())


def test_what_is_split_in_an_odd_number_is_no_hindrance(two: Workers) -> None:
    assert two.run(by_speed, odd) == [{(5, 14)}, {(5, 10)}]


def test_totals_are_those_that_most_sizes_can_be_divided_in() -> None:
    assert candidate_totals([12, 3072, 768, 50257], 2) == [12, 768, 3072, 50257]
    assert candidate_totals([8, 32, 4096], 8) == [32, 4096]
    assert candidate_totals([2, 2], 2) == candidate_totals([], 2) == []


def test_a_parameter_that_is_pinned_to_be_sharded_says_what_is_split(two: Workers) -> None:
    two.run(pinned)


def pinned() -> None:
    hints = {"up": (Shard(0),), "down.weight": (Shard(1),)}
    module, example = wide()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = autoshard.plan(module, mesh, (), example, shares=SHARES, hints=hints, **QUICKLY)
    assert plan.shares == SHARES
    assert plan.placements["up.weight"] == (Replicate(),)
    assert "5 of 8 parts on 1 of tp, 3 on 1" in str(plan)
    check(wide, plan=autoshard.ShardingPlan.from_json(plan.to_json()), shares="auto")


def test_sizes_of_a_graph_in_parts_are_those_that_it_had() -> None:
    module, example = build("gpt")
    with Float64Mode():
        graph = capture(module, (), example)
    mesh = MeshShape.of({"tp": 2})
    rules = GraphRules(graph, mesh)
    plan = autoshard.plan(module, {"tp": 2}, (), example, cluster=fast_links(), hints={"": autoshard.split("tp")})
    loops = unequal_loops(Flow(rules, Decisions.from_data(plan.decisions), mesh), 0)
    parted = with_unequal_loops(graph, mesh, [loop for loop, size in loops.items() if size % 4 == 0], 4)
    dynamic = 0
    for node in parted.graph.nodes:
        for value, shape in zip(flat(node.meta.get("val")), node.meta.get("sizes", ()), strict=False):
            if isinstance(value, torch.Tensor):
                assert tuple(value.shape) == tuple(map(int, shape))
                dynamic += any(map(is_dynamic, shape))
    assert dynamic > 50
    assert all("sizes" not in node.meta for node in graph.graph.nodes)


def flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
