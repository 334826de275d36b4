"""What a call returns has the autograd state that one device gives, output by output, whatever `forward` returns."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

import autoshard
from autoshard.errors import InputError
from autoshard.runtime.shards import gather_full_tensor
from autoshard.tools.verify.float64 import default_float64
from tests import models
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links
from tests.workers import Workers

WIDTH = 4


@dataclasses.dataclass
class Returned:
    """An output that no graph holds."""

    first: Any
    rest: dict[str, Any]


class Border(nn.Module):
    """Computes one value from another by each step, and returns some of them.

    Args:
        steps: the operations, each with the place of the value that it takes: the input, or the result of a step.
        returned: the places of the values that are returned.
        form: of what is returned.
    """

    def __init__(self, steps: Sequence[tuple[str, int]], returned: Sequence[int], form: str) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.steps, self.returned, self.form = tuple(steps), tuple(returned), form

    def forward(self, x: Tensor) -> Any:
        values = [x, self.body(x)]
        for kind, place in self.steps:
            values.append(self._step(kind, values[place % len(values)]))
        outputs = [values[place % len(values)] for place in self.returned]
        if self.form == "dict":
            return {f"output_{place}": output for place, output in enumerate(outputs)}
        if self.form == "dataclass":
            return Returned(outputs[0], dict(enumerate(outputs[1:])))
        return tuple(outputs)

    def _step(self, kind: str, value: Tensor) -> Tensor:
        match kind:
            case "linear":
                return self.head(value if value.dtype.is_floating_point and value.shape[-1:] == (WIDTH,) else self.w)
            case "double":
                return value * 2
            case "square":
                return value * value
            case "detach":
                return value.detach()
            case "view":
                return value[:]
            case "flatten":
                return value.reshape(-1)
            case "one":
                return value * 1
            case "no_grad":
                with torch.no_grad():
                    return value * 2
            case "enable_grad":
                with torch.enable_grad():
                    return value * self.body.bias.sum()
            case "spectrum":
                return torch.fft.fft(value) if value.ndim else value
            case "integer":
                return (value.real > 0).long()
            case "mean":
                return value.mean() if value.dtype.is_floating_point else value
            case "parameter":
                return self.body.bias
        raise AssertionError(kind)

    @property
    def w(self) -> Tensor:
        return self.body.weight


KINDS = ("linear", "double", "square", "detach", "view", "flatten", "one", "no_grad", "enable_grad", "spectrum")
STEPS = st.tuples(st.sampled_from((*KINDS, "integer", "mean", "parameter")), st.integers(0, 9))


def _whole(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The value that all ranks hold, which must be one."""
    value = gather_full_tensor(value) if isinstance(value, DTensor) else value.detach()
    first, *rest = per_rank(value, mesh).values()
    for other in rest:
        assert torch.equal(first, other)
    return first


def _assert_same(ours: Tensor | None, expected: Tensor | None, mesh: DeviceMesh, what: str) -> None:
    assert (ours is None) == (expected is None), f"{what}: {ours} is not {expected}"
    if ours is not None and expected is not None:
        found = _whole(ours, mesh)
        assert found.dtype == expected.dtype, what
        # Gradients that are zero but for rounding stand beside others, as those of the biases of keys do.
        scale = max(1e-3, float(expected.detach().abs().max()) if expected.numel() else 0.0)
        torch.testing.assert_close(
            found, expected.detach(), rtol=1e-9, atol=1e-9 * scale, msg=lambda text: f"{what}: {text}"
        )


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    """A loss in which every number of every output has another weight."""
    total = torch.zeros(())
    for place, output in enumerate(outputs):
        number = output.abs().square() if output.is_complex() else output
        total = total + (number * (1 + place + torch.arange(number.numel()).view(number.shape))).sum()
    return total


