"""Python state that `forward` reads and sets: programs for every state, one device's numbers in each of them."""

from __future__ import annotations

import contextlib
import copy
import timeit
import types
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

import autoshard
from autoshard.capture import joint
from autoshard.capture._torch import trace_joint
from autoshard.capture.joint import capture
from autoshard.capture.python.guards import ValueGuard
from autoshard.errors import AutoshardError, InputError
from autoshard.runtime.shards import gather_full_tensor
from tests import models
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links, held_by_ranks
from tests.workers import Workers

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Config:
    """A plain object, such as models hold of their sizes."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.rope = {"theta": 3.0, "kinds": ["a", "b"]}


class Part(nn.Module):
    """A layer that reads all kinds of state."""

    power = 1.0  # of the class

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False, dtype=torch.float64)])
        self.flag = False
        self.weight_of_loss = 1
        self.factors = [1.0, 2.0]
        self.activation: Callable[[Tensor], Tensor] = torch.tanh
        self.history: list[int] = []
        self.unread = 0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.config.scale + self.config.rope["theta"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(self.drop(self.activation(self.linear(x))))
        for layer in self.layers:
            x = layer(x)
        if self.flag:
            x = x * 3
        return x * self.weight_of_loss * sum(self.factors) * self.power + len(self.history)


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part(Config())
        self.head = nn.Linear(4, 2, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x)).square().mean()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with simulated_mesh(x=2) as mesh:
        yield mesh


def _x() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64)


def _pair(mesh: DeviceMesh, make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model on the mesh, and its copy on one device."""
    module = make()
    alone = copy.deepcopy(module)
    search = autoshard.Search(effort="fast")
    autoshard.parallelize(module, mesh, (_x(),), cluster=fast_links(), search=search, **options)
    return module, alone


def _same(module: nn.Module, alone: nn.Module, mesh: DeviceMesh, x: Tensor | None = None) -> None:
    """A step of both has the same loss and gradients."""
    x = _x() if x is None else x
    for each in (module, alone):
        each.zero_grad()
    ours, expected_value = module(x), alone(x)
    ours.backward()
    expected_value.backward()
    pairs = [
        (ours, expected_value),
        *((p.grad, q.grad) for p, q in zip(module.parameters(), alone.parameters(), strict=True)),
    ]
    for one, other in pairs:
        for held in per_rank(gather_full_tensor(one) if isinstance(one, DTensor) else one.detach(), mesh).values():
            torch.testing.assert_close(held, other.detach(), **TOLERANCE)


def _programs(module: nn.Module) -> int:
    """How many there are for calls with gradients."""
    return sum(1 for first in vars(module)["_autoshard_runtime"].programs.table.values() for _ in first.candidates())


