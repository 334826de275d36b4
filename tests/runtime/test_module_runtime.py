"""A parallelised module in use: signatures, gradients in the ways that autograd offers, state and identity."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

import autoshard
from autoshard.capture._torch import outside_modes
from autoshard.capture.joint import CaptureOptions, capture_call
from autoshard.capture.joint_graph import JointInput
from autoshard.errors import InputError
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.planning_problem import Constraints
from autoshard.program.localize import localize
from autoshard.program.split import split
from autoshard.runtime.calls import NewCall
from autoshard.runtime.in_place_changes import place_constant
from autoshard.runtime.module_runtime import Runtime
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.shards import gather_full_tensor, replace_parameters
from autoshard.runtime.step import Ranks, RunnableStep
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec
from tests import models
from tests.planner.steps import flow_of, planner_of
from tests.runtime.meshes import one_device, per_rank, simulated_mesh
from tests.targets import target
from tests.training import fast_links

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with simulated_mesh(x=2) as mesh:
        yield mesh


def _mlp() -> models.Model:
    return models.mlp(dtype=torch.float64)


def _parallel(mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """An MLP on the mesh, sharded where the planner would not, a copy on one device, and their inputs."""
    module, inputs = _mlp()
    alone = copy.deepcopy(module)
    hints = {"up.weight": Shard(0), "down.weight": Shard(1)}
    given = {"hints": hints, "cluster": fast_links(), "search": autoshard.Search(effort="fast"), **options}
    autoshard.parallelize(module, mesh, (), inputs, **given)
    return module, alone, inputs


def _same(ours: torch.Tensor | None, expected: torch.Tensor | None, mesh: DeviceMesh) -> None:
    assert ours is not None
    assert expected is not None
    value = gather_full_tensor(ours) if isinstance(ours, DTensor) else ours.detach()
    for held in per_rank(value, mesh).values():
        torch.testing.assert_close(held, expected.detach(), **TOLERANCE)


def _same_gradients(module: nn.Module, alone: nn.Module, mesh: DeviceMesh) -> None:
    for (name, ours), (other, expected) in zip(module.named_parameters(), alone.named_parameters(), strict=True):
        assert name == other
        _same(ours.grad, expected.grad, mesh)


class _Counted(ProgramMaker):
    """The maker of a module's programs, which are counted."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module, mesh, ModulePlanner(module, MeshShape.of(mesh), target("cpu")), None)
        self.prepared: list[bool] = []
        replicated = Spec.all_replicated(mesh.ndim)
        replace_parameters(module, {name: replicated for name, _ in module.named_parameters()}, mesh)
        Runtime(self).install()

    def make(self, call: NewCall, *_: Any) -> Any:
        self.prepared.append(call.bound.grad)
        graph = capture_call(call.bound, CaptureOptions(tangents=call.tangents))
        constraints = Constraints(pinned={name: (Replicate(),) for name, _ in self.module.named_parameters()})
        planner = planner_of(graph, {"x": 2}, constraints)
        ranks = Ranks(self.device_mesh, torch.device("cpu"))
        with outside_modes():
            step = localize(flow_of(planner, planner.plan()), planner.resharder, ranks.groups)
            halves = split(step, compile=False)
        return graph, RunnableStep(step, halves, ranks)


# Signatures


def test_each_new_signature_is_prepared_once(mesh: DeviceMesh) -> None:
    module, inputs = _mlp()
    counted = _Counted(module, mesh)
    half = {name: value[:6] for name, value in inputs.items()}
    calls = [
        lambda: module(**inputs),
        lambda: module(inputs["x"], inputs["target"]),  # positional
        lambda: module(**half),
        lambda: module(x=inputs["x"]),
        lambda: module.eval()(**inputs),
    ]
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            call()
            assert len(counted.prepared) == number
    module.train()
    module(**inputs)
    assert len(counted.prepared) == len(calls)
    with torch.no_grad():
        module(**inputs)
        module(**inputs)
    assert counted.prepared == [True] * len(calls) + [False]


@pytest.mark.parametrize("batch", [4, 7])
def test_another_batch_size_gives_the_numbers_of_one_device(mesh: DeviceMesh, batch: int) -> None:
    module, alone, _ = _parallel(mesh)
    _, inputs = models.mlp(dtype=torch.float64, batch=batch, seed=3)
    for each in (module, alone):
        each(**inputs).backward()
    _same_gradients(module, alone, mesh)


