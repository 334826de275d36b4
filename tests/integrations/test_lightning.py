"""Lightning's Trainer and Fabric on two processes: losses, checkpoints and batches equal to those of one device."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pytest.importorskip("lightning")

import lightning
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.plugins.precision import DoublePrecision as FabricDoublePrecision
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision

import autoshard
from autoshard.errors import AutoshardError, InputError, MeshError, PipelineError, PlanError
from autoshard.integrations.lightning import AutoshardFabricStrategy, AutoshardStrategy
from tests.models.common import fixed_seed
from tests.training import fast_links
from tests.workers import Workers

SAMPLES, BATCH, FEATURES, CLASSES = 24, 8, 8, 4
TOLERANCE = 1e-9

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


class Gated(nn.Module):
    """A model whose fused weight is sharded in strides, with its loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 16)
        self.fused = nn.Linear(16, 48)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        a, b, c = self.fused(torch.tanh(self.up(x))).chunk(3, -1)
        logits = self.head(torch.tanh(a * b + c))
        return logits if labels is None else functional.cross_entropy(logits, labels)


class Training(lightning.LightningModule):
    """Records losses and batches. `loss` says whether the model computes its loss, or the step does."""

    def __init__(self, loss: str = "inside", late: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.losses: list[float] = []
        self.batches: list[float] = []
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with fixed_seed(torch.float64, 0):
                self.model = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def loss_of(self, batch: Any) -> Tensor:
        x, labels = batch
        return self.model(x, labels) if self.loss == "inside" else functional.cross_entropy(self(x), labels)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss_of(batch)
        self.batches.append(batch[0].double().sum().item())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", self.loss_of(batch))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0]) if self.loss == "outside" else self.model(*batch)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [
            {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
            {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.03)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def data(dtype: torch.dtype = torch.float64, batch: int = BATCH, shuffled: bool = False) -> DataLoader[Any]:
    """The data set, in the order in which Lightning has several devices train if it is `shuffled`."""
    with fixed_seed(dtype, 0):
        dataset = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0) if shuffled else None
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


def example(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"x": torch.zeros(BATCH, FEATURES, dtype=dtype), "labels": torch.zeros(BATCH, dtype=torch.long)}


def trainer(strategy: Any = "auto", epochs: int = 1, double: bool = True, **keywords: Any) -> lightning.Trainer:
    """A quiet Trainer in float64: on two processes with a strategy, else on one device."""
    plugins: list[Any] = [DoublePrecision()] if double else []
    devices = 1
    if strategy != "auto":
        devices = 2
        plugins.append(TorchElasticEnvironment())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        plugins=plugins,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        **{**quiet, "gradient_clip_val": 0.2, "accumulate_grad_batches": 2} | keywords,
    )


def strategy(mesh: Any, **keywords: Any) -> AutoshardStrategy:
    return AutoshardStrategy(mesh, **{"example": example(), "cluster": fast_links(), "accumulate": 2} | keywords)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.state_dict().items()
    }


def on_one_device(epochs: int = 2, **keywords: Any) -> tuple[Training, float]:
    """A training by Lightning alone, and the loss of its validation."""
    module, run = Training(), trainer(epochs=epochs, **keywords)
    run.fit(module, data(shuffled=True), data())
    return module, run.callback_metrics["validation"].item()


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def is_strided(parameter: Any) -> bool:
    return any(getattr(placement, "split_factor", 1) > 1 for placement in parameter.placements)


# ---- The Trainer ----------------------------------------------------------------------------------------------------


def train_and_resume(folder: Path) -> dict[str, Any]:
    """Train an epoch, save shards, resume on another mesh, evaluate, and save whole tensors."""
    first, run = Training(), trainer(strategy({"tp": 2}))
    run.fit(first, data(), data())
    run.save_checkpoint(folder / "shards")
    second = Training(late=True)
    # Two axes, the mesh that the LightningModule sees, and whole tensors in the new checkpoint.
    layout = strategy({"dp": 1, "tp": 2}, save_distributed_checkpoint=False)
    run = trainer(layout, epochs=2)
    run.fit(second, data(), data(), ckpt_path=folder / "shards")
    run.save_checkpoint(folder / "whole.ckpt")
    validation = run.validate(second, data(), verbose=False)[0]["validation"]
    predictions = run.predict(second, data())
    third = Training()
    run = trainer(strategy("auto"), epochs=2)
    run.fit(third, data(), data(), ckpt_path=folder / "whole.ckpt")
    assert not third.losses, "both epochs are over"
    assert second.device_mesh is layout.device_mesh
    return {
        "losses": first.losses + second.losses,
        "batches": first.batches,
        "strided": is_strided(first.model.fused.weight) and is_strided(second.model.fused.weight),
        "axes": tuple(second.device_mesh.mesh_dim_names or ()),
        "validation": validation,
        "predictions": predictions,
        "weights": weights(second),
        "resumed": weights(third),
    }


