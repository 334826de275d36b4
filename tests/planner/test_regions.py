"""Regions of a step: what runs again, what is kept and what is moved are as hints and the model's code say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoshard
from autoshard.capture.joint import capture
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.marks import Saving
from autoshard.capture.nodes import is_view
from autoshard.capture.offloading import base_in_memory
from autoshard.capture.recomputation import RECOMPUTES, captured_step, graph_of_plan, rerunnable
from autoshard.errors import BudgetError, HintError
from autoshard.planner.plan_checks import checked_flow
from autoshard.planner.regions import with_regions
from autoshard.planner.rerun_context import RerunContext
from autoshard.plans.sharding_plan import ShardingPlan
from tests.capture.interpret import run_joint
from tests.planner.steps import planner_of
from tests.training import fast_links

MESH = {"x": 2}
WIDTH = 8
MLP = "layers.0.mlp"
KEEP, RECOMPUTE, OFFLOAD = autoshard.keep(), autoshard.recompute(), autoshard.offload()


class Layer(nn.Module):
    """A normalised MLP with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).tanh()


class Stack(nn.Module):
    """Layers, each called in some way, and a loss."""

    def __init__(
        self, call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x), layers: int = 3, width: int = 8
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers)).double()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()


X = torch.randn(4, WIDTH, dtype=torch.float64)
MODULES = [name for name, _ in Stack().named_modules()]


@pytest.fixture(scope="module")
def step() -> JointGraph:
    """The captured step of a stack without marks."""
    return capture(Stack(), (X,), {})


def _again(graph: JointGraph) -> set[str]:
    """Names of the operators that run again, without views."""
    nodes = (node for node in graph.graph.nodes if RECOMPUTES in node.meta and not is_view(node))
    return {node.meta[RECOMPUTES] for node in nodes}


def _saved(graph: JointGraph) -> set[str]:
    """Names of the operators of the forward half whose memory the backward half reads."""
    backward = [node for node in graph.graph.nodes if node.op == "call_function" and graph.phase(node) == "backward"]
    read = {base_in_memory(source) for node in backward for source in node.all_input_nodes}
    return {node.name for node in read if node.op == "call_function" and graph.phase(node) == "forward"}


def _modules(graph: JointGraph, names: set[str]) -> set[str]:
    return {graph.module_path(node) for node in graph.graph.nodes if node.name in names}


def test_what_a_hinted_module_makes_inside_runs_again_and_what_leaves_it_is_kept(step: JointGraph) -> None:
    graph = with_regions(step, {"layers.*.mlp": RECOMPUTE}, MODULES)
    assert _modules(graph, _again(graph)) == {f"layers.{layer}.mlp.{part}" for layer in range(3) for part in (0, 1)}
    # Neither half of the norm is inside: its result, which enters, is kept.
    inside = {node.name for node in step.graph.nodes if ".mlp" in step.module_path(node) and not is_view(node)}
    assert _saved(graph) == _saved(step) - inside
    assert set(graph.recomputed) >= _again(graph)
    # Each module is a region: of whole layers, what goes from one to the next is kept.
    whole = with_regions(step, {"layers.*": RECOMPUTE}, MODULES)
    assert len(_saved(whole)) == 3  # the results of three layers; the first takes the input
    assert _again(whole) > _again(graph)
    stack = with_regions(step, {"layers": RECOMPUTE}, MODULES)
    assert len(_saved(stack)) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from([name for name in MODULES if name]), st.sampled_from([KEEP, RECOMPUTE, OFFLOAD]))
)
def test_the_innermost_region_counts_and_numbers_stay(step: JointGraph, hints: dict[str, Saving]) -> None:
    try:
        graph = with_regions(step, hints, MODULES)
    except HintError:
        return  # what is wrong is tested below
    again, moved = _again(graph), set(graph.offloaded)
    for node in step.graph.nodes:
        if node.op != "call_function" or step.phase(node) == "backward" or is_view(node):
            continue
        path = step.module_path(node)
        kinds = {name: value.kind for name, value in hints.items() if f"{path}.".startswith(f"{name}.")}
        innermost = kinds[max(kinds, key=len)] if kinds else None
        if innermost == "keep":
            assert node.name not in again | moved
        if "recompute" not in kinds.values():
            assert node.name not in again
        if "offload" not in kinds.values():
            assert node.name not in moved
    module = Stack()
    expected, found = (run_joint(each, module, (X,)) for each in (step, graph))
    torch.testing.assert_close(found.output, expected.output, rtol=0.0, atol=0.0)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-12, atol=0.0)


