"""Changes of parameters between calls, in every placement, against one device."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import autoshard
from autoshard.errors import AutoshardError, InputError
from autoshard.runtime.placed_tensor import PlacedTensor, place_parameters
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.spec import Spec, shard_placement
from tests.training import fast_links
from tests.workers import Workers

# Of a weight of 6 x 5: whole, rows, columns of which one rank has more, and rows that interleave.
PLACEMENTS = {
    "whole": Replicate(),
    "rows": Shard(0),
    "uneven columns": Shard(1),
    "strided rows": shard_placement(0, 3),
}

Change = Callable[[nn.Parameter], object]


def _keep_a_row(weight: nn.Parameter) -> None:
    row, before = weight[3], weight[3].clone()
    weight.add_(1)
    row.mul_(2)
    weight[4] = before
    weight[5].copy_(row)


def _perturb(weight: nn.Parameter) -> None:
    """As sharpness-aware minimisation does."""
    old = weight.data.clone()
    weight.add_(weight * 0.1 / weight.norm())
    weight[0].zero_()
    weight.data = old


def _swap_rows(weight: nn.Parameter) -> None:
    weight[[0, 5]] = weight[[5, 0]].clone()


def _assign_and_change(weight: nn.Parameter) -> None:
    value = weight.data.clone()
    weight.data = value
    value[2].fill_(4.0)


def _noise(draw: Callable[[Tensor], Tensor]) -> Change:
    return lambda weight: weight.add_(draw(weight), alpha=0.1)


def _in_inference_mode(weight: nn.Parameter) -> None:
    # Torch has no views of DTensors there.
    with torch.inference_mode():
        weight.mul_(3)
        weight[[1, 2]] = 4.0
        nn.init.uniform_(weight)


CHANGES: dict[str, Change] = {
    "data of an operator": lambda weight: setattr(weight, "data", weight.data.clamp(-0.1, 0.1)),
    "data of a plain tensor": lambda weight: setattr(weight, "data", torch.arange(30.0).double().view(6, 5)),
    "data of a transpose": lambda weight: setattr(weight, "data", (weight.data @ weight.data.t()) @ weight.data),
    "data shares its memory": _assign_and_change,
    "perturb and restore": _perturb,
    "a row": lambda weight: weight[3].zero_(),
    "rows of data": lambda weight: weight.data[1:4].fill_(1.0),
    "rows of detach": lambda weight: weight.detach()[1:4].mul_(2),
    "a column": lambda weight: weight[:, 2].copy_(weight[:, 3]),
    "strided rows": lambda weight: weight[1::2].mul_(3),
    "chunks": lambda weight: [part.mul_(k + 2) for k, part in enumerate(weight.chunk(3))],
    "chunks of columns": lambda weight: [part.mul_(k + 2) for k, part in enumerate(weight.chunk(2, 1))],
    "pieces": lambda weight: [part.add_(k) for k, part in enumerate(weight.split([1, 2, 3]))],
    "rows one by one": lambda weight: [row.add_(k) for k, row in enumerate(weight.unbind())],
    "a view of a view": lambda weight: weight[2:][1][2:4].fill_(7.0),
    "a transpose": lambda weight: weight.t()[1].zero_(),
    "flat": lambda weight: weight.view(-1)[7:19].zero_(),
    "the diagonal": lambda weight: weight.diagonal().fill_(2.0),
    "a row that is kept": _keep_a_row,
    "rows swapped": _swap_rows,
    "an element": lambda weight: weight.__setitem__((2, 3), 5.0),
    "rows to a number": lambda weight: weight.__setitem__(slice(1, 4), 0.5),
    "elements to a number": lambda weight: weight.view(-1).__setitem__(slice(5, 19), 0.5),
    "rows to a tensor": lambda weight: weight.__setitem__(slice(1, 3), torch.ones(2, 5).double()),
    "a mask": lambda weight: weight.__setitem__(weight < 0, 0.0),
    "masked_fill": lambda weight: weight.masked_fill_(torch.eye(6, 5, dtype=torch.bool), 3.0),
    "index_fill": lambda weight: weight.index_fill_(0, torch.tensor([1, 4]), 3.0),
    "index_copy": lambda weight: weight.index_copy_(0, torch.tensor([1, 4]), torch.ones(2, 5).double()),
    "tril": lambda weight: weight.tril_(),
    "fill_diagonal": lambda weight: weight.fill_diagonal_(2.0),
    "copy of a plain tensor": lambda weight: weight.copy_(torch.arange(30.0).view(6, 5)),
    "times a plain tensor": lambda weight: weight.mul_(torch.arange(30.0).double().view(6, 5)),
    "plus": lambda weight: weight.__iadd__(1),
    "detached": lambda weight: weight.detach().mul_(2),
    "foreach": lambda weight: torch._foreach_mul_([weight[1], weight.detach()[2]], 2),
    "out": lambda weight: torch.add(weight, weight, out=weight),
    "norm is clipped": lambda weight: weight.div_(weight.norm(dim=1, keepdim=True)),
    "in inference mode": _in_inference_mode,
    "trunc_normal": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "normal": nn.init.normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "constant": lambda weight: nn.init.constant_(weight, 2.0),
    "eye": nn.init.eye_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda weight: nn.init.sparse_(weight, 0.3),
    "dirac": lambda weight: nn.init.dirac_(weight.view(6, 5, 1)),
    "normal rows": lambda weight: weight[1:4].normal_(),
    "exponential": lambda weight: weight.exponential_(2.0),
    "own generator": lambda weight: weight.uniform_(generator=torch.Generator().manual_seed(3)),
    "randn_like": _noise(torch.randn_like),
    "rand_like of data": _noise(lambda weight: torch.rand_like(weight.data)),
    "empty_like": _noise(lambda weight: torch.empty_like(weight).normal_()),
    "zeros_like": _noise(lambda weight: torch.zeros_like(weight).uniform_()),
    "new_empty": _noise(lambda weight: weight.new_empty(6, 5).normal_()),
    "clone": _noise(lambda weight: weight.clone().uniform_()),
    "bernoulli": _noise(lambda weight: torch.bernoulli(torch.full_like(weight, 0.5))),
    "softmax and products": lambda weight: weight.copy_(weight.softmax(0) @ (weight.t() @ weight)),
    "dropout": lambda weight: weight.copy_(nn.functional.dropout(weight.data, 0.5)),
}


def _zero_rows(weight: Tensor) -> None:
    weight[:2].zero_()
    weight[5] *= 2


def _unscale(weight: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # makes the scale
    scaler.unscale_(optimizer)


GRADIENT_CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "rows": lambda weight: _zero_rows(weight.grad),
    "rows to a number": lambda weight: weight.grad.__setitem__(slice(1, 4), 0.0),
    "noise": lambda weight: weight.grad.add_(torch.randn_like(weight.grad)),
    "data": lambda weight: setattr(weight.grad, "data", weight.grad.data.clamp(-0.5, 0.5)),
    "mask": lambda weight: weight.grad.mul_(torch.ones(6, 5, dtype=torch.float64).tril()),
    "another one": lambda weight: setattr(weight, "grad", weight.detach() * 2),
    "scale": _unscale,
    "none": lambda weight: delattr(weight, "grad"),
}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))


def _changed(placement: object, change: Change, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Return the weight after the change, and a number that the default generator draws then."""
    holder = Holder()
    if placement is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        place_parameters(holder, {"weight": Spec.of(placement)}, mesh)
    torch.manual_seed(7 + rank)
    with torch.no_grad():
        change(holder.weight)
    return gather_full_tensor(holder.weight), torch.rand(())


