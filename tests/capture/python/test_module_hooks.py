"""Forward hooks of submodules: what they keep, count and change is what one device has, and no tensor is fake."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autoshard
from autoshard.capture._torch import FakeTensor
from autoshard.capture.joint import capture
from autoshard.errors import AutoshardError, CaptureError
from autoshard.runtime.shards import gather_full_tensor
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links

GLOBAL: dict[str, Any] = {}


class Net(nn.Module):
    """Layers with hooks, one of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.act = nn.ReLU(inplace=True)
        self.twice = nn.Tanh()
        self.last = nn.Linear(4, 4, dtype=torch.float64)
        self.round = 0
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.round = 1
        x = self.twice(self.act(self.first(x)))
        self.round = 2
        return self.last(self.twice(x)) * self.scale


class Extractor:
    """Keeps features, as the class of every forum does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.features: dict[str, Tensor] = {}
        self.calls = 0
        self.history: collections.deque[Tensor] = collections.deque(maxlen=3)

    def save(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.calls += 1
        self.features[type(module).__name__] = output.detach()
        self.history.append(args[0])

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        self.features[f"{type(module).__name__} {kwargs}"] = output.clone()


def _dict(net: Net) -> Any:
    kept: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept["features"] = output.detach()
        kept["calls"] = kept.get("calls", 0) + 1

    net.twice.register_forward_hook(keep)
    return kept


def _list(net: Net) -> Any:
    kept: list[Tensor] = []
    net.twice.register_forward_hook(lambda module, args, output: kept.append(output))
    return kept


def _method(net: Net) -> Any:
    extractor = Extractor(net)
    for part in (net.first, net.twice):
        part.register_forward_hook(extractor.save)
    return extractor, ("features", "calls", "history")


def _object(net: Net) -> Any:
    extractor = Extractor(net)
    net.last.register_forward_hook(extractor, with_kwargs=True)
    return extractor, ("features",)


def _partial(net: Net) -> Any:
    kept: dict[str, Any] = {}

    def keep(kept: dict[str, Any], name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        kept[name] = output

    for name, part in net.named_children():
        part.register_forward_hook(functools.partial(keep, kept, name))
    return kept


def _closures(net: Net) -> Any:
    count, features = 0, None

    def keep(module: nn.Module, args: Any) -> None:
        nonlocal count, features
        count, features = count + 1, args[0].mean()

    net.last.register_forward_pre_hook(keep)
    holder = types.SimpleNamespace(get=lambda: (count, features))
    return holder.get


def _global(net: Net) -> Any:
    GLOBAL.clear()

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        GLOBAL.setdefault("all", []).append(output.detach())

    net.last.register_forward_hook(keep)
    return GLOBAL


def _numbers(net: Net) -> Any:
    kept: list[Any] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.abs().mean() > 0:
            kept.append(tuple(output.shape))
        kept.append(bool(torch.isfinite(output).all()))

    net.last.register_forward_hook(look)
    return kept


def _attribute(net: Net) -> Any:
    def keep(module: Any, args: Any, output: Tensor) -> None:
        module.seen = getattr(module, "seen", 0) + 1
        module.features = output

    net.last.register_forward_hook(keep)
    return net.last, ("features",)


def _before_a_change(net: Net) -> Any:
    """What the layer after the hook changes in place."""
    kept: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept["same memory"] = output.detach()
        kept["copy"] = output.clone()

    net.first.register_forward_hook(keep)
    return kept


def _what_forward_sets(net: Net) -> Any:
    kept: dict[int, Any] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept[net.round] = output.detach()

    net.twice.register_forward_hook(keep)
    return kept


def _change(net: Net) -> Any:
    kept: dict[str, Any] = {}

    def before(module: nn.Module, args: Any) -> None:
        kept["input"] = args[0]

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + kept["input"]

    net.last.register_forward_pre_hook(before)
    net.last.register_forward_hook(after)
    return kept


def _in_place(net: Net) -> Any:
    net.first.register_forward_hook(lambda module, args, output: [output.mul_(3)].clear())
    return {}


def _change_in_place(net: Net) -> Any:
    kept: list[Tensor] = []

    def change(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output.detach().clone())
        output.clamp_(min=0.1)

    net.first.register_forward_hook(change)
    return kept


def _weights(net: Net) -> Any:
    kept: dict[str, Any] = {}

    def keep(module: Any, args: Any, output: Tensor) -> None:
        kept["score"] = (output @ module.weight).detach()

    net.last.register_forward_hook(keep)
    return kept


def _loss(net: Net) -> Any:
    """A term of the loss."""
    kept: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept["loss"] = output.square().mean()

    net.twice.register_forward_hook(keep)
    return kept


def _always(net: Net) -> Any:
    kept: list[Any] = []
    net.last.register_forward_hook(lambda *all: kept.append(len(all)), with_kwargs=True, always_call=True)
    net.last.register_forward_hook(lambda *all: kept.append(len(all)), prepend=True)
    return kept


PROGRAMS: dict[str, Callable[[Net], Any]] = {
    name.strip("_"): function
    for name, function in list(globals().items())
    if isinstance(function, types.FunctionType) and name.startswith("_") and function.__module__ == __name__
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with simulated_mesh(x=2) as mesh:
        yield mesh


def _x() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64)


def _kept(kept: Any) -> Any:
    """What hooks left, in plain containers."""
    if isinstance(kept, types.FunctionType):
        return kept()
    if isinstance(kept, tuple):
        owner, names = kept
        kept = {name: getattr(owner, name) for name in names}
    return pytree.tree_map(lambda leaf: list(leaf) if isinstance(leaf, collections.deque) else leaf, kept)


def _assert_equal(kept: Any, expected: Any, mesh: DeviceMesh) -> None:
    ours, structure = pytree.tree_flatten(kept)
    others, same = pytree.tree_flatten(expected)
    assert structure == same
    for one, other in zip(ours, others, strict=True):
        if not isinstance(other, Tensor):
            assert one == other
            continue
        assert not isinstance(one, (FakeTensor, DTensor))
        assert one.requires_grad == other.requires_grad
        for held in per_rank(one.detach(), mesh).values():
            torch.testing.assert_close(held, other.detach(), rtol=1e-9, atol=1e-12)


class Nets(nn.Module):
    """Networks beside one another, by name, for the same input."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.nets = nn.ModuleDict({name: Net() for name in names})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: net(x) for name, net in self.nets.items()}


