"""The `parallelize_fn` of a torchtitan `ModelSpec`: plans and shards a decoder."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.mtp import MTPDecoder

import autoshard
from autoshard.errors import PlanError
from autoshard.integrations.torchtitan.experts import prepare_experts
from autoshard.options import OptionKeywords
from autoshard.options.options import Recompute
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.materialize import initialize_shards

DATA_AXES = ("dp_replicate", "dp_shard", "fsdp")
"""Axes over which ranks read different batches; `spmd_backend="partial_dtensor"` calls the second one `fsdp`."""

TENSOR_AXIS = "tp"

_DECIDED = (
    *("inputs", "outputs", "data_axes", "example_inputs", "input_placements", "output_placements"),
    *("dynamic", "pipeline"),
)
"""Options that the trainer's loop decides."""


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
    plan: ShardingPlan | None = None,
    **options: Unpack[OptionKeywords],
) -> nn.Module:
    """Plan a torchtitan decoder for its trainer, and shard it in place: the `parallelize_fn` of a `ModelSpec`.

    The model is on the meta device; the trainer allocates and initialises it afterwards (`to_empty`, `init_weights`),
    with the numbers of one device. It takes the rank's batch of tokens, with positions, and returns the rank's logits:
    those of its batch, and with `spmd_backend="spmd_types"` of its part of the vocabulary, for the trainer's loss over
    a sharded vocabulary.

    Args:
        model: a `Decoder`, such as those of llama3, deepseek_v3 and qwen3.
        parallel_dims: the degrees of the job, whose meshes give the mesh of the plan.
        training: sizes of the batch, precisions.
        parallelism: not used; `parallel_dims` has its degrees.
        compile_config: with `enable` and `"model"` among the components, local programs are compiled by inductor.
        ac_config: full activation checkpointing recomputes every layer, None recomputes none, and any other value as
            many as the memory limit requires.
        dump_folder: not used.
        plan: apply this plan instead of making one.
        **options: the fields of `autoshard.Options`, except those for inputs, outputs and pipelines. They override
            values derived from the other arguments.

    Returns:
        The model, of the same class.

    Raises:
        PlanError: a setting of the job is not supported; the message says what to set.
        TypeError: there is no option of that name, or the trainer decides it.
        BudgetError, CaptureError, HintError, InputError: as for `autoshard.parallelize`.
    """
    decided = sorted(set(options) & set(_DECIDED))
    if decided:
        raise TypeError(f"{decided[0]}: the trainer of torchtitan decides this option. Leave it out.")
    _check_job(parallel_dims, training, compile_config)
    _check_model(model)
    mesh = device_mesh(parallel_dims)
    prepare_experts(model)
    _prepare_calls(model)
    rows = {name: Shard(0) for name in mesh.mesh_dim_names or () if name != TENSOR_AXIS}
    batch = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    example = torch.empty((batch, training.seq_len), dtype=torch.int64, device="meta")
    words = {TENSOR_AXIS: Shard(2)} if parallel_dims.spmd_backend == "spmd_types" and parallel_dims.tp > 1 else {}
    settings: OptionKeywords = {
        "inputs": "local",
        "data_axes": tuple(rows),
        # As DTensors, whose gradients are not divided: the trainer divides its loss by the tokens of all ranks.
        "output_placements": {"output*": {**rows, **words}},
        "mp_policy": _precision(training),
        "recompute": _recompute(ac_config),
        "compile": compile_config.enable and "model" in compile_config.components,
    }
    settings.update(options)
    with warnings.catch_warnings():
        # The warning comes from the routers, whose gates are in float32 without autocast.
        warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
        autoshard.parallelize(model, mesh, (example,), {"positions": example}, plan=plan, **settings)
    model.register_forward_pre_hook(_check_call, with_kwargs=True)
    model.register_forward_hook(_to_local)
    return model


def _check_job(parallel_dims: ParallelDims, training: TrainingConfig, compile_config: CompileConfig) -> None:
    """Raise a `PlanError` if a setting of the job is not supported."""
    wrong = [
        ("pipeline_parallel_degree", parallel_dims.pp, "give these devices to the other axes"),
        ("context_parallel_degree", parallel_dims.cp, "a plan splits sequences over any axis"),
        ("expert_parallel_degree", parallel_dims.ep, "a plan sends tokens to experts over any axis"),
    ]
    for name, degree, advice in wrong:
        if degree > 1:
            raise PlanError(f"parallelism.{name}={degree}: set it to 1; {advice}.")
    if parallel_dims.spmd_backend == "full_dtensor":
        raise PlanError(
            "parallelism.spmd_backend='full_dtensor' passes DTensors to the model and the loss, which take the rank's "
            "own tensors here: set it to 'spmd_types'."
        )
    if training.enable_cpu_offload:
        raise PlanError("training.enable_cpu_offload: nothing is offloaded to the host. Set memory_limit instead.")
    if not training.disable_cuda_graphs:
        raise PlanError(
            "training.disable_cuda_graphs=False: ranks compare the sizes of every call on the host, which a CUDA graph "
            "cannot hold. Set --training.disable_cuda_graphs."
        )
    if compile_config.enable_async_tensor_parallel:
        raise PlanError(
            "compile.enable_async_tensor_parallel is for torchtitan's own tensor parallelism: leave it out."
        )
    if compile_config.enable and "model" in compile_config.components and compile_config.backend != "inductor":
        raise PlanError(f"compile.backend={compile_config.backend!r}: local programs are compiled by 'inductor' alone.")


