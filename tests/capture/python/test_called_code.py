from __future__ import annotations

import copy

import torch
from torch import Tensor, fx, nn

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import capture, export_call
from autoshard.capture.joint_graph import fingerprint
from autoshard.capture.python.called_code import FreeTensors, PythonCall, Substitution, TensorScope
from tests.models.gradients import Reverse, Small, gradients


def _scaled(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
    with scope:
        return [tensors[0] * _SCALE * sizes[0]]


_SCALE = torch.tensor(2.0)


def test_a_call_reads_the_tensors_that_it_is_given_for_those_that_it_names() -> None:
    call = PythonCall("scaled", "scaled", _scaled)
    call.free.append((_SCALE,))
    (result,) = call([torch.ones(()), torch.tensor(5.0)], [3])
    assert result == 15
    assert copy.deepcopy(call) is call


def test_a_graph_with_calls_runs_as_code() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(PythonCall("scaled <lambda>", "scaled", _scaled), ([x], [3])))
    module = copy.deepcopy(fx.GraphModule(nn.Module(), graph))
    assert module(torch.ones(()))[0] == 6


def _text(strength: float) -> str:
    module, kwargs = gradients("reversal")
    type(module).between = lambda model, x: Reverse.apply(x, strength)  # type: ignore[attr-defined]
    exported = export_call(BoundCall.of(module, (), kwargs))
    return fingerprint(exported.inputs, (), exported.graph_module.graph)


def test_forward_graphs_tell_calls_apart_by_what_they_do() -> None:
    assert _text(2.0) == _text(2.0) != _text(3.0)


def test_calls_that_may_differ_have_numbers() -> None:
    def between(model: Small, x: Tensor) -> Tensor:
        for factor in (2.0, 3.0):
            x.register_hook(lambda gradient, factor=factor: gradient * factor)
        return x

    module, kwargs = gradients("reversal")
    type(module).between = between  # type: ignore[attr-defined]
    exported = export_call(BoundCall.of(module, (), kwargs))
    calls = [str(node.target) for node in exported.graph_module.graph.nodes if isinstance(node.target, PythonCall)]
    assert calls == ["register_hook #0", "register_hook #1"]


def test_joint_graphs_hold_operators_alone() -> None:
    module, kwargs = gradients("lean linear")
    graph = capture(module, (), kwargs).graph_module.graph
    assert {node.op for node in graph.nodes} == {"placeholder", "call_function", "output"}
    assert not any(isinstance(node.target, PythonCall) for node in graph.nodes)
    weights = [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    assert {node.meta["module_path"] for node in weights} <= {"", "first", "second"}


def test_what_code_reads_and_was_neither_given_nor_made_is_found() -> None:
    given, free, other = torch.ones(2), torch.ones(2), torch.ones(2)
    scope = FreeTensors([given])
    with scope:
        made = given * free
        torch.cat([made, given[:1], other])
    assert [id(tensor) for tensor in scope.tensors] == [id(free), id(other)]
    assert not scope.has_mutated_tensor()


def test_changes_of_found_tensors_are_known() -> None:
    free = torch.ones(2)
    scope = FreeTensors([])
    with scope:
        free.add_(1)
    assert scope.has_mutated_tensor()


def test_tensors_are_replaced_wherever_they_are_passed() -> None:
    known, stranger = torch.ones(2), torch.full((2,), 3.0)
    with Substitution({id(known): torch.full((2,), 5.0)}):
        total = torch.stack([known, stranger]).sum() + torch.add(stranger, other=known).sum()
    assert total == 16 + 16


def test_losses_are_computed_as_in_all_that_is_exported() -> None:
    """Torch's own looks at the numbers of the variance, and refuses these."""
    with Substitution({}):
        loss = torch.nn.functional.gaussian_nll_loss(torch.ones(2), torch.ones(2), torch.tensor([-1.0, 1.0]))
    assert loss.isfinite()