def test_what_hints_make_of_a_step_is_made_of_the_captured_one(step: JointGraph) -> None:
    graph = with_regions(step, {"layers.0": RECOMPUTE, "layers.1": OFFLOAD, MLP: KEEP}, MODULES)
    assert captured_step(graph).graph is step.graph
    assert graph.kept
    # A plan names what runs again and is moved: another process needs no hints.
    other = graph_of_plan(step, graph.recomputed, graph.offloaded)
    assert [node.format_node() for node in other.graph.nodes] == [node.format_node() for node in graph.graph.nodes]
    assert graph_of_plan(graph, (), ()).graph is step.graph
    # A plan counts more than what is kept.
    kept = next(name for name in graph.kept if "gelu" in name)  # which the backward half reads
    assert _again(graph_of_plan(graph, (kept,), ())) == {kept}
    assert not rerunnable(graph).keys() & graph.kept.keys()
    assert with_regions(step, {}, MODULES) is step
    inference = capture(Stack(), (X,), {}, grad=False)
    assert with_regions(inference, {"layers.*": RECOMPUTE}, MODULES) is inference


def _in_region(mark: Callable[[], Saving]) -> Callable[[nn.Module, Tensor], Tensor]:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        with mark():
            result: Tensor = layer(x)
        return result

    return call


def test_contexts_in_forward_are_regions_as_modules_are(step: JointGraph) -> None:
    graph = with_regions(capture(Stack(_in_region(autoshard.recompute)), (X,), {}), None, ())
    assert graph.recomputed == with_regions(step, {"layers.*": RECOMPUTE}, MODULES).recomputed
    # Outside of a capture they do nothing.
    torch.testing.assert_close(Stack(_in_region(autoshard.recompute), layers=1)(X).shape, torch.Size(()))

    def around(layer: Any, x: Tensor) -> Tensor:
        with autoshard.recompute():
            normed = layer.norm(x)
            with autoshard.keep():
                hidden = layer.mlp[0](normed)
            return x + layer.mlp[2](layer.mlp[1](hidden)).tanh()

    graph = with_regions(capture(Stack(around), (X,), {}), None, ())
    parts = {path.removeprefix(f"layers.{layer}.") for layer in range(3) for path in _modules(graph, _again(graph))}
    assert {"norm", "mlp.1"} <= parts
    assert "mlp.0" not in parts


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_a_region(step: JointGraph, reentrant: bool) -> None:
    x = X.clone().requires_grad_()
    module = Stack(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))  # type: ignore[no-any-return]
    graph = with_regions(capture(module, (x,), {}), None, ())
    assert _modules(graph, _again(graph)) == _modules(
        step, _again(with_regions(step, {"layers.*": RECOMPUTE}, MODULES))
    )
    with pytest.raises(HintError, match=r"torch.utils.checkpoint around .*test_regions.py:\d+ .* and the hint "):
        with_regions(capture(module, (x,), {}), {"layers.*": KEEP}, MODULES)


