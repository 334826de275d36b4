"""Questions about numbers in `forward`: answered by the example where inputs say it, checked by every run where not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributions import Categorical, Distribution, Normal, StudentT
from torch.nn import functional

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import CaptureError, InputError
from autoshard.tools.verify.float64 import Float64Mode
from tests.capture.python.data_read_models import MODELS
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks, loss_of, outputs_of, relative_difference

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ALL, SOME, OTHERS, MORE = (torch.tensor(one).bool() for one in ([1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 0]))

Code = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A layer, and code that gets its result and a mask or numbers."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.code = code

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.code(self.linear(x), mask).square().mean()


def branch(y: Tensor, mask: Tensor) -> Tensor:
    return y if mask.all() else y * mask[:, None]


def select(y: Tensor, mask: Tensor) -> Tensor:
    return y[mask].relu()


def pick(y: Tensor, mask: Tensor) -> Tensor:
    filled = y.clone()
    filled[mask] = y[: int(mask.sum())].tanh()
    (rows,) = torch.where(mask)
    parts = torch.split(filled, [int(mask.sum()), int((~mask).sum())])
    selected = y.masked_select(mask[:, None].expand_as(y)).reshape(-1, 6)
    return torch.cat([y[rows], selected, y[mask.nonzero()[:, 0]], *(part.softmax(0) for part in parts)])


def count(y: Tensor, mask: Tensor) -> Tensor:
    steps = torch.arange(mask.sum(), dtype=y.dtype)
    repeated = torch.repeat_interleave(y, mask.int() + 1, dim=0)[: torch.unique_consecutive(mask).shape[0]]
    return repeated * torch.tensor([mask.sum(), mask.sum() + 1]).sum() + steps.sum()


def change(y: Tensor, mask: Tensor) -> Tensor:
    flags = mask.clone()
    flags[:3] = False
    return y.relu() if flags.any() else y


def train(module: nn.Module, mask: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    module.zero_grad()
    loss = module(X, mask)
    loss.backward()
    gradients = {name: held_by_ranks(one.grad) for name, one in module.named_parameters() if one.grad is not None}
    return {"loss": held_by_ranks(loss.detach())}, gradients


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with simulated_mesh(a=2) as device_mesh:
        yield device_mesh


def parallel(module: nn.Module, mesh: DeviceMesh, *args: Any, **options: Any) -> nn.Module:
    return autoshard.parallelize(
        module, mesh, args, cluster=fast_links(), search=autoshard.Search(effort="fast"), **options
    )


def programs(module: Any) -> int:
    return sum(len(program.candidates()) for program in module._autoshard_runtime.programs.table.values())


@pytest.mark.parametrize(
    ("code", "programs_made"),
    [
        (branch, [1, 2, 2]),
        (pick, [1, 2, 2]),
        (count, [1, 2, 3]),
        (change, [1, 2, 2]),
    ],
)
def test_questions_about_inputs(mesh: DeviceMesh, code: Code, programs_made: list[int]) -> None:
    """Every call has one device's numbers, and each new answer a program, which serves all calls that have it."""
    module, plain = Model(code), Model(code)
    plain.load_state_dict(module.state_dict())
    parallel(module, mesh, X, ALL)
    for mask, made in zip((ALL, SOME, OTHERS), programs_made, strict=True):
        for found, wanted in zip(train(module, mask), train(plain, mask), strict=True):
            assert relative_difference(found, wanted) <= TOLERANCE
        assert programs(module) == made
    train(module, ALL)
    assert programs(module) == programs_made[-1]


def raise_for_numbers(y: Tensor, mask: Tensor) -> Tensor:
    if mask.sum() > 3:
        raise LookupError("too many")
    torch._assert(mask.any(), "none")
    return y


def test_an_error_of_the_models_own_for_numbers_in_inputs(mesh: DeviceMesh) -> None:
    module = parallel(Model(raise_for_numbers), mesh, X, SOME)
    for mask, error, text in ((ALL, LookupError, "too many"), (~ALL, AssertionError, "none")):
        with pytest.raises(error, match=text):
            module(X, mask)
    train(module, OTHERS)
    assert programs(module) == 1