def _set(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        holder = module
        for step in owner.split("."):
            holder = getattr(holder, step)
        setattr(holder, name, value)

    return change


def _twice(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "flag": _set("part.flag", True),
    "number": _set("part.weight_of_loss", 3),
    "its type": _set("part.weight_of_loss", 1.5),
    "config": _set("part.config.scale", 0.5),
    "another config": lambda net: (setattr(net.part, "config", Config()), setattr(net.part.config, "scale", 7.0)),
    "dict in a config": lambda net: net.part.config.rope.update(theta=5.0),
    "item of a list": lambda net: net.part.factors.__setitem__(0, 4.0),
    "length of a list": lambda net: net.part.history.append(1),
    "function": _set("part.activation", torch.sigmoid),
    "class": lambda net: setattr(net.part, "power", 2.0),
    "instance's forward": lambda net: setattr(
        net.head,
        "forward",
        types.MethodType(lambda self, x: functional.linear(x, self.weight * 5, self.bias), net.head),
    ),
    "instance's method": lambda net: setattr(
        net.part, "scaled", types.MethodType(lambda self, x: x * self.config.scale - 1, net.part)
    ),
    "forward hook": lambda net: net.part.register_forward_hook(_twice),
    "forward pre-hook": lambda net: net.part.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "full backward hook": lambda net: net.head.register_full_backward_hook(
        lambda module, inner, outer: (3 * inner[0],)
    ),
    "full backward pre-hook": lambda net: net.part.linear.register_full_backward_pre_hook(
        lambda module, outer: (2 * outer[0],)
    ),
    "module without parameters": _set("part.drop", nn.Tanh()),
    "one more layer": lambda net: net.part.layers.append(nn.Tanh()),
}


def test_changes_of_state_are_seen(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh)
    x = _x()
    _same(module, alone, mesh, x)
    for number, (name, change) in enumerate(CHANGES.items()):
        for each in (module, alone):
            change(each)
        for _ in range(2):
            _same(module, alone, mesh, x)
        assert _programs(module) == number + 2, name


def test_a_state_that_comes_back_has_its_program(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh)
    for _ in range(2):
        for flag in (True, False):
            for each in (module, alone):
                each.part.flag = flag
            _same(module, alone, mesh)
    assert _programs(module) == 2
    handles = [each.part.register_forward_hook(_twice) for each in (module, alone)]
    _same(module, alone, mesh)
    assert _programs(module) == 3
    for handle in handles:
        handle.remove()
    _same(module, alone, mesh)
    assert _programs(module) == 3


class Recording(nn.Module):
    """As models of Hugging Face that are asked for hidden states: the first such call registers hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        result: list[Tensor] = []
        if not self.hooked:
            self.linear.register_forward_hook(lambda module, args, output: _recorded.get().append(output))
            self.hooked = True
        token = _recorded.set(result)
        y = self.linear(x).tanh()
        _recorded.reset(token)
        return y * result[0]


_recorded: ContextVar[list[Tensor]] = ContextVar("recorded")


def test_hooks_that_forward_registers_are_there_when_a_call_is_captured_again(mesh: DeviceMesh) -> None:
    module, x = Recording(), _x()
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
    for rows in (slice(None), slice(None), slice(2)):
        for held in per_rank(module(x[rows]), mesh).values():
            torch.testing.assert_close(held, alone(x[rows]), **TOLERANCE)
    assert len(module.linear._forward_hooks) == 1


class SetsOnce(nn.Module):
    """As classifiers of Hugging Face, which set the kind of their loss when they are first called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.kind: str | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.kind = self.kind or "square"
        y = self.linear(x)
        return y.square().mean(), y


def test_a_state_with_an_equal_graph_is_not_planned_again(mesh: DeviceMesh) -> None:
    module, x = SetsOnce(), _x()
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, (x,), cluster=fast_links())
    for index in (0, 0, 1):
        if index:  # this call differentiates more than the loss
            (served,) = vars(module)["_autoshard_runtime"].programs.table.values()
            first, second = served.candidates()
            assert first.program.halves is second.program.halves
        for each in (module, alone):
            each.zero_grad()
            each(x)[index].sum().backward()
        for held in per_rank(gather_full_tensor(module.linear.weight.grad), mesh).values():
            torch.testing.assert_close(held, alone.linear.weight.grad, **TOLERANCE)


def test_what_forward_does_not_read_is_no_state(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh)
    module.part.unread = 7
    module.part.another = "new"
    module.part.config.scale = float("2.0")  # another object of the same value
    module.part.factors = [1.0, 2.0]
    module.register_forward_hook(lambda *_: None)  # it runs around the program
    module.part.linear.weight.register_hook(lambda gradient: None)
    _same(module, alone, mesh)
    assert _programs(module) == 1


def test_dropout_and_evaluation(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh)
    x = _x()
    module.part.drop.p = 1.0 - 1e-12
    dropped = module(x)
    alone.part.activation = torch.zeros_like
    _value(dropped, alone(x), mesh)
    module.part.drop.p = 0.0
    for each in (module, alone):
        each.eval()
        each.part.activation = torch.tanh
        each.part.flag = True
    with torch.no_grad():
        _value(module(x), alone(x), mesh)
        for each in (module, alone):
            each.part.flag = False
        _value(module(x), alone(x), mesh)


def _value(ours: Tensor, expected_value: Tensor, mesh: DeviceMesh) -> None:
    for held in per_rank(ours.detach(), mesh).values():
        torch.testing.assert_close(held, expected_value.detach(), **TOLERANCE)


