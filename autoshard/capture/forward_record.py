"""A record of the operators that `forward` calls, as a graph without an export, in a tenth of its time."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from autoshard.capture._torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    applying_functions_by,
    as_if_exporting,
    outside_modes,
    pytree,
    without_checkpoints,
)
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.marks import capturing
from autoshard.capture.padded_encoder import capturable_encoder
from autoshard.capture.python.called_code import module_tensors
from autoshard.capture.python.fake_module import fake_like
from autoshard.capture.repeated_layers import Repetition
from autoshard.capture.replacements import current_replacements
from autoshard.errors import CaptureError


class ForwardRecord(TorchDispatchMode):
    """A mode that records operators.

    Args:
        known: the tensors of the module and its inputs, with their names.

    Attributes:
        graph: a node for every existing tensor, operator and result.
        names: the names of the tensors in placeholders.
        path: the path of the list element that is running.
    """

    def __init__(self, known: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.names: dict[fx.Node, str] = {}
        self.path = ""
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # because tensors are identified by `id`
        for name, tensor in known:
            if id(tensor) not in self._nodes:
                self.names[self._placeholder(tensor)] = name

    def _placeholder(self, tensor: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"given_{len(self._nodes) + 1}")
        self._note(node, tensor)
        return node

    def _note(self, node: fx.Node, tensor: torch.Tensor) -> None:
        node.meta |= {"val": tensor, **self._modules()}
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def _modules(self) -> dict[str, Any]:
        return {"module_path": self.path, "nn_module_stack": {"": (self.path, "")}}

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node that made a tensor, or a new node if none was recorded, such as for a constant."""
        if id(tensor) not in self._nodes:
            # Numbers of constants may differ between layers.
            numbers = None if isinstance(tensor, FakeTensor) or tensor.is_meta else _digest(tensor)
            self._note(self.graph.call_function(_tensor_of_code, (numbers,)), tensor)
        return self._nodes[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func.namespace == "prim":  # a query about a tensor, such as its device
            return results
        operands = pytree.tree_map_only(torch.Tensor, self.node_of, (args, kwargs))
        node = self.graph.call_function(func, *operands)
        node.meta |= {"gradients_on": torch.is_grad_enabled(), **self._modules()}
        if isinstance(results, torch.Tensor):
            self._note(node, results)
            return results
        leaves = pytree.tree_leaves(results)
        node.meta["val"] = tuple(leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._note(self.graph.call_function(operator.getitem, (node, index)), leaf)
        return results


def _tensor_of_code(digest: str | None) -> Any:
    """Represent a tensor held by Python code, by a digest of its numbers."""


def _digest(tensor: torch.Tensor) -> str:
    with outside_modes():
        return hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()


def record_forward(call: BoundCall, repetitions: Sequence[Repetition], mode: FakeTensorMode) -> ForwardRecord:
    """Return a record of a fake module's call, without gradients.

    Args:
        call: a call of a module with fake tensors of `mode`. Its parameters require no gradients afterwards.
        repetitions: the layers with whose paths nodes are annotated.
        mode: the mode of the fake tensors.

    Raises:
        CaptureError: gradients pass through code that operator records do not show.
        Exception: any error of `forward` with tensors without numbers.
    """
    module = call.module.requires_grad_(False)
    fake_call = call.map_tensors(lambda leaf: fake_like(leaf.detach(), mode))
    tensors = [leaf for leaf in fake_call.leaves if isinstance(leaf, torch.Tensor)]
    attributes = [
        (f"{path}.{name}" if path else name, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    ]
    known = [*module_tensors(module), *attributes, *((f"{place}", tensor) for place, tensor in enumerate(tensors))]
    record = ForwardRecord(known)
    with (
        outside_modes(),
        as_if_exporting(),
        capturing(),
        capturable_encoder(),
        mode,
        _noting_paths(module, repetitions, record),
        applying_functions_by(_refuse_function),
        without_checkpoints(lambda _: contextlib.nullcontext()),
        current_replacements().running_forward(),
        record,
    ):
        output = module(*fake_call.args, **fake_call.kwargs)
    results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    record.graph.output(tuple(map(record.node_of, results)))
    return record


def _refuse_function(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError("the gradient of an autograd.Function may differ from layer to layer.")


@contextlib.contextmanager
def _noting_paths(module: nn.Module, repetitions: Sequence[Repetition], record: ForwardRecord) -> Iterator[None]:
    """Context in which the record tracks the path of the running layer."""
    handles = []

    def noting(path: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            record.path = path

        return note

    for repetition in repetitions:
        for name, element in module.get_submodule(repetition.path)._modules.items():
            assert element is not None
            path = f"{repetition.path}.{name}" if repetition.path else name
            handles.append(element.register_forward_pre_hook(noting(path)))
            handles.append(element.register_forward_hook(noting("")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
