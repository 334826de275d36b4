"""The strategy of Lightning's Trainer, without its base class: that is `lightning`'s or `pytorch_lightning`'s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from autoshard.errors import InputError, MeshError, warn_caller
from autoshard.integrations.lightning_strategies.checkpoints import load_whole_optimizer, read_whole
from autoshard.integrations.lightning_strategies.layout import (
    Example,
    Layout,
    Mesh,
    check_all_placed,
    no_backward_sync,
    parallelized_mesh,
)
from autoshard.names import suggestion
from autoshard.options import OptionKeywords
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.checkpoint import checkpointable

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as Base
else:
    Base = object

_LIGHTNING = ("lightning", "pytorch_lightning")


class TrainerStrategy(Base):
    """Trains a LightningModule on any mesh, with the numbers of one device.

    The strategy parallelises the LightningModule's attribute `model` if that has all its trained parameters, or else
    the LightningModule itself, whose `forward` must then contain all uses of them. It does so before
    `configure_optimizers`, and after `configure_model` if there is one. A LightningModule that calls
    `autoshard.parallelize` in its own `configure_model`, on `self.device_mesh`, is not changed.

    With `inputs="global"` (the default) every rank loads the same batches, with the data loader's batch size. With
    `inputs="local"` the ranks along `data_axes` load different ones. A loss returned by `forward` is that of the global
    batch. To compute the loss outside, from this rank's rows, pass `outputs="local"`: gradients are then those of the
    mean of the ranks' losses, as in `DistributedDataParallel`.

    Args:
        mesh: the sizes of the axes by name, such as `{"dp": 2, "tp": 4}`; a `DeviceMesh` of all ranks; or `"auto"`: the
            best mesh that `autoshard.search` finds. It is the LightningModule's `device_mesh`.
        example: the arguments of a call of the parallelised module, with tensors of global shape: keyword arguments as
            a mapping, positional ones as a tuple or list, or one tensor. By default the module's `example_input_array`.
        module: the name of the attribute to parallelise; `""` for the LightningModule itself.
        plan: apply this plan instead of making one.
        save_distributed_checkpoint: True for a folder with the shards of every rank; False for one file with whole
            tensors, which `load_from_checkpoint` reads on one device. Both can be resumed on any mesh.
        process_group_backend, timeout: as for `ModelParallelStrategy`.
        **options: the fields of `autoshard.Options`. With `precision="bf16-mixed"`, the default of `mp_policy` is
            bfloat16, with gradients reduced in float32.

    Raises:
        AutoshardError: an argument is not valid; the message names it.
        TypeError: there is no option of that name; the message names the close ones.
    """

    def __init__(
        self,
        mesh: Mesh = "auto",
        example: Example | None = None,
        *,
        module: str | None = None,
        plan: ShardingPlan | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **options: Unpack[OptionKeywords],
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._layout = Layout(mesh, example, plan, options)
        self._module_name = module
        # A module that was planned only for evaluation.
        self._evaluated: nn.Module | None = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh.

        Raises:
            MeshError: processes have not started, or the mesh is `"auto"` and there is no plan yet.
        """
        if self._layout.device_mesh is None:
            raise MeshError(
                'the strategy has no mesh before processes start; with mesh="auto", before the model is set up, which '
                "follows configure_model."
            )
        return self._layout.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The part of the data set that this rank loads."""
        return dict(self._layout.sampler_arguments())

    def setup_environment(self) -> None:
        """Start the process group and make the mesh."""
        super().setup_environment()
        self._layout.make_mesh(self.root_device.type, self.world_size)
        self._publish_mesh()

    def setup(self, trainer: Any) -> None:
        """Parallelise the module, and make its optimizers.

        Raises:
            InputError: there is no example call, or a trained parameter is outside the module.
            MeshError: the module was parallelised on another mesh.
            AutoshardError: as for `autoshard.parallelize`.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == "fit"
        self._parallelize(fits)
        self.model_to_device()
        self.barrier()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _parallelize(self, fits: bool) -> None:
        root = self.lightning_module
        assert root is not None
        mesh = parallelized_mesh(root)
        if mesh is not None:
            self._layout.adopt_mesh(mesh)
            if fits and self._evaluated is root:
                warn_caller(
                    "the module was planned for evaluation, which came first, and is now trained under these "
                    "placements. For a plan of the training step, call fit first, or pass plan=autoshard.plan(...)."
                )
        else:
            self.model = self.precision_plugin.convert_module(root)
            name = self._name_of_module(root)
            module = root.get_submodule(name)
            with self.precision_plugin.forward_context(), _mode(module, train=fits):
                self._layout.parallelize(module, self.root_device, self.precision_plugin)
            self._evaluated = None if fits else root
            if fits:
                check_all_placed(root, name)
        self._publish_mesh()

    def _name_of_module(self, root: nn.Module) -> str:
        """Return the path of the module to parallelise."""
        if self._module_name is not None:
            try:
                root.get_submodule(self._module_name)
            except AttributeError as error:
                names = [name for name, _ in root.named_modules() if name]
                raise InputError(
                    f"module={self._module_name!r}: {type(root).__name__} has no such module. "
                    f"{suggestion(self._module_name, names)}"
                ) from error
            return self._module_name
        model = getattr(root, "model", None)
        trained = [name for name, parameter in root.named_parameters() if parameter.requires_grad]
        if isinstance(model, nn.Module) and all(name.startswith("model.") for name in trained):
            return "model"
        if type(root).forward.__module__.partition(".")[0] in _LIGHTNING:
            others = [name for name in trained if not name.startswith("model.")]
            raise InputError(
                f"{type(root).__name__} has no forward, and no attribute `model` with all its trained parameters "
                f"({', '.join(others[:3])} are outside): autoshard parallelises one module. Pass its name as "
                'module="...", or parallelise several in configure_model, by autoshard.parallelize(module, '
                "self.device_mesh, ...)."
            )
        return ""

    def _publish_mesh(self) -> None:
        """Set the `device_mesh` of the LightningModule."""
        root: Any = self.lightning_module
        if not hasattr(root, "_device_mesh"):
            raise InputError(
                "this release of Lightning keeps the mesh of a LightningModule in an unknown place; autoshard was "
                "tried with 2.6.6."
            )
        root._device_mesh = self._layout.device_mesh

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context of backwards whose gradients are accumulated, as `accumulate_grad_batches` requests."""
        root = self.lightning_module
        assert root is not None
        with no_backward_sync(root):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module; whole tensors, on rank 0, for a checkpoint in one file."""
        return checkpointable(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer; whole tensors, on rank 0, for a checkpoint in one file."""
        return checkpointable(super().optimizer_state(optimizer))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any mesh or of one device into the module and its optimizers.

        Args:
            checkpoint_path: a folder with shards, or a file with whole tensors.
            weights_only: as for `torch.load`.

        Returns:
            The other contents.

        Raises:
            InputError: training is resumed from a file without optimizer states, or with those of other optimizers.
        """
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_file():
            return super().load_checkpoint(path, weights_only=weights_only)
        checkpoint = read_whole(path, weights_only)
        root = self.lightning_module
        assert root is not None
        root.load_state_dict(checkpoint.pop("state_dict"), strict=root.strict_loading)
        states = checkpoint.get("optimizer_states", [])
        if self.optimizers and len(states) != len(self.optimizers):
            raise InputError(
                f"{path} has the states of {len(states)} optimizers, and the module has {len(self.optimizers)}: to "
                "start from its weights alone, load them in configure_model, and pass no ckpt_path to fit."
            )
        for optimizer, state in zip(self.optimizers, states, strict=False):
            load_whole_optimizer(root, optimizer, state)
        return checkpoint


@contextmanager
def _mode(module: nn.Module, *, train: bool) -> Iterator[None]:
    """Context in which a module is in training mode, or in evaluation mode."""
    if train:
        yield
        return
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
