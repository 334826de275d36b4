"""Programs under autograd: padding, seeds, missing gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture.joint import capture
from autoshard.planner.planning_problem import Constraints
from autoshard.program.split import split
from autoshard.runtime.shards import distribute
from autoshard.runtime.step import Ranks, RunnableStep
from autoshard.runtime.step_function import run_step
from autoshard.specs.spec import Spec
from tests import models
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.runtime.programs import step_on


def test_ranks_know_their_coordinates_and_groups() -> None:
    with simulated_mesh(x=2, y=3) as mesh:
        ranks = Ranks(mesh, torch.device("cpu"))
        for axis in range(2):
            held = per_rank(ranks.coordinates[axis], mesh)
            assert {place: int(value) for place, value in held.items()} == {place: place[axis] for place in held}
        assert len(ranks.groups) == 2


def test_a_seed_is_one_number_for_all_ranks_and_another_for_every_step() -> None:
    with simulated_mesh(x=2, y=2) as mesh:
        ranks = Ranks(mesh, torch.device("cpu"))
        draws = [{int(value) for value in per_rank(ranks.seed(True), mesh).values()} for _ in range(2)]
        assert [len(draw) for draw in draws] == [1, 1]
        assert draws[0] != draws[1]
        assert {int(value) for value in per_rank(ranks.seed(False), mesh).values()} == {0}


def test_the_seed_is_drawn_from_the_default_generator() -> None:
    with simulated_mesh(x=2) as mesh:
        ranks = Ranks(mesh, torch.device("cpu"))
        torch.manual_seed(7)
        first = per_rank(ranks.seed(True), mesh)[0,]
        torch.manual_seed(7)
        assert int(first) == int(per_rank(ranks.seed(True), mesh)[0,])


@pytest.mark.parametrize("size", [2, 5])
def test_a_program_takes_dtensors_and_hands_gradients_back_as_they_lie(size: int) -> None:
    """On five ranks, shards are uneven, and padded inside."""
    module, inputs = models.mlp(dtype=torch.float64)
    graph = capture(module, (), inputs)
    pinned = {"up.weight": (Shard(0),), "up.bias": (Shard(0),), "down.weight": (Shard(1),), "down.bias": (Replicate(),)}
    with simulated_mesh(x=size) as mesh:
        step = step_on(graph, mesh, Constraints(pinned=pinned))
        program = RunnableStep(step, split(step, compile=False), Ranks(mesh, torch.device("cpu")))
        tensors = [
            distribute(copy.deepcopy(module.get_parameter(border.name)), mesh, border.spec).requires_grad_()
            if border.kind == "parameter"
            else inputs[border.name]
            for border in step.inputs
            if border.kind != "tangent"
        ]
        (loss,) = run_step(program, tensors, {})
        loss.backward()
        module(**inputs).backward()
        for tensor, border in zip(tensors, step.inputs, strict=False):
            if border.kind == "parameter":
                expected = module.get_parameter(border.name).grad
                assert expected is not None
                wanted = distribute(expected, mesh, Spec.of(*pinned[border.name]))
                assert tensor.grad.placements == wanted.placements
                for one, other in zip(
                    per_rank(tensor.grad, mesh).values(), per_rank(wanted, mesh).values(), strict=True
                ):
                    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_outputs_without_a_gradient_count_as_zero() -> None:
    module, inputs = models.mlp(dtype=torch.float64)
    graph = capture(module, (), inputs)
    with simulated_mesh(x=2) as mesh:
        step = step_on(graph, mesh)
        program = RunnableStep(step, split(step, compile=False), Ranks(mesh, torch.device("cpu")))
        tensors = [
            distribute(module.get_parameter(border.name), mesh, border.spec)
            if border.kind == "parameter"
            else inputs[border.name]
            for border in step.inputs
            if border.kind != "tangent"
        ]
        _, saved = program.forward(program.local(tensors, {}), {})
        for gradient in program.backward(list(saved), [None], {}):
            assert all(not value.any() for value in per_rank(gradient, mesh).values())