def bound(y: Tensor, mask: Tensor) -> Tensor:
    if not torch.isfinite(y).all() or (y.abs() > 1e6).any():
        y = y.clamp(-1, 1)
    return y


def test_a_branch_on_what_all_ordinary_numbers_agree_on_is_checked_by_every_run(mesh: DeviceMesh) -> None:
    module, plain = Model(bound), Model(bound)
    plain.load_state_dict(module.state_dict())
    parallel(module, mesh, X, ALL)
    for found, wanted in zip(train(module, ALL), train(plain, ALL), strict=True):
        assert relative_difference(found, wanted) <= TOLERANCE
    for factor in (float("inf"), 1e9):
        with pytest.raises(InputError, match=r"test_data_reads.py:\d+ \(if not torch.isfinite\(y\).all\(\)"):
            module(X * factor, ALL)
    assert programs(module) == 1


def warn(y: Tensor, mask: Tensor) -> Tensor:
    if torch.isnan(y).any():
        warnings.warn("nan", stacklevel=1)
    return y


def note_down(y: Tensor, mask: Tensor) -> Tensor:
    if torch.isnan(y).any():
        SEEN.append("nan")
    return y


def warn_or_change(y: Tensor, mask: Tensor) -> Tensor:
    if torch.isnan(y).any():
        warnings.warn("nan", stacklevel=1)
    else:
        y = y * 2
    return y


def warn_and_change(y: Tensor, mask: Tensor) -> Tensor:
    if torch.isnan(y).any():
        logging.getLogger().warning("nan")
        y = y.nan_to_num()
    return y


def warn_of_what_is_named(y: Tensor, mask: Tensor) -> Tensor:
    lost = bool(torch.isnan(y).any())
    if lost:
        warnings.warn("nan", stacklevel=1)
    return y


def warn_and_remember(y: Tensor, mask: Tensor) -> Tensor:
    if lost := bool(torch.isnan(y).any()):
        warnings.warn("nan", stacklevel=1)
    return y.nan_to_num() if lost else y


def note(y: Tensor) -> bool:
    SEEN.append("nan")
    return True


def warn_behind_a_call(y: Tensor, mask: Tensor) -> Tensor:
    if torch.isnan(y).any() and note(y):
        warnings.warn("nan", stacklevel=1)
    return y


def log(y: Tensor, mask: Tensor) -> Tensor:
    if torch.isnan(y).any():
        logging.getLogger().warning("%s", y.shape)
        print("nan")  # noqa: T201
    return y


SEEN: list[str] = []


