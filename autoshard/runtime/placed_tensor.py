"""Sharded parameters that users may change between calls as on one device.

A `PlacedTensor` is the `DTensor` of a parameter, or one computed from it. Its class intercepts operators, since a
`DTensor` silently loses some changes and gets others wrong:

* `p.data = value` changes the wrapper of a `DTensor`, not the shard. Here it replaces the shard.
* Each rank draws random numbers for its shard. Here they are drawn for the whole tensor, as on one device, and each
  rank keeps its part of the numbers of the first rank.
* A view that cuts a sharded dim, such as `p[3]`, is a copy. Here it has a source: writes to the view also write the
  source, and each use of the view reads the source again.
* In-place operators that are not element-wise (`tril_`, `index_fill_`, `p[rows] = value`, `out=p`), and those with
  plain tensors among their arguments, run on the whole tensor.
* Numbers read on the host, such as `p.grad.norm().item()`, are those of the whole tensor, where a `DTensor` gives each
  rank's part. Partial norms, extrema, truth values and counts are reduced before operators take them, since torch's
  rules for them are wrong; partial sums are not.

Operators without a rule in torch run on whole tensors. All others are torch's, and the tensors have the class
`DTensor` while they run. All ranks make the same changes and read the same numbers, in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils import _pytree as pytree

from autoshard.capture.capture_errors import running_line
from autoshard.errors import InputError
from autoshard.runtime import _torch
from autoshard.runtime._torch import TorchDispatchMode
from autoshard.runtime.operator_effects import Effect, effect_of, leaves_of
from autoshard.runtime.shards import (
    cut,
    fill,
    from_first_rank,
    gather_full_tensor,
    local_of,
    redistribute,
    replace_parameters,
    wrap,
)
from autoshard.specs.spec import Spec


class PlacedTensor(DTensor):
    """A `DTensor` that can be changed as a tensor on one device; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, as that of `DTensor` does behind wrappers that take most of the time of making a tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Autograd detaches every gradient that it accumulates.
        if func is _DETACH and _MARKS.isdisjoint(args[0].__dict__):
            return placed_as(local_of(args[0]).detach(), _torch.dtensor_spec_of(args[0]))
        return _run(effect_of(func), func, args, kwargs or {})

    if not _torch.shows_operators_to_subclasses():

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            """Intercept the operators of a function where torch does not."""
            with _torch.without_torch_functions():
                if _torch.is_getter(func):
                    return func(*args, **(kwargs or {}))
                with _Operators():
                    return func(*args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The tensor outside of autograd, with the same memory; may be set to a whole tensor or a `DTensor`."""
        return _torch.data_of(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _assign(self, value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, also a placed tensor, so that users can zero its rows or add noise to it."""
        gradient = _torch.gradient_of(self)
        if type(gradient) is DTensor:
            make_placed(gradient)
        if gradient is not None and _STAGED in self.__dict__:
            gradient.__dict__[_STAGED] = True
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _torch.set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        _torch.set_gradient(self, None)

    def tolist(self) -> Any:
        """Return the numbers of the whole tensor."""
        return _whole_numbers(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the numbers of the whole tensor as a read-only copy, since writes would not change the parameter."""
        array = _whole_numbers(self.detach() if force else self).numpy(force=force)  # type: ignore[arg-type]
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __format__(self, format_spec: str) -> str:
        # Torch's method prints the object.
        if self.ndim == 0 and format_spec:
            return format(self.item(), format_spec)
        return super().__format__(format_spec)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Return the tensor with other placements; `full_tensor` calls it too."""
        if placements is None or device_mesh not in (None, self.device_mesh) or set(options) - {"async_op"}:
            return super().redistribute(device_mesh, placements, **options)
        return redistribute(self, placements, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedTensor:
        if id(self) in memo or not self.is_leaf:
            return super().__deepcopy__(memo)
        # If the shard starts within other memory, torch copies the memory of the wrapper, which has none.
        memo[id(self)] = copied = make_placed(self.detach().clone())  # type: ignore[arg-type]
        # Torch keeps sizes there as pointers, which belong to the original.
        state = {key: value for key, value in self.__dict__.items() if key != _SOURCE and not _torch.is_pointer(value)}
        copied.__dict__.update(copy.deepcopy(state, memo))
        copied.requires_grad = self.requires_grad
        if not isinstance(self, nn.Parameter):  # torch does not copy the gradient of a parameter
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Files have torch's class.
        with _as_dtensors([self]):
            return self.__reduce_ex__(protocol)


class _Operators(TorchDispatchMode):
    """While active, runs operators on placed tensors by `_run`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(type(leaf) is PlacedTensor for leaf in leaves_of(args, kwargs or {})):
            return _run(effect_of(func), func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_torch.allow_foreach(PlacedTensor)

_NAME, _SOURCE, _STAGED, _PARTS, _HOOKED = (
    f"_autoshard_{name}" for name in ("name", "source", "staged", "parts", "hooked")
)
# What a detached tensor has, too.
_MARKS = frozenset([_SOURCE, _STAGED, _PARTS])


def place_parameters(module: nn.Module, placements: Mapping[str, Spec], device_mesh: DeviceMesh) -> None:
    """Replace every parameter of a module by a placed tensor with a name, through `replace_parameters`."""
    replace_parameters(module, placements, device_mesh)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            make_placed(parameter).__dict__[_NAME] = name


@torch.no_grad()
def make_state_whole(module: nn.Module) -> None:
    """Gather buffers and attributes that users computed from parameters, since programs read them whole.

    Buffers, such as pruning masks, are replicated in place. Attributes become plain tensors, except those that autograd
    recorded, since programs have no gradients for them.
    """
    for buffer in module.buffers():
        if isinstance(buffer, DTensor) and not Spec(tuple(buffer.placements)).is_replicated:
            _replicate(buffer)
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, DTensor) and not value.requires_grad:
                setattr(part, name, _gather_whole(value))


def _replicate(tensor: DTensor) -> None:
    """Replicate a tensor in place."""
    mesh, replicated = tensor.device_mesh, Spec.all_replicated(tensor.device_mesh.ndim)
    whole = wrap(_gather_whole(tensor), mesh, replicated, tensor.shape, tensor.dtype)
    _torch.set_local_tensor(tensor, local_of(whole), _torch.dtensor_spec_of(whole))
    tensor.__dict__.pop(_PARTS, None)


def make_placed(tensor: DTensor) -> PlacedTensor:
    """Make a `DTensor` a placed tensor, in place, and return it."""
    tensor.__class__ = PlacedTensor
    if any(placement.is_partial() for placement in tensor.placements):
        tensor.__dict__[_PARTS] = True
    return tensor  # type: ignore[return-value]


def placed_as(local: Tensor, spec: _torch.DTensorSpec) -> PlacedTensor:
    """Return a placed tensor around a rank's local one, given torch's description of it, without partial placements."""
    return PlacedTensor(local, spec, requires_grad=False)


def refuse_draws(parameters: Iterable[Tensor]) -> None:
    """Refuse random numbers for parameters of a pipeline, whose ranks hold different ones, and for their results."""
    for parameter in parameters:
        parameter.__dict__[_STAGED] = True


def _name_of_operator(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _name_of(tensor: Tensor) -> str:
    name = tensor.__dict__.get(_NAME)
    return f"a tensor of shape {tuple(tensor.shape)}" if name is None else f"the parameter {name}"


class _as_dtensors:  # noqa: N801
    """Context in which placed tensors have the class `DTensor`, so that torch runs their operators."""

    def __init__(self, tensors: Sequence[DTensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        for tensor in self._tensors:
            tensor.__class__ = DTensor

    def __exit__(self, *failure: object) -> None:
        for tensor in self._tensors:
            tensor.__class__ = PlacedTensor


_DETACH = torch.ops.aten.detach.default
_ROWS = torch.ops.aten.index.Tensor
_NUMBER = torch.ops.aten._local_scalar_dense.default
_STACK = torch.ops.aten.stack.default


def _is_recorded(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _run(effect: Effect, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on placed tensors."""
    # One loop, with exact classes, for speed: fused optimizers have five arguments per parameter.
    tensors, views, parts, staged = [], [], [], None
    plain: list[Tensor] = []
    numbers: list[Tensor] = []
    for leaf in leaves_of(args, kwargs):
        kind = type(leaf)
        if kind is PlacedTensor:
            tensors.append(leaf)
            if _SOURCE in leaf.__dict__:
                views.append(leaf)
            if _STAGED in leaf.__dict__:
                staged = leaf
            if _PARTS in leaf.__dict__:
                parts.append(leaf)
        elif kind is not DTensor and isinstance(leaf, Tensor):
            (plain if leaf.numel() > 1 else numbers).append(leaf)
    if effect.reshapes and any(_NAME in tensor.__dict__ for tensor in tensors):
        raise InputError(
            f"{_name_of_operator(func)} changes the shape of {_name_of(tensors[0])} in place, which a parallelised "
            "module can't follow. Change numbers only, or change the shape before autoshard.parallelize."
        )
    if effect.draws and staged is not None:
        raise InputError(
            f"{_name_of_operator(func)} draws random numbers for {_name_of(staged)} of a pipeline. Each rank "
            "holds other parameters, so that it draws other numbers than one device does. Initialise the model before "
            "autoshard.parallelize (on the meta device: by pipeline.materialize(init=...)). For noise, draw plain "
            "tensors for all parameters of the model on every rank, and use those of its own: parameter.add_(noise)."
        )
    if views:
        written = {id(leaf) for leaf in effect.written_arguments(args, kwargs)}
        _check_bases(func, views, written)
        for view in views:
            _read_again(view)
        views = [view for view in views if id(view) in written]
    # Torch refuses other operators with plain tensors: it can't tell a whole one from the rows of a rank.
    is_mixed = bool(plain) and (effect.writes or (func is _ROWS and not _is_recorded(tensors)))
    if parts and not (func is _STACK and not numbers and len({tensor.placements for tensor in tensors}) == 1):
        for tensor in parts:
            if func is _NUMBER or not _is_sum(tensor):
                _replicate(tensor)
    is_known = effect.is_elementwise or effect.keeps_pieces or _torch.computes_with_strided_pieces(tensors)
    is_unsafe = effect.writes and not (effect.is_elementwise or effect.reshapes)
    if effect.draws or is_mixed or is_unsafe or not is_known or (effect.is_wrong and not plain):
        result = _run_on_whole_tensors(effect, func, args, kwargs)
    else:
        try:
            with _as_dtensors(tensors):
                result = func(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            # A view that cuts a sharded dim, an operator without a rule, or pieces that torch can't redistribute.
            if _torch.is_mixed_tensors_error(error):
                raise _mixed_error(func, tensors, plain) from error
            is_refusal = _torch.lacks_rule(error) or _torch.is_strided_refusal(error)
            if not is_refusal and not (effect.is_view and isinstance(error, RuntimeError)):
                raise
            result = _run_on_whole_tensors(effect, func, args, kwargs)
    if effect.writes:
        for view in views:
            _write_to_source(view)
        return result
    _mark_results(effect, func, args, kwargs, result)
    if numbers and torch.is_grad_enabled():
        for number in numbers:
            _take_whole_gradient(number)
    if staged is not None:
        refuse_draws(leaf for leaf in leaves_of((result,), {}) if type(leaf) is PlacedTensor)
    return result


def _mixed_error(func: Any, tensors: Sequence[DTensor], plain: Sequence[Tensor]) -> InputError:
    name, placed = _name_of_operator(func), _name_of(tensors[0]) if tensors else "a tensor"
    shapes = ", ".join(str(tuple(each.shape)) for each in plain)
    return InputError(
        f"{running_line()}: {name} got mixed torch.Tensor and DTensor, namely plain tensors of shape {shapes} and "
        f"{placed}, which lies on a mesh. A rank's rows can't be told from a whole tensor here. If it is whole, place "
        "it: torch.distributed.tensor.distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim), with mesh = "
        "parameter.device_mesh. Or compute this in forward, and return it, as a loss of logits and labels."
    )


def _is_sum(tensor: DTensor) -> bool:
    """Return True for a partial sum of floating or complex numbers; operators treat no others as sums."""
    placements = [placement for placement in tensor.placements if placement.is_partial()]
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and all(type(each) is Partial and each.reduce_op == "sum" for each in placements)


def _take_whole_gradient(number: Tensor) -> None:
    """Make a plain number's gradient a plain tensor; such a number is a loss to which a penalty is added."""
    if number.requires_grad and not number.__dict__.get(_HOOKED):
        number.__dict__[_HOOKED] = True
        number.register_hook(lambda gradient: _gather_whole(gradient) if isinstance(gradient, DTensor) else None)


def _check_bases(func: Any, views: Sequence[PlacedTensor], written: Collection[int]) -> None:
    """Refuse an operator that writes both a tensor and a view of it: each change would undo the other."""
    for view in views:
        base = view
        while id(view) in written and (source := base.__dict__.get(_SOURCE)) is not None:
            base = source.base
            if id(base) in written:
                raise InputError(
                    f"{_name_of_operator(func)} changes {_name_of(base)} and a view of it in one call, which are "
                    "separate memory where parameters are in shards: change them one after the other."
                )


def _gather_whole(tensor: DTensor) -> Tensor:
    """Return the whole tensor in new memory, with partial sums reduced."""
    if Spec(tuple(tensor.placements)).partial_axes:
        with _as_dtensors([tensor] if isinstance(tensor, PlacedTensor) else []):
            replicated = Spec.all_replicated(tensor.device_mesh.ndim).placements
            return local_of(tensor.redistribute(tensor.device_mesh, replicated)).clone()
    return gather_full_tensor(tensor)


def _whole_numbers(tensor: PlacedTensor) -> Tensor:
    """Return the whole tensor for the host; torch refuses to read it if the tensor requires gradients."""
    _read_again(tensor)
    return _gather_whole(tensor).requires_grad_(tensor.requires_grad)


def _run_on_whole_tensors(effect: Effect, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on whole tensors, and keep this rank's parts of written tensors and results."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    originals = {id(leaf): leaf for leaf in leaves if isinstance(leaf, DTensor)}
    wholes = {key: _gather_whole(tensor) for key, tensor in originals.items()}
    whole_args, whole_kwargs = pytree.tree_unflatten([wholes.get(id(leaf), leaf) for leaf in leaves], structure)
    result = func(*whole_args, **whole_kwargs)
    model = next(iter(originals.values()))

    def agree_on(whole: Tensor) -> Tensor:
        return from_first_rank(whole, model.device_mesh) if effect.draws else whole

    written = {id(leaf) for leaf in effect.written_arguments(args, kwargs)}
    for key in written & set(originals):
        _check_shape(func, originals[key], wholes[key])
    for key, tensor in originals.items():
        if key in written:
            fill(tensor, agree_on(wholes[key]))
    original_of = {id(whole): originals[key] for key, whole in wholes.items()}

    plain = {id(leaf) for leaf in leaves if id(leaf) not in originals}

    def wrap_result(value: Tensor) -> Tensor:
        if id(value) in original_of or id(value) in plain:
            return original_of.get(id(value), value)
        like = value.shape == model.shape and not Spec(tuple(model.placements)).partial_axes
        spec = Spec(tuple(model.placements)) if like else Spec.all_replicated(model.device_mesh.ndim)
        return wrap(cut(agree_on(value), model.device_mesh, spec), model.device_mesh, spec, value.shape, value.dtype)

    return pytree.tree_map_only(Tensor, wrap_result, result)


def _check_shape(func: Any, tensor: DTensor, whole: Tensor) -> None:
    if whole.shape != tensor.shape:
        raise InputError(
            f"{_name_of_operator(func)} gave {_name_of(tensor)} the shape {tuple(whole.shape)}; it has the shape "
            f"{tuple(tensor.shape)}, and nothing was changed."
        )


def _assign(tensor: PlacedTensor, value: Any) -> None:
    """Set `.data` of a placed tensor to a `DTensor` or a whole tensor; equal placements share memory."""
    if not isinstance(value, Tensor):
        raise TypeError(f".data of {_name_of(tensor)} must be a tensor, not {type(value).__name__}.")
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise InputError(
            f".data of {_name_of(tensor)} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was to become "
            f"{value.dtype} of shape {tuple(value.shape)}: the programs of a parallelised module are made for the one. "
            "Convert the module before autoshard.parallelize, or assign numbers of the same shape and dtype."
        )
    if _SOURCE in value.__dict__:
        _read_again(value)  # type: ignore[arg-type]
    mesh, spec = tensor.device_mesh, Spec(tuple(tensor.placements))
    with torch.no_grad():
        if isinstance(value, DTensor) and value.device_mesh == mesh and value.placements == tensor.placements:
            local = local_of(value).contiguous()
        else:
            whole = _gather_whole(value) if isinstance(value, DTensor) else value.detach()
            local = cut(whole.to(local_of(tensor).device), mesh, spec)
    _torch.set_local_tensor(tensor, local, _torch.dtensor_spec_of(tensor))
    tensor.__dict__.pop(_SOURCE, None)


@dataclass(frozen=True, slots=True)
class _Source:
    """The source of the numbers of a view.

    Attributes:
        base: the base of the view.
        view: the operator that made the view; None if view and base share their shards.
        args: its arguments after the base.
        kwargs: its named arguments.
        place: the index of the view among the results.
    """

    base: PlacedTensor
    view: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int

    def part(self, whole: Tensor) -> Tensor:
        """Return the view of the whole base."""
        result: Tensor = pytree.tree_leaves(self.view(whole, *self.args, **self.kwargs))[self.place]
        return result


def _read_again(tensor: PlacedTensor) -> None:
    """Read a view from its source, which may have changed."""
    source: _Source | None = tensor.__dict__.get(_SOURCE)
    if source is None:
        return
    _read_again(source.base)
    if _PARTS in source.base.__dict__:
        _replicate(source.base)
    if source.view is not None:
        fill(tensor, source.part(gather_full_tensor(source.base)))


def _write_to_source(tensor: PlacedTensor) -> None:
    """Write a changed view to its source."""
    source: _Source | None = tensor.__dict__.get(_SOURCE)
    if source is None:
        return
    if source.view is not None:
        whole = gather_full_tensor(source.base)
        source.part(whole).copy_(gather_full_tensor(tensor))
        fill(source.base, whole)
    _write_to_source(source.base)


def _mark_results(effect: Effect, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Make the results placed tensors, and record the sources of views."""
    base = args[0] if effect.is_view else None
    for place, leaf in enumerate(leaves_of((result,), {})):
        if type(leaf) is DTensor:
            make_placed(leaf)
            if type(base) is PlacedTensor:
                shares = _torch.shares_memory(leaf, base)
                if not shares or _SOURCE in base.__dict__:
                    source = _Source(base, None if shares else func, tuple(args[1:]), kwargs, place)
                    leaf.__dict__[_SOURCE] = source
