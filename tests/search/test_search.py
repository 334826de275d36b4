"""`autoshard.search` from the user's side.

Every rank of a job on the mesh that the first rank found: real processes over gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import BudgetError, InputError, MeshError, PlanError
from autoshard.operators.large_losses import loss_in_pieces
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.result import BEST, SearchResult
from autoshard.search.search import SearchOptions, auto_mesh
from tests.notebooks import check_repr, shown
from tests.option_groups import grouped
from tests.pipeline.small_pipelines import tower
from tests.search.test_mesh_search import hosts, model
from tests.targets import target as target_of
from tests.training import TOLERANCE, fast_links
from tests.workers import Workers


def search(devices: int = 4, **asked: Any) -> SearchResult:
    module, args, _ = model()
    return autoshard.search(
        module, devices, args, cluster=hosts(2), search=autoshard.Search(effort="fast"), pipelines=False, **asked
    )


@pytest.fixture(scope="module")
def profile() -> SearchResult:
    return search(option="profiling", memory_limit=TIGHT)


TIGHT = 18 * 2**20
"""Bytes with which one device is too few."""


def test_the_fastest_on_these_devices() -> None:
    result = search(6)
    assert result.mesh.size == 6
    assert result.pipeline_axis is None
    assert isinstance(result.plan, ShardingPlan)
    assert result.plan.mesh == result.mesh
    assert result.plan.step_seconds == result.best.seconds
    assert result.plan.memory.peak == result.best.peak
    assert {str(one.shape) for one in result.candidates} == {"x=6", "x=3, y=2", "x=2, y=3"}
    planned = [one.seconds for one in result.candidates if one.seconds is not None]
    assert planned == sorted(planned)
    assert result.candidates[0].verdict == BEST


def test_the_plan_is_one_that_plan_makes() -> None:
    """Of the same mesh, to the last decision."""
    module, args, _ = model()
    result = search()
    alone = autoshard.plan(
        module,
        dict(zip(result.mesh.names, result.mesh.sizes, strict=True)),
        args,
        cluster=hosts(2),
        search=autoshard.Search(effort="fast"),
        memory_limit=result.memory_limit,
    )
    assert alone.decisions == result.plan.decisions  # type: ignore[union-attr]
    assert alone.step_seconds == pytest.approx(result.plan.step_seconds)
    assert alone.fingerprint == result.plan.fingerprint


def test_meshes_are_planned_with_moves_and_regions() -> None:
    """Pipelines are planned beside them, and move nothing."""
    module, inputs = tower(4096)
    options: dict[str, Any] = {"cluster": hosts(2), "search": autoshard.Search(effort="fast"), "recompute": "none"}
    with pytest.raises(BudgetError) as error:
        autoshard.plan(module, {"x": 2}, (), inputs, memory_limit=1, **options)
    assert error.value.peak is not None
    limit = error.value.peak - 1
    result = autoshard.search(module, 2, (), inputs, offload="auto", memory_limit=limit, **options)
    plans = {candidate.shape.axis: candidate.plan for candidate in result.candidates}
    assert plans.keys() == {None, "pp"}
    assert isinstance(plans[None], ShardingPlan)
    assert plans[None].offloaded
    assert plans[None].memory.peak <= limit
    assert "can not have" not in str(result)
    hinted = autoshard.search(module, 2, (), inputs, hints={"*": autoshard.offload()}, pipelines=False, **options)
    assert isinstance(hinted.plan, ShardingPlan)
    assert hinted.plan.offloaded
    again = autoshard.search(module, 2, (), inputs, hints={"": autoshard.recompute()}, pipelines=False, **options)
    assert isinstance(again.plan, ShardingPlan)
    assert again.plan.recomputed


class Head(nn.Module):
    """Logits and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x), labels)


def test_losses_are_in_pieces_where_plans_of_as_many_devices_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_in_pieces, "LARGE_LOGITS", 10 * 12)
    module, args = Head(), (torch.randn(16, 8), torch.arange(16) % 12)
    options: dict[str, Any] = {"cluster": hosts(1), "search": autoshard.Search(effort="fast")}
    result = autoshard.search(module, 2, args, option="profiling", pipelines=False, **options)
    plans = {one.devices: one.plan for one in result.candidates if one.plan is not None}
    pieces = {count: "logit_statistics" in str(plan.to_json()) for count, plan in plans.items()}
    assert pieces == {1: True, 2: False}
    for count, plan in plans.items():
        assert plan.is_in_pieces == pieces[count]
        assert plan.fingerprint == capture(module, args, {}, devices=count).fingerprint


def test_it_prints_every_mesh_with_its_verdict(profile: SearchResult) -> None:
    text = str(profile)
    for one in profile.candidates:
        assert f" {one.shape} " in text
    assert "best" in text
    assert "By number of devices" in text
    assert "nothing fits" in text
    assert max(map(len, text.splitlines())) <= 120
    assert repr(profile).startswith(f"SearchResult({len(profile.candidates)} meshes, best ")
    assert "by number of devices" not in str(search(2))
    check_repr(profile)
    assert any(row[0] == "1" and row[-1] == "nothing fits" for row in shown(profile).rows)


def test_a_profile_has_the_best_of_every_number_of_devices(profile: SearchResult) -> None:
    assert {one.devices for one in profile.candidates} == {1, 2, 4}
    best = profile.by_devices
    assert list(best) == [2, 4]
    assert all(one.plan is not None and one.plan.mesh.size == count for count, one in best.items())
    assert profile.best.seconds == min(one.seconds or 0.0 for one in best.values())
    assert any("no mesh of 1 devices fits" in note for note in profile.notes)
    four = search(4, memory_limit=TIGHT)
    assert best[4].seconds == pytest.approx(four.best.seconds)


