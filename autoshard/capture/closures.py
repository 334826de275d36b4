"""Free tensors of Python code, which it reads without having them as arguments: found, and replaced in later runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from autoshard.capture._torch import FakeTensor, pytree, storage_of, version_of
from autoshard.capture.capture_errors import running_line
from autoshard.capture.composites import Exportable, attend
from autoshard.capture.data_reads import READS
from autoshard.errors import CaptureError

_attributes: Any = Tensor  # attributes of the class are descriptors, which the type does not know
_SET_GRAD = _attributes.grad.__set__

# Exported graphs have such calls replaced in them; this code is not in an exported graph.
_TRACED_AS: dict[Any, Callable[..., Any]] = {functional.scaled_dot_product_attention: attend}


class TensorScope(Exportable):
    """Mode in which code runs that a graph calls; parts of it that run later, such as backward, enter it again.

    Losses, bags, recurrent layers and attention are computed in it as in exported code.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Equal and not identical: every access of the descriptor makes a new object.
        if func == _SET_GRAD:
            raise CaptureError(
                f"{running_line()} sets the gradient of a tensor in the midst of backward: no graph can hold that. "
                "Take the tensor as an argument of the function, and return its gradient from backward."
            )
        if func in READS and isinstance(args[0], FakeTensor):
            raise CaptureError(
                f"{running_line()} asks for the numbers in a tensor in a hook or in a function with its own backward: "
                "the graph of a step has no place for Python that depends on numbers. Keep them in tensors; gradients "
                "are found in .grad behind backward(), or in forward, by torch.autograd.grad."
            )
        args, kwargs = pytree.tree_map_only(Tensor, self.resolve, (args, kwargs or {}))
        result = super().__torch_function__(_TRACED_AS.get(func, func), types, args, kwargs)
        self.note(result)
        return result

    def resolve(self, tensor: Tensor) -> Tensor:
        """Return the tensor to read in place of one that the code reads."""
        return tensor

    def note(self, result: Any) -> None:
        """Note the result of a call."""


class FreeTensors(TensorScope):
    """Scope that finds the tensors that code reads, and that are neither its arguments nor made by it.

    Args:
        given: the arguments of the code.

    Attributes:
        tensors: the tensors, in the order in which they are read first.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._versions: list[int] = []
        # Tensors of the code stay alive, so that no id and no number of memory stands for two.
        self._own: dict[int, Tensor] = {}
        self._memory: set[int] = set()
        for tensor in given:
            self._keep(tensor)

    def has_mutated_tensor(self) -> bool:
        """Return True if the code changed one of the tensors in place."""
        return any(version_of(tensor) != version for tensor, version in zip(self.tensors, self._versions, strict=True))

    def resolve(self, tensor: Tensor) -> Tensor:
        # Autograd hands out saved tensors as new objects over memory that is known.
        if id(tensor) not in self._own and storage_of(tensor) not in self._memory:
            self.tensors.append(tensor)
            self._versions.append(version_of(tensor))
            self._keep(tensor)
        return tensor

    def note(self, result: Any) -> None:
        pytree.tree_map_only(Tensor, self._keep, result)

    def _keep(self, tensor: Tensor) -> None:
        self._own[id(tensor)] = tensor
        self._memory.add(storage_of(tensor))


class Substitution(TensorScope):
    """Scope that gives code other tensors than those that it was exported with.

    Args:
        tensors: replacements, by the `id` of the tensors that the code names.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def resolve(self, tensor: Tensor) -> Tensor:
        return self.tensors.get(id(tensor), tensor)
