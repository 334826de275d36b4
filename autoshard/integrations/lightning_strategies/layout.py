"""The mesh, the example call and the options of a Lightning strategy, and the module parallelised with them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.api import materialize, parallelize
from autoshard.errors import InputError, MeshError, PipelineError, PlanError
from autoshard.options import Options, Pipeline, collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.data_loader import BatchPart
from autoshard.runtime.module_runtime import RUNTIME, Runtime
from autoshard.search.search import auto_mesh
from autoshard.specs.axes import MeshShape

Mesh = DeviceMesh | Mapping[str, int] | Literal["auto"]
Example = Tensor | Sequence[Any] | Mapping[str, Any]

_MIXED = {"bf16-mixed": torch.bfloat16}
"""Lightning's name of a precision -> the dtype to which parameters are cast before they are gathered."""


class Layout:
    """The mesh and the options with which a strategy parallelises one model.

    Args:
        mesh: the sizes of the axes by name, a `DeviceMesh` of all ranks, or `"auto"`: the best mesh that
            `autoshard.search` finds, without pipelines.
        example: a call of the module, with tensors of global shape (see `Options.example_inputs`): keyword arguments as
            a mapping, positional ones as a tuple or list, or one tensor; None to use the module's
            `example_input_array`.
        plan: a plan to apply, instead of making one.
        options: the fields of `autoshard.Options`.

    Attributes:
        options: the checked options.

    Raises:
        MeshError, PipelineError, PlanError, InputError, TypeError: an argument is not valid; the message names it.
    """

    def __init__(
        self,
        mesh: Mesh,
        example: Example | None,
        plan: ShardingPlan | None,
        options: Mapping[str, Any],
    ) -> None:
        if not isinstance(mesh, (DeviceMesh, Mapping)) and mesh != "auto":
            raise MeshError(f'mesh={mesh!r}: pass sizes such as {{"dp": 2, "tp": 4}}, a DeviceMesh, or "auto".')
        if mesh == "auto" and plan is not None:
            raise PlanError('mesh="auto" and a plan: a plan is for one mesh, pass that.')
        self._mesh = mesh
        self._example = example
        self._plan = plan
        self._keywords = dict(options)
        self.options: Options = collect_options("parallelize", options)
        self._device_mesh: DeviceMesh | None = None
        if not isinstance(mesh, str):
            names = tuple(mesh) if isinstance(mesh, Mapping) else mesh.mesh_dim_names
            _refuse_pipeline(names or (), self.options.pipeline)
        if self.options.inputs == "local" and isinstance(mesh, str):
            raise MeshError(
                'mesh="auto" and inputs="local": the axes that the batch is split over are not known before the '
                'search. Pass the sizes of a mesh, or inputs="global".'
            )

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh; None before it is made, with `"auto"` before there is a plan."""
        return self._device_mesh

    def make_mesh(self, device_type: str, world_size: int) -> None:
        """Make the mesh of all ranks from its sizes, once; for `"auto"`, `parallelize` makes it.

        Raises:
            MeshError: the number of ranks is wrong, an axis in `data_axes` does not exist, or no data axis is found.
        """
        mesh = self._mesh
        if self._device_mesh is not None or isinstance(mesh, str):
            return
        size = mesh.size() if isinstance(mesh, DeviceMesh) else math.prod(mesh.values())
        if size != world_size:
            raise MeshError(
                f"the mesh {_describe(mesh)} has {size} devices, and the strategy runs on {world_size} processes: set "
                "devices and num_nodes so that their product is the size of the mesh, or change the mesh."
            )
        if isinstance(mesh, Mapping):
            mesh = init_device_mesh(device_type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        self._device_mesh = mesh
        self._data_axes(mesh)

    def sampler_arguments(self) -> dict[str, int]:
        """Return the number of parts of the data set, and the index of this rank's part.

        Raises:
            MeshError: the mesh has not been made.
        """
        if self.options.inputs == "global":
            return {"num_replicas": 1, "rank": 0}
        mesh = self._device_mesh
        if mesh is None:
            raise MeshError("the parts of the data set are known from the mesh, which is made when processes start.")
        part = BatchPart.of(mesh, self._data_axes(mesh))
        return {"num_replicas": part.count, "rank": part.index}

    def parallelize(self, module: nn.Module, device: torch.device, precision: Any) -> None:
        """Parallelise a module in place, and materialize it if it is on the meta device.

        Args:
            module: the module.
            device: the device of this rank.
            precision: Lightning's precision plugin. `bf16-mixed` casts parameters to bfloat16 before they are gathered,
                and reduces gradients in float32, unless the options have an `mp_policy`.

        Raises:
            InputError: there is no example call.
            AutoshardError: as for `autoshard.parallelize`.
        """
        args, kwargs = self._example_call(module, device, precision)
        keywords, plan = dict(self._keywords), self._plan
        dtype = _MIXED.get(str(getattr(precision, "precision", "")))
        if dtype is not None and self.options.mp_policy is None:
            # Autocast casts the inputs of operators that benefit, and leaves others, such as labels, unchanged.
            keywords["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        if self._device_mesh is None:
            target = Target.of(collect_options("parallelize", keywords), device.type)
            agreed = auto_mesh(BatchCall(module, args, kwargs), target, pipelines=False)
            assert isinstance(agreed.plan, ShardingPlan), "the search was without pipelines"
            self._device_mesh, plan = agreed.device_mesh, agreed.plan
        parallelize(module, self._device_mesh, args, kwargs, plan=plan, **keywords)
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            materialize(module, device)

    def adopt_mesh(self, mesh: DeviceMesh) -> None:
        """Use the mesh of a module that is already parallelised.

        Raises:
            MeshError: its axes differ from the strategy's.
        """
        if self._device_mesh is not None and _describe(mesh) != _describe(self._device_mesh):
            raise MeshError(
                f"the module was parallelised on the mesh {_describe(mesh)}, and this strategy has the mesh "
                f"{_describe(self._device_mesh)}: pass the same mesh, or a new module."
            )
        self._device_mesh = mesh

    def _example_call(
        self, module: nn.Module, device: torch.device, precision: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        example = self._example
        if example is None:
            example = getattr(module, "example_input_array", None)
        if example is None:
            raise InputError(
                f"the strategy has no example call of {type(module).__name__}, and a plan is made for one: pass "
                "example=..., the arguments of a call with the global batch (a mapping of keyword arguments, a tuple "
                "of positional ones, or a tensor), or set example_input_array in the module."
            )

        def to_device(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_meta else tensor.to(device)

        example = precision.convert_input(pytree.tree_map_only(Tensor, to_device, example))
        if isinstance(example, Mapping):
            return (), dict(example)
        return ((example,) if isinstance(example, Tensor) else tuple(example)), {}

    def _data_axes(self, mesh: DeviceMesh) -> tuple[str, ...]:
        """Return the names of the axes along which ranks load different rows; none with global inputs."""
        target = Target.of(self.options, mesh.device_type).on_mesh(MeshShape.of(mesh), self._plan)
        return target.data_axes if target.inputs == "local" else ()


def parallelized_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh of a module's `DTensor` parameters; None if it has none."""
    return next((value.device_mesh for value in module.parameters() if isinstance(value, DTensor)), None)