def _registered(module: Nets) -> dict[str, Any]:
    """What the hooks of each network, which are registered, keep."""
    return {name: PROGRAMS[name](net) for name, net in module.nets.items()}


def _step(module: nn.Module, x: Tensor, all_kept: dict[str, Any]) -> dict[str, Tensor]:
    module.zero_grad()
    losses = {name: output.square().mean() for name, output in module(x).items()}
    for name in losses:
        extra = _kept(all_kept[name])
        if isinstance(extra, dict) and "loss" in extra:
            losses[name] = losses[name] + extra["loss"]
    torch.stack([*losses.values()]).sum().backward()
    return losses


def _assert_same_steps(module: Nets, alone: Nets, ours: Any, expected: Any, mesh: DeviceMesh) -> None:
    for _ in range(2):
        x, wrong = _x(), {}
        found, wanted = _step(module, x, ours), _step(alone, x, expected)
        for name, net in alone.nets.items():
            try:
                _assert_equal(found[name], wanted[name], mesh)
                _assert_equal(_kept(ours[name]), _kept(expected[name]), mesh)
                for one, other in zip(module.nets[name].parameters(), net.parameters(), strict=True):
                    _assert_equal(gather_full_tensor(one.grad).detach(), other.grad, mesh)
            except AssertionError as error:
                wrong[name] = str(error)
        assert not wrong