def test_a_checkpoint_with_a_policy_is_left_to_the_planner() -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return result

    assert not with_regions(capture(Stack(call), (X,), {}), None, ()).recomputed


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"blocks.*": RECOMPUTE}, r"the hint 'blocks.\*': recompute\(\) matches no module. There are"),
        ({"layers.*.mlp.2": RECOMPUTE}, r"'layers.\*.mlp.2': recompute\(\) runs nothing again: .* layers.0.mlp.2,"),
        (
            {"layers.*": RECOMPUTE, "layers.1": KEEP},
            r"'layers.\*': recompute\(\) and .* 'layers.1': keep\(\) contradict",
        ),
        ({MLP: OFFLOAD, "*.0.mlp": KEEP}, r"contradict each other on the operator t of layers.0.mlp.0, and neither"),
        ({"layers.*": KEEP, f"{MLP}.*": OFFLOAD, f"{MLP}.1": KEEP, f"{MLP}.0": KEEP}, r"contradict"),
    ],
)
def test_a_wrong_hint_is_named(step: JointGraph, hints: dict[str, Saving], said: str) -> None:
    with pytest.raises(HintError, match=said):
        with_regions(step, hints, MODULES)


# Plans


def _plan(module: nn.Module | None = None, x: Tensor = X, mesh: dict[str, int] = MESH, **options: Any) -> ShardingPlan:
    return autoshard.plan(module or Stack(), mesh, (x,), cluster=fast_links(), **options)


def _paths(plan: ShardingPlan) -> set[str]:
    """Modules of the operators that run again, without views."""
    named = set(plan.recomputed)
    return {one.module for one in plan.choices if one.node in named and one.seconds}


def test_hints_count_with_and_without_a_limit_and_beside_the_option(tmp_path: Path) -> None:
    # On one device nothing but second runs makes a peak smaller.
    wide, module, alone = torch.randn(512, 32), Stack(width=32).float(), {"x": 1}
    hints = {"layers.1": RECOMPUTE, MLP: KEEP}
    free = _plan(module, wide, alone, hints=hints)
    assert free.hints == {"layers.1": "recompute()", MLP: "keep()"}
    assert _paths(free)
    assert all(path.startswith("layers.1") for path in _paths(free))
    everything = _plan(module, wide, alone, hints=hints, recompute="full")
    assert {path.split(".")[1] for path in _paths(everything)} == {"0", "1", "2"}
    assert not any(path.startswith(MLP) for path in _paths(everything))
    least = _plan(module, wide, alone, recompute="none", hints={MLP: KEEP})
    assert everything.memory.peak < free.memory.peak
    limit = (everything.memory.peak + free.memory.peak) // 2
    tight = _plan(module, wide, alone, hints=hints, memory_limit=limit)
    assert tight.memory.peak <= limit
    assert set(free.recomputed) < set(tight.recomputed)
    assert not any(path.startswith(MLP) for path in _paths(tight))
    assert tight.lower_bound <= tight.cost * (1 + 1e-9)
    # `none` is of what is not named.
    assert _plan(module, wide, alone, hints=hints, recompute="none").recomputed == free.recomputed
    # Questions: what is there already; what it would cost; what cannot be.
    assert free.why_not({"layers.1": RECOMPUTE}).plan is free
    other = least.why_not({"layers.2": RECOMPUTE})
    assert other.plan is not None
    assert _paths(other.plan)
    assert all(path.startswith("layers.2") for path in _paths(other.plan))
    assert "contradict" in str(free.why_not({"*layers.1": KEEP}))
    instead = free.why_not({"layers.1": KEEP}).plan
    assert instead is not None
    assert not instead.recomputed
    file = tmp_path / "plan.json"
    tight.save(file)
    assert ShardingPlan.load(file).recomputed == tight.recomputed


def test_selective_recomputation_runs_all_that_is_cheap_and_no_product(step: JointGraph) -> None:
    plan = _plan(recompute="selective")
    again = {one.operator.split(".")[1] for one in plan.choices if one.node in set(plan.recomputed) and one.seconds}
    assert again == {"native_layer_norm", "gelu", "tanh"}
    assert not _plan(recompute="auto").recomputed
    limited = _plan(recompute="selective", memory_limit=plan.memory.peak)
    assert limited.recomputed == plan.recomputed
    kept = _plan(recompute="selective", hints={"layers.*.norm": KEEP})
    assert not any(path.endswith("norm") for path in _paths(kept))
    assert len(kept.recomputed) < len(plan.recomputed)