def test_training_checkpoints_and_evaluation_equal_one_device(two: Workers, tmp_path: Path) -> None:
    reference, validation = on_one_device()
    for found in two.run(train_and_resume, tmp_path):
        assert found["strided"]
        assert found["axes"] == ("dp", "tp")
        assert_equal(found["losses"], reference.losses)
        assert_equal(found["batches"], reference.batches[:3])
        assert_equal(found["validation"], validation)
        assert_equal(found["weights"], weights(reference))
        assert_equal(found["resumed"], weights(reference))
        expected = trainer().predict(reference, data())
        assert_equal(found["predictions"], expected)
    loaded = Training.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert_equal(weights(loaded), weights(reference))
    # The state of the optimizer serves one device, too.
    longer, _ = on_one_device(epochs=3)
    resumed = Training()
    trainer(epochs=3).fit(resumed, data(shuffled=True), data(), ckpt_path=tmp_path / "whole.ckpt")
    assert_equal(resumed.losses, longer.losses[6:])
    # So do shards that Lightning's own tool puts together.
    run_module("lightning.fabric.utilities.consolidate_checkpoint", str(tmp_path / "shards"))
    loaded = Training.load_from_checkpoint(tmp_path / "shards.consolidated")
    assert_equal(weights(loaded), weights(on_one_device(epochs=1)[0]))