@pytest.mark.parametrize(
    "options", [{}, {"inputs": "local"}, {"dynamic": {"x": {0: "batch"}, "target": {0: "batch"}}}], ids=str
)
def test_a_known_call_is_flattened_once(
    mesh: DeviceMesh, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, inputs = _parallel(mesh, **options)
    module(**inputs)
    flattened = []
    for name in ("tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map"):
        function = getattr(pytree, name)

        def counting(*given: Any, function: Any = function, name: str = name, **keywords: Any) -> Any:
            trees = [tree for tree in given if isinstance(tree, tuple)]
            if any(leaf is inputs["x"] for leaf in pytree.tree_iter(trees)):
                flattened.append(name)
            return function(*given, **keywords)

        monkeypatch.setattr(pytree, name, counting)
    module(**inputs)
    assert flattened == ["tree_flatten"]


# Gradients


def test_gradients_lie_as_their_parameters_in_memory_of_their_own(mesh: DeviceMesh) -> None:
    class Sums(nn.Module):
        """The gradients of `a`, `b` and `c` are one and the same, those of `d` and `e` constants."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.e = (nn.Parameter(torch.randn(8, dtype=torch.float64)) for _ in range(3))
            self.c, self.d = (nn.Parameter(torch.randn(2, 4, dtype=torch.float64)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.a + self.b + self.c.reshape(8)).square().sum() + self.d.sum() + 2 * self.e.sum()

    module, x = Sums(), torch.randn(4, 8, dtype=torch.float64)
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, (x,), hints={"*": Replicate()})
    for each in (module, alone):
        each(x).backward()
        for parameter in each.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(3)
    _same_gradients(module, alone, mesh)
    for parameter in module.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert all(local.is_contiguous() for local in per_rank(parameter.grad, mesh).values())


def test_autograd_grad_of_the_parameters(mesh: DeviceMesh) -> None:
    module, alone, inputs = _parallel(mesh)
    ours = torch.autograd.grad(module(**inputs), list(module.parameters()))
    expected = torch.autograd.grad(alone(**inputs), list(alone.parameters()))
    for one, other in zip(ours, expected, strict=True):
        _same(one, other, mesh)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_graph_that_is_retained_is_differentiated_twice(mesh: DeviceMesh) -> None:
    module, alone, inputs = _parallel(mesh)
    for each in (module, alone):
        loss = each(**inputs)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    _same_gradients(module, alone, mesh)


def test_hooks_on_parameters_run(mesh: DeviceMesh) -> None:
    module, alone, inputs = _parallel(mesh)
    seen: list[tuple[str, Any]] = []
    for each in (module, alone):
        each.up.weight.register_hook(lambda gradient: gradient * 2)
        each.down.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(("down", parameter.grad)))
        each(**inputs).backward()
    assert len(seen) == 2
    assert isinstance(seen[0][1], DTensor)
    _same_gradients(module, alone, mesh)


def test_hooks_on_the_module_run(mesh: DeviceMesh) -> None:
    module, alone, inputs = _parallel(mesh)
    for each in (module, alone):
        each.register_forward_hook(lambda module, args, output: output * 3)
        each(**inputs).backward()
    _same_gradients(module, alone, mesh)


def _penalty_of_inputs(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    loss = module(x=x, target=target)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + (gradient.norm(dim=1) - 1).square().mean()).backward()


def _penalty_of_parameters(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    parameters = list(module.parameters())
    loss = module(x=x, target=target)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    torch.autograd.grad(loss + sum(gradient.sum() for gradient in gradients), parameters)


def _penalty_behind_other_operators(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    loss = module(x=2 * x, target=target)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(gradient.sum(), x)


_PENALTIES = (_penalty_of_inputs, _penalty_of_parameters, _penalty_behind_other_operators)


@pytest.mark.parametrize("penalise", _PENALTIES, ids=lambda penalise: penalise.__name__)
def test_second_derivatives_are_refused(mesh: DeviceMesh, penalise: Any) -> None:
    module, _, inputs = _parallel(mesh)
    with pytest.raises(InputError, match=r"differentiated again .*in forward: there torch.autograd.grad"):
        penalise(module, inputs["x"].requires_grad_(), inputs["target"])


def test_gradients_with_a_graph_are_numbers_as_all_others(mesh: DeviceMesh) -> None:
    module, alone, inputs = _parallel(mesh)
    x = inputs["x"].requires_grad_()
    ours, expected = (
        torch.autograd.grad(one(x=x, target=inputs["target"]), x, create_graph=True)[0] for one in (module, alone)
    )
    _same(ours, expected, mesh)
    (ours.detach() * x).sum().backward()


def test_derivatives_in_forward_mode_are_refused() -> None:
    module, inputs = _mlp()
    with one_device("cpu") as mesh:
        autoshard.parallelize(module, mesh, (), inputs)
        with forward_ad.dual_level(), pytest.raises(InputError, match="no derivative in forward mode"):
            module(**{**inputs, "x": forward_ad.make_dual(inputs["x"], torch.ones_like(inputs["x"]))})


_TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], object]] = {
    "vmap": lambda module, x, target: torch.vmap(lambda x: module(x=x, target=target))(torch.stack([x, x])),
    "grad": lambda module, x, target: torch.func.grad(lambda x: module(x=x, target=target))(x),
    "grad of parameters": lambda module, x, target: torch.func.grad(
        lambda values: torch.func.functional_call(module, values, (), {"x": x, "target": target})
    )({name: parameter.detach() for name, parameter in module.named_parameters()}),
    "rows at once": lambda module, x, target: torch.autograd.grad(
        module(x=x, target=target), list(module.parameters()), torch.ones(3), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("name", _TRANSFORMS)
def test_transforms_of_calls_are_refused(name: str) -> None:
    module, inputs = _mlp()
    with one_device("cpu") as mesh:
        autoshard.parallelize(module, mesh, (), inputs)
        with pytest.raises(InputError, match=r"test_module_runtime.* in a transform of torch.func .*call the module"):
            _TRANSFORMS[name](module, inputs["x"], inputs["target"])
        module(**inputs).backward()


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(mesh: DeviceMesh, to_none: bool) -> None:
    module, alone, inputs = _parallel(mesh)
    for each in (module, alone):
        for _ in range(2):
            each.zero_grad(set_to_none=to_none)
            each(**inputs).backward()
    _same_gradients(module, alone, mesh)


# State and identity


def test_names_class_and_attributes_stay(mesh: DeviceMesh) -> None:
    module, alone, _ = _parallel(mesh)
    assert type(module) is models.Mlp
    assert isinstance(module.up, nn.Linear)
    assert list(module.state_dict()) == list(alone.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in alone.named_modules()]
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert module.sharding_plan.placements["up.weight"] == (Shard(0),)
    for name, tensor in module.state_dict().items():
        _same(tensor, alone.state_dict()[name], mesh)


def test_a_state_dict_is_loaded_and_used(mesh: DeviceMesh) -> None:
    module, _, inputs = _parallel(mesh)
    other, _ = models.mlp(dtype=torch.float64, seed=5)
    module.load_state_dict(other.state_dict())
    _same(module(**inputs), other(**inputs), mesh)


def test_buffers_change_as_on_one_device(mesh: DeviceMesh) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(24, 12), nn.BatchNorm1d(12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x)).square().mean()

    module, x = Normed().double(), torch.randn(12, 24, dtype=torch.float64)
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
    for each in (module, alone):
        each(x).backward()
        each(2 * x)
    for ours, expected in zip(module.buffers(), alone.buffers(), strict=True):
        _same(ours, expected, mesh)
    assert int(alone.norm.num_batches_tracked) == 2


class _WithTable(nn.Module):
    """Returns beside its result a table that depends on no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x.cos()


def test_outputs_that_nothing_trained_leads_to_require_no_gradient(mesh: DeviceMesh) -> None:
    module, x = _WithTable(), torch.randn(4, 4, dtype=torch.float64)
    autoshard.parallelize(module, mesh, (x,))
    result, table = module(x)
    assert result.requires_grad
    assert not table.requires_grad
    (result * table).sum().backward()
    assert module.linear.weight.grad is not None


class _TwoHeads(nn.Module):
    """Returns what two heads make; with a loss of the first where `loss`."""

    def __init__(self, loss: bool) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.loss = loss

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.body(x).tanh()
        first, second = self.first(hidden), self.second(hidden)
        return ((first.square().mean(),) if self.loss else ()) + (first, second)


@pytest.mark.parametrize("loss", [False, True])
def test_what_takes_no_part_in_a_loss_has_no_gradient(mesh: DeviceMesh, loss: bool) -> None:
    module, x = _TwoHeads(loss), torch.randn(4, 4, dtype=torch.float64)
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, (x,))
    ends: list[Callable[..., torch.Tensor]] = [lambda *results: results[-2].sum(), lambda *results: results[-1].sum()]
    for end in ends:
        for one in (module, alone):
            end(*one(x)).backward()
        for (name, ours), expected in zip(module.named_parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) == (expected.grad is None), name
            if expected.grad is not None:
                _same(ours.grad, expected.grad, mesh)
        for one in (module, alone):
            one.zero_grad()