def test_a_limit_that_a_hint_forbids_names_the_hint_and_what_is_enough_without_it() -> None:
    wide, module = torch.randn(4096, 32), Stack(width=32).float()
    with pytest.raises(
        BudgetError, match=r"drop the hint 'layers.\*': keep\(\) \(without that, a plan needs ([\d.]+) MiB"
    ) as hinted:
        _plan(module, wide, hints={"layers.*": KEEP}, memory_limit=100_000)
    with pytest.raises(BudgetError) as free:
        _plan(module, wide, memory_limit=100_000)
    assert hinted.value.peak is not None
    assert free.value.peak is not None
    assert free.value.peak < hinted.value.peak
    assert "keep()" not in str(free.value)
    marked = Stack(_in_region(autoshard.keep), width=32).float()
    with pytest.raises(BudgetError, match=r"drop autoshard.keep\(\) around .*test_regions.py"):
        _plan(marked, wide, memory_limit=100_000)


def test_a_solution_beside_what_runs_again_in_any_case_costs_what_its_program_costs(step: JointGraph) -> None:
    graph = with_regions(step, {"layers.0": RECOMPUTE, "layers.1.mlp.0": KEEP, "layers.2.mlp": OFFLOAD}, MODULES)
    planner = planner_of(graph, {"x": 2})
    context = RerunContext(planner, copy_price=1.0)
    free = planner.solve(planner.constraints)
    moments = len(context.rules.operators) + 1
    names = set()
    for strength in (0.0, 1.0, 100.0):
        prices = torch.full((moments,), strength * free.cost / free.memory.peak / moments).double().numpy()
        plan = context.solve(context.constraints, prices=prices)
        made = plan.estimate.context
        account = made.account(plan.decisions)  # type: ignore[attr-defined]
        assert account.total_seconds == pytest.approx(plan.cost, rel=2e-2)
        assert account.total_seconds <= plan.cost * (1 + 1e-9)
        assert set(graph.recomputed) <= set(made.graph.recomputed)
        assert set(graph.offloaded) <= set(made.graph.offloaded)
        assert not _again(made.graph) & graph.kept.keys()
        names |= set(made.graph.recomputed)
        # Without the hints, in a captured step.
        flow = checked_flow(planner_of(step, {"x": 2}), made.describe(plan))
        assert flow.graph.recomputed == made.graph.recomputed
    assert names > set(graph.recomputed)


def test_depth_does_not_hide_the_marks_of_a_layer() -> None:
    """A context around one layer of many is of that layer alone, also where a few layers stand for all."""

    class Deep(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for place, layer in enumerate(self.layers):
                x = _in_region(autoshard.recompute)(layer, x) if place < 5 else layer(x)
            return functional.mse_loss(x, torch.zeros_like(x))

    plan = _plan(Deep(layers=24))
    assert {path.split(".")[1] for path in _paths(plan)} == set("01234")


@pytest.mark.parametrize("way", ["outside", "inside", "checkpoint"])
def test_regions_hold_under_autocast(way: str) -> None:
    cast = torch.autocast("cpu", dtype=torch.bfloat16)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.GELU(), nn.Linear(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            if way == "outside":
                with cast, autoshard.recompute():
                    x = self.layer(x)
            elif way == "inside":
                with autoshard.recompute(), cast, torch.no_grad():
                    x = x * 2
                with autoshard.recompute(), cast:
                    x = self.layer(x)
            else:
                with cast:
                    x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
            return x.float().square().mean()

    graph = with_regions(capture(Cast(), (torch.randn(8, 16),), {}), None, ())
    assert {"tanh", "gelu"} <= set(graph.recomputed)
