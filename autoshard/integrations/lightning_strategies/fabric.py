"""The strategy of Lightning Fabric, without its base class: that is `lightning`'s or `lightning_fabric`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from autoshard.errors import InputError, MeshError
from autoshard.integrations.lightning_strategies.checkpoints import load_whole_optimizer, read_whole, save_sharded
from autoshard.integrations.lightning_strategies.layout import (
    Example,
    Layout,
    Mesh,
    check_all_placed,
    no_backward_sync,
    parallelized_mesh,
)
from autoshard.options import OptionKeywords
from autoshard.plans.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as Base
else:
    Base = object


class _BackwardSync:
    """The object that `fabric.no_backward_sync(module)` asks for a context."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_backward_sync(module, enabled)


class FabricStrategy(Base):
    """Sets up modules on any mesh, with the numbers of one device.

    `fabric.setup(module, optimizer)` parallelises the module in place, and replaces its parameters in the optimizer. A
    module that is already parallelised is not changed.

    Args:
        mesh, plan, save_distributed_checkpoint, process_group_backend, timeout, **options: as for the strategy of the
            Trainer.
        example: the arguments of a call of the module, with tensors of global shape: keyword arguments as a mapping,
            positional ones as a tuple or list, or one tensor. By default the module's `example_input_array`.

    Raises:
        AutoshardError: an argument is not valid; the message names it.
        TypeError: there is no option of that name; the message names the close ones.
    """

    def __init__(
        self,
        mesh: Mesh = "auto",
        example: Example | None = None,
        *,
        plan: ShardingPlan | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **options: Unpack[OptionKeywords],
    ) -> None:
        super().__init__(
            parallelize_fn=self._parallelize,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._backward_sync_control: Any = _BackwardSync()
        self._layout = Layout(mesh, example, plan, options)
        self._saves_shards = save_distributed_checkpoint

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh.

        Raises:
            MeshError: processes have not started, or the mesh is `"auto"` and no module is set up.
        """
        if self._layout.device_mesh is None:
            raise MeshError(
                'the strategy has no mesh before fabric.launch(); with mesh="auto", before fabric.setup(module).'
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

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Parallelise a module in place, and return it.

        Raises:
            InputError: there is no example call.
            MeshError: the module was parallelised on another mesh.
            AutoshardError: as for `autoshard.parallelize`.
        """
        mesh = parallelized_mesh(module)
        if mesh is not None:
            self._layout.adopt_mesh(mesh)
            return module
        return self._parallelize(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Parallelise a module in place, and replace its parameters in its optimizers."""
        before = {parameter: name for name, parameter in module.named_parameters()}
        module = self.setup_module(module)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # In place, since L-BFGS keeps the list.
                group["params"][:] = [
                    module.get_parameter(before[parameter]) if parameter in before else parameter
                    for parameter in group["params"]
                ]
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def _parallelize(self, module: nn.Module, device_mesh: DeviceMesh | None = None) -> nn.Module:
        with self.precision.forward_context():
            self._layout.parallelize(module, self.root_device, self.precision)
        check_all_placed(module, type(module).__name__)
        return module

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a module, its optimizers and other values.

        Args:
            path: the folder, or the file.
            state: one parallelised module, optimizers, and other values.
            storage_options: not supported.
            filter: for files with whole tensors, name -> a predicate of the keys and values to save.

        Raises:
            InputError: there is no parallelised module, or more than one.
            TypeError, NotImplementedError: `storage_options`, or `filter` for a folder.
        """
        if not self._saves_shards or storage_options is not None or filter is not None:
            super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
            return
        folder = Path(self.broadcast(path))
        save_sharded(folder, state, _only_module(state)[1], self.is_global_zero)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of any mesh or of one device into modules and optimizers, in place.

        Args:
            path: a folder with shards, or a file with whole tensors.
            state: a module, whose state dict is the whole file; or a mapping with one parallelised module, optimizers,
                and values, which are replaced.
            strict: True if missing names are an error.
            weights_only: as for `torch.load`.

        Returns:
            The other contents.

        Raises:
            InputError: there is no parallelised module, or more than one; or a name is missing.
            ValueError, NotImplementedError: `state` is empty, or an optimizer.
        """
        source = Path(self.broadcast(path))
        if not source.is_file() or not state or isinstance(state, Optimizer):
            return super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        checkpoint = read_whole(source, weights_only)
        if isinstance(state, nn.Module):
            state.load_state_dict(checkpoint, strict=strict)
            return {}
        missing = [name for name in state if name not in checkpoint]
        if missing and strict:
            raise InputError(f"{source} has no {missing[0]!r}; it has {', '.join(checkpoint)}. Or pass strict=False.")
        _, module = _only_module(state)
        for name, value in state.items():
            if name not in checkpoint:
                continue
            if isinstance(value, nn.Module):
                value.load_state_dict(checkpoint.pop(name), strict=strict)
            elif isinstance(value, Optimizer):
                load_whole_optimizer(module, value, checkpoint.pop(name))
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(checkpoint.pop(name))
            else:
                state[name] = checkpoint.pop(name)
        return checkpoint


def _only_module(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """Return the parallelised module of a state, with its name."""
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    placed = [(name, module) for name, module in modules.items() if parallelized_mesh(module) is not None]
    if len(placed) != 1:
        raise InputError(
            f"a checkpoint is of one module that fabric.setup returned, and {len(placed)} of "
            f"{', '.join(state)} are such modules."
        )
    return placed[0]