def _check_model(model: nn.Module) -> None:
    """Raise a `PlanError` for a model that is not a decoder of tokens, or has attention that cannot be captured."""
    if not isinstance(model, Decoder) or type(model).forward not in (Decoder.forward, MTPDecoder.forward):
        raise PlanError(
            f"{type(model).__name__} is called in its own way. Decoders of torchtitan that are called with tokens and "
            "positions are supported, such as those of llama3, deepseek_v3 and qwen3."
        )
    for name, part in model.named_modules():
        if isinstance(part, VarlenAttention):
            raise PlanError(
                f"{name} is VarlenAttention, whose sizes depend on the documents in a batch: no one graph holds it. "
                "Build the model with attn_backend='flex'."
            )


def device_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """Return the mesh of all axes larger than 1, the data axes first; with one axis if there are none."""
    data = [name for name in DATA_AXES if _size(parallel_dims, name) is not None]
    names = [name for name in (*data, TENSOR_AXIS) if (_size(parallel_dims, name) or 1) > 1]
    return parallel_dims.get_mesh(names or data[-1:])


def _size(parallel_dims: ParallelDims, name: str) -> int | None:
    """Return the number of devices of an axis; None if the job has no axis of that name."""
    try:
        mesh = parallel_dims.get_optional_mesh(name)
    except ValueError:  # another backend's name
        return None
    return 1 if mesh is None else mesh.size()


def _precision(training: TrainingConfig) -> MixedPrecisionPolicy | None:
    own, computed = (TORCH_DTYPE_MAP[name] for name in (training.dtype, training.mixed_precision_param))
    reduced = TORCH_DTYPE_MAP[training.mixed_precision_reduce]
    if own == computed == reduced:
        return None
    return MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced, cast_forward_inputs=False)


def _recompute(ac_config: ActivationCheckpointing.Config | None) -> Recompute:
    if ac_config is None:
        return "none"
    return "full" if isinstance(ac_config, FullAC.Config) else "auto"


# Attributes of the model itself, which a capture binds to its copy of the model.


def _prepare_calls(model: nn.Module) -> None:
    """Let the model make its own masks, and draw the initial weights of one device."""
    model.forward = functools.partial(_forward, model)
    model.get_attention_masks = functools.partial(_no_masks, model)  # type: ignore[assignment]
    model.init_weights = functools.partial(_init_weights, model)  # type: ignore[assignment]


def _forward(model: Decoder, tokens: Tensor, positions: Tensor | None = None) -> Any:
    """Call the model with masks for its positions: mask functions cannot be inputs of a graph."""
    masks = None
    if positions is not None and any(isinstance(part, FlexAttention) for part in model.modules()):
        masks = type(model).get_attention_masks(model, positions=positions)
    return type(model).forward(model, tokens, positions, masks)


def _no_masks(model: Decoder, positions: Tensor) -> None:
    """Return None to the trainer, which makes masks outside the model."""


def _init_weights(model: Decoder, **kwargs: Any) -> None:
    """Initialise the allocated parameters and buffers as on one device; each rank fills its shards."""
    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor)
    initialize = functools.partial(type(model).init_weights, model, **kwargs)
    initialize_shards(model, parameter.device_mesh, parameter.device, initialize)


def _check_call(model: Decoder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the arguments of a call without masks; raise an error for a call that no plan serves."""
    if model._skip_lm_head:
        raise PlanError(
            "ChunkedLossWrapper calls lm_head outside of the model, whose parameters lie on the mesh. Build the "
            "configuration by autoshard.integrations.torchtitan.with_autoshard, or set config.loss to "
            "config.loss.loss_fn."
        )
    rest = dict(kwargs)
    if rest.pop("attention_masks", None) is not None:
        raise PlanError(
            "attention_masks: a parallelised decoder makes the masks of its positions itself. Leave them out."
        )
    return args, rest


def _to_local(model: nn.Module, args: Any, output: Any) -> Any:
    """Return the rank's parts of the outputs, for the trainer's loss."""
    return pytree.tree_map_only(DTensor, DTensor.to_local, output)