def change_as_one_device_does(name: str) -> None:
    change = CHANGES[name]
    expected, number = _changed(None, change)
    for place, placement in PLACEMENTS.items():
        weight, drawn = _changed(placement, change)
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12, msg=f"{place}: {weight} for {expected}")
        assert drawn == number, place


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_that_of_one_device_in_every_placement(two: Workers, name: str) -> None:
    two.run(change_as_one_device_does, name)


READS: dict[str, Callable[[Tensor], object]] = {
    "item of a norm": lambda tensor: tensor.norm().item(),
    "item of data": lambda tensor: tensor.detach().data.mean().item(),
    "float of a largest": lambda tensor: float(tensor.norm(float("inf"))),
    "int of a count": lambda tensor: int((tensor > 0).sum()),
    "sqrt of a sum": lambda tensor: math.sqrt(tensor.detach().pow(2).sum()),
    "both extrema": lambda tensor: [each.item() for each in torch.aminmax(tensor.detach())],
    "list": lambda tensor: tensor.sum(0).tolist(),
    "array": lambda tensor: tensor.detach().numpy().sum(),
    "array of a product": lambda tensor: np.asarray(tensor.detach() @ tensor.detach().T, dtype=np.float32).max(),
    "text": lambda tensor: float(f"{tensor.norm():.6f}"),
    "equal within": lambda tensor: torch.allclose(tensor, tensor + 1e-12),
    "positions": lambda tensor: torch.nonzero(tensor.detach() > 0).tolist(),
    "quantile": lambda tensor: tensor.detach().quantile(0.3).item(),
    "cosine": lambda tensor: nn.functional.cosine_similarity(tensor.flatten(), tensor.flatten() + 1, dim=0).item(),
    # What torch computes wrongly of parts on ranks.
    "sum of norms": lambda tensor: torch.stack([tensor.norm(), tensor.norm(), tensor.mean()]).sum().item(),
    "sum of norms of columns": lambda tensor: tensor.norm(dim=0).sum().item(),
    "truth as a number": lambda tensor: (2.0 * (tensor > 0).any()).item(),
    "product": lambda tensor: torch.stack([tensor.prod(), tensor.sum()]).max().item(),
    "losses": lambda tensor: [
        loss(tensor, torch.ones_like(tensor)).item()
        for loss in (nn.functional.mse_loss, nn.functional.huber_loss, nn.functional.binary_cross_entropy_with_logits)
    ],
    "row of a product": lambda tensor: torch.corrcoef(tensor.detach()).tolist(),
}


