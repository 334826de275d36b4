"""Materialization of meta parameters: each rank allocates its parts, initialised with the numbers of one device.

Every rank runs the initialisers of the whole model, since the random numbers of a parameter depend on all earlier
draws. Functions see one whole parameter at a time, of which the rank keeps its part: its shard, and in a pipeline that
of its stages (Rhino 6.3, distributed initialisation). So the numbers equal those drawn on one device, whatever the
operators, and the whole model is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard.errors import InputError
from autoshard.runtime import _torch
from autoshard.runtime.rank_agreement import gather_from_axis
from autoshard.runtime.shards import (
    fill,
    from_first_rank,
    gather_full_tensor,
    local_of,
    parameter_like,
    set_tensor,
    wrap_like,
)
from autoshard.specs.spec import Spec

Model = TypeVar("Model", bound=nn.Module)
Initializer = Callable[[nn.Module], object]


def materialize_module(
    model: Model, device: torch.device | str | None = None, init: Initializer | None = None
) -> Model:
    """Materialize a module whose parameters are `DTensor`s on one mesh, as documented in `autoshard.materialize`."""
    mesh = None
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise InputError(f"parameter {name!r} is no DTensor: call autoshard.parallelize(model, mesh) first.")
        mesh = parameter.device_mesh if mesh is None else mesh
    if mesh is None:
        raise InputError("the model has no parameters, so there is nothing to materialize.")
    device = _target_device(mesh, device)
    work = _MetaTensors.of(model)
    work.allocate(model, device)
    _initialize(model, init, work, _ModuleParts(model, device), mesh, device)
    return model


def materialize_stages(
    model: nn.Module,
    stages: Sequence[nn.Module],
    device_mesh: DeviceMesh,
    axis: str,
    device: torch.device | str | None = None,
    init: Initializer | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Allocate and initialise the meta tensors of this rank's stages, in place.

    A rank holds its parts of its stages' parameters and, temporarily, one whole parameter, as documented in
    `autoshard.materialize`. Parameters of the stages remain the same objects. All ranks of the mesh call this together;
    an initialiser that reads a tensor of another rank receives it from there. A parameter that no stage has is drawn,
    too, and kept until the end.

    Args:
        model: the whole model on the meta device, where it remains, except for tensors shared with stages. Tensors on
            another device count as initialised, also if only a stage of some rank has them on another device.
        stages: the stages of this rank. Their parameters, plain or `DTensor`s, have the names of the model's.
        device_mesh: the whole mesh.
        axis: the mesh axis along which ranks have different stages.
        device: the device of the new tensors; by default the mesh's device type.
        init: as for `autoshard.materialize`, called with submodules of `model`.
        names: the tensors to initialise if they are on the meta device; by default all tensors of the model.

    Raises:
        InputError: the device is of another type than the mesh, or a tensor was not initialised.

    Source: Rhino 6.3.
    """
    device = _target_device(device_mesh, device)
    work = _MetaTensors.of(model, _uninitialized_names(model, stages, device_mesh, axis, names))
    _initialize(model, init, work, _StageParts(model, work, stages, device_mesh, axis, device), device_mesh, device)


def allocate(model: nn.Module, device: torch.device, names: Container[str]) -> None:
    """Allocate the named parameters and buffers that are on the meta device, without initialising them."""
    _MetaTensors.of(model, names).allocate(model, device)


def initialize_shards(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, initialize: Callable[[], object]
) -> None:
    """Call an initialiser of a module with allocated shards, so that the shards get the numbers of one device.

    Args:
        model: a parallelised module.
        mesh: its mesh; all ranks call this together.
        device: the device of this rank.
        initialize: writes to the parameters and buffers of the module, which it sees as whole tensors.
    """
    with torch.no_grad():
        _synchronize_random_state(mesh, device)
        with _WholeTensors(_ModuleParts(model, device)):
            initialize()


