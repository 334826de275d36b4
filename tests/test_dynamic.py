"""Training with dynamic sizes: one plan and one program, and at every size the numbers of one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.export import Dim

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import InputError, PlanError
from autoshard.specs.axes import MeshShape
from tests import models
from tests.option_groups import grouped
from tests.random_plans import random_plan
from tests.releases import skip_without
from tests.runtime.meshes import simulated_mesh
from tests.training import (
    OF_ONE_LAYER,
    ONE_LAYER,
    TOLERANCE,
    Float64Mode,
    build,
    captured_as,
    default_float64,
    fast_links,
    held_by_ranks,
    loss_of,
    outputs_of,
    relative_difference,
)

Inputs = dict[str, Any]
Held = dict[str, list[torch.Tensor]]

ROWS = {"x": {0: "batch"}, "target": {0: "batch"}}
TOKENS = {"input_ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}
SIZES = ((12, 12), (5, 7), (2, 2), (3, 8), (4, 12), (13, 5))
"""Even and uneven ones, fewer rows than devices, and more than in the example."""


def of_size(inputs: Inputs, batch: int, seq: int) -> Inputs:
    """Inputs of other sizes, made of rows of these; `seq` counts where there are tokens."""
    made = {}
    for name, tensor in inputs.items():
        rows = torch.cat([tensor, tensor])[:batch]
        made[name] = (rows if tensor.is_floating_point() or tensor.ndim < 2 else rows[:, :seq]).contiguous()
    return made


def step(module: nn.Module, inputs: Inputs) -> Held:
    """Outputs and gradients of one forward and backward."""
    module.zero_grad()
    outputs = outputs_of(module(**inputs))
    loss_of(outputs).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {name: held_by_ranks(tensor.detach()) for name, tensor in (outputs | gradients).items()}


def check(
    name: str,
    mesh: Mapping[str, int],
    dynamic: Mapping[str, Any],
    sizes: Sequence[tuple[int, int]] = SIZES,
    **options: Any,
) -> None:
    """At all these sizes, a model on a mesh does what it does on one device, by one program."""
    options = {"cluster": fast_links(), "effort": "fast"} | options
    alone, inputs = build(name)
    with Float64Mode():
        expected = {size: step(alone, of_size(inputs, *size)) for size in sizes}
    module, _ = build(name)
    with simulated_mesh(**mesh) as device_mesh:
        with Float64Mode():
            autoshard.parallelize(module, device_mesh, (), inputs, dynamic=dynamic, **grouped(options))
        with default_float64():
            for size in sizes:
                assert relative_difference(step(module, of_size(inputs, *size)), expected[size]) <= TOLERANCE, size
    assert programs(module) == 1


def programs(module: nn.Module) -> int:
    """How many call signatures a parallelised module has programs for."""
    return len(module.__dict__["_autoshard_runtime"].programs.table)


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "tp": 2}])
def test_one_program_serves_all_batches(mesh: dict[str, int]) -> None:
    check("mlp", mesh, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        (ONE_LAYER, {"dp": 3}),
        ("hf_llama" + OF_ONE_LAYER, {"dp": 2}),
    ],
)
def test_one_program_serves_all_batches_and_lengths(name: str, mesh: dict[str, int]) -> None:
    if name.startswith("hf_llama"):
        skip_without("export of repeated key heads of any length")
    check(name, mesh, TOKENS, SIZES[1:3])


@pytest.mark.slow
def test_a_network_of_images_takes_any_batch() -> None:
    _, inputs = build("vgg")
    check("vgg", {"dp": 2}, {name: {0: "batch"} for name in inputs}, ((5, 0), (3, 0)))


@pytest.mark.slow
def test_a_range_that_the_model_sets_is_kept() -> None:
    sizes = {0: "batch", 1: "seq"}
    dynamic = {"input_ids": sizes, "attention_mask": sizes, "labels": {0: "batch"}}
    check("hf_bert" + OF_ONE_LAYER, {"dp": 2}, dynamic, ((12, 12), (5, 7)))


@pytest.mark.slow
def test_a_random_plan_holds_at_all_sizes() -> None:
    mesh = {"tp": 2}
    module, inputs = build(ONE_LAYER)
    with Float64Mode():
        graph = capture(module, (), inputs, dynamic=TOKENS)
    plan = random_plan(graph, MeshShape.of(mesh), seed=2, forced=0.3, recompute=0.7)
    with captured_as(graph):
        check(ONE_LAYER, mesh, TOKENS, SIZES[1:3], plan=plan)


def test_multiples_may_be_split_by_several_axes() -> None:
    rows = 4 * Dim("rows")
    dynamic = {"x": {0: rows}, "target": {0: rows}}
    check("mlp", {"dp": 2, "fsdp": 2}, dynamic, ((12, 0), (8, 0), (20, 0)))


def test_a_batch_of_one_has_a_graph_of_its_own() -> None:
    alone, inputs = build("mlp")
    expected = step(alone, of_size(inputs, 1, 0))
    module, _ = build("mlp")
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, dynamic=ROWS, cluster=fast_links())
        assert relative_difference(step(module, of_size(inputs, 1, 0)), expected) <= TOLERANCE
        assert programs(module) == 2
        step(module, of_size(inputs, 7, 0))
        assert programs(module) == 2


def test_sizes_of_one_name_must_be_equal() -> None:
    module, inputs = build("mlp")
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, dynamic=ROWS)
        with pytest.raises(InputError, match='dim 0 of target is 5, but dim 0 of x is 6, and both were declared as "b'):
            module(inputs["x"][:6], inputs["target"][:5])


def test_without_an_example_the_first_call_is_one() -> None:
    module, inputs = build("mlp")
    alone, _ = build("mlp")
    expected = step(alone, of_size(inputs, 5, 0))
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, dynamic=ROWS, cluster=fast_links())
        step(module, inputs)
        assert relative_difference(step(module, of_size(inputs, 5, 0)), expected) <= TOLERANCE
    assert programs(module) == 1


def test_evaluation_and_training_have_programs_of_their_own() -> None:
    module, inputs = build("mlp")
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, dynamic=ROWS)
        for batch in (4, 7):
            with torch.no_grad():
                module(**of_size(inputs, batch, 0))
    assert programs(module) == 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 11, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.tokens(ids))
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_call_may_leave_out_labels_that_are_said_to_be_dynamic() -> None:
    module = Words()
    alone = copy.deepcopy(module)
    ids = torch.arange(24).reshape(4, 6) % 11
    sizes = {0: "batch", 1: "length"}
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(
            module,
            mesh,
            (ids, ids),
            dynamic={"ids": sizes, "labels": sizes},
            cluster=fast_links(),
            search=autoshard.Search(effort="fast"),
        )
        for length in (6, 4):
            for given in ((ids[:, :length], ids[:, :length]), (ids[:, :length],)):
                ours, theirs = held_by_ranks(module(*given).detach()), [alone(*given).detach()]
                assert relative_difference({"": ours}, {"": theirs}) <= TOLERANCE
    assert programs(module) == 2


class Named(nn.Module):
    """Tensors that have names in no signature: in `*rest`, in a container, in `**more`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, *rest: Any, last: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        x, pair = rest
        return self.linear(x) * more["scale"] + pair[1]["z"] - last * more["shift"]