def read_as_one_device_does() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for place, placement in PLACEMENTS.items():
        holder, alone = Holder(), Holder()
        place_parameters(holder, {"weight": Spec.of(placement)}, mesh)
        for weight in (holder.weight, alone.weight):
            weight.pow(3).sum().backward()
        for name, read in READS.items():
            for placed, plain in ((holder.weight, alone.weight), (holder.weight.grad, alone.weight.grad)):
                numbers = [torch.tensor(read(tensor), dtype=torch.float64) for tensor in (placed, plain)]
                torch.testing.assert_close(*numbers, rtol=1e-9, atol=1e-12, msg=f"{name}, {place}: {numbers}")
        with pytest.raises(ValueError, match="read-only"):
            holder.weight.detach().numpy()[0] = 0.0


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_the_host_reads_numbers_of_the_whole_tensor(two: Workers) -> None:
    two.run(read_as_one_device_does)


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda loss, weight: loss.square() + 0.1 * weight.pow(2).sum(),
    "a norm before": lambda loss, weight: 0.1 * weight.norm() + loss.square(),
    "a factor": lambda loss, weight: loss.square() * (1 + weight.norm(1)),
    "a list": lambda loss, weight: torch.stack([loss.exp(), weight.norm(), weight[2].sum()]).mean(),
    "sum": lambda loss, weight: sum([weight.abs().sum(), weight[:, 1].norm()], start=loss.exp()),
    "loss of a row": lambda loss, weight: nn.functional.mse_loss(weight[1], loss * torch.ones_like(weight[1])),
    "variation": lambda loss, weight: loss * (weight[1:] - weight[:-1]).abs().sum(),
}


