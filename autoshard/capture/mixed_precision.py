"""Mixed precision as part of the graph: casts of parameters, inputs, outputs and gradients, planned like any operator.

A cast of a sharded parameter is local, so half as many bytes are gathered after it. A cast of a partial gradient sets
the dtype in which the ranks' partial sums are added. No other part of the library needs to know about precisions.

FSDP2 policies are written into the graph. `torch.autocast("cuda")` is traced. It depends on a tensor's device, with one
list of operators for GPUs and another for the CPU, on which the tensors of a capture are. So while a model is captured
under the autocast of GPUs, autocast of the CPU replaces it, with the list of GPUs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture._torch import attribute_patch, below_autocast, operator_of, operators_under_autocast, pytree
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.joint_graph import JointOutput
from autoshard.errors import CaptureError

aten = torch.ops.aten

REDUCED = "reduced"
"""Key of a node's meta: `"here"`: the gradient is reduced as this node's result; `"before"`: it was reduced before."""


class LoweredModule:
    """A fake copy of a module whose parameters and inputs are cast for export.

    The casts are those of `fully_shard(module, mp_policy=policy)` on a whole module: floating parameters (not buffers),
    the inputs of `forward`, its outputs, and gradients on their way to the optimizer.

    Args:
        module: the fake copy; its parameters are replaced.
        policy: the precisions, as for FSDP2.
    """

    def __init__(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        self.policy = policy
        self.originals: dict[str, torch.dtype] = {}
        dtype = policy.param_dtype
        lowered: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if parameter not in lowered:  # a parameter with several names stays one
                    lowered[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, lowered[parameter])
                self.originals[name] = parameter.dtype

    def inputs(self, call: BoundCall) -> BoundCall:
        """Return a call with floating tensors in the dtype that `forward` receives."""
        if self.policy.param_dtype is None or not self.policy.cast_forward_inputs:
            return call

        def lower(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(self.policy.param_dtype).requires_grad_(tensor.requires_grad)

        return call.map_tensors(lower)

    def with_casts(self, exported: Exported, call: Sequence[torch.Tensor]) -> Exported:
        """Return the exported graph with inputs in the callers' dtypes, and a cast at the first use of each.

        Args:
            exported: the forward graph of the fake copy, on cast tensors.
            call: the tensors of the call before the casts, in order.
        """
        graph = exported.graph
        tensors = iter(call)
        inputs = []
        for node, item in exported.placeholders.items():
            dtype = item.fake.dtype
            if item.kind == "parameter":
                dtype = self.originals.get(item.name, dtype)
            elif item.kind == "input":
                dtype = next(tensors).dtype
            inputs.append(item if dtype == item.fake.dtype else _cast_at_first_use(graph, node, item, dtype))
        output_dtype = self.policy.output_dtype
        outputs = tuple(
            _cast(graph, node, output_dtype, graph.output_node(), graph.output_node())
            if output_dtype is not None and node.meta["val"].is_floating_point()
            else node
            for node in exported.outputs
        )
        return replace(exported, inputs=tuple(inputs), outputs=outputs)


def _cast_at_first_use(graph: fx.Graph, node: fx.Node, item: ExportedInput, dtype: torch.dtype) -> ExportedInput:
    """Give a placeholder the callers' dtype, insert a cast before its first user, and return its input."""
    # At the first use, not at the start: otherwise cast copies of all parameters would exist from the first layer on.
    users = list(node.users)
    fake = item.fake.detach().to(dtype).requires_grad_(item.fake.requires_grad)
    node.meta["val"] = fake
    if users:
        first = min(users)
        cast = _cast(graph, node, item.fake.dtype, first, first)
        cast.meta["val"] = item.fake
        for user in users:
            user.replace_input_with(node, cast)
    return replace(item, fake=fake)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, before: fx.Node, like: fx.Node) -> fx.Node:
    """Insert a cast of `node` before one node, with the module and the half of another, and return it."""
    if node.meta["val"].dtype == dtype:
        return node
    with graph.inserting_before(before):
        cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    # Forward graphs have stacks of modules; joint graphs have the other keys.
    keys = ("nn_module_stack", "partitioner_tag", "module_path", "sizes")
    cast.meta.update({key: like.meta[key] for key in keys if key in like.meta})
    cast.meta["val"] = node.meta["val"].to(dtype)
    return cast


