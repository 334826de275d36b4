"""Materialization of meta parameters: local shards are allocated, and initialised as one device would do it.

An initialiser runs on the whole tensor of one parameter at a time, of which this rank's part is kept. So it draws the
random numbers that one device draws, whatever its operators, and the whole model is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import InputError
from autoshard.runtime.shards import from_first_rank, local_of, parameter_like, set_tensor, wrap_like
from autoshard.runtime.whole_tensors import DTensorParts, TensorParts, WholeTensors

Model = TypeVar("Model", bound=nn.Module)
Initializer = Callable[[nn.Module], object]


def materialize_module(
    model: Model, device: torch.device | str | None = None, init: Initializer | None = None
) -> Model:
    """Materialize a module whose parameters are `DTensor`s on one mesh, as `autoshard.materialize` says."""
    mesh = None
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise InputError(f"parameter {name!r} is no DTensor: call autoshard.parallelize(model, mesh) first.")
        mesh = parameter.device_mesh if mesh is None else mesh
    if mesh is None:
        raise InputError("the model has no parameters, so there is nothing to materialize.")
    device = target_device(mesh, device)
    work = MetaTensors.of(model)
    with torch.no_grad():
        work.allocate(model, device)
        synchronize_random_state(mesh, device)
        with WholeTensors(DTensorParts()) as mode:
            initialize(model, init, work)
        left = list(work.finish_parameters(model, mode.touched, DTensorParts()))
        for name, buffer in work.buffers.items():
            current = model.get_buffer(name)
            if current is not buffer:
                set_tensor(model, name, current.to(device))
            # An empty buffer needs no numbers.
            if current.is_meta or (current is buffer and buffer not in mode.touched and buffer.numel()):
                left.append(name)
    check_filled(left)
    return model


def target_device(mesh: DeviceMesh, device: torch.device | str | None) -> torch.device:
    """Return the given device, by default that of the mesh; raise an `InputError` if its type is not the mesh's."""
    device = torch.device(mesh.device_type if device is None else device)
    if device.type != mesh.device_type:
        raise InputError(
            f"materialize(device={str(device)!r}), but the model lies on a mesh of {mesh.device_type!r} devices: "
            f"materialize it there, or make the mesh of {device.type!r} devices."
        )
    return device


def allocate(model: nn.Module, device: torch.device, names: Container[str]) -> None:
    """Allocate, without numbers, those of the named parameters and buffers that are on the meta device."""
    with torch.no_grad():
        MetaTensors.of(model, names).allocate(model, device)


@dataclass(frozen=True, slots=True)
class MetaTensors:
    """The tensors of a model that were on the meta device when the work began.

    Attributes:
        parameters: by their names, aliases included.
        buffers: by their names; `allocate` replaces them.
        modules: the submodules that hold any of these.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    modules: frozenset[nn.Module]

    @staticmethod
    def of(model: nn.Module, names: Container[str] | None = None) -> MetaTensors:
        """Return the meta tensors of a model, or those of them with one of these names."""

        def is_selected(name: str, value: Tensor) -> bool:
            return is_meta(value) and (names is None or name in names)

        parameters = {n: value for n, value in model.named_parameters(remove_duplicate=False) if is_selected(n, value)}
        buffers = {n: value for n, value in model.named_buffers(remove_duplicate=False) if is_selected(n, value)}
        owners = {name.rpartition(".")[0] for name in (*parameters, *buffers)}
        return MetaTensors(parameters, buffers, frozenset(model.get_submodule(owner) for owner in owners))

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        # Tied tensors are allocated once.
        for parameter in dict.fromkeys(self.parameters.values()):
            _allocate(parameter, device)
        replaced: dict[Tensor, Tensor] = {}
        for name, buffer in self.buffers.items():
            replaced.setdefault(buffer, torch.empty_like(buffer, device=device))
            self.buffers[name] = replaced[buffer]
            set_tensor(model, name, replaced[buffer])

    def finish_parameters(self, model: nn.Module, touched: Container[Tensor], parts: TensorParts) -> Iterator[str]:
        """Undo that initialisers replaced parameters, keeping parts of the new ones; yield names without numbers."""
        for name, parameter in self.parameters.items():
            current = model.get_parameter(name)
            if current is not parameter:
                parts.keep(parameter, current)
                set_tensor(model, name, parameter)
            elif parameter not in touched:
                yield name


def check_filled(left: Sequence[str]) -> None:
    """Raise an `InputError` if parameters or buffers, by their names, were left without numbers."""
    if left:
        raise InputError(
            f"{left[0]!r}{f' and {len(left) - 1} more' if len(left) > 1 else ''} got memory, but no numbers: no "
            f"initialiser of the model wrote to it. Give its module a reset_parameters() that does, pass "
            f"init=function of a module, or load a checkpoint instead. (A Hugging Face model has to be built under "
            f'`with torch.device("meta")`: built elsewhere, it holds itself for initialised.)'
        )


def is_meta(tensor: Tensor) -> bool:
    """Return True if a tensor, or the local tensor of a `DTensor`, is on the meta device."""
    return local_of(tensor).is_meta


def _allocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter on the meta device memory on another one; it stays the same object."""
    real: Tensor = torch.empty_like(local_of(parameter), device=device)
    if isinstance(parameter, DTensor):
        real = wrap_like(real, parameter)
    # References to the parameter, such as an optimizer's, stay valid.
    try:
        torch.utils.swap_tensors(parameter, parameter_like(real, parameter))
    except RuntimeError as error:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} can't be materialized in place, because something still "
            f"refers to its meta tensor, such as the graph of a forward pass or a weak reference: {error} Materialize "
            f"before the first call."
        ) from error


def initialize(model: nn.Module, init: Initializer | None, work: MetaTensors) -> None:
    """Call the initialisers of a model in the order in which one device would."""
    init_weights = getattr(model, "init_weights", None)
    if init is None and callable(init_weights):
        init_weights()
        return
    for module in _children_first(model, set()):
        if init is not None:
            init(module)
        # Modules without meta tensors were initialised before.
        elif module in work.modules:
            # `nn.Transformer` and `nn.MultiheadAttention` have the private one.
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield every submodule once, in the order in which constructors finish, and draw random numbers."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


def synchronize_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Give every rank the random state of rank 0, on the CPU and on the device."""
    states = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        # Devices draw from generators of their own.
        states.append((accelerator.get_rng_state, accelerator.set_rng_state))
    # The state is a CPU tensor, and the mesh may broadcast tensors of its device alone.
    for get, set_ in states:
        set_(from_first_rank(get().to(device), mesh).cpu())