def test_inputs_are_named_wherever_they_stand_in_a_call() -> None:
    torch.manual_seed(0)
    module = Named()
    alone = copy.deepcopy(module)

    def given(batch: int) -> tuple[tuple[Any, ...], Inputs]:
        x, z, *more = torch.randn(5, batch, 8, dtype=torch.float64)
        return (x, (3, {"z": z})), dict(zip(("shift", "last", "scale"), more, strict=True))

    rows = {0: "batch"}
    names = {"args[0]": rows, "args[1][1]['z']": rows, "last": rows, "shift": rows, "scale": rows}
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(
            module, mesh, *given(4), dynamic=names, cluster=fast_links(), search=autoshard.Search(effort="fast")
        )
        for batch in (4, 6):
            args, kwargs = given(batch)
            ours, theirs = held_by_ranks(module(*args, **kwargs).detach()), [alone(*args, **kwargs).detach()]
            assert relative_difference({"": ours}, {"": theirs}) <= TOLERANCE
    assert programs(module) == 1


class Twice(nn.Module):
    """A loss, and an output that may be differentiated as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"loss": y.square().mean(), "y": y}


def test_more_than_the_loss_is_differentiated_at_any_size() -> None:
    torch.manual_seed(0)
    alone, module = Twice(), Twice()
    module.load_state_dict(alone.state_dict())
    x = torch.randn(7, 8, dtype=torch.float64)

    def gradients(model: nn.Module) -> Held:
        model.zero_grad()
        outputs = model(x)
        (outputs["loss"] + outputs["y"].sum()).backward()
        return {name: held_by_ranks(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients(alone)
    with simulated_mesh(dp=2) as mesh:
        example = torch.zeros(4, 8, dtype=torch.float64)
        autoshard.parallelize(module, mesh, (example,), dynamic={"x": {0: "batch"}}, cluster=fast_links())
        assert relative_difference(gradients(module), expected) <= TOLERANCE


def test_a_plan_for_dynamic_sizes_is_saved_and_applied(tmp_path: Any) -> None:
    module, inputs = build("mlp")
    plan = autoshard.plan(module, {"dp": 2}, (), inputs, dynamic=ROWS, cluster=fast_links())
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.ShardingPlan.load(tmp_path / "plan.json")
    check("mlp", {"dp": 2}, ROWS, ((5, 0), (12, 0)), plan=loaded)
    with simulated_mesh(dp=2) as mesh, pytest.raises(PlanError):
        autoshard.parallelize(build("mlp")[0], mesh, (), inputs, plan=loaded)


def test_a_dim_that_the_hints_split_stays_split_at_all_sizes() -> None:
    check("mlp", {"dp": 2}, ROWS, ((5, 0), (12, 0)), hints={"*weight": Shard(0)})


def test_costs_are_those_of_the_example() -> None:
    module, inputs = models.mlp()
    fixed = autoshard.plan(module, {"dp": 2}, (), inputs)
    dynamic = autoshard.plan(module, {"dp": 2}, (), inputs, dynamic=ROWS)
    assert dynamic.memory.peak == pytest.approx(fixed.memory.peak, rel=0.2)


class TwoInputs(nn.Module):
    """Sums of two products, whose weights are split so that the gradients of both inputs are summed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first(x).tanh() * self.second(y).tanh()).sum()


