"""`AutoshardTrainer` on two processes beside `Trainer` on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard.errors import InputError, MeshError, PlanError
from autoshard.specs.axes import MeshShape
from tests.workers import Workers

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import GPT2LMHeadModel, LlamaForCausalLM, Trainer, TrainingArguments

from autoshard.integrations.transformers import AutoshardTrainer, _ranks_with_rows, save_pretrained
from tests.integrations.hugging_face import LLAMA, Rows, Words, arguments, gpt2, llama, recording
from tests.training import fast_links

TRAINED, TESTED = 10, 5

# Small models are fastest whole; this makes the ranks work together.
MEGATRON = {
    "*.embed_tokens.weight": {"tp": Shard(0)},
    "*.q_proj.weight": {"tp": Shard(0)},
    "*.k_proj.weight": {"tp": Shard(0)},
    "*.v_proj.weight": {"tp": Shard(0)},
    "*.down_proj.weight": {"tp": Shard(1)},
    "lm_head.weight": {"tp": Shard(0)},
}


@dataclass(frozen=True)
class Run:
    """What a run gives: of the trainer, the losses of all batches, logged norms, metrics and predictions of a test."""

    losses: list[float]
    norms: list[float]
    test_loss: float
    predictions: Any
    labels: Any
    sharded: int = 0


def finish(trainer: Any, checkpoint: Path | None = None) -> Run:
    """Train, and predict."""
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    output = trainer.predict(Rows(TESTED, 1))
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    parameters = [parameter for parameter in trainer.model.parameters() if isinstance(parameter, DTensor)]
    sharded = sum(any(placement.is_shard() for placement in parameter.placements) for parameter in parameters)
    return Run(
        getattr(trainer, "losses", []),
        norms,
        output.metrics["test_loss"],
        output.predictions,
        output.label_ids,
        sharded,
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Tensor]]:
    """On one device: a run, and the weights after it."""
    trainer = recording(Trainer)(
        model=gpt2(), args=arguments(tmp_path_factory.mktemp("one")), train_dataset=Rows(TRAINED)
    )
    return finish(trainer), trainer.model.state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For checkpoints that several tests read."""
    return tmp_path_factory.mktemp("ranks")


def assert_equal(run: Run, expected: Run, losses: slice) -> None:
    assert run.losses == pytest.approx(expected.losses[losses], rel=1e-9)
    assert run.norms == pytest.approx(expected.norms, rel=1e-9)
    assert run.predictions.shape == expected.predictions.shape == (TESTED, 8, 32)
    assert run.predictions == pytest.approx(expected.predictions, rel=1e-9, abs=1e-9)
    assert (run.labels == expected.labels).all()
    assert run.sharded > 0


def _train(folder: Path) -> tuple[Run, Run, bool]:
    """A run with checkpoints, and one that goes on from the first of them; batches have a row of each rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    runs = []
    for checkpoint in (None, folder / "checkpoint-2"):
        trainer = recording(AutoshardTrainer)(
            gpt2(),
            arguments(
                folder,
                save_strategy="steps",
                save_steps=2,
                per_device_train_batch_size=1,
                per_device_eval_batch_size=1,
            ),
            train_dataset=Rows(TRAINED),
            mesh=mesh,
            options={"cluster": fast_links()},
        )
        runs.append(finish(trainer, checkpoint))
    return runs[0], runs[1], trainer.args.should_save


def test_training_checkpoints_and_predictions(two: Workers, one: tuple[Run, dict[str, Tensor]], folder: Path) -> None:
    expected, weights = one
    for run, resumed, _ in two.run(_train, folder):
        assert_equal(run, expected, slice(None))
        assert run.test_loss == pytest.approx(expected.test_loss, rel=1e-9)
        # The last of three steps, which is one batch.
        assert resumed.losses == run.losses[-1:]
        assert (resumed.predictions == run.predictions).all()
    saved = GPT2LMHeadModel.from_pretrained(folder / "checkpoint-3")
    for name, value in saved.state_dict().items():
        assert torch.allclose(value, weights[name], rtol=1e-9, atol=1e-9), name


def _train_rows(folder: Path) -> tuple[Run, int, bool]:
    """The last step on another mesh, where every rank loads rows of its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    trainer = recording(AutoshardTrainer)(
        gpt2(),
        arguments(folder / "rows", per_device_train_batch_size=1, per_device_eval_batch_size=1),
        train_dataset=Rows(TRAINED),
        mesh=mesh,
        data_axes=("dp",),
        options={"cluster": fast_links(), "hints": {"*.mlp.c_fc.weight": {"dp": Shard(0)}}},
    )
    run = finish(trainer, folder / "checkpoint-2")
    trainer.args.save_strategy = "no"
    return run, len(trainer.get_train_dataloader()), trainer.args.train_batch_size == 1


def test_a_run_goes_on_on_another_mesh_with_rows_of_each_rank(
    two: Workers, one: tuple[Run, dict[str, Tensor]], folder: Path
) -> None:
    if not (folder / "checkpoint-2").is_dir():
        two.run(_train, folder)
    for run, batches, one_row in two.run(_train_rows, folder):
        assert_equal(run, one[0], slice(-1, None))
        assert batches == TRAINED // 2
        assert one_row


