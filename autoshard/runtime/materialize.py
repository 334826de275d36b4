"""Meta parameters become real: local shards are allocated and initialised as one device would initialise them.

An initialiser runs on a whole tensor, of one parameter at a time: a temporary, of which this rank's part is kept. So it
draws the random numbers that one device draws, whatever operators it is made of, and no whole model is ever there.
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
from autoshard.runtime.shards import from_first_rank, local_of, parameter_like, set_parameter, wrap_like
from autoshard.runtime.whole_tensors import DTensorParts, TensorParts, WholeTensors

Model = TypeVar("Model", bound=nn.Module)
Initializer = Callable[[nn.Module], object]


def materialize_module(
    model: Model, device: torch.device | str | None = None, init: Initializer | None = None
) -> Model:
    """As `autoshard.materialize`, of a module whose parameters are `DTensor`s on one mesh.

    Raises:
        InputError: as there.
    """
    mesh = _mesh_of(model)
    device = target_device(mesh, device)
    work = MetaTensors.of(model)
    with torch.no_grad():
        work.allocate(model, device)
        synchronize_random_state(mesh, device)
        with WholeTensors(DTensorParts()) as mode:
            initialize(model, init, work)
        work.finish(model, mode.touched, device)
    return model


def target_device(mesh: DeviceMesh, device: torch.device | str | None) -> torch.device:
    """The device asked for, by default the mesh's; `InputError` where it is of another type."""
    device = torch.device(mesh.device_type if device is None else device)
    if device.type != mesh.device_type:
        raise InputError(
            f"materialize(device={str(device)!r}), but the model lies on a mesh of {mesh.device_type!r} devices: "
            f"materialize it there, or make the mesh of {device.type!r} devices."
        )
    return device


def allocate(model: nn.Module, device: torch.device, names: Container[str]) -> None:
    """Memory on `device`, without numbers, for those named parameters and buffers that are on the meta device."""
    with torch.no_grad():
        MetaTensors.of(model, names).allocate(model, device)


def _mesh_of(model: nn.Module) -> DeviceMesh:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise InputError(f"parameter {name!r} is no DTensor: call autoshard.parallelize(model, mesh) first.")
    for parameter in model.parameters():
        return parameter.device_mesh  # type: ignore[attr-defined]
    raise InputError("the model has no parameters, so there is nothing to materialize.")


@dataclass(frozen=True, slots=True)
class MetaTensors:
    """What was on the meta device when the work began.

    Attributes:
        parameters: by their names, aliases included.
        buffers: by their names; filled by `allocate` with what stands there instead.
        modules: the submodules that hold any of these.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    modules: frozenset[nn.Module]

    @staticmethod
    def of(model: nn.Module, names: Container[str] | None = None) -> MetaTensors:
        """The work on a model, or on what has one of these names."""

        def is_selected(name: str, value: Tensor) -> bool:
            return is_meta(value) and (names is None or name in names)

        parameters = {n: value for n, value in model.named_parameters(remove_duplicate=False) if is_selected(n, value)}
        buffers = {n: value for n, value in model.named_buffers(remove_duplicate=False) if is_selected(n, value)}
        owners = {name.rpartition(".")[0] for name in (*parameters, *buffers)}
        return MetaTensors(parameters, buffers, frozenset(model.get_submodule(owner) for owner in owners))

    def allocate(self, model: nn.Module, device: torch.device) -> None:
        for parameter in dict.fromkeys(self.parameters.values()):
            _allocate(parameter, device)
        made: dict[Tensor, Tensor] = {}
        for name, buffer in self.buffers.items():
            made.setdefault(buffer, torch.empty_like(buffer, device=device))
            self.buffers[name] = made[buffer]
            set_buffer(model, name, made[buffer])

    def finish(self, model: nn.Module, touched: frozenset[Tensor], device: torch.device) -> None:
        """Bring home what initialisers put in the place of parameters and buffers; check that nothing was left out."""
        check_filled(
            [*self.finish_parameters(model, touched, DTensorParts()), *self._finish_buffers(model, touched, device)]
        )

    def finish_parameters(self, model: nn.Module, touched: frozenset[Tensor], parts: TensorParts) -> Iterator[str]:
        """Keep the parts of what initialisers put in the place of parameters; the names of those without numbers."""
        for name, parameter in self.parameters.items():
            now = model.get_parameter(name)
            if now is not parameter:
                parts.keep(parameter, now)
                set_parameter(model, name, parameter)
            elif parameter not in touched:
                yield name

    def _finish_buffers(self, model: nn.Module, touched: frozenset[Tensor], device: torch.device) -> Iterator[str]:
        for name, buffer in self.buffers.items():
            now = model.get_buffer(name)
            if now is not buffer:
                set_buffer(model, name, now.to(device))
            if now.is_meta or (now is buffer and buffer not in touched and buffer.numel()):
                yield name


def check_filled(left: Sequence[str]) -> None:
    """`InputError` if some parameters or buffers, by their names, were left without numbers."""
    if left:
        raise InputError(
            f"{left[0]!r}{f' and {len(left) - 1} more' if len(left) > 1 else ''} got memory, but no numbers: no "
            f"initialiser of the model wrote to it. Give its module a reset_parameters() that does, pass "
            f"init=function of a module, or load a checkpoint instead. (A Hugging Face model has to be built under "
            f'`with torch.device("meta")`: built elsewhere, it holds itself for initialised.)'
        )


def is_meta(tensor: Tensor) -> bool:
    """Whether a tensor, of a `DTensor` this rank's part, is on the meta device."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).is_meta


def _allocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter on the meta device memory on another one; it stays the same object."""
    real: Tensor = torch.empty_like(local_of(parameter) if isinstance(parameter, DTensor) else parameter, device=device)
    if isinstance(parameter, DTensor):
        real = wrap_like(real, parameter)
    try:
        torch.utils.swap_tensors(parameter, parameter_like(real, parameter))
    except RuntimeError as error:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} can't be materialized in place, because something still "
            f"refers to its meta tensor, such as the graph of a forward pass or a weak reference: {error} Materialize "
            f"before the first call."
        ) from error


def set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of the buffer under a qualified name; it stays persistent or not."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, value)


def initialize(model: nn.Module, init: Initializer | None, work: MetaTensors) -> None:
    """Call the initialisers of a model in the order in which one device would."""
    own = getattr(model, "init_weights", None)
    if init is None and callable(own):
        own()
        return
    for module in _children_first(model, set()):
        if init is not None:
            init(module)
        elif module in work.modules:
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Every submodule once, in the order in which constructors finish."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


def synchronize_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Give every rank the random state of rank 0, on the processor and on the device."""
    states = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        states.append((accelerator.get_rng_state, accelerator.set_rng_state))
    for get, set_ in states:
        set_(from_first_rank(get().to(device), mesh).cpu())
