"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

# Runs a function once per rank where one process holds all ranks, and once elsewhere.
from torch.distributed._local_tensor import LocalTensor, maybe_run_for_local_tensor
from torch.distributed.checkpoint import hf_storage, state_dict, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, placement_types

# Mesh, placements, shape and strides of a DTensor: its public constructors compute them anew, in six times the time.
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef  # the identity of a tensor's memory

# Both have a list of the classes that functions on lists of tensors take, in which torch puts DTensor at its import.
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees operators while it is active

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def per_rank(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a function of a rank's tensors and coordinates so that it runs for every rank that this process holds.

    The function has no side effects and returns new tensors.
    """
    wrapped: Callable[Arguments, Result] = maybe_run_for_local_tensor(function)
    return wrapped


def replicates_implicitly() -> bool:
    """Return True in torch's `implicit_replication()`, where operators take plain tensors for replicated ones."""
    return bool(getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False))


def is_mixed_tensors_error(error: Exception) -> bool:
    """Return True for an error about an operator that takes plain tensors beside DTensors, torch's or ours."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def lacks_rule(error: Exception) -> bool:
    """Return True for torch's errors about an operator that it can't run on DTensors."""
    return isinstance(error, NotImplementedError) or "Sharding propagation failed" in str(error)


@functools.cache
def shows_operators_to_subclasses() -> bool:
    """Return True if this release of torch runs `__torch_dispatch__` of subclasses of `DTensor`; 2.11 does not."""

    class OperatorShownError(Exception):
        pass

    class Probe(DTensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise OperatorShownError

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)  # needs no process group
    probe = dtensor(torch.zeros(1, device="cpu"), dtensor_spec(mesh, (Replicate(),), (1,), torch.float32))
    probe.__class__ = Probe
    try:
        torch.neg(probe)
    except Exception as error:
        # In a mode such as torch's `LocalTensorMode`, an operator that the class does not see may fail.
        return isinstance(error, OperatorShownError)
    return False


def computes_with_strided_pieces(tensors: Sequence[DTensor]) -> bool:
    """Return True if torch knows that the dims of strided pieces are split: 2.11 takes some of them for whole dims."""
    strided = placement_types._StridedShard  # no public name yet
    return hasattr(placement_types, "_is_shard_like") or not any(
        isinstance(placement, strided) for tensor in tensors for placement in tensor.placements
    )


def is_getter(function: Any) -> bool:
    """Return True for what `__torch_function__` is told where an attribute of a tensor is read that is no tensor."""
    attribute = getattr(getattr(function, "__self__", None), "__name__", "data")
    return getattr(function, "__name__", "") == "__get__" and attribute not in ("data", "T", "mT", "H", "mH", "real")


def without_torch_functions() -> Any:
    """Context in which no `__torch_function__` of a class of tensors is called."""
    # What torch's own `__torch_function__` is run in.
    return torch._C.DisableTorchFunctionSubclass()


def is_strided_refusal(error: Exception) -> bool:
    """Return True for the error of torch 2.11 about strided pieces that no order of mesh axes makes.

    Its `DTensor`s hold such pieces, and it has no way from or to them; later releases have.
    """
    return isinstance(error, ValueError) and "unable to be interpreted into a corresponding shard_order" in str(error)


def dtensor_spec(
    device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return torch's description of a contiguous global tensor on a mesh."""
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=_contiguous(tuple(shape), dtype))


@functools.lru_cache(maxsize=1 << 14)
def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    return TensorMeta(torch.Size(shape), tuple(strides), dtype)


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor around `local`, without checks, copies or autograd."""
    return DTensor(local, spec, requires_grad=False)


def dtensor_spec_of(tensor: DTensor) -> DTensorSpec:
    """Return torch's description of a DTensor, which DTensors may share."""
    return tensor._spec


def local_tensor(tensor: DTensor) -> Tensor:
    """Return the local tensor of a DTensor itself, outside autograd (`to_local` records it and makes a view)."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor, spec: DTensorSpec) -> None:
    """Give a DTensor other contents, of the same global shape, dtype and device; hooks and identity stay."""
    tensor._local_tensor = local
    tensor._spec = spec


def data_of(tensor: Tensor) -> Tensor:
    """Return the `.data` of a tensor whose class has a `data` of its own."""
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined,no-any-return]


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return the `.grad` of a tensor whose class has a `grad` of its own."""
    return Tensor.grad.__get__(tensor)  # type: ignore[union-attr,no-any-return]


def set_gradient(tensor: Tensor, value: Tensor | None) -> None:
    """Set the `.grad` of a tensor whose class has a `grad` of its own."""
    Tensor.grad.__set__(tensor, value)  # type: ignore[union-attr]