def check_border(
    module: nn.Module, inputs: dict[str, Any], mesh: DeviceMesh, chosen: Sequence[bool], grad: bool
) -> None:
    """Compare a call on a mesh with one on one device: outputs, their state, and gradients.

    Args:
        module, inputs: the call.
        mesh: the mesh.
        chosen: which outputs are differentiated.
        grad: False for a call under `torch.no_grad`.
    """
    alone = copy.deepcopy(module)
    with torch.set_grad_enabled(grad):
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"))
        ours, expected = module(**inputs), alone(**inputs)
    assert type(ours) is type(expected)
    if isinstance(ours, Returned):
        ours, expected = vars(ours), vars(expected)
    ours = [leaf for leaf in pytree.tree_leaves(ours) if isinstance(leaf, Tensor)]
    expected = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, Tensor)]
    assert len(ours) == len(expected)
    passed = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    held = {id(parameter) for parameter in alone.parameters()}
    for place, (output, wanted) in enumerate(zip(ours, expected, strict=True)):
        _assert_same(output, wanted, mesh, f"output {place}")
        if grad or id(wanted) not in held:
            assert output.requires_grad == wanted.requires_grad, f"output {place}"
        assert [output is tensor for tensor in passed] == [wanted is tensor for tensor in passed], f"output {place}"
    for (a, b), (c, d) in zip(itertools.combinations(ours, 2), itertools.combinations(expected, 2), strict=True):
        assert (a is b) == (c is d)
    pairs = [(a, c) for a, c in zip(ours, expected, strict=True) if a.requires_grad and c.requires_grad]
    if not pairs:
        return
    # One for another, each alone and with the parameters.
    for (a, c), (b, d) in itertools.permutations(pairs, 2):
        arguments = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(_loss([a]), [b, *module.parameters()], **arguments)
        wanted = torch.autograd.grad(_loss([c]), [d, *alone.parameters()], **arguments)
        for one, other in zip(found, wanted, strict=True):
            _assert_same(one, other, mesh, "a gradient of an output for another one")
        (found,), (wanted,) = (torch.autograd.grad(_loss([x]), [y], **arguments) for x, y in ((a, b), (c, d)))
        _assert_same(found, wanted, mesh, "a gradient of an output for another one alone")
    for a, c in pairs:
        a.retain_grad()
        c.retain_grad()
    picked = [pair for pair, is_chosen in zip(pairs, itertools.cycle(chosen), strict=False) if is_chosen] or pairs
    _loss([a for a, _ in picked]).backward()
    _loss([c for _, c in picked]).backward()
    for a, c in pairs:
        if not c.is_leaf:
            _assert_same(a.grad, c.grad, mesh, "the gradient of an output")
    for one, other in zip(module.parameters(), alone.parameters(), strict=True):
        _assert_same(one.grad, other.grad, mesh, "the gradient of a parameter")


@settings(max_examples=9, deadline=None, derandomize=True, database=None)
@given(
    steps=st.lists(STEPS, min_size=2, max_size=5),
    returned=st.lists(st.integers(0, 9), min_size=2, max_size=5),
    form=st.sampled_from(("tuple", "dict", "dataclass")),
    chosen=st.lists(st.booleans(), min_size=1, max_size=5),
    trained=st.booleans(),
    grad=st.sampled_from((True, True, True, False)),
)
def test_outputs_have_the_state_that_one_device_gives(
    steps: list[tuple[str, int]], returned: list[int], form: str, chosen: list[bool], trained: bool, grad: bool
) -> None:
    with default_float64(), simulated_mesh(x=2) as mesh:
        torch.manual_seed(0)
        module = Border(steps, returned, form)
        check_border(module, {"x": torch.randn(6, WIDTH, requires_grad=trained)}, mesh, chosen, grad)


