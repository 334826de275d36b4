"""Parameters and buffers of stages under the model's names.

Tied parameters in several stages: one object on one rank, and plans that agree on where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import prune

from autoshard.errors import PipelineError, PlanError
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import StageModule, cut
from autoshard.pipeline.run.stage_state import (
    Holders,
    TiedParameters,
    check_same_placements,
    register_stage_state,
    relink_entries,
    state_entries,
    tie,
)
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.pipeline.chain import balance_stages
from tests.pipeline.pipelines import model
from tests.workers import Workers


def stage(*names: str) -> nn.Module:
    """A module that holds a parameter under each of the names, and beside each a buffer that no state dict has."""
    module = nn.Module()
    for name in names:
        *path, key = name.split(".")
        owner = module
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(key, nn.Parameter(torch.randn(2)))
        owner.register_buffer(f"{key}_buffer", torch.zeros(1), persistent=False)
    return module


def test_stages_become_one_module() -> None:
    """One submodule is parted: its weight is on the one, its bias on the other."""
    stages = [stage("layers.0.weight", "scale"), stage("layers.0.bias", "layers.1.weight")]
    whole = nn.Module()
    register_stage_state(whole, stages)
    names = ["layers.0.weight", "scale", "layers.0.bias", "layers.1.weight"]
    assert set(whole.state_dict()) == set(names)
    assert {name for name, _ in whole.named_buffers()} == {f"{name}_buffer" for name in names}
    for one in stages:
        for name, parameter in one.named_parameters():
            assert whole.get_parameter(name) is parameter


def test_what_is_replaced_in_the_whole_is_replaced_in_its_stage() -> None:
    one = stage("layers.0.weight", "scale")
    whole = nn.Module()
    register_stage_state(whole, [one])
    found = state_entries(one, whole)
    whole.load_state_dict({"layers.0.weight": torch.ones(2), "scale": torch.ones(2)}, assign=True)
    relink_entries(found)
    for name in ("layers.0.weight", "scale"):
        assert one.get_parameter(name) is whole.get_parameter(name)


def _delete(whole: nn.Module) -> None:
    del whole.get_submodule("layers.0").weight


def _assign(whole: nn.Module, value: torch.Tensor) -> None:
    whole.get_submodule("layers.0").weight = nn.Parameter(value)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "prune": (
        lambda whole: prune.identity(whole.get_submodule("layers.0"), "weight"),
        r"layers\.0\.weight was deleted",
    ),
    "deleted": (_delete, r"layers\.0\.weight was deleted"),
    "shape": (lambda whole: _assign(whole, torch.ones(3)), r"made float32 of shape \(3,\), where it was float32 .*2,"),
    "dtype": (lambda whole: whole.double(), "made float64 of shape"),
    "hook": (
        lambda whole: whole.get_submodule("layers.0").register_forward_hook(print),
        r"a hook of calls is set on layers\.0 of the pipeline",
    ),
    "module": (lambda whole: setattr(whole, "layers", nn.Linear(2, 2)), "layers of the pipeline was .* replaced"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_stage_can_take_is_refused(name: str) -> None:
    change, message = CHANGES[name]
    one, whole = stage("scale", "layers.0.weight"), nn.Module()
    register_stage_state(whole, [one])
    holders, entries = Holders(nn.Module(), whole), state_entries(one, whole)
    former = one.get_parameter("scale")
    whole.scale = nn.Parameter(torch.ones(2))

    def check() -> None:
        holders.check()
        relink_entries(entries)
        holders.check_hooks()

    change(whole)
    with pytest.raises(PipelineError, match=message):
        check()
    assert one.get_parameter("scale") is former or name == "hook"


def test_names_that_are_taken() -> None:
    class Standing(nn.Module):
        def train_step(self) -> None: ...

    with pytest.raises(PipelineError, match="the model has something called 'train_step', and so has Standing"):
        register_stage_state(Standing(), [stage("train_step.weight")])


def test_a_stage_that_reads_what_is_elsewhere() -> None:
    with pytest.raises(
        PipelineError, match=r"this call reads layers\.0\.weight on a stage whose rank does not hold it"
    ):
        state_entries(stage("layers.0.weight"), nn.Module())


def stages() -> list[StageModule]:
    module, inputs = model("gpt", layers=1, tied=True)
    graph = capture_microbatch(module, (), inputs)
    return cut(graph, balance_stages(graph, 3), 3)


def test_stages_of_one_rank_hold_one_object() -> None:
    first, _, last = stages()
    # As parallelising each alone leaves them.
    own = type(last.module.tokens.weight)(last.module.tokens.weight.detach().clone())
    last.module.tokens.weight = last.module.head.weight = own
    tie([first, last])
    for name in ("tokens.weight", "head.weight"):
        assert last.module.get_parameter(name) is first.module.get_parameter("tokens.weight")


def test_plans_have_to_agree() -> None:
    parts = stages()
    mesh = MeshShape.of({"tp": 2})
    plans = [
        ShardingPlan(mesh=mesh, placements={"tokens.weight": (placement,)})
        for placement in (Shard(0), Replicate(), Shard(0))
    ]
    check_same_placements(parts, plans)
    with pytest.raises(PlanError, match=r"parameter tokens\.weight is held by stages 0, 2"):
        check_same_placements(parts, [plans[1], *plans[1:]])


def test_pipelines_one_after_the_other_make_groups_that_meet(four: Workers) -> None:
    """The first is shared by some ranks, which have one group more than the others if those make none."""
    assert four.run(started_equal, (0, 3)) == [0, 1, 2, 0]
    assert four.run(started_equal, (1, 2, 3)) == [0, 1, 1, 1]


def started_equal(holders: tuple[int, ...]) -> float:
    """What the rank has of a parameter that starts as its rank, once the holders start equal."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([float(dist.get_rank())]))
    stages = [SimpleNamespace(shared={"weight": holders} if stage in holders else {}) for stage in range(4)]
    group = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)).get_group()
    TiedParameters(module, stages, range(4), group).broadcast_values()  # type: ignore[arg-type]
    return module.weight.item()