def reduce_gradients(
    graph: fx.Graph, outputs: Sequence[JointOutput], policy: MixedPrecisionPolicy
) -> list[JointOutput]:
    """Insert the casts around the reductions of parameter gradients, and mark these nodes with `REDUCED` in their meta.

    Args:
        graph: the joint graph; its output node returns the nodes of `outputs`.
        outputs: the outputs of the step.
        policy: its `reduce_dtype` is the dtype of the reduction; without one, that of autograd's gradients.

    Returns:
        The outputs with the cast gradients.
    """
    if policy.param_dtype is None and policy.reduce_dtype is None:
        return list(outputs)
    reduced: dict[fx.Node, fx.Node] = {}
    result = []
    for output in outputs:
        node = output.node
        if output.kind == "gradient" and node is not None and node.meta["val"].is_floating_point():
            if node not in reduced:
                reduced[node] = _cast_for_reduction(graph, node, policy)
            output = replace(output, node=reduced[node])
        result.append(output)
    graph.output_node().args = (tuple(output.node for output in result),)
    for node in reduced:
        if not node.users:
            graph.erase_node(node)  # autograd's own cast, replaced by another one
    return result


def _cast_for_reduction(graph: fx.Graph, node: fx.Node, policy: MixedPrecisionPolicy) -> fx.Node:
    """Return the gradient `node`, reduced in the policy's dtype and cast back to its own."""
    # Autograd makes the gradient of a cast parameter in `param_dtype`, then casts it: reduce it before that cast.
    source, final_dtype = node, node.meta["val"].dtype
    if node.target is aten._to_copy.default and node.all_input_nodes[0].meta["val"].dtype == policy.param_dtype:
        source = node.all_input_nodes[0]
    dtype = policy.reduce_dtype or source.meta["val"].dtype
    reduced = node if dtype == final_dtype else _cast(graph, source, dtype, source.next, node)
    if reduced is not source:
        reduced.meta[REDUCED] = "here"
    if dtype == final_dtype:
        return reduced
    restored = node if reduced is source else _cast(graph, reduced, final_dtype, reduced.next, node)
    restored.meta[REDUCED] = "before"
    return restored


# fmt: off
# Operators that compute in the dtype of autocast.
_LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "scaled_dot_product_attention",
)

# Operators that compute in float32.
_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "linalg_matrix_sqrth",
)

# Operators that are called with the dtype float32 unless the caller passes a dtype.
_FLOAT32_BY_ARGUMENT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)

# Operators that compute in the widest dtype among their operands.
_WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)

# fmt: on

# Norms, and their overloads with a dtype, which are called with float32 instead.
_FLOAT32_NORMS = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",  # in builds with named tensors
}

_Kernel = Callable[..., Any]