def squared_error(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    return outputs["logits"].square().sum() / num_items_in_batch + labels.float().mean() * outputs["logits"].mean()


def _words(kind: str, folder: Path, mesh: DeviceMesh | None) -> tuple[list[float], str]:
    base = Trainer if mesh is None else AutoshardTrainer
    changes = {"mixed": {"bf16": True, "torch_compile": mesh is not None}, "outer": {}}[kind]
    keywords = {} if mesh is None else {"mesh": mesh, "options": {"hints": {"head.*": {"tp": Shard(0)}}}}
    trainer = recording(base)(
        Words(),
        arguments(folder, **changes),
        train_dataset=Rows(4),
        compute_loss_func=squared_error if kind == "outer" else None,
        **keywords,
    )
    trainer.train()
    dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    return trainer.losses, ", ".join(dtypes)


def _words_on_ranks(kind: str, folder: Path) -> tuple[list[float], str]:
    return _words(kind, folder, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


def test_a_loss_outside_of_the_model(two: Workers, tmp_path: Path) -> None:
    expected, _ = _words("outer", tmp_path / "one", None)
    for losses, _ in two.run(_words_on_ranks, "outer", tmp_path):
        # In float32.
        assert losses == pytest.approx(expected, rel=1e-5)


def test_bf16_and_torch_compile_reach_the_plan(two: Workers, tmp_path: Path) -> None:
    expected, _ = _words("mixed", tmp_path / "one", None)
    for losses, dtypes in two.run(_words_on_ranks, "mixed", tmp_path):
        # bfloat16 has eight bits.
        assert losses == pytest.approx(expected, rel=2**-6)
        assert losses != pytest.approx(expected, rel=1e-7)
        assert dtypes == "torch.float32"


def _load_shards(folder: Path, target: Path) -> tuple[Any, list[str]]:
    """A model on the meta device that reads its shards, and trains in a trainer that did not parallelise it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
    batch = torch.utils.data.default_collate([Rows(2)[index] for index in range(2)])
    autoshard.parallelize(model, mesh, example_kwargs=batch, hints=MEGATRON)
    autoshard.materialize(model)
    autoshard.load_safetensors(model, folder)
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
    trainer = AutoshardTrainer(model, arguments(target, max_steps=1), train_dataset=Rows(4))
    trainer.train()
    metrics = trainer.evaluate(Rows(4))
    # Two batches, which both ranks share.
    assert metrics["eval_steps_per_second"] * metrics["eval_runtime"] == pytest.approx(2, rel=0.01)
    save_pretrained(model, target)
    texts = []
    for changes in ({"bf16": True}, {"torch_compile": True}):
        with pytest.raises(PlanError) as info:
            AutoshardTrainer(model, arguments(target, **changes), train_dataset=Rows(4))
        texts.append(str(info.value))
    with pytest.raises(InputError, match="parallelised already"):
        AutoshardTrainer(model, arguments(target), mesh=mesh)
    with pytest.raises(MeshError, match=r"data_axes=\('rows',\).* out of tp"):
        AutoshardTrainer(llama(), arguments(target), mesh=mesh, data_axes=("rows",), train_dataset=Rows(4))
    # The configuration is as it was: nothing is captured anew after a save.
    return logits, [*texts, str(model.config.architectures)]


def test_shards_from_files_and_a_model_that_is_parallelised(two: Workers, tmp_path: Path) -> None:
    model = llama().eval()
    model.save_pretrained(tmp_path / "whole")
    batch = torch.utils.data.default_collate([Rows(2)[index] for index in range(2)])
    with torch.no_grad():
        expected = model(**batch).logits
    for logits, (bf16, compiled, architectures) in two.run(_load_shards, tmp_path / "whole", tmp_path / "ranks"):
        assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-6)
        assert "pass mp_policy=MixedPrecisionPolicy" in bf16
        assert "pass compile=True to autoshard.parallelize" in compiled
        assert architectures == "None"
    trainer = Trainer(model, arguments(tmp_path / "one", max_steps=1), train_dataset=Rows(4))
    trainer.train()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "ranks")
    for name, value in saved.state_dict().items():
        # In float32; a step is as long for small gradients.
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-3, atol=1e-3), name


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [({"dp": 2, "tp": 4}, 2), ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 4), ({"x": 4}, 4), ({"tp": 8}, 1)],
)
def test_rows_are_counted_by_rank_as_in_transformers(sizes: dict[str, int], ranks: int) -> None:
    assert _ranks_with_rows(MeshShape.of(sizes)) == ranks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True}, "fp16 is not for AutoshardTrainer: use bf16=True"),
        ({"eval_use_gather_object": True}, "predictions are gathered as tensors"),
        ({"train_sampling_strategy": "batch_rebalance"}, "use another strategy"),
    ],
)
def test_arguments_that_mean_something_else_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    from autoshard.integrations.transformers import _check_arguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(PlanError, match=message):
        _check_arguments(args, parallelised=False, data_axes=())


def test_a_plain_model_needs_a_mesh(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Words is not parallelised: give AutoshardTrainer mesh="):
        AutoshardTrainer(Words(), arguments(tmp_path))
    with pytest.raises(InputError, match="are for a model that AutoshardTrainer parallelises"):
        AutoshardTrainer(Words(), arguments(tmp_path), data_axes=("dp",))
    with pytest.raises(InputError, match="takes no model_init"):
        AutoshardTrainer(args=arguments(tmp_path), model_init=Words)