@pytest.mark.parametrize("code", [warn, log])
def test_a_branch_on_activations_that_only_warns_is_no_error(mesh: DeviceMesh, code: Code) -> None:
    module, plain = Model(code), Model(code)
    plain.load_state_dict(module.state_dict())
    parallel(module, mesh, X, ALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found, wanted in zip(train(module, ALL), train(plain, ALL), strict=True):
            assert relative_difference(found, wanted) <= TOLERANCE
    with pytest.warns(UserWarning, match=r"asks for numbers .* answer is True"):
        assert torch.isnan(module(X * float("nan"), ALL)).all()
    assert programs(module) == 1


@pytest.mark.parametrize(
    "code", [note_down, warn_or_change, warn_and_change, warn_of_what_is_named, warn_and_remember, warn_behind_a_call]
)
def test_a_branch_on_activations_that_leaves_anything_else_is_checked_by_every_run(
    mesh: DeviceMesh, code: Code
) -> None:
    module = parallel(Model(code), mesh, X, ALL)
    train(module, ALL)
    with pytest.raises(InputError, match=r"asks for numbers .* answer False"):
        module(X * float("nan"), ALL)
    assert not SEEN


def likelihood(y: Tensor, mask: Tensor) -> Tensor:
    scale = y.exp() if mask.all() else y - y
    kinds = (Normal(y, scale), StudentT(y.exp() + 2, y, scale), Categorical(logits=y), Normal(0.0, 1.0))
    return torch.cat([kind.log_prob((y.detach()[:, :1] > 0).to(y.dtype)) for kind in kinds], 1)


def test_distributions_are_validated_by_every_run(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # the first torch.compile of a process sets it to False
    module, plain = Model(likelihood), Model(likelihood)
    plain.load_state_dict(module.state_dict())
    parallel(module, mesh, X, ALL)
    for found, wanted in zip(train(module, ALL), train(plain, ALL), strict=True):
        assert relative_difference(found, wanted) <= TOLERANCE
    for x, mask in ((X, SOME), (X * float("nan"), ALL)):
        with pytest.raises(ValueError, match=r"satisfy the constraint"):
            plain(x, mask)
        with pytest.raises(ValueError, match=r"Normal of torch.distributions: .*constraint.*kinds = \(Normal"):
            module(x, mask)


def solve(y: Tensor, mask: Tensor) -> Tensor:
    square = y.mT @ y + mask.sum() * torch.eye(6, dtype=y.dtype)
    return torch.linalg.solve(square, y.mT) + torch.linalg.inv(square)[:, :4] + torch.linalg.cholesky(square)[:, :4]


def test_a_matrix_that_has_no_inverse_is_found_by_the_run(mesh: DeviceMesh) -> None:
    module, plain = Model(solve), Model(solve)
    plain.load_state_dict(module.state_dict())
    parallel(module, mesh, X, ALL)
    for found, wanted in zip(train(module, ALL), train(plain, ALL), strict=True):
        assert relative_difference(found, wanted) <= TOLERANCE
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg\.\w+: the input is singular.*test_data_reads"):
        module(X * 0, ~ALL)


class Sizes(nn.Module):
    """A branch on a size that depends on numbers, beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("least", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        rows = y[y[:, 0] > 0]
        return rows.sum() if rows.shape[0] <= self.least else y.sum()


def test_a_size_compared_with_a_tensor_is_refused_by_the_line() -> None:
    with pytest.raises(
        CaptureError,
        match=r"rows.shape\[0\] <= self.least.*a number that forward computes.*a branch: compute both ways",
    ):
        capture(Sizes(), (X,), {})


class Padding(nn.Module):
    """Sizes and branches from a buffer and from a tensor in an attribute, as in codecs of audio."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("stride", torch.tensor(4), persistent=False)
        self.register_buffer("steps", torch.tensor(0))
        self.limit = torch.tensor([0.5, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        frames = torch.ceil((x.shape[-1] - self.stride + 1) / self.stride + 1).long()
        padded = functional.pad(self.linear(x), (self.stride - 1, frames * self.stride - x.shape[-1]))
        if self.limit[1] > self.stride or self.steps > 5:
            padded = padded.tanh()
        return padded[:, : padded.shape[1] - self.stride].square().mean()


def same_as(plain: nn.Module, module: nn.Module) -> None:
    for found, wanted in zip(train_alone(module), train_alone(plain), strict=True):
        assert relative_difference(found, wanted) <= TOLERANCE


def train_alone(module: nn.Module) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    module.zero_grad()
    loss = module(X)
    loss.backward()
    return {"loss": held_by_ranks(loss.detach())}, {"gradient": held_by_ranks(module.linear.weight.grad)}


def test_numbers_in_buffers_are_conditions_of_a_program() -> None:
    module, plain = Padding(), Padding()
    plain.load_state_dict(module.state_dict())
    with simulated_mesh(a=2) as mesh:
        parallel(module, mesh, X)
        for _ in range(2):
            same_as(plain, module)
        assert programs(module) == 1
        for one in (module, plain):
            one.stride.data.fill_(1)  # unseen by version counters
        same_as(plain, module)
        assert programs(module) == 2
        for one in (module, plain):
            one.limit, one.stride = torch.tensor([0.0, 0.0]), torch.tensor(4)
        for _ in range(4):  # the count of steps comes to more than five
            same_as(plain, module)
        assert programs(module) == 3


def test_buffers_without_numbers_are_refused() -> None:
    module = Padding()
    module.register_buffer("stride", torch.empty((), dtype=torch.int64, device="meta"))
    with pytest.raises(CaptureError, match=r"numbers in self.stride, which has none.*Make the module with real"):
        capture(module, (X,), {})


def test_examples_without_numbers_are_refused() -> None:
    for example in (ALL.to("meta"), capture(Model(bound), (X, ALL), {}).inputs[-2].node.meta["val"]):
        with pytest.raises(CaptureError, match=r"mask.all\(\).*input mask.*example of real tensors"):
            capture(Model(branch), (X, example), {})


def test_local_inputs_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(CaptureError, match=r'input mask.*inputs="local"'):
        parallel(Model(branch), mesh, X, ALL, inputs="local")


def choose(y: Tensor, mask: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def scale(y: Tensor, mask: Tensor) -> Tensor:
    return y * (mask * 0.5).sum().item()


@pytest.mark.parametrize("code", [choose, scale])
def test_numbers_that_never_come_again_are_refused(code: Code) -> None:
    with pytest.raises(CaptureError, match=rf"test_data_reads.py.*{'y.sum' if code is choose else 'item'}"):
        capture(Model(code), (X, ALL), {})


def test_values_without_end_are_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.capture.python.conditions._MAX_VALUES", 2)
    module = parallel(Model(select), mesh, X, ALL)
    module(X, SOME)
    with pytest.raises(InputError, match=r"return y\[mask\].*program of its own"):
        module(X, MORE)


class Counting(nn.Module):
    """Logits beside the loss, whose gradient asks for a further program: its mask has to be the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        y = self.linear(x[mask])
        return {"loss": y.square().mean(), "y": y}


def test_gradients_into_other_outputs_are_of_the_same_answers(mesh: DeviceMesh) -> None:
    module, plain = Counting(), Counting()
    plain.load_state_dict(module.state_dict())
    parallel(module, mesh, X, SOME)
    for one in (module, plain):
        result = one(X, SOME)
        (result["loss"] + result["y"].tanh().sum()).backward()
    gradient = module.linear.weight.grad
    assert isinstance(gradient, DTensor)
    found, wanted = ({"weight": held_by_ranks(one)} for one in (gradient, plain.linear.weight.grad))  # type: ignore[arg-type]
    assert relative_difference(found, wanted) <= TOLERANCE


class Converting(nn.Module):
    """A layer that is converted to the dtype that it has, or to another one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(self.dtype)
        return functional.relu(self.linear(x))


def test_modules_that_forward_converts() -> None:
    x = torch.randn(4, 6)
    assert len(capture(Converting(torch.float32), (x,), {}).tangent_outputs) == 1
    with pytest.raises(CaptureError, match=r"self.linear.to\(self.dtype\).*Linear.weight from torch.float32"):
        capture(Converting(torch.float64), (x,), {})


def test_branches_on_data_do_not_serve_pipelines() -> None:
    with pytest.raises(CaptureError, match=r"mask.all\(\).*no pipeline does"):
        autoshard.plan(Model(branch), {"pp": 2}, (X, ALL))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no sharding rule:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_models_that_ask_for_numbers_train_as_on_one_device(name: str) -> None:
    with Float64Mode():
        alone, inputs = MODELS[name]()
        module, _ = MODELS[name]()
        module.load_state_dict(alone.state_dict())
        expected = losses_and_gradients(alone, inputs)
    with simulated_mesh(a=2) as mesh, Float64Mode():
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"))
        assert relative_difference(losses_and_gradients(module, inputs), expected) <= TOLERANCE


def losses_and_gradients(module: nn.Module, inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    loss = loss_of(outputs_of(module(**inputs)))
    loss.backward()
    gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    return {name: held_by_ranks(one) for name, one in (gradients | {"the loss": loss.detach()}).items()}


class ReturnsNumbers(nn.Module):
    """Returns what a function makes of a tensor, beside it."""

    def __init__(self, number: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 3), number

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return y, self.number(y)


@pytest.mark.parametrize(
    "number",
    [
        lambda y: y.mean().item(),
        lambda y: {"accuracy": y.argmax(-1).eq(0).float().mean().item() / 2},
        lambda y: y.argmax(-1).tolist(),
    ],
)
def test_numbers_that_forward_returns_are_refused_by_their_line(number: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        CaptureError, match=r"returns a number, output\[1\].* \(.*test_data_reads.py:\d+ .*\): it is read from"
    ):
        capture(ReturnsNumbers(number), (torch.randn(2, 4),), {})


def test_a_dynamic_size_that_forward_returns_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"returns a number, output\[1\].*take a size from a tensor's shape"):
        capture(ReturnsNumbers(lambda y: y.shape[0]), (torch.randn(4, 4),), {}, dynamic={"x": {0: "batch"}})