def test_attributes_that_a_graph_holds_move_to_the_device_of_the_mesh() -> None:
    """The meta device stands for an accelerator: it is not the device on which the module was built."""
    module = nn.Linear(2, 2)
    module.offsets, shared = torch.arange(2.0), torch.arange(3.0)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("offsets", "shared")]
    for node, value in zip(nodes, (module.offsets, shared), strict=True):
        node.meta["val"] = value
    with one_device("meta") as mesh:
        held = place_constant(module, JointInput("constant", "offsets", nodes[0], module.offsets), mesh)
        value = place_constant(module, JointInput("constant", "shared", nodes[1], shared), mesh)
    assert held == (vars(module), "offsets")
    assert module.offsets.device.type == "meta"
    assert isinstance(value, torch.Tensor)
    assert value.device.type == "meta"
    assert shared.device.type == "cpu"


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).pow(2).mean()


def _patched(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * module.up(x).sin().mean()  # type: ignore[operator]


def _twice(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What a tool puts around a `forward`: accelerate does so for its precisions, with closures and `__wrapped__`."""

    def around(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * forward(*args, **kwargs)

    around.__wrapped__ = forward  # type: ignore[attr-defined]
    return around


def _bound(module: nn.Module) -> types.MethodType:
    forward = module.forward
    return types.MethodType(lambda self, x: 2 * forward(x), module)


def _in_part(module: nn.Module) -> functools.partial[torch.Tensor]:
    forward = module.forward
    return functools.partial(lambda x, factor: factor * forward(x), factor=2)


SET: dict[str, Callable[[nn.Module], Any]] = {
    "method": lambda module: types.MethodType(_patched, module),
    "partial": lambda module: functools.partial(_patched, module),
}
AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "closure": lambda module: _twice(module.forward),
    "closures": lambda module: _twice(_twice(module.forward)),
    "method around": _bound,
    "partial around": _in_part,
}


@pytest.mark.parametrize(
    ("kind", "later"), [(kind, False) for kind in (*SET, "method around")] + [(kind, True) for kind in AROUND]
)
def test_a_forward_that_the_user_set_serves_every_kind_of_call(mesh: DeviceMesh, kind: str, later: bool) -> None:
    def set_forward(one: nn.Module) -> None:
        one.forward = (SET | AROUND)[kind](one)

    module = _Scaled()
    alone = copy.deepcopy(module)
    set_forward(alone)
    x = torch.randn(4, 8, dtype=torch.float64)
    if not later:
        set_forward(module)
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
    if later:
        set_forward(module)
    _same(module(x), alone(x), mesh)
    with torch.no_grad():
        _same(module(x), alone(x), mesh)
    _same(module.eval()(x), alone.eval()(x), mesh)
    _same(module(x[:2]), alone(x[:2]), mesh)


_PACKED: dict[str, Callable[[], Any]] = {
    "on the CPU": save_on_cpu,
    "doubled": lambda: saved_tensors_hooks(lambda tensor: tensor + tensor, lambda tensor: tensor / 2),
}


@pytest.mark.parametrize("name", _PACKED)
def test_tensors_for_backward_may_be_packed(mesh: DeviceMesh, name: str) -> None:
    module, alone, inputs = _parallel(mesh)
    for one in (module, alone):
        with _PACKED[name]():
            loss = one(**inputs)
        loss.backward()
    _same_gradients(module, alone, mesh)