def test_a_replaced_submodule_trains(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh, hints={"part.linear.weight": Shard(0)})
    before = module.part.linear
    x = _x()
    _same(module, alone, mesh, x)
    new = nn.Linear(4, 4, dtype=torch.float64)
    old, alone.part.linear = alone.part.linear, copy.deepcopy(new)
    module.part.linear = new
    optimizer = torch.optim.SGD(module.parameters(), 0.1)  # made before the call that places the new parameters
    reference = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(2):
        _same(module, alone, mesh, x)
        optimizer.step()
        reference.step()
    assert isinstance(module.part.linear.weight, DTensor)
    module.part.linear, alone.part.linear = before, old
    _same(module, alone, mesh, x)
    assert _programs(module) == 2


def test_a_replaced_submodule_of_another_shape(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh, hints={"head.weight": Shard(0)})
    new = nn.Linear(4, 3, dtype=torch.float64)
    alone.head, module.head = copy.deepcopy(new), new
    _same(module, alone, mesh)


def test_a_parameter_replaced_by_a_plain_one(mesh: DeviceMesh) -> None:
    module, _ = _pair(mesh, hints={"part.linear.weight": Shard(0)})
    for frozen in (False, True):  # a call that is known, and a new kind
        module.part.linear.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64), not frozen)
        with pytest.raises(
            InputError, match=r"part\.linear\.weight was replaced by a plain Parameter of shape \(4, 4\)"
        ):
            module(_x())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("was_tied", [False, True])
def test_parameters_tied_and_untied_after_a_call(mesh: DeviceMesh, was_tied: bool) -> None:
    module = Tied()
    if was_tied:
        module.second.weight = module.first.weight
    hints = {"first.weight": Shard(0)} if was_tied else {"first.weight": Shard(0), "second.weight": Shard(1)}
    autoshard.parallelize(module, mesh, (_x(),), cluster=fast_links(), hints=hints)
    module(_x())
    kept = module.second.weight
    module.second.weight = nn.Parameter(kept.detach().clone()) if was_tied else module.first.weight
    with pytest.raises(InputError, match=r"\.weight was tied, untied, or replaced by another of shape \(4, 4\)"):
        module(_x())
    module.second.weight = kept
    module(_x())


def test_a_parameter_replaced_by_a_plain_tensor_is_no_longer_one(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh, hints={"part.linear.weight": Shard(0)})
    for each in (module, alone):
        del each.part.linear.weight
        each.part.linear.weight = torch.ones(4, 4, dtype=torch.float64)
    _same(module, alone, mesh)


class Counting(nn.Module):
    """A forward that changes numbers of the module in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.calls = 0
        self.decay = 1.0
        self.phase = 0
        self.seen = 0
        self.started = False
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.decay *= 0.5
        self.phase = (self.phase + 1) % 3
        self.seen = self.seen + x.shape[0]
        if not self.started:
            self.started = True
        self.last = "train" if self.training else "eval"
        return self.linear(x).sum()


def test_counters_count_as_on_one_device(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh, Counting)
    names = ("calls", "decay", "phase", "seen", "started", "last")
    assert [getattr(module, name) for name in names] == [0, 1.0, 0, 0, False, None]  # as it was before the capture
    for step in range(5):
        _same(module, alone, mesh)
        assert [getattr(module, name) for name in names] == [getattr(alone, name) for name in names]
        if step == 2:
            for each in (module, alone):
                each.calls = 0  # by the user, between calls
    assert type(module.calls) is int
    assert _programs(module) == 2  # before and after the start
    with torch.no_grad():
        for each in (module.eval(), alone.eval()):
            each(_x())
    assert [getattr(module, name) for name in names] == [getattr(alone, name) for name in names]


class Warming(nn.Module):
    """A counter that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).sum() * min(1.0, self.calls / 2)