def test_the_fewest_devices_that_fit(profile: SearchResult) -> None:
    result = search(option="mini-parallelism", memory_limit=TIGHT)
    assert result.mesh.size == 2
    assert {one.devices for one in result.candidates} == {1, 2}
    assert result.best.seconds == pytest.approx(profile.by_devices[2].seconds)
    assert search(option="mini-parallelism").mesh.size == 1


def test_nothing_fits_on_any_number_of_devices() -> None:
    with pytest.raises(BudgetError, match=r"no mesh of 4 devices fits in 64\.0 KiB per device") as error:
        search(option="mini-parallelism", memory_limit="64KiB")
    assert error.value.peak is not None


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_profile_is_drawn(profile: SearchResult, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"profile{suffix}"
    profile.plot(path)
    assert path.stat().st_size > 2000


def test_one_number_of_devices_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match='option="profiling"'):
        search(2).plot(tmp_path / "one.png")


@pytest.mark.parametrize("devices", [0, -4, 2.0, True, "16", None])
def test_a_number_of_devices_is_a_whole_one(devices: Any) -> None:
    with pytest.raises(MeshError, match="a whole number from 1 up"):
        SearchOptions("mini-time", devices)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"option": "fastest"}, "mini-time, mini-parallelism, profiling"),
        ({"pipeline": "sideways"}, '"outer", "inner"'),
        ({"microbatches": 0}, "microbatches=0"),
        ({"virtual": "many"}, "virtual='many'"),
        ({"effort": "much"}, "effort='much'"),
        ({"time_limit": 0.0}, "time_limit=0.0"),
    ],
)
def test_unknown_options_are_named(asked: dict[str, Any], said: str) -> None:
    module, args, _ = model()
    with pytest.raises(PlanError, match=said):
        autoshard.search(module, 4, args, **grouped(asked))


def test_options_say_which_numbers_of_devices_are_looked_at() -> None:
    assert SearchOptions("mini-time", 12).counts == (12,)
    assert SearchOptions("mini-parallelism", 12).counts == (1, 2, 3, 4, 6, 12)


def test_by_default_the_limit_is_what_a_device_has() -> None:
    cluster = hosts(2)
    module, args, _ = model()
    result = autoshard.search(module, 1, args, cluster=cluster, search=autoshard.Search(effort="fast"), pipelines=False)
    assert result.memory_limit == cluster.device.memory
    assert str(result.mesh) == "x=1"


def test_numbers_are_left_alone() -> None:
    """Real parameters are neither touched nor sharded."""
    module = torch.nn.Linear(8, 8)
    before = module.weight.detach().clone()
    autoshard.search(
        module, 2, (torch.ones(4, 8),), cluster="cpu", search=autoshard.Search(effort="fast"), pipelines=False
    )
    assert torch.equal(module.weight, before)


class Scores(nn.Module):
    """Two layers and a loss, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48, dtype=torch.float64)
        self.down = nn.Linear(48, 24, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.down(functional.gelu(self.up(x)))).square().mean()


def scores() -> tuple[Scores, torch.Tensor]:
    torch.manual_seed(0)
    return Scores(), torch.randn(12, 24, dtype=torch.float64)


def target(memory_limit: str | None = None) -> Target:
    """The target of a quick search."""
    return target_of("cpu", time_limit=60.0, effort="fast", memory_limit=memory_limit)


def test_all_ranks_train_on_the_mesh_that_was_found(four: Workers) -> None:
    module, x = scores()
    loss = module(x)
    loss.backward()
    told = four.run(trained)
    for axes, plan, losses in told:
        assert (axes, plan) == told[0][:2]
        torch.testing.assert_close(losses, [loss.detach(), module.up.weight.grad], rtol=TOLERANCE, atol=1e-14)


def trained() -> tuple[dict[str, int], str, list[torch.Tensor]]:
    """The mesh, the plan as text, and the loss and a whole gradient of a step under it."""
    module, x = scores()
    agreed = auto_mesh(BatchCall(module, (x,), {}), target(), pipelines=False)
    assert agreed.pipeline is None
    assert isinstance(agreed.device_mesh, DeviceMesh)
    assert isinstance(agreed.plan, ShardingPlan)
    assert agreed.device_mesh.size() == dist.get_world_size()
    autoshard.parallelize(module, agreed.device_mesh, (x,), cluster=fast_links(), plan=agreed.plan)
    loss = module(x)
    loss.backward()
    gradient: Any = module.up.weight.grad
    names = agreed.device_mesh.mesh_dim_names
    assert names is not None
    axes = dict(zip(names, agreed.device_mesh.shape, strict=True))
    return axes, agreed.plan.to_json(), [loss.detach(), gradient.full_tensor()]


def test_what_fails_on_the_first_rank_fails_on_all(four: Workers) -> None:
    assert four.run(refused) == ["BudgetError"] * 4


def refused() -> str:
    module, x = scores()
    with pytest.raises(BudgetError, match=r"no mesh of 4 devices fits in 1\.0 KiB") as error:
        auto_mesh(BatchCall(module, (x,), {}), target("1KiB"), pipelines=False)
    return type(error.value).__name__


def test_without_an_example_call_there_is_nothing_to_plan_for(four: Workers) -> None:
    assert four.run(without_example) == [True] * 4


def without_example() -> bool:
    with pytest.raises(InputError, match="needs an example call"):
        auto_mesh(BatchCall(scores()[0], (), {}), target())
    return True


def test_without_a_process_group_there_are_no_ranks() -> None:
    module, x = scores()
    with pytest.raises(MeshError, match="torchrun"):
        auto_mesh(BatchCall(module, (x,), {}), target())