def test_gradients_of_inputs_of_other_sizes_are_summed_one_by_one() -> None:
    with Float64Mode():
        alone = TwoInputs().double()
        module = copy.deepcopy(alone)
        inputs = {name: torch.randn(12, 6, dtype=torch.float64, requires_grad=True) for name in ("x", "y")}
    hints = {name: Shard(0) for name in ("first.weight", "second.weight")}
    rows = {name: {0: "batch"} for name in inputs}
    with simulated_mesh(tp=2) as device_mesh:
        autoshard.parallelize(module, device_mesh, (), inputs, dynamic=rows, hints=hints, cluster=fast_links())
        for batch in (12, 5):
            mine, others = (
                {name: tensor[:batch].detach().clone().requires_grad_() for name, tensor in inputs.items()}
                for _ in range(2)
            )
            module(**mine).backward()
            alone(**others).backward()
            for name, tensor in mine.items():
                for held in held_by_ranks(tensor.grad):
                    torch.testing.assert_close(held, others[name].grad, rtol=TOLERANCE, atol=0.0)


class Spread(nn.Module):
    """Variances of a batch of any size, of which numbers of elements are taken off that are whole, and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.var() + y.std(0, correction=0.5).sum()


def test_variances_divide_by_the_elements_of_each_call() -> None:
    alone, inputs = Spread(), {"x": torch.randn(8, 16, dtype=torch.float64)}
    module = copy.deepcopy(alone)
    with simulated_mesh(dp=2) as mesh:
        options: dict[str, Any] = {"cluster": fast_links(), "effort": "fast", "hints": {"*": (Replicate(),)}}
        autoshard.parallelize(module, mesh, (), inputs, dynamic={"x": {0: "batch"}}, **grouped(options))
        for rows in (8, 5):
            call = {"x": inputs["x"][:rows]}
            assert relative_difference(step(module, call), step(alone, call)) <= TOLERANCE