class Growing(nn.Module):
    """A counter that the result depends on without end, in code that hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.linear(x).sum() * len(self.sizes)


@pytest.mark.parametrize("make", [Warming, Growing])
def test_a_counter_that_is_read_ends_with_its_line(mesh: DeviceMesh, make: Callable[[], nn.Module]) -> None:
    module, alone = _pair(mesh, make)
    x = _x()
    for _ in range(4):
        _same(module, alone, mesh, x)
    with pytest.raises(InputError, match=r"reads self\.(calls|sizes) .*register_buffer") as raised:
        module(x)
    assert ("self.calls += 1" in str(raised.value)) == (make is Warming)
    assert 1 < _programs(module) < 6


class Returning(Counting):
    """A counter that is returned."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.calls


def test_a_counter_that_is_returned_is_read(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh, Returning)
    assert [module(_x())[1] for _ in range(3)] == [alone(_x())[1] for _ in range(3)]


def test_counters_are_no_reason_to_trace_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    monkeypatch.setattr(joint, "trace_joint", lambda *given: (traces.append(given), trace_joint(*given))[1])
    reads = capture(Counting(), (_x(),), {}).state.guards.reads
    assert len(traces) == 1
    assert {read.path for read in reads}.isdisjoint({"self.calls", "self.decay", "self.phase", "self.seen"})


class Remembering(nn.Module):
    """State that is made by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.state is not None:
            h = h + self.state
        self.state = h.detach()
        return h.square().mean()


def test_a_tensor_where_none_was(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh, Remembering)
    x = _x()
    for _ in range(3):
        _same(module, alone, mesh, x)
    for each in (module, alone):
        each.state = None
    _same(module, alone, mesh, x)
    assert _programs(module) == 2


def test_capture_leaves_no_trace(mesh: DeviceMesh) -> None:
    before = dict(vars(nn.Module))
    module, _ = _pair(mesh)
    assert dict(vars(nn.Module)) == before
    assert type(module.part) is Part
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(_x())


def test_guards_stand_in_no_way_of_dynamic_sizes(mesh: DeviceMesh) -> None:
    module, alone = _pair(mesh, dynamic={"x": {0: "batch"}})
    for rows in (4, 6):
        x = torch.randn(rows, 4, dtype=torch.float64)
        for flag in (False, True):
            for each in (module, alone):
                each.part.flag = flag
            _same(module, alone, mesh, x)
    assert _programs(module) == 2


def _differing() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    module = Net()
    autoshard.parallelize(module, mesh, (_x(),), cluster=fast_links())
    module(_x())
    module.part.weight_of_loss = 2 + dist.get_rank()
    try:
        module(_x())
    except AutoshardError as error:
        return str(error)
    return "nothing"


def test_ranks_in_other_states_are_an_error_on_all(two: Workers) -> None:
    for message in two.run(_differing):
        assert "differ in the attribute self.part.weight_of_loss: 2 on rank 0; 3 on rank 1" in message


def test_the_text_of_a_function_is_the_same_on_all_ranks() -> None:
    table: dict[str, Any] = {"act": torch.relu}
    guard = ValueGuard("self.act", table, "act")
    texts = []
    for value in (torch.tanh, _x, [_x], {"act": 1}):
        table["act"] = value
        texts.append(guard.describe_value())
    assert texts == ["_VariableFunctionsClass.tanh", "_x", "a list", "{'act': 1}"]


def test_guards_are_checked_in_microseconds() -> None:
    module, inputs = models.hf_gpt2()
    hold = capture(module, (), inputs).state.guards.hold
    assert hold()
    assert min(timeit.repeat(hold, number=100, repeat=20)) / 100 < 20e-6


@pytest.mark.parametrize("early", [True, False])
def test_hooks_for_all_modules_run_around_the_whole_and_are_told_of_once(early: bool) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4)
    expected, reported = 2 * net(x).detach().double(), []
    with simulated_mesh(x=2) as mesh, warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")

        def register() -> None:
            hook = register_module_forward_hook(lambda part, args, out: 2 * out if part is net else None)
            stack.callback(hook.remove)

        if early:
            register()
        autoshard.parallelize(net, mesh, (x,), cluster=fast_links())
        if not early:
            register()
        for _ in range(2):
            for held in held_by_ranks(net(x).detach()):
                torch.testing.assert_close(held, expected)
            reported.append(sum("hooks for all modules" in str(one.message) for one in caught))
    assert reported == [1, 1]