def _target_device(mesh: DeviceMesh, device: torch.device | str | None) -> torch.device:
    """Return the given device, by default the mesh's; raise an `InputError` if its type is not the mesh's."""
    device = torch.device(mesh.device_type if device is None else device)
    if device.type != mesh.device_type:
        raise InputError(
            f"materialize(device={str(device)!r}), but the model lies on a mesh of {mesh.device_type!r} devices: "
            f"materialize it there, or make the mesh of {device.type!r} devices."
        )
    return device


@dataclass(frozen=True, slots=True)
class _MetaTensors:
    """The tensors of a model that were on the meta device at the start.

    Attributes:
        parameters: by their names, aliases included.
        buffers: by their names; `allocate` replaces them.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module, names: Container[str] | None = None) -> _MetaTensors:
        """Return the meta tensors of a model, optionally only those with one of these names."""

        def is_selected(name: str, value: Tensor) -> bool:
            return local_of(value).is_meta and (names is None or name in names)

        parameters = {n: value for n, value in model.named_parameters(remove_duplicate=False) if is_selected(n, value)}
        buffers = {n: value for n, value in model.named_buffers(remove_duplicate=False) if is_selected(n, value)}
        return _MetaTensors(parameters, buffers)

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The parameters, then the buffers."""
        return {**self.parameters, **self.buffers}

    @torch.no_grad()
    def allocate(self, model: nn.Module, device: torch.device) -> None:
        # Tied tensors are allocated once.
        for parameter in dict.fromkeys(self.parameters.values()):
            _allocate(parameter, device)
        replaced: dict[Tensor, Tensor] = {}
        for name, buffer in self.buffers.items():
            replaced.setdefault(buffer, torch.empty_like(buffer, device=device))
            self.buffers[name] = replaced[buffer]
            set_tensor(model, name, replaced[buffer])


def _allocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Allocate a meta parameter on another device; it remains the same object."""
    real: Tensor = torch.empty_like(local_of(parameter), device=device)
    if isinstance(parameter, DTensor):
        real = wrap_like(real, parameter)
    # References to the parameter, such as an optimizer's, stay valid.
    try:
        torch.utils.swap_tensors(parameter, parameter_like(real, parameter))
    except RuntimeError as error:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} can't be materialized in place, because something still "
            f"refers to its meta tensor, such as the graph of a forward pass or a weak reference. Materialize "
            f"before the first call."
        ) from error


@torch.no_grad()
def _initialize(
    model: nn.Module,
    init: Initializer | None,
    work: _MetaTensors,
    parts: _Parts,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Call the initialisers of a model, and keep this rank's parts of the results.

    Raises:
        InputError: a parameter or buffer has not been initialised.
    """
    _synchronize_random_state(mesh, device)
    # From here on all ranks draw the same numbers.
    with _WholeTensors(parts) as mode:
        _call_initializers(model, init, work)
    left = []
    # Initialisers may replace parameters and buffers instead of writing to them.
    for name, parameter in work.parameters.items():
        current = model.get_parameter(name)
        if current is not parameter:
            parts.keep(parameter, current)
            set_tensor(model, name, parameter)
        elif parameter not in mode.touched:
            left.append(name)
    for name, buffer in work.buffers.items():
        current_buffer = model.get_buffer(name)
        if current_buffer is not buffer:
            parts.replace_buffer(name, buffer, current_buffer)
        # An empty buffer needs no numbers.
        elif buffer not in mode.touched and buffer.numel():
            left.append(name)
    if left:
        raise InputError(
            f"{left[0]!r}{f' and {len(left) - 1} more' if len(left) > 1 else ''} got memory, but no numbers: no "
            f"initialiser of the model wrote to it. Give its module a reset_parameters() that does, pass "
            f"init=function of a module, or load a checkpoint instead. (A Hugging Face model has to be built under "
            f'`with torch.device("meta")`: built elsewhere, it holds itself for initialised.)'
        )


