"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

# Runs a function once per rank if this process simulates all ranks, and once otherwise.
from torch.distributed._local_tensor import LocalTensor, maybe_run_for_local_tensor
from torch.distributed.checkpoint import hf_storage, state_dict, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, placement_types

# Mesh, placements, shape and strides of a DTensor. Public constructors recompute them, which takes six times as long.
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef  # the identity of a tensor's memory

# Both modules list the classes that functions on lists of tensors accept. Torch adds DTensor to the lists at import.
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees operators while it is active

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def per_rank(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a function of a rank's tensors and coordinates to run once for every rank that this process holds.

    The function must have no side effects and return new tensors.
    """
    wrapped: Callable[Arguments, Result] = maybe_run_for_local_tensor(function)
    return wrapped


def replicates_implicitly() -> bool:
    """Return True in torch's `implicit_replication()`, where operators take plain tensors for replicated ones."""
    return bool(getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False))


def is_mixed_tensors_error(error: Exception) -> bool:
    """Return True for torch's or our error about an operator that mixes plain tensors with DTensors."""
    return "got mixed torch.Tensor and DTensor" in str(error)


def lacks_rule(error: Exception) -> bool:
    """Return True for torch's errors about an operator that cannot run on DTensors."""
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
        # In modes such as torch's `LocalTensorMode`, an operator that the class does not see may fail.
        return isinstance(error, OperatorShownError)
    return False


def computes_with_strided_pieces(tensors: Sequence[DTensor]) -> bool:
    """Return True if torch knows that strided pieces split their dims: 2.11 treats some of these dims as whole."""
    strided = placement_types._StridedShard  # no public name yet
    return hasattr(placement_types, "_is_shard_like") or not any(
        isinstance(placement, strided) for tensor in tensors for placement in tensor.placements
    )


def is_getter(function: Any) -> bool:
    """Return True if `__torch_function__` was called for reading an attribute that is not a tensor."""
    attribute = getattr(getattr(function, "__self__", None), "__name__", "data")
    return getattr(function, "__name__", "") == "__get__" and attribute not in ("data", "T", "mT", "H", "mH", "real")


def without_torch_functions() -> Any:
    """Return a context that disables `__torch_function__` of tensor subclasses."""
    # Torch runs its own `__torch_function__` in this context.
    return torch._C.DisableTorchFunctionSubclass()


def is_strided_refusal(error: Exception) -> bool:
    """Return True for the error of torch 2.11 about strided pieces that do not correspond to an order of mesh axes.

    `DTensor`s of torch 2.11 can hold such pieces, but cannot be redistributed from or to them; later releases can.
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
    """Return the local tensor object of a DTensor, outside autograd (`to_local` records the call and makes a view)."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: Tensor, spec: DTensorSpec) -> None:
    """Replace the contents of a DTensor by those of equal global shape, dtype and device; keep hooks and identity."""
    tensor._local_tensor = local
    tensor._spec = spec


def data_of(tensor: Tensor) -> Tensor:
    """Return `.data` of a tensor whose class overrides `data`."""
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined,no-any-return]


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return `.grad` of a tensor whose class overrides `grad`."""
    return Tensor.grad.__get__(tensor)  # type: ignore[union-attr,no-any-return]


def set_gradient(tensor: Tensor, value: Tensor | None) -> None:
    """Set `.grad` of a tensor whose class overrides `grad`."""
    Tensor.grad.__set__(tensor, value)  # type: ignore[union-attr]


def is_pointer(value: object) -> bool:
    """Return True for a C++ pointer held as an attribute, such as `_sym_sizes_capsule` of DTensors."""
    return type(value).__name__ == "PyCapsule"


def shares_memory(one: DTensor, other: DTensor) -> bool:
    """Return True if the shards of two DTensors share memory."""
    pairs = zip(local_tensors(one._local_tensor), local_tensors(other._local_tensor), strict=True)
    return all(StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()) for a, b in pairs)


def allow_foreach(kind: type[DTensor]) -> None:
    """Let optimizers and gradient clipping take lists of a subclass of DTensor, as they take lists of DTensors."""
    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if kind not in known:
            known.append(kind)


def copy_all(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors, outside autograd, in one call: separate copies take 15 µs each on the host of a GPU."""
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
    """Return True if autograd treats a tensor as a view of another one."""
    return tensor._is_view()


def is_batched(tensor: Tensor) -> bool:
    """Return True for a tensor of a backward with `is_grads_batched`, which is not a `torch.func` transform."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks that this process holds."""
    return list(tensor._local_tensors.values()) if isinstance(tensor, LocalTensor) else [tensor]


def has_views(tensor: Tensor) -> bool:
    """Return True if another tensor shares the tensor's memory, on any rank that this process holds."""
    # Two references are this tensor and the storage object created here. Torch has no other count of tensors.
    shards = local_tensors(tensor)
    return any(torch._C._storage_Use_Count(shard.untyped_storage()._cdata) > 2 for shard in shards)


def broadcasts_from_first_rank() -> bool:
    """Return True within a load of `torch.distributed.checkpoint.state_dict` with `broadcast_from_rank0`."""
    # Torch does not pass the option on, so it is read from the stack. In releases with other names the result is False.
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
    """Return the name of the function of `safetensors.torch` on the stack, or None."""
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
    """Register the `DTensor` rule that `torch.autograd.detect_anomaly` needs, if this release of torch lacks it."""
    # Registers a rule of DTensor for an operator.
    from torch.distributed.tensor.experimental import register_sharding

    # Reduces the NaN flags of a gradient.
    operator = torch.ops.aten._is_any_true.default
    if not has_dtensor_rule(operator):
        register_sharding(operator)(lambda flags: [([Replicate()], [Replicate()])])


def has_dtensor_rule(operator: Any) -> bool:
    """Return True if this release of torch can run an operator on DTensors."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
    return any(operator in getattr(propagator, table, ()) for table in tables)


def graph_task() -> int:
    """Return the id of the current autograd run."""
    # Gradients that links report are valid for one run.
    return torch._C._current_graph_task_id()


def will_execute(node: Any) -> bool:
    """Return True if the current autograd run executes a node, or returns the gradient at the node."""
    # Tells whether the gradient of an output was requested.
    return torch._C._will_engine_execute_node(node)


def hooks_of(tensor: Tensor) -> Mapping[Any, Any]:
    """Register the hook table of a tensor with autograd, and return it; the table outlives the tensor."""
    tensor.register_hook(lambda gradient: None).remove()
    hooks = tensor._backward_hooks
    assert hooks is not None
    return hooks