def add_penalties_as_one_device_does() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for name, penalty in PENALTIES.items():
        for place, placement in PLACEMENTS.items():
            holder, alone = Holder(), Holder()
            place_parameters(holder, {"weight": Spec.of(placement)}, mesh)
            scales = [torch.full((2, 2), 0.4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
            for weight, scale in zip((holder.weight, alone.weight), scales, strict=True):
                # What comes before the loss computes with more than numbers.
                penalty((scale @ scale).square().mean(), weight).backward()
            for actual, expected in ((holder.weight.grad, alone.weight.grad), (scales[0].grad, scales[1].grad)):
                assert type(scales[0].grad) is Tensor
                torch.testing.assert_close(
                    gather_full_tensor(actual), expected, rtol=1e-9, atol=1e-12, msg=f"{name}, {place}"
                )


def test_penalties_on_parameters_may_be_added_to_a_loss(two: Workers) -> None:
    two.run(add_penalties_as_one_device_does)


def refuse_plain_tensors() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    holder = Holder()
    place_parameters(holder, {"weight": Spec.of(Shard(0))}, mesh)
    with pytest.raises(InputError, match=r"test_placed_tensor.*mm got mixed .* \(5, 2\) and the parameter weight"):
        holder.weight @ torch.ones(5, 2, dtype=torch.float64)
    ones = distribute_tensor(torch.ones(5, 2, dtype=torch.float64), mesh, [Replicate()])
    (holder.weight @ ones).sum().backward()


def test_plain_tensors_beside_parameters_are_refused_with_what_to_do(two: Workers) -> None:
    two.run(refuse_plain_tensors)


def numbers_of_the_first_rank_hold() -> None:
    rank = torch.distributed.get_rank()
    for name in ("normal", "randn_like", "normal rows"):
        expected, _ = _changed(None, CHANGES[name])
        for placement in PLACEMENTS.values():
            weight, drawn = _changed(placement, CHANGES[name], rank)
            torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
            # Each rank goes on from a state of its own.
            assert drawn == _changed(None, CHANGES[name], rank)[1]


def test_ranks_with_other_states_get_the_numbers_of_the_first(two: Workers) -> None:
    two.run(numbers_of_the_first_rank_hold)


REFUSALS: dict[str, tuple[Change, str]] = {
    "another shape": (lambda weight: setattr(weight, "data", torch.ones(3, 5).double()), r"weight .*\(3, 5\)"),
    "another dtype": (lambda weight: setattr(weight, "data", weight.data.float()), r"weight .*float64.*float32"),
    "transposed in place": (lambda weight: weight.t_(), "t_ changes the shape of the parameter weight"),
    "out of another shape": (lambda weight: torch.eye(3, out=weight), r"eye .*weight the shape \(3, 3\)"),
}


def refuse_and_change_nothing(name: str) -> None:
    change, text = REFUSALS[name]

    def attempt(weight: nn.Parameter) -> None:
        with pytest.raises(AutoshardError, match=text):
            change(weight)

    for placement in PLACEMENTS.values():
        assert torch.equal(_changed(placement, attempt)[0], Holder().weight.data)


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_no_program_could_take_is_refused(two: Workers, name: str) -> None:
    two.run(refuse_and_change_nothing, name)


def change_a_base_and_its_view() -> None:
    def change(weight: nn.Parameter) -> None:
        torch._foreach_mul_([weight, weight[2]], 2.0)

    def refuse(weight: nn.Parameter) -> None:
        with pytest.raises(InputError, match="_foreach_mul_ changes the parameter weight and a view"):
            change(weight)

    for place, placement in PLACEMENTS.items():
        # Where rows are whole, a row shares the memory of its shard.
        is_right = place in ("whole", "uneven columns")
        expected = _changed(None, change)[0] if is_right else Holder().weight.data
        torch.testing.assert_close(_changed(placement, change if is_right else refuse)[0], expected)


def test_a_list_with_a_view_and_its_base_is_refused_where_a_view_is_a_copy(two: Workers) -> None:
    two.run(change_a_base_and_its_view)


def change_gradients_as_one_device_does() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for name, change in GRADIENT_CHANGES.items():
        for place, placement in PLACEMENTS.items():
            holder, alone = Holder(), Holder()
            place_parameters(holder, {"weight": Spec.of(placement)}, mesh)
            for weight in (holder.weight, alone.weight):
                for _ in range(2):
                    weight.square().sum().backward()
                    torch.manual_seed(3)
                    change(weight)
                optimizer = torch.optim.SGD([weight], lr=0.1)
                nn.utils.clip_grad_norm_([weight], 1.0)
                optimizer.step()
            whole = gather_full_tensor(holder.weight)
            torch.testing.assert_close(whole, alone.weight.detach(), rtol=1e-9, atol=1e-12, msg=f"{name}: {place}")


def test_gradients_are_changed_as_on_one_device(two: Workers) -> None:
    two.run(change_gradients_as_one_device_does)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.up, self.down = nn.Embedding(14, 8, padding_idx=3), nn.Linear(8, 12), nn.Linear(12, 7)
        self.scale: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.scale is not None:
            return self.down(self.up(self.table(ids)).tanh() * self.scale).square().mean()
        return self.down(self.up(self.table(ids)).tanh()).square().mean()


HINTS = {"table.weight": Shard(0), "up.*": shard_placement(0, 3), "down.weight": Shard(1), "down.bias": Shard(0)}


def _reset(net: Net) -> None:
    net.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)


def _assign_all(net: Net) -> None:
    vector_to_parameters(parameters_to_vector(net.parameters()).detach() * 0.5, net.parameters())


def _step_and_average(net: Net) -> None:
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    with torch.no_grad():
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, torch.tensor(2.0).double())
    torch.optim.AdamW(net.parameters(), lr=0.1).step()
    average.update_parameters(net)
    net.load_state_dict({name: value * 1.5 for name, value in average.module.state_dict().items()})


