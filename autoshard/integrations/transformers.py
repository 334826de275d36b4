"""`AutoshardTrainer`: the `Trainer` of Hugging Face transformers for a parallelised model.

The model computes the loss of the whole batch on every rank, so nothing is averaged over ranks. The trainer therefore
differs from its base in these ways: nothing wraps the model; the loaders yield the same batch on all ranks, or
different rows along data axes; whole tensors are written to files for `from_pretrained`; and runs resume from shards
saved by `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from autoshard.api import full_state_dict, load_safetensors, parallelize
from autoshard.errors import InputError, PlanError
from autoshard.options import OptionKeywords, Pipeline
from autoshard.pipeline.run.pipeline_module import resolve_pipeline
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.rank_agreement import on_first_rank
from autoshard.specs.axes import MeshShape

try:
    from accelerate import DataLoaderConfiguration
    from accelerate.utils import GradientAccumulationPlugin
    from transformers import PreTrainedModel, Trainer, TrainingArguments
    from transformers.trainer_utils import has_length

    from autoshard.integrations.accelerate import (
        SHARDS,
        AutoshardAccelerator,
        check_parallelised,
        data_axes_of,
        unwrap_optimizer,
    )
except ImportError as error:
    raise ImportError(
        "autoshard.integrations.transformers needs the packages transformers and accelerate: pip install "
        "'autoshard[transformers]'."
    ) from error

TRIED = "transformers 5.23"

# Methods of `Trainer` without a public name that are overridden or called here.
_METHODS = (
    "_get_dataloader",
    "_issue_warnings_after_load",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_move_model_to_device",
    "_save",
    "_save_optimizer_and_scheduler",
)
if not all(hasattr(Trainer, name) for name in _METHODS):
    raise ImportError(f"this version of transformers has another Trainer than {TRIED}, the one tried here.")

# Axes along which transformers does not count rows: tensor, sequence, context and expert parallelism.
_SHARED_ROWS = ("tp", "sp", "cp", "ep", "tensor", "sequence", "context", "expert", "model")

# The file of a transformers checkpoint.
_SCHEDULER = "scheduler.pt"


class AutoshardTrainer(Trainer):
    """A `Trainer` that trains a model on a mesh with the numbers of one device.

    Pass a model that `autoshard.parallelize` returned; or a plain one and a mesh, and the first batch is used to
    parallelise the model, with `bf16=True` as `mp_policy` and `torch_compile=True` as `compile=True`. A model on the
    meta device is loaded afterwards, by `autoshard.load_safetensors(trainer.model, folder)` or from a checkpoint.

    A batch has `per_device_train_batch_size` rows for every rank, as in transformers, but ranks along axes called `tp`,
    `sp`, `cp` or `ep` share rows. Every rank loads the whole batch, or with `data_axes` its own rows. Losses, metrics
    and predictions are those of the whole batch. `save_model` writes whole tensors; a checkpoint also contains the
    shards of model and optimizer, and can be resumed on any mesh.

    Args:
        model: the model: parallelised, or plain with `mesh`.
        args: the arguments, except those for other ways of sharding or scaling (`fsdp`, `deepspeed`, `fp16`), or that
            depend on the process of a row; these are refused.
        *positional: further arguments of `Trainer`.
        mesh: the mesh for parallelising a plain model; without a pipeline axis.
        data_axes: with `mesh`, names of the axes along which ranks load different rows. For a parallelised model they
            are those along which it takes local inputs.
        example_kwargs: with `mesh`, a call to plan for, with tensors of global shape; by default the first batch.
        plan: with `mesh`, the plan to apply instead of making one.
        options: with `mesh`, the keywords of `autoshard.parallelize`. By default outputs remain sharded
            (`output_placements="planned"`) unless a function outside the model computes the loss, so that logits are
            not gathered; in `compute_loss` of a subclass they are `DTensor`s. If training does not read them,
            `unread_outputs=("logits",)` omits them.
        **keywords: further keywords of `Trainer`.

    Raises:
        InputError: the model is neither parallelised nor given with a mesh, or both.
        PlanError: an argument is refused; the message says what to use instead.
        MeshError: the mesh has no such axis.
        CaptureError, HintError, BudgetError: as for `autoshard.parallelize`.
    """

    accelerator: AutoshardAccelerator
    # Never None when it is used, although the base class allows it.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        mesh: DeviceMesh | None = None,
        data_axes: Sequence[str] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        plan: ShardingPlan | None = None,
        options: OptionKeywords | None = None,
        **keywords: Any,
    ) -> None:
        if model is None:
            raise InputError("AutoshardTrainer needs a model; it takes no model_init, whose models are new ones.")
        _check_one_way(model, mesh, (data_axes, example_kwargs, plan, options))
        self._data_axes: Sequence[str]
        if mesh is None:
            runtime = check_parallelised(model)
            self._mesh, self._data_axes = runtime.device_mesh, data_axes_of(runtime)
        else:
            self._mesh, self._data_axes = mesh, data_axes
            pipeline = (options or {}).get("pipeline", Pipeline())
            if resolve_pipeline(MeshShape.of(mesh), pipeline) is not None:
                raise PlanError("AutoshardTrainer runs no pipelines: give it a mesh without a pipeline axis.")
        if args is not None:
            _check_arguments(args, parallelised=mesh is None, data_axes=self._data_axes)
        # The number of ranks whose rows every rank loads.
        self._loaded_ranks = 1 if self._data_axes else _ranks_with_rows(MeshShape.of(self._mesh))
        self._evaluated_batches = 0
        super().__init__(model, args, *positional, **keywords)
        if self._data_axes and self._has_outer_loss():
            raise PlanError(
                "with data axes the model computes the loss, since each rank has rows of its own: leave out "
                "compute_loss_func and label_smoothing_factor, or data_axes."
            )
        if mesh is not None:
            self._parallelize(mesh, example_kwargs, plan, dict(options or {}))

    def _has_outer_loss(self) -> bool:
        return self.label_smoother is not None or self.compute_loss_func is not None

    def _parallelize(
        self,
        mesh: DeviceMesh,
        example_kwargs: Mapping[str, Any] | None,
        plan: ShardingPlan | None,
        options: dict[str, Any],
    ) -> None:
        """Parallelise the model in place, as the arguments request."""
        args, model = self.args, self.model
        example = self._example() if example_kwargs is None else dict(example_kwargs)
        if args.bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options.setdefault("mp_policy", policy)
        if args.torch_compile:
            options.setdefault("compile", True)
        if not self._has_outer_loss() and "shares" not in options:
            options.setdefault("output_placements", "planned")
        if self._data_axes:
            options = {"inputs": "local", "data_axes": tuple(self._data_axes), **options}
        trains = self.train_dataset is not None
        model.train(trains)
        with torch.set_grad_enabled(trains):
            parallelize(model, mesh, (), example, plan=plan, **options)

    def _example(self) -> dict[str, Any]:
        """Return the first batch of all ranks, as `compute_loss` passes it to the model; keep random states."""
        loader = self.get_eval_dataloader() if self.train_dataset is None else self.get_train_dataloader()
        # A collator may draw from any of these generators.
        states = random.getstate(), np.random.get_state()  # noqa: NPY002
        with torch.random.fork_rng(devices=[]):
            batch = _first_batch(loader)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.args.device), dict(batch))
        batch = {
            name: self.accelerator.gather(value) if isinstance(value, Tensor) and value.ndim else value
            for name, value in batch.items()
        }
        if "labels" in batch and self._has_outer_loss():
            del batch["labels"]
        elif "labels" in batch and self.model_accepts_loss_kwargs:
            batch["num_items_in_batch"] = (batch["labels"] != -100).sum()
        return batch

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which wraps no model."""
        config = cast(Any, self.args.accelerator_config).to_dict()
        accumulation = config.pop("gradient_accumulation_kwargs") or {}
        names = ("split_batches", "dispatch_batches", "even_batches", "non_blocking")
        self.accelerator = AutoshardAccelerator(
            self._mesh,
            self._data_axes,
            dataloader_config=DataLoaderConfiguration(
                **{name: config[name] for name in names}, data_seed=self.args.data_seed
            ),
            # The trainer itself accumulates.
            gradient_accumulation_plugin=GradientAccumulationPlugin(**{**accumulation, "num_steps": 1}),
        )
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, use_gather_object=False)
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do not move the model: `autoshard.parallelize` moves each rank's shards."""

    def get_tp_size(self) -> int:
        """Return the number of ranks by which the base class counts tokens: those along data axes."""
        # The base class divides all ranks' tokens by it, and multiplies losses by `num_processes` over it: by one.
        return self.accelerator.num_processes

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of rows per optimizer step."""
        return self._rows_of_batch(self._train_batch_size) * args.gradient_accumulation_steps

    def _rows_of_batch(self, rows: int) -> int:
        """Return the number of rows of a whole batch, given the rows per rank."""
        return self._loaded_rows(rows) * self.accelerator.num_processes

    def _loaded_rows(self, rows: int) -> int:
        # With `split_batches`, a loader's batch is the whole one.
        return rows if cast(Any, self.args.accelerator_config).split_batches else rows * self._loaded_ranks

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **keywords: Any
    ) -> DataLoader:
        """Return a loader of the rows that a rank loads: `batch_size` for each rank whose rows it loads."""
        loader: DataLoader = super()._get_dataloader(
            dataset, description, self._loaded_rows(batch_size), *args, **keywords
        )
        return loader

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **keywords: Any) -> Any:
        """Evaluate, and count the batches."""
        self._evaluated_batches = len(dataloader) if has_length(dataloader) else 0
        return super().evaluation_loop(dataloader, *args, **keywords)

    def predict(self, test_dataset: Any, *args: Any, **keywords: Any) -> Any:
        """Predict; see `Trainer.predict`."""
        output = super().predict(test_dataset, *args, **keywords)
        self._count_steps(cast(Any, output.metrics))
        return output

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        """Log numbers, including the speed of an evaluation in steps of the mesh."""
        self._count_steps(logs)
        super().log(logs, *args, **keywords)

    def _count_steps(self, metrics: dict[str, float]) -> None:
        """Correct an evaluation's steps per second in place, which the base class divides by all processes."""
        for name in [name for name in metrics if name.endswith("_steps_per_second") and not name.startswith("train_")]:
            seconds = metrics.get(name.removesuffix("_steps_per_second") + "_runtime")
            if seconds and self._evaluated_batches:
                metrics[name] = round(self._evaluated_batches / seconds, 3)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of the whole batch as a plain tensor, and with `return_outputs` the outputs, unchanged."""
        if num_items_in_batch is not None:
            # The count over all ranks, as an integer, which mixed precision does not round.
            count = torch.as_tensor(num_items_in_batch) * self.get_tp_size()
            num_items_in_batch = count.round().long()
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the batch's loss, once per rank whose rows it has, and this rank's predictions and labels."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            # The base class weights it by the rows of one rank.
            loss = loss.repeat(self._loaded_rows(1))
        return loss, pytree.tree_map_only(Tensor, self.accelerator.own_rows, logits), labels

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Gather the whole tensors on all ranks, and write them on the first one."""
        state = _state_to_save(self.model) if state_dict is None else state_dict
        super()._save(output_dir, state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the shards of model and optimizer on all ranks, and the scheduler."""
        state = {"model": self._model_shards(), "optimizer": self._optimizer_shards()}
        save_distributed(state, checkpoint_id=Path(output_dir, SHARDS))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _model_shards(self) -> dict[str, Any]:
        """Return the state to resume from; for a model with adapters, without the frozen parameters."""
        state = self.model.state_dict()
        if not _adapters(self.model):
            return state
        parameters = self.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def _optimizer_shards(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter name; an optimizer without a step yet creates an empty state."""
        return get_optimizer_state_dict(self.model, unwrap_optimizer(self.optimizer))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the model from the shards of this trainer's checkpoint, or from the files of another one."""
        folder = Path(resume_from_checkpoint)
        if (folder / SHARDS).is_dir():
            # In place: the state refers to the model's own tensors.
            load_distributed({"model": self._model_shards()}, checkpoint_id=folder / SHARDS)
        elif _adapters(self.model) or not list(folder.glob("*.safetensors")):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            keys = load_safetensors(self.model, folder, strict=False)
            if keys.missing_keys:
                raise InputError(
                    f"{folder} does not hold {', '.join(keys.missing_keys[:4])}"
                    f"{' and others' if len(keys.missing_keys) > 4 else ''}, under the names that the model has: load "
                    "the model by from_pretrained before autoshard.parallelize, and train without "
                    "resume_from_checkpoint."
                )
            self._issue_warnings_after_load(keys)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer and scheduler from a checkpoint of this trainer; others have no suitable state."""
        if checkpoint is None:
            return
        if not Path(checkpoint, SHARDS).is_dir():
            if Path(checkpoint, "optimizer.pt").is_file():
                raise InputError(
                    f"{checkpoint} has an optimizer of one device or of another trainer, which does not fit shards: "
                    "load the model alone, and train without resume_from_checkpoint."
                )
            return
        state = {"optimizer": self._optimizer_shards()}
        load_distributed(state, checkpoint_id=Path(checkpoint, SHARDS))
        set_optimizer_state_dict(self.model, unwrap_optimizer(self.optimizer), state["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER), weights_only=True))


def save_pretrained(model: nn.Module, folder: str | Path, **keywords: Any) -> None:
    """Save a parallelised model, or its adapters, to files for `from_pretrained`; all ranks call it together.

    Args:
        model: a parallelised `PreTrainedModel` or `PeftModel`.
        folder: the folder of the files, on the machine of the first rank.
        **keywords: keywords of the model's `save_pretrained`, which the first rank calls.

    Raises:
        InputError: the model is not parallelised, or has tensors on the meta device.
    """
    mesh = check_parallelised(model).device_mesh
    state = _state_to_save(model)

    on_first_rank(mesh, lambda: cast(Any, model).save_pretrained(folder, state_dict=state, **keywords))


def _state_to_save(model: nn.Module) -> dict[str, Any]:
    """Return the whole tensors that `save_pretrained` writes: of a `PeftModel`, those of its adapters."""
    if not _adapters(model):
        return full_state_dict(model)
    from peft import get_peft_model_state_dict

    shards = model.state_dict()
    written = {
        id(value)
        for adapter in _adapters(model)
        for value in get_peft_model_state_dict(model, state_dict=shards, adapter_name=adapter).values()
    }
    return full_state_dict(model, names={name for name, value in shards.items() if id(value) in written})


def _adapters(model: nn.Module) -> Mapping[str, Any]:
    """Return the configurations of a `PeftModel`'s adapters by name; empty for other models."""
    configs: Mapping[str, Any] = {} if isinstance(model, PreTrainedModel) else getattr(model, "peft_config", {})
    return configs


def _ranks_with_rows(mesh: MeshShape) -> int:
    """Return the number of ranks with different rows, as transformers counts them."""
    return math.prod(axis.size for axis in mesh.axes if not axis.name.startswith(_SHARED_ROWS))


def _check_one_way(model: nn.Module, mesh: DeviceMesh | None, others: Sequence[Any]) -> None:
    """Raise an `InputError` unless the model is either parallelised, or plain with a mesh."""
    if mesh is None and any(others):
        raise InputError(
            "data_axes, example_kwargs, plan and options are for a model that AutoshardTrainer parallelises: pass "
            "mesh=, too, or give them to autoshard.parallelize, without data_axes."
        )
    if mesh is not None and RUNTIME in model.__dict__:
        raise InputError("the model is parallelised already: leave out mesh=, or build the model anew.")
    if mesh is None and RUNTIME not in model.__dict__:
        raise InputError(
            f"{type(model).__name__} is not parallelised: give AutoshardTrainer mesh=, or pass the result of "
            "autoshard.parallelize(model, mesh, example_kwargs=batch), which is no pipeline."
        )


def _check_arguments(args: TrainingArguments, parallelised: bool, data_axes: Sequence[str]) -> None:
    """Raise a `PlanError` for an argument that would not have its documented effect here."""
    refused = {
        "fp16": (args.fp16, "use bf16=True, which needs no scale for losses"),
        "fsdp": (args.fsdp, "the plan shards the parameters"),
        "deepspeed": (args.deepspeed, "the plan shards the parameters"),
        "parallelism_config": (args.parallelism_config, "the mesh says it"),
        "eval_use_gather_object": (args.eval_use_gather_object, "predictions are gathered as tensors"),
        "train_sampling_strategy": (
            args.train_sampling_strategy == "batch_rebalance",
            'its "batch_rebalance" gives every process rows of its own; use another strategy',
        ),
        "average_tokens_across_devices": (
            bool(data_axes) and not args.average_tokens_across_devices,
            "the loss is that of the batch of all ranks, so leave it True",
        ),
        "bf16": (
            parallelised and args.bf16,
            "the model is parallelised already; pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) to "
            "autoshard.parallelize and leave bf16 out, or give the mesh to AutoshardTrainer",
        ),
        "torch_compile": (
            parallelised and args.torch_compile,
            "the model is parallelised already; pass compile=True to autoshard.parallelize and leave torch_compile "
            "out, or give the mesh to AutoshardTrainer",
        ),
    }
    for name, (is_set, remedy) in refused.items():
        if is_set:
            raise PlanError(f"TrainingArguments.{name} is not for AutoshardTrainer: {remedy}.")


def _first_batch(loader: DataLoader) -> Any:
    """Return a loader's first batch, fetched without an iterator, so without worker processes."""
    if isinstance(loader.dataset, IterableDataset):
        rows = list(itertools.islice(iter(loader.dataset), loader.batch_size))
    else:
        batches = loader.batch_sampler
        assert batches is not None
        rows = [loader.dataset[index] for index in next(iter(batches), [])]
    if not rows:
        raise InputError("the dataset has no rows to plan for: pass example_kwargs.")
    return loader.collate_fn(rows)