def run_module(name: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_module(name, run_name="__main__")


def train_on_own_rows(folder: Path) -> dict[str, Any]:
    """Each rank loads half of every batch, and the loss is computed by the model, or outside of it."""
    inside = Training()
    run = trainer(strategy({"dp": 2}, inputs="local", save_distributed_checkpoint=False))
    run.fit(inside, data(batch=BATCH // 2), data(batch=BATCH // 2))
    run.save_checkpoint(folder / "whole.ckpt")
    outside = Training("outside")
    layout = strategy(
        {"dp": 2, "tp": 1},
        inputs="local",
        outputs="local",
        example_inputs="local",
        example=example()["x"][: BATCH // 2],
    )
    run = trainer(layout, epochs=2)
    run.fit(outside, data(batch=BATCH // 2), data(batch=BATCH // 2), ckpt_path=folder / "whole.ckpt")
    return {
        "inside": inside.losses,
        "outside": outside.losses,
        "batches": inside.batches,
        "validation": run.callback_metrics["validation"].item(),
        "weights": weights(outside),
    }


def test_own_rows_of_every_rank(two: Workers, tmp_path: Path) -> None:
    reference, validation = on_one_device()
    found = two.run(train_on_own_rows, tmp_path)
    for rank in found:
        assert_equal(rank["inside"], reference.losses[:3])
        assert_equal(rank["weights"], weights(reference))
    # The mean of what the ranks compute.
    means = [sum(losses) / 2 for losses in zip(*(rank["outside"] for rank in found), strict=True)]
    assert_equal(means, reference.losses[3:])
    assert_equal(sum(rank["validation"] for rank in found) / 2, validation)
    assert found[0]["batches"] != found[1]["batches"]


class WholeModule(lightning.LightningModule):
    """A LightningModule that is the model itself, and has its own example."""

    def __init__(self) -> None:
        super().__init__()
        with fixed_seed(torch.float32, 0):
            self.gated, self.scale = Gated(), nn.Parameter(torch.ones(()))
        self.example_input_array = torch.zeros(BATCH, FEATURES)
        self.losses: list[float] = []
        self.batches: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.gated(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.batches.append(batch[0].sum().item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_whole_module() -> dict[str, Any]:
    """Train the LightningModule itself, in bfloat16, in the order of the loader."""
    module = WholeModule()
    layout = AutoshardStrategy({"tp": 2}, cluster=fast_links())
    run = trainer(layout, double=False, precision="bf16-mixed", use_distributed_sampler=False)
    run.fit(module, data(torch.float32))
    half = WholeModule()
    layout = AutoshardStrategy({"tp": 2}, cluster=fast_links())
    run = trainer(layout, double=False, precision="bf16-true", use_distributed_sampler=False)
    run.fit(half, data(torch.float32))
    return {
        "losses": module.losses,
        "dtypes": {parameter.dtype for parameter in module.parameters()},
        "sharded": [isinstance(parameter, DTensor) for parameter in module.parameters()],
        "batches": module.batches,
        "graph": module.sharding_plan.fingerprint,
        "half": half.losses,
    }


def test_whole_module_in_bfloat16_and_the_order_of_the_loader(two: Workers) -> None:
    reference = WholeModule()
    # What is gathered is cast before, and gradients are summed in float32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        planned = autoshard.plan(reference, {"tp": 2}, (reference.example_input_array,), mp_policy=policy)
        uncast = autoshard.plan(reference, {"tp": 2}, (reference.example_input_array,))
    assert planned.fingerprint != uncast.fingerprint
    trainer(double=False, precision="bf16-mixed").fit(reference, data(torch.float32))
    half = WholeModule()
    trainer(double=False, precision="bf16-true").fit(half, data(torch.float32))
    for rank in two.run(train_whole_module):
        # Numbers of bfloat16 are rounded to 8 binary digits; sums over ranks are rounded in another order.
        torch.testing.assert_close(rank["losses"], reference.losses, rtol=2**-6, atol=0.0)
        torch.testing.assert_close(rank["half"], half.losses, rtol=2**-6, atol=0.0)
        assert rank["dtypes"] == {torch.float32}
        assert all(rank["sharded"])
        torch.testing.assert_close(rank["batches"], reference.batches)
        assert rank["graph"] == planned.fingerprint


class OnMeta(Training):
    """Its model is made without numbers."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = Gated()
            torch.manual_seed(0)


class OwnPlacement(Training):
    """Parallelises its model itself."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            super().configure_model()
            autoshard.parallelize(self.model, self.device_mesh, (), example(), cluster=fast_links())


def set_up_in_other_ways(folder: Path) -> dict[str, Any]:
    meta = OnMeta(late=True)
    trainer(strategy({"tp": 2}, module="model")).fit(meta, data())
    own = OwnPlacement(late=True)
    best = ModelCheckpoint(folder, monitor="validation", save_top_k=1)
    run = trainer(AutoshardStrategy({"tp": 2}), epochs=2, enable_checkpointing=True, callbacks=[best])
    run.fit(own, data(), data())
    (restored,) = run.validate(own, data(), ckpt_path="best", verbose=False)
    evaluated = Training()
    (before,) = trainer(strategy({"tp": 2})).validate(evaluated, data(), verbose=False)
    run = trainer(strategy({"tp": 2}))
    # The same run evaluates first.
    first = Training()
    (again,) = run.validate(first, data(), verbose=False)
    with pytest.warns(UserWarning, match="planned for evaluation"):
        run.fit(first, data())
    return {
        "meta": meta.losses,
        "own": own.losses,
        "validations": [before["validation"], again["validation"]],
        "best": [restored["validation"], best.best_model_score.item()],
        "first": first.losses,
    }


def test_other_ways_to_set_up(two: Workers, tmp_path: Path) -> None:
    reference, _ = on_one_device()
    (untrained,) = trainer().validate(Training(), data(), verbose=False)
    for found in two.run(set_up_in_other_ways, tmp_path):
        assert_equal(found["meta"], reference.losses[:3])
        assert_equal(found["own"], reference.losses)
        assert_equal(found["first"], reference.losses[:3])
        assert_equal(found["validations"], [untrained["validation"]] * 2)
        assert_equal(found["best"][0], found["best"][1])


# ---- Fabric ---------------------------------------------------------------------------------------------------------


def fabric(strategy: Any = "auto") -> lightning.Fabric:
    plugins: list[Any] = [FabricDoublePrecision()]
    devices = 1
    if strategy != "auto":
        devices = 2
        plugins.append(TorchElasticEnvironment())
    result = lightning.Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins)
    result.launch()
    return result


def fabric_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    with fixed_seed(torch.float64, 0):
        model = Gated()
    return model, torch.optim.AdamW(model.parameters(), lr=0.03)


def fabric_steps(run: lightning.Fabric, model: Any, optimizer: Any) -> list[float]:
    """An epoch of steps with gradients of two batches, clipped."""
    losses = []
    for index, (x, labels) in enumerate(run.setup_dataloaders(data(batch=BATCH // 2))):
        with run.no_backward_sync(model, enabled=index % 2 == 0):
            loss = model(x, labels)
            run.backward(loss)
        losses.append(loss.item())
        if index % 2:
            run.clip_gradients(model, optimizer, max_norm=0.2)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def fabric_on_meshes(folder: Path) -> dict[str, Any]:
    half = {name: value[: BATCH // 2] for name, value in example().items()}
    options: dict[str, Any] = {"example": half, "cluster": fast_links()}
    losses = []
    saved = None
    for name, layout in (
        ("shards", AutoshardFabricStrategy({"tp": 2}, **options)),
        (
            "whole.ckpt",
            AutoshardFabricStrategy(
                init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
                save_distributed_checkpoint=False,
                **options,
            ),
        ),
        (None, AutoshardFabricStrategy("auto", **options)),
    ):
        run = fabric(layout)
        model, optimizer = run.setup(*fabric_model())
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if saved is not None:
            assert run.load(folder / saved, state) == {}
            assert state["epoch"] == len(losses)
        losses.append(fabric_steps(run, model, optimizer))
        if name is not None:
            run.save(folder / name, {**state, "epoch": len(losses)})
        saved = name
    return {"losses": losses, "weights": weights(model)}


def test_fabric_equals_one_device(two: Workers, tmp_path: Path) -> None:
    run = fabric()
    model, optimizer = run.setup(*fabric_model())
    expected = [fabric_steps(run, model, optimizer) for _ in range(3)]
    for found in two.run(fabric_on_meshes, tmp_path):
        assert_equal(found["losses"], expected)
        assert_equal(found["weights"], weights(model))


# ---- Errors, and the other name ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda kind: kind({"dp": 2}, hintz={}), TypeError, "Close ones are hints"),
        (lambda kind: kind("dp=2"), MeshError, 'or "auto"'),
        (lambda kind: kind({"pp": 2, "dp": 2}), PipelineError, "the axis 'pp' is a pipeline"),
        (lambda kind: kind({"a": 2}, pipeline=autoshard.Pipeline(axis="a")), PipelineError, "the axis 'a'"),
        (lambda kind: kind("auto", inputs="local"), MeshError, "before the search"),
        (lambda kind: kind({"dp": 2}, data_axes=["dp"]), PlanError, 'data_axes is for inputs="local"'),
    ],
)
@pytest.mark.parametrize("kind", [AutoshardStrategy, AutoshardFabricStrategy])
def test_wrong_arguments_are_errors_at_once(
    kind: Any, make: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(kind)


class Outside(Training):
    """One trained parameter more than the model has."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros((), dtype=torch.float64))


def errors_on_processes() -> list[str]:
    """The messages of runs that can't start."""

    class Formless(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(2, 2), nn.Linear(2, 2)

        def training_step(self, batch: Any, index: int) -> None:
            raise AssertionError("it does not get so far")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    cases: list[tuple[Any, Any]] = [
        (Training(), strategy({"dp": 4})),
        (Training(), strategy({"dp": 2}, inputs="local", data_axes=["tp"])),
        (Training(), strategy({"dp": 2}, example=None)),
        (Training(), strategy({"dp": 2}, module="net")),
        (Formless(), strategy({"dp": 2})),
        (Outside(), strategy({"dp": 2}, module="model")),
    ]
    messages = []
    for module, layout in cases:
        with pytest.raises(AutoshardError) as raised:
            trainer(layout).fit(module, data())
        messages.append(str(raised.value))
    return messages


def test_errors_name_the_remedy(two: Workers) -> None:
    expected = [
        "has 4 devices, and the strategy runs on 2 processes",
        "names of mesh axes, out of dp",
        "no example call of Gated",
        "module='net'",
        "has no forward, and no attribute `model`",
        "extra is trained and not part of 'model'",
    ]
    for messages in two.run(errors_on_processes):
        for message, text in zip(messages, expected, strict=True):
            assert text in message


def test_checkpoint_without_states_of_optimizers_is_refused(two: Workers, tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    run, module = trainer(), Training()
    run.fit(module, data())
    run.save_checkpoint(path, weights_only=True)
    assert all("0 optimizers" in message for message in two.run(resume_error, path))


def resume_error(path: Path) -> str:
    with pytest.raises(InputError) as raised:
        trainer(strategy({"tp": 2})).fit(Training(), data(), ckpt_path=path)
    return str(raised.value)


def test_the_other_name_of_lightning() -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    from autoshard.integrations import pytorch_lightning as other

    class Other(pytorch_lightning.LightningModule):
        configure_model = Training.configure_model
        forward = Training.forward
        loss_of = Training.loss_of
        training_step = Training.training_step
        configure_optimizers = Training.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.loss, self.losses, self.batches = "inside", [], []
            self.configure_model()

    module = Other()
    run = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=other.AutoshardStrategy({"tp": 1}, example=example()),
        plugins=[pytorch_lightning.plugins.precision.DoublePrecision()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.2,
        accumulate_grad_batches=2,
    )
    run.fit(module, data())
    assert isinstance(module.model.fused.weight, DTensor)
    assert_equal(module.losses, on_one_device(epochs=1)[0].losses)
    assert other.AutoshardFabricStrategy({"tp": 1}, example=example()) is not None


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] in (name, "lightning_fabric")]:
        monkeypatch.setitem(sys.modules, loaded, None)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"autoshard.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'autoshard\["):
        __import__(f"autoshard.integrations.{name}")