@contextlib.contextmanager
def autocast_of_gpus() -> Iterator[None]:
    """Context in which autocast of GPUs, active or entered later, acts on CPU tensors."""
    initialize = torch.autocast.__init__
    with contextlib.ExitStack() as stack:
        kernels = _Kernels(stack)

        def initialize_on_cpu(
            self: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            # The user's `torch.autocast("cuda")` in `forward` becomes one of the CPU, with the kernels of GPUs.
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
                kernels.install()
            # The CPU's autocast does not support float32, but that of GPUs and its kernels do. An exported region is
            # entered again as one of the CPU.
            widens = device_type == "cpu" and dtype == torch.float32 and kernels.installed
            initialize(self, device_type, torch.bfloat16 if widens else dtype, enabled, cache_enabled)
            if widens:
                self.fast_dtype = torch.float32

        stack.enter_context(attribute_patch(torch.autocast, "__init__", initialize_on_cpu))
        # The capture was called under autocast: enter it again, through the replaced `__init__`.
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cuda", torch.get_autocast_dtype("cuda")))
        yield


class _Kernels:
    """Autocast kernels of GPUs that replace those of the CPU until a context ends.

    Attributes:
        installed: True once they are in place.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.installed = False
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def install(self) -> None:
        """Replace the kernels, once."""
        if self.installed:
            return
        self.installed = True
        library = self._stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of replaced kernels
            for name, kernel in self._by_name().items():
                library.impl(name, kernel, "AutocastCPU")

    def _by_name(self) -> dict[str, _Kernel]:
        # An operator that is only on the CPU's list is not cast on a GPU.
        kernels = dict.fromkeys(operators_under_autocast("CPU"), torch.library.fallthrough_kernel)
        known = operators_under_autocast("CUDA")  # the lists above contain names of several torch versions
        for names, make in (
            (_LOWER_PRECISION, lambda name: self._casting(name, lambda _: torch.get_autocast_dtype("cpu"))),
            (_FLOAT32, lambda name: self._casting(name, lambda _: torch.float32)),
            (_FLOAT32_BY_ARGUMENT, self._float32_by_argument),
            (_FLOAT32_NORMS, self._float32_norm),
            (_WIDEST, lambda name: self._casting(name, _widest_dtype)),
        ):
            kernels |= {name: make(name) for name in names if name in known}
        return kernels | {"binary_cross_entropy": _refuse_probabilities}

    def _casting(self, name: str, dtype_of: Callable[[Any], torch.dtype]) -> _Kernel:
        """Return a kernel that casts operands to the dtype that a function of all arguments chooses."""
        op = operator_of(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = dtype_of((args, kwargs))
            with below_autocast():
                return op(*self._cast(args, dtype), **self._cast(kwargs, dtype))

        return kernel

    def _float32_by_argument(self, name: str) -> _Kernel:
        op = operator_of(name)
        position = [argument.name for argument in op._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            passed = args[position] if len(args) > position else kwargs.get("dtype")
            if passed is None and _is_cast(args[0]):
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            with below_autocast():
                return op(*args, **kwargs)

        return kernel

    def _float32_norm(self, name: str) -> _Kernel:
        op, with_dtype = operator_of(name), operator_of(_FLOAT32_NORMS[name])

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with below_autocast():
                if not _is_cast(args[0]):
                    return op(*args, **kwargs)
                # By name: the overloads have arguments at different positions.
                names = [argument.name for argument in op._schema.arguments]
                return with_dtype(**dict(zip(names, args, strict=False)), **kwargs, dtype=torch.float32)

        return kernel

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        return pytree.tree_map_only(Tensor, lambda leaf: self._cast_of(leaf, dtype) if _is_cast(leaf) else leaf, value)

    def _cast_of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor in another dtype."""
        if tensor.dtype == dtype:
            return tensor
        # torch's autocast caches casts of parameters under these conditions, so one cast serves all uses.
        cached = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32 and torch.is_grad_enabled()
        if not cached or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        # Keep the tensor, so that its id is not reused.
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor, tensor.to(dtype)
        return self._casts[id(tensor)][1]


def _refuse_probabilities(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        "binary_cross_entropy under torch.autocast on a GPU: torch refuses it there, since logarithms of 16-bit "
        "probabilities overflow. Call binary_cross_entropy_with_logits, or run the loss under autocast(enabled=False)."
    )


def _is_cast(value: Any) -> bool:
    """Return True if autocast changes the dtype of a value."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _widest_dtype(arguments: Any) -> torch.dtype:
    dtypes = {leaf.dtype for leaf in pytree.tree_leaves(arguments) if _is_cast(leaf)}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")