@pytest.mark.parametrize(
    ("names", "moment"),
    [
        ([*PROGRAMS], "before parallelize"),
        (("dict", "method", "change"), "after parallelize"),
        (("dict", "method", "change"), "after a call"),
    ],
)
def test_hooks_leave_what_they_leave_on_one_device(names: Sequence[str], moment: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    module = Nets(names)
    alone, x = copy.deepcopy(module), _x()
    ours = _registered(module) if moment == "before parallelize" else None
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links(), search=autoshard.Search(effort="fast"))
    if moment == "after a call":
        module(x)
        alone(x)
    if ours is None:
        ours = _registered(module)
    theirs = {name: PROGRAMS[name](net) for name, net in alone.nets.items() if name != "global"}
    if "global" in names:  # which is of both
        kept = theirs["global"] = {}
        last = alone.nets["global"].last
        last.register_forward_hook(lambda m, a, out: kept.setdefault("all", []).append(out.detach()))
    _assert_same_steps(module, alone, ours, theirs, mesh)


def _reached(*roots: Any) -> Iterator[Any]:
    """All objects that can be reached, without modules of Python, classes and the insides of torch."""
    waiting, known = list(roots), {}
    while waiting:
        value = waiting.pop()
        if id(value) in known or isinstance(value, (types.ModuleType, type, types.FrameType)):
            continue
        known[id(value)] = value
        yield value
        if isinstance(value, types.FunctionType):  # not its globals
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        else:
            waiting += gc.get_referents(value)


def test_no_fake_tensor_stays_behind_a_capture() -> None:
    module = Nets(PROGRAMS)
    kept = _registered(module)
    before = {name: pytree.tree_leaves(_kept(one)) for name, one in kept.items() if name != "attribute"}
    capture(module, (_x(),), {})
    assert {name for name, net in module.nets.items() if _has_fakes(net, kept[name])} == set()
    assert not _has_fakes(module, GLOBAL)
    assert not GLOBAL
    assert {name: pytree.tree_leaves(_kept(kept[name])) for name in before} == before


def _has_fakes(*roots: Any) -> bool:
    return any(isinstance(value, (FakeTensor, torch.SymInt, torch.SymFloat)) for value in _reached(*roots))


def test_a_hook_that_is_removed_is_gone(mesh: DeviceMesh) -> None:
    module, x = Net(), _x()
    kept: list[Any] = []
    handle = module.first.register_forward_hook(lambda module, args, output: kept.append(tuple(output.shape)))
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
    assert kept == []
    module(x)
    handle.remove()
    module(x)
    assert kept == [(4, 4)]


def test_a_hook_that_keeps_tensors_where_nobody_finds_them_is_refused_by_its_line() -> None:
    deep: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": {"g": []}}}}}}}
    module = Net()

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        deep["a"]["b"]["c"]["d"]["e"]["f"]["g"].append(output)

    module.first.register_forward_hook(keep)
    with pytest.raises(CaptureError, match=r"forward hook .*keep of self.first .*keeps tensors where no capture"):
        capture(module, (_x(),), {})


def test_a_hook_that_changes_the_output_by_its_numbers_is_refused(mesh: DeviceMesh) -> None:
    def repair(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.abs().max().item() > 1e-9:
            output.zero_()

    module, x = Net(), _x()
    module.last.register_forward_hook(repair)
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
    with pytest.raises(AutoshardError, match="the numbers"):
        module(x)


def _keeps(kept: list[Any], counts: bool) -> Callable[..., None]:
    def hook(module: nn.Module, inner: Any, outer: Any) -> None:
        kept.append(1 if counts else outer[0])

    return hook


@pytest.mark.parametrize("counts", [True, False])
def test_backward_hooks_that_keep_gradients_are_refused_by_name(counts: bool) -> None:
    module, kept = Net(), list[Any]()
    module.last.register_full_backward_hook(_keeps(kept, counts))
    with pytest.raises(CaptureError, match="in the midst of backward"):
        capture(module, (_x(),), {})
    assert kept == []


def test_hooks_keep_running_under_no_grad_and_in_evaluation(mesh: DeviceMesh) -> None:
    module, x = Net(), _x()
    kept: list[Any] = []
    module.twice.register_forward_hook(lambda module, args, output: kept.append((module.training, output)))
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
    with torch.no_grad():
        module.eval()(x)
    assert [training for training, _ in kept] == [False, False]
    assert not any(output.requires_grad for _, output in kept)