@contextlib.contextmanager
def no_backward_sync(root: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Context in which backwards of parallelised modules in `root` reduce no gradients, if their plans allow it.

    Args:
        root: the module, or one that contains it.
        enabled: False to change nothing.
    """
    with contextlib.ExitStack() as stack:
        for part in root.modules():
            runtime = part.__dict__.get(RUNTIME)
            if enabled and isinstance(runtime, Runtime):
                stack.enter_context(runtime.counted_no_sync())
        yield


def check_all_placed(root: nn.Module, name: str) -> None:
    """Raise an `InputError` if a trained parameter is outside the parallelised module `name`."""
    for parameter_name, parameter in root.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise InputError(
                f"{parameter_name} is trained and not part of {name!r}, which is parallelised: clipping and "
                "optimizers take no mixture of plain parameters and DTensors. Move it into that module, have forward "
                'of the LightningModule use it and pass module="", or freeze it.'
            )


def _refuse_pipeline(names: Sequence[str], pipeline: Pipeline) -> None:
    axis = pipeline.axis or "pp"
    if axis in names:
        raise PipelineError(
            f"the axis {axis!r} is a pipeline, whose train_step runs forward and backward of all microbatches, and "
            "Lightning calls them one by one. Use a mesh without it, or train without Lightning."
        )


def _describe(mesh: DeviceMesh | Mapping[str, int]) -> str:
    if isinstance(mesh, Mapping):
        return ", ".join(f"{name}={size}" for name, size in mesh.items())
    names = mesh.mesh_dim_names or [str(index) for index in range(mesh.ndim)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