def is_pointer(value: object) -> bool:
    """Return True for a pointer of C++ that an attribute holds; DTensors may have `_sym_sizes_capsule`."""
    return type(value).__name__ == "PyCapsule"


def shares_memory(one: DTensor, other: DTensor) -> bool:
    """Return True if the shards of two DTensors lie in the same memory."""
    pairs = zip(local_tensors(one._local_tensor), local_tensors(other._local_tensor), strict=True)
    return all(StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()) for a, b in pairs)


def allow_foreach(kind: type[DTensor]) -> None:
    """Let optimizers and the clipping of gradients take lists of a class of DTensors, as they take DTensors."""
    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if kind not in known:
            known.append(kind)


def copy_all(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors, outside autograd, with one call for all: each copy takes a GPU's host 15 µs alone."""
    with torch.no_grad():
        torch._foreach_copy_(targets, values)


def gradient_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that `register_hook` put on a tensor."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that `register_post_accumulate_grad_hook` put on a tensor."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def allows_mutation() -> bool:
    """Return True if `torch.autograd.graph.allow_mutation_on_saved_tensors` is active."""
    return bool(getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False))


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd takes a tensor for a view of another one."""
    return tensor._is_view()


def is_batched(tensor: Tensor) -> bool:
    """Return True for a tensor of a vectorized backward, which is no transform of `torch.func`."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks that this process holds."""
    return list(tensor._local_tensors.values()) if isinstance(tensor, LocalTensor) else [tensor]


def has_views(tensor: Tensor) -> bool:
    """Return True if another tensor uses the same memory, for any of the ranks that this process holds."""
    # Two users are the tensor and the storage object made here. Torch counts tensors in no other way.
    shards = local_tensors(tensor)
    return any(torch._C._storage_Use_Count(shard.untyped_storage()._cdata) > 2 for shard in shards)


def broadcasts_from_first_rank() -> bool:
    """Return True within a load of `torch.distributed.checkpoint.state_dict` with `broadcast_from_rank0`."""
    # Torch passes the option to nobody, so it is read on the stack. For releases with other names this is False.
    loads = {_code(state_dict, name) for name in ("_load_model_state_dict", "_load_optim_state_dict")}
    infos = (frame.f_locals.get("info") for frame in _stack() if frame.f_code in loads)
    return any(getattr(info, "broadcast_from_rank0", False) for info in infos)


def saves_in_hugging_face_files() -> bool:
    """Return True within a `torch.distributed.checkpoint.save` with a `HuggingFaceStorageWriter`, by the stack."""
    place = state_dict_saver.__file__
    frames = (frame for frame in _stack() if frame.f_code.co_filename == place)
    writer = hf_storage.HuggingFaceStorageWriter
    return any(isinstance(frame.f_locals.get("storage_writer"), writer) for frame in frames)


def running_safetensors_function() -> str | None:
    """Return the name of the function of `safetensors.torch` that is being called, by the stack; None if none is."""
    frames = (frame for frame in _stack() if frame.f_globals.get("__name__") == "safetensors.torch")
    frame = next(frames, None)
    return None if frame is None else frame.f_code.co_name


def _code(module: Any, name: str) -> Any:
    return getattr(inspect.unwrap(getattr(module, name, None)), "__code__", None)  # type: ignore[arg-type]


def _stack() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def support_anomaly_detection() -> None:
    """Give `DTensor` the rule that `torch.autograd.detect_anomaly` needs, where this release of torch has none."""
    # Gives DTensor a rule for an operator.
    from torch.distributed.tensor.experimental import register_sharding

    # Reduces the flags of NaN in a gradient.
    operator = torch.ops.aten._is_any_true.default
    if not has_dtensor_rule(operator):
        register_sharding(operator)(lambda flags: [([Replicate()], [Replicate()])])


def has_dtensor_rule(operator: Any) -> bool:
    """Return True if this release of torch can run an operator on DTensors."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
    return any(operator in getattr(propagator, table, ()) for table in tables)


def graph_task() -> int:
    """Return the number of the run of autograd that calls this code."""
    # Gradients that links report belong to one run.
    return torch._C._current_graph_task_id()


def will_execute(node: Any) -> bool:
    """Return True if the current run of autograd comes to a node, or returns the gradient that arrives there."""
    # Tells whether somebody asks for the gradient of an output.
    return torch._C._will_engine_execute_node(node)


def hooks_of(tensor: Tensor) -> Mapping[Any, Any]:
    """Return the table of a tensor's hooks, which outlives it; it is registered with autograd now."""
    tensor.register_hook(lambda gradient: None).remove()
    hooks = tensor._backward_hooks
    assert hooks is not None
    return hooks