def _save_and_load(net: Net) -> None:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    _reset(net)
    net.load_state_dict(torch.load(file, weights_only=False))  # torch's list of what is safe has no strided shards


BETWEEN_CALLS: dict[str, Callable[[Net], object]] = {
    "an attribute": lambda net: setattr(net, "scale", net.up.bias.detach() * 2),
    "reset": _reset,
    "vector": _assign_all,
    "average": _step_and_average,
    "save": _save_and_load,
    "prune": lambda net: prune.l1_unstructured(net.up, "weight", 0.4),
    "prune at random": lambda net: prune.random_unstructured(net.down, "weight", 0.4),
    "weight norm": lambda net: nn.utils.parametrizations.weight_norm(net.up),
}


def _train(net: Net, change: Callable[[Net], object], ids: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(5)
    losses = []
    for step in range(2):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses.append(net(ids))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        if not step:
            change(net)
    return {f"loss {k}": loss.detach() for k, loss in enumerate(losses)} | {
        name: gather_full_tensor(parameter) for name, parameter in net.named_parameters()
    }


def train_with_a_change(name: str) -> None:
    ids = torch.randint(0, 14, (6, 5), generator=torch.Generator().manual_seed(0))
    expected = _train(Net().double(), BETWEEN_CALLS[name], ids)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    net = autoshard.parallelize(Net().double(), mesh, (ids,), hints=HINTS, cluster=fast_links())
    assert all(type(parameter) is PlacedTensor for parameter in net.parameters())
    try:
        got = _train(net, BETWEEN_CALLS[name], ids)
    except AutoshardError as error:
        assert "weight" in str(error)  # noqa: PT017
        return
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", BETWEEN_CALLS)
def test_training_goes_on_with_the_change(two: Workers, name: str) -> None:
    two.run(train_with_a_change, name)


def autograd_sees_the_parameter_itself() -> None:
    for placement in PLACEMENTS.values():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        holder, alone = Holder(), Holder()
        place_parameters(holder, {"weight": Spec.of(placement)}, mesh)
        for weight in (holder.weight, alone.weight):
            weight.square().sum().backward()
        torch.testing.assert_close(gather_full_tensor(holder.weight.grad), alone.weight.grad)
        copied = copy.deepcopy(holder.weight)
        assert type(copied) is PlacedTensor
        assert isinstance(copied, nn.Parameter)
        assert copied.grad is None is copy.deepcopy(alone.weight).grad
        square = holder.weight.square().sum()
        with torch.no_grad():
            holder.weight[3].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()


def state_dicts_are_of_torchs_own_class() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    holder = Holder()
    place_parameters(holder, {"weight": Spec.of(Shard(0))}, mesh)
    file = io.BytesIO()
    torch.save(holder.state_dict(), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["weight"]) is DTensor


def all_of_autograd() -> None:
    autograd_sees_the_parameter_itself()
    state_dicts_are_of_torchs_own_class()


def test_autograd_and_files(two: Workers) -> None:
    two.run(all_of_autograd)
