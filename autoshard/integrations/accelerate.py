"""`AutoshardAccelerator`: training loops for Hugging Face accelerate with a parallelised module.

The module synchronises itself: it is not wrapped, and its loss is that of the whole batch on every rank. accelerate
handles the data, the optimizer, the schedulers and the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from autoshard.api import full_state_dict
from autoshard.errors import InputError, PlanError
from autoshard.runtime.data_loader import BatchPart
from autoshard.runtime.module_runtime import RUNTIME, Runtime
from autoshard.runtime.rank_agreement import from_first_rank
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from autoshard.specs.data_axes import check_data_axes, row_placements

try:
    from accelerate import Accelerator, DataLoaderConfiguration
except ImportError as error:
    raise ImportError(
        "autoshard.integrations.accelerate needs the package accelerate: pip install 'autoshard[accelerate]'."
    ) from error

TRIED = "accelerate 1.15"

# Attributes of `Accelerator` that have no public name.
_LISTS = ("_models", "_optimizers")

# The folder of a checkpoint for shards of `torch.distributed.checkpoint`.
SHARDS = "autoshard"


class AutoshardAccelerator(Accelerator):
    """An `Accelerator` for a parallelised module.

    `prepare` does not change the module. Data loaders yield the same batches on all ranks, or each rank's own rows
    along `data_axes`; `num_processes` is the number of these parts of the batch, and `process_index` the index of this
    rank's. `gather` and `gather_for_metrics` concatenate the parts. A scheduler makes one step per optimizer step.
    `get_state_dict(model)` returns whole CPU tensors on the first rank; `save_state` and `load_state` save and load on
    any mesh.

    Args:
        mesh: the mesh of the module.
        data_axes: names of the mesh axes along which every rank loads its own rows; for a module parallelised with
            `inputs="local"`. By default every rank loads the whole batch.
        **keywords: the keywords of `Accelerator`, except precisions, compilation and other ways of sharding, which
            `autoshard.parallelize` decides.

    Raises:
        MeshError: the mesh has no such axis.
        PlanError: a keyword belongs to `autoshard.parallelize`.
    """

    _models: list[nn.Module]
    _optimizers: list[Optimizer]

    def __init__(self, mesh: DeviceMesh, data_axes: Sequence[str] = (), **keywords: Any) -> None:
        _check_keywords(keywords)
        self.mesh = mesh
        self._shape = MeshShape.of(mesh)
        self._data_axes = check_data_axes(self._shape, data_axes)
        self._part = BatchPart.of(mesh, self._data_axes)
        config = keywords.pop("dataloader_config", None) or DataLoaderConfiguration()
        if config.dispatch_batches:
            raise PlanError(
                "dispatch_batches=True sends every process other rows of a batch, and the ranks of a mesh share rows: "
                "leave it out, every rank reads its rows itself."
            )
        # All ranks know the seed of the order of rows.
        config = dataclasses.replace(config, dispatch_batches=False, use_seedable_sampler=True)
        super().__init__(mixed_precision="no", dynamo_backend="no", dataloader_config=config, **keywords)
        if not all(hasattr(self, name) for name in _LISTS):
            raise ImportError(f"this version of accelerate keeps other attributes than {TRIED}, the one tried here.")

    @property
    def num_processes(self) -> int:
        """The number of ranks with different rows."""
        return self._part.count

    @property
    def process_index(self) -> int:
        """The index of this rank's rows, in the order of `Shard(0)`."""
        return self._part.index

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Register a parallelised module without changing it; raise an `InputError` for any other module."""
        check_parallelised(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context in which backwards reduce no gradients, if the module's plan accounts for the sums (`accumulate=`).

        Otherwise every backward reduces: sums might exceed the plan's memory limit. `accumulate` uses it, too.
        """
        with check_parallelised(model).counted_no_sync():
            yield

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Wrap an optimizer as accelerate does; its state stays with its parameters."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler so that it makes one step per optimizer step."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **keywords: Any) -> DataLoader:
        """Return a loader of equal batches on all ranks, or of this rank's rows; all ranks call it together."""
        config = self.dataloader_config
        seed = config.data_seed
        if seed is None:
            config.data_seed = int(from_first_rank(self.mesh, lambda: str(torch.initial_seed())))
        try:
            return super().prepare_data_loader(data_loader, *args, **keywords)
        finally:
            config.data_seed = seed

    def gather(self, tensor: Any) -> Any:
        """Concatenate all ranks' rows along dim 0, in every tensor of a nest; numbers become 1-d tensors."""
        return pytree.tree_map_only(Tensor, self._gather_rows, tensor)

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        tensor = gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        rows = tensor if tensor.ndim else tensor[None]
        if self.num_processes == 1:
            return rows
        placements = row_placements(self._shape, self._data_axes)
        return gather_full_tensor(DTensor.from_local(rows.contiguous(), self.mesh, placements, run_check=False))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Concatenate all ranks' rows without those that pad the last batch; raise an `InputError` for objects."""
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(input_data)):
            raise InputError(
                "gather_for_metrics gathers tensors: the ranks of a mesh share rows, and objects do not tell which."
            )
        return super().gather_for_metrics(input_data)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of an output of the module as a plain tensor; all ranks call it together."""
        whole = gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        return whole.chunk(self.num_processes)[self.process_index] if whole.ndim else whole

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the module's whole tensors on the CPU of the first rank; see `autoshard.full_state_dict`."""
        return full_state_dict(model)

    def save_state(self, output_dir: Any = None, *args: Any, **keywords: Any) -> Any:
        """Save what was prepared as accelerate does, except that all ranks save shards of models and optimizers.

        Returns:
            The folder, which contains the folder `autoshard` of `torch.distributed.checkpoint`.
        """
        with self._sharded_set_aside():
            location = super().save_state(output_dir, *args, **keywords)
        models, optimizers = self._shards()
        save_distributed(models | optimizers, checkpoint_id=Path(location, SHARDS))
        return location

    def load_state(self, input_dir: Any = None, *args: Any, **keywords: Any) -> Any:
        """Load a folder of `save_state`, on this mesh or another; `input_dir` is the folder that it returned."""
        if input_dir is None:
            raise InputError("load_state(None): pass the folder that save_state returned.")
        with self._sharded_set_aside():
            result = super().load_state(input_dir, *args, **keywords)
        models, optimizers = self._shards()
        # Models are loaded in place: their states refer to their own tensors.
        load_distributed(models | optimizers, checkpoint_id=Path(input_dir, SHARDS))
        for optimizer, state in zip(self._optimizers, optimizers.values(), strict=True):
            set_optimizer_state_dict(_model_of(optimizer, self._models), unwrap_optimizer(optimizer), state)
        return result

    @contextlib.contextmanager
    def _sharded_set_aside(self) -> Iterator[None]:
        """Hide models and optimizers from the base class, which would treat a rank's shards as whole tensors."""
        models, self._models = self._models, []
        optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _shards(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of the models, and those of their optimizers."""
        models = {f"model_{number}": model.state_dict() for number, model in enumerate(self._models)}
        optimizers = {
            f"optimizer_{number}": get_optimizer_state_dict(
                _model_of(optimizer, self._models), unwrap_optimizer(optimizer)
            )
            for number, optimizer in enumerate(self._optimizers)
        }
        return models, optimizers


def _check_keywords(keywords: dict[str, Any]) -> None:
    remedies = {
        "mixed_precision": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        "dynamo_backend": "compile=True",
        "dynamo_plugin": "compile=True",
        "fsdp_plugin": "the mesh",
        "deepspeed_plugin": "the mesh",
        "megatron_lm_plugin": "the mesh",
        "parallelism_config": "the mesh",
    }
    for name, remedy in remedies.items():
        if keywords.pop(name, None) not in (None, "no"):
            raise PlanError(f"{name} is not for AutoshardAccelerator: pass {remedy} to autoshard.parallelize instead.")


def check_parallelised(model: nn.Module) -> Runtime:
    """Return the runtime of a parallelised module; raise an `InputError` for any other module."""
    runtime = model.__dict__.get(RUNTIME)
    if not isinstance(runtime, Runtime):
        raise InputError(
            f"{type(model).__name__} is not parallelised: call autoshard.parallelize(model, mesh, ...) first, without "
            "a pipeline axis. (Wrap the module, as peft does, before that.)"
        )
    return runtime


def data_axes_of(runtime: Runtime) -> tuple[str, ...]:
    """Return the names of the mesh axes along which calls of a module pass different rows."""
    return runtime.data_axes if runtime.inputs == "local" else ()


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper, or an optimizer without a wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _model_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model that an optimizer trains."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if trained <= {id(parameter) for parameter in model.parameters()}:
            return model
    raise InputError(
        "save_state and load_state need the model of every optimizer: prepare it, too, and give an optimizer the "
        "parameters that one model has after autoshard.parallelize."
    )