# Each was wrong once, or is a kind of its own.
PROGRAMS = {
    "detached": ([("detach", 1), ("linear", 1)], [1, 2, 3]),
    "detached first": ([("detach", 1), ("linear", 1)], [2, 1, 3]),
    "equal values": ([("no_grad", 1), ("double", 1), ("double", 1)], [2, 3, 4]),
    "views": ([("view", 1), ("flatten", 1), ("mean", 2)], [1, 2, 3, 4]),
    "complex": ([("spectrum", 1), ("mean", 1)], [2, 3]),
    "twice": ([("linear", 1)], [1, 1, 2]),
    "inputs and parameters": ([("parameter", 0), ("one", 0), ("linear", 0)], [0, 2, 3, 4]),
    "chain": ([("square", 1), ("square", 2), ("linear", 3), ("mean", 4)], [1, 2, 4, 5]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_return_values_of_one_another(name: str) -> None:
    steps, returned = PROGRAMS[name]
    with default_float64(), simulated_mesh(x=2) as mesh:
        torch.manual_seed(0)
        check_border(Border(steps, returned, "tuple"), {"x": torch.randn(6, WIDTH)}, mesh, [True, False, True], True)


def test_gradients_that_forward_enables_under_no_grad() -> None:
    with default_float64(), simulated_mesh(x=2) as mesh:
        module = Border([("enable_grad", 0), ("linear", 1)], [1, 2, 3], "tuple")
        check_border(module, {"x": torch.randn(6, WIDTH)}, mesh, [True], False)


@pytest.mark.parametrize(("name", "layers"), [("gpt", 1), ("hf_gpt2", 2)])
def test_models_of_the_zoo(name: str, layers: int) -> None:
    with simulated_mesh(x=2) as mesh:
        module, inputs = models.ALL[name](dtype=torch.float64, layers=layers)
        with default_float64():
            check_border(module.eval(), inputs, mesh, [True, False], True)


def _double_without_gradients(output: Tensor) -> None:
    with torch.no_grad():
        output.mul_(2)


OUTPUT_CHANGES: dict[str, Callable[[Tensor], object]] = {
    "doubled": lambda output: output.mul_(2),
    "squared": lambda output: output.pow_(2),
    "a row": lambda output: output.__setitem__(0, 0) if output.ndim else output.fill_(0),
    "a view": lambda output: output.view(-1).mul_(3),
    "detached": lambda output: output.detach().zero_(),
    "without gradients": _double_without_gradients,
}
Change = tuple[int, str]
"""The place of an output, and the kind of its change."""


def _programs() -> Iterator[tuple[Sequence[tuple[str, int]], Sequence[int], Sequence[Sequence[Change]], bool]]:
    """Yield programs, changes of their outputs, and True for parameters in shards; and random ones."""
    for name in ("detached", "views", "inputs and parameters", "chain"):
        steps, returned = PROGRAMS[name]
        changes = [[(k % len(returned), kind)] for k, kind in enumerate([*OUTPUT_CHANGES, *OUTPUT_CHANGES])]
        yield steps, returned, changes, False
        if name == "inputs and parameters":
            yield steps, returned, [[(1, kind)] for kind in OUTPUT_CHANGES], True
    draw = random.Random(0)
    kinds = [kind for kind in (*KINDS, "integer", "mean", "parameter") if kind != "view"]  # which numbers do not have
    steps = [(draw.choice(kinds), draw.randrange(9)) for _ in range(4)]
    pairs = [[(draw.randrange(4), draw.choice(list(OUTPUT_CHANGES))) for _ in range(2)] for _ in range(8)]
    yield steps, [draw.randrange(9) for _ in range(4)], pairs, False


def _error_of(action: Callable[[], object]) -> str:
    """The error of an action that torch refuses, or none."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


_MODIFIED = "modified by an inplace operation"
# Torch's texts of two errors about views.
_IS_REFUSED = "is a view and is being modified inplace"
_WAS_CHANGED = "is a view and its base or another view of its base has been modified inplace"


class _Changed:
    """A module whose outputs were changed in place, with the numbers, versions and errors of that.

    Args:
        module: to be called.
        changes: one after the other.
    """

    def __init__(self, module: nn.Module, changes: Sequence[Change]) -> None:
        module.zero_grad()
        torch.manual_seed(1)
        self.module, self.x = module, torch.randn(6, WIDTH)
        self.outputs: Sequence[Tensor] = module(x=self.x)
        first = [output._version for output in self.outputs]
        self.errors, self.versions = [], []
        for place, kind in changes:
            output = self.outputs[place % len(self.outputs)]
            self.errors.append(_error_of(lambda output=output, kind=kind: OUTPUT_CHANGES[kind](output)))
            self.versions.append([output._version - k for output, k in zip(self.outputs, first, strict=True)])

    @property
    def values(self) -> list[Tensor]:
        return [_held(value) for value in (*self.outputs, self.x, *self.module.parameters())]

    def backward(self, differentiated: Sequence[bool]) -> str:
        chosen = list(itertools.compress(self.outputs, differentiated))
        return _error_of(lambda: _loss(chosen).backward())

    @property
    def gradients(self) -> list[Tensor | None]:
        gradients = [value.grad for value in (self.x, *self.module.parameters())]
        return [None if gradient is None else _held(gradient) for gradient in gradients]


def _held(tensor: Tensor) -> Tensor:
    return gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _refusal(module: nn.Module, original: nn.Module, changes: Sequence[Change]) -> str:
    """Compare changes with those on one device; return the text of what is refused that one device does."""
    ours, expected = _Changed(module, changes), _Changed(copy.deepcopy(original), changes)
    for error, wanted in zip(ours.errors, expected.errors, strict=True):
        if error and not wanted:
            assert _IS_REFUSED in error or _WAS_CHANGED in error
            return error
        assert bool(error) == bool(wanted), f"{error} for {wanted}"
    assert ours.versions == expected.versions
    try:
        torch.testing.assert_close(ours.values, expected.values, rtol=1e-9, atol=1e-12)
    except AssertionError:
        # A copy of a parameter in shards was changed.
        with pytest.raises(InputError, match="shares memory with the parameter body"):
            module(x=ours.x)
        return "of a parameter"
    differentiated = [output.requires_grad for output in expected.outputs]
    if not any(differentiated):
        return ""
    error, wanted = ours.backward(differentiated), expected.backward(differentiated)
    if error:
        assert _WAS_CHANGED in error or (wanted and _MODIFIED in error), f"{error} for {wanted}"
        return "" if wanted else error
    if wanted:
        # What the program saves is not what one device saves: gradients are those of the values that it saved.
        assert _MODIFIED in wanted
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved):
            expected = _Changed(copy.deepcopy(original), changes)
            assert not expected.backward(differentiated)
    torch.testing.assert_close(ours.gradients, expected.gradients, rtol=1e-9, atol=1e-12)
    return ""


def change_outputs_as_one_device_does() -> tuple[int, list[str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    refusals = []
    torch.manual_seed(0)
    with default_float64():
        for steps, returned, cases, shards in _programs():
            original = Border(steps, returned, "tuple")
            module = copy.deepcopy(original)
            options: dict[str, Any] = {"hints": {"body.*": Shard(0)}} if shards else {}
            search = autoshard.Search(effort="fast")
            example = {"x": torch.randn(6, WIDTH)}
            autoshard.parallelize(module, mesh, (), example, cluster=fast_links(), search=search, **options)
            for changes in cases:
                try:
                    refusals.append(_refusal(module, original, changes))
                except Exception as error:
                    raise AssertionError(f"{steps}, {returned}, {changes}, {shards}: {error}") from error
                with torch.no_grad():
                    for parameter, value in zip(module.parameters(), original.parameters(), strict=True):
                        parameter.copy_(value)
    return len(refusals), [text for text in refusals if text]


def test_outputs_are_changed_in_place_as_on_one_device_or_not_at_all(two: Workers) -> None:
    for count, refusals in two.run(change_outputs_as_one_device_does):
        assert len(refusals) < count / 4
        assert "of a parameter" in refusals