def _call_initializers(model: nn.Module, init: Initializer | None, work: _MetaTensors) -> None:
    """Call the initialisers of a model in the order of one device."""
    init_weights = getattr(model, "init_weights", None)
    if init is None and callable(init_weights):
        init_weights()
        return
    # The other modules are initialised already: resetting them would draw additional random numbers.
    meta_modules = {model.get_submodule(name.rpartition(".")[0]) for name in work.by_name}
    for module in _children_first(model, set()):
        if init is not None:
            init(module)
        elif module in meta_modules:
            # `nn.Transformer` and `nn.MultiheadAttention` have the private method.
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield every submodule once, in the order in which constructors finish and draw random numbers."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


def _synchronize_random_state(mesh: DeviceMesh, device: torch.device) -> None:
    """Copy rank 0's random state to every rank, for the CPU and the device."""
    states = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        # Devices have separate generators.
        states.append((accelerator.get_rng_state, accelerator.set_rng_state))
    # The state is a CPU tensor, but the mesh may only be able to broadcast tensors of its device.
    for get, set_ in states:
        set_(from_first_rank(get().to(device), mesh).cpu())


class _Parts(Protocol):
    """The tensors of which this rank may have a part."""

    def __contains__(self, tensor: Tensor) -> bool:
        """Return True if a tensor is one of them."""

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        """Return the whole tensor that replaces a tensor, with its numbers if any were written."""

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        """Keep this rank's part of a whole tensor that is no longer used."""

    def device_sample(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device of the whole tensor."""

    def replace_buffer(self, name: str, buffer: Tensor, new: Tensor) -> None:
        """Keep the tensor that an initialiser assigned instead of a buffer."""


class _ModuleParts:
    """The `DTensor`s of a module; every rank has one shard of each."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device

    def __contains__(self, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor)

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        assert isinstance(tensor, DTensor)
        # Functions write to it directly.
        if Spec(tuple(tensor.placements)).is_replicated:
            return local_of(tensor)
        if written:
            return gather_full_tensor(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=local_of(tensor).device)

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        if whole is not local_of(tensor):
            fill(tensor, whole)

    def device_sample(self, tensor: Tensor) -> Tensor:
        return tensor

    def replace_buffer(self, name: str, buffer: Tensor, new: Tensor) -> None:
        set_tensor(self._model, name, new.to(self._device))


class _StageParts:
    """The meta tensors of a model; this rank has, and allocates, those of its stages.

    The arguments are those of `materialize_stages`; `work` contains the tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        work: _MetaTensors,
        stages: Sequence[nn.Module],
        device_mesh: DeviceMesh,
        axis: str,
        device: torch.device,
    ) -> None:
        self._model = model
        self._stages = stages
        self._group = device_mesh.get_group(axis)
        self._device_sample = torch.empty(0, device=device)
        tensors = work.by_name
        # A tied tensor is identified by its first name.
        self._names = {tensor: name for name, tensor in reversed(tensors.items())}
        # For each tensor, those of this rank's stages: none, one, or several if stages share it. Dicts keep order.
        self._here: dict[Tensor, dict[Tensor, None]] = {tensor: {} for tensor in self._names}
        for stage in stages:
            held = _MetaTensors.of(stage, tensors)
            held.allocate(stage, device)
            for name, part in held.by_name.items():
                self._here[tensors[name]][part] = None
        # The whole tensors of those in no stage.
        self._stageless: dict[Tensor, Tensor] = {}
        names_here = {self._names[tensor] for tensor, parts in self._here.items() if parts}
        names_of_ranks = list(enumerate(gather_from_axis(device_mesh, axis, names_here)))
        # If several ranks have a tensor, the first one sends it: it is written last here.
        self._owner = {name: place for place, names in reversed(names_of_ranks) for name in names}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._names

    def whole(self, tensor: Tensor, written: bool) -> Tensor:
        owner = self._owner.get(self._names[tensor])
        if written and owner is None:
            return self._stageless.pop(tensor)
        # A tensor that no function has written to is not sent: its numbers do not matter.
        if written and self._here[tensor]:
            value = gather_full_tensor(next(iter(self._here[tensor])))
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device_sample.device)
        if written:
            dist.broadcast(value, group=self._group, group_src=owner)
        return value

    def keep(self, tensor: Tensor, whole: Tensor) -> None:
        for part in self._here[tensor]:
            fill(part, whole)
        if self._names[tensor] not in self._owner:
            self._stageless[tensor] = whole

    def device_sample(self, tensor: Tensor) -> Tensor:
        return self._device_sample

    def replace_buffer(self, name: str, buffer: Tensor, new: Tensor) -> None:
        # The model keeps its meta buffer; the stages get the new one.
        set_tensor(self._model, name, buffer)
        for stage in self._stages:
            if name in dict(stage.named_buffers(remove_duplicate=False)):
                set_tensor(stage, name, new.to(self._device_sample.device))


def _uninitialized_names(
    model: nn.Module, stages: Sequence[nn.Module], device_mesh: DeviceMesh, axis: str, names: Collection[str] | None
) -> frozenset[str]:
    """Return the names, optionally within `names`, of the model's tensors that no stage on any rank has initialised."""
    here = {name for stage in stages for name, tensor in _named_tensors(stage) if not local_of(tensor).is_meta}
    filled = set[str]().union(*gather_from_axis(device_mesh, axis, here))
    # By tensors, not names: a tied tensor is filled under all its names.
    filled_tensors = {tensor for name, tensor in _named_tensors(model) if name in filled}
    return frozenset(
        name
        for name, tensor in _named_tensors(model)
        if (names is None or name in names) and tensor not in filled_tensors
    )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class _WholeTensors(TorchFunctionMode):
    """A mode in which functions receive whole plain tensors instead of parts; afterwards the parts are kept.

    A whole tensor exists while a function or a view needs it. All ranks must call the same functions in the same order,
    as they do in initialisation.
    """

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self._parts = parts
        # Part -> whole tensor.
        self._stand_ins: dict[Tensor, Tensor] = {}
        # Arguments of functions that may have written to them.
        self.touched: set[Tensor] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_metadata(function):
            if _attribute_name(function) in _DEVICE_ATTRIBUTES and args[0] in self._parts:
                # A meta tensor of the model represents one on the device of the stages.
                args = (self._parts.device_sample(args[0]), *args[1:])
            return function(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Release the whole tensors of earlier functions first, so that there is seldom more than one at a time.
        self._release(keep=tensors)
        opened = {tensor: self._stand_in_for(tensor) for tensor in tensors if tensor in self._parts}
        leaves = [opened.get(leaf, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.touched.update(tensors)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        result = function(*args, **kwargs)
        # An in-place function returns its argument.
        return next((tensor for tensor, stand_in in opened.items() if stand_in is result), result)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        # After a failure, whole tensors may contain anything.
        if failure[0] is None:
            self._release(keep=(), views=False)

    def _stand_in_for(self, tensor: Tensor) -> Tensor:
        if tensor not in self._stand_ins:
            self._stand_ins[tensor] = self._parts.whole(tensor, tensor in self.touched)
        return self._stand_ins[tensor]

    def _release(self, keep: Sequence[Tensor], views: bool = True) -> None:
        """Keep the parts of all whole tensors except `keep` and, with `views`, those with views; release them."""
        kept = {id(tensor) for tensor in keep}
        for tensor, stand_in in list(self._stand_ins.items()):
            if id(tensor) in kept or (views and _torch.has_views(stand_in)):
                continue
            self._parts.keep(tensor, stand_in)
            del self._stand_ins[tensor]


# Functions that read or set properties known without the whole tensor.
_METADATA_METHODS = frozenset(
    {
        *("dim", "ndimension", "size", "numel", "nelement", "stride", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "__len__", "__hash__", "__repr__"),
    }
)
_DEVICE_ATTRIBUTES = frozenset({"device", "is_meta", "is_cpu", "is_cuda"})
_DATA_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def _is_metadata(function: Any) -> bool:
    """Return True if a function reads or sets only metadata of a tensor."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return _attribute_name(function) not in _DATA_ATTRIBUTES
    return name in _METADATA_METHODS


def _attribute_name(function: Any) -> str:
    """Return the name of the attribute that a function gets or sets; the empty string for any other function."""
    return getattr(getattr(function, "__self__", None), "__name__", "")
