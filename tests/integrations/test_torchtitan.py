"""torchtitan's own trainer on two processes, planned, against the same trainer on one process without autoshard."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.distributed_c10d import _set_pg_timeout

from autoshard.cluster.cluster import Cluster, Link
from autoshard.errors import PlanError
from tests.releases import skip
from tests.workers import Workers

pytest.importorskip("torchtitan")
if not hasattr(fsdp, "DataParallelMeshDims"):
    skip("names of fully_shard that torchtitan imports", whole_file=True)
pytest.importorskip("triton")  # which torchtitan imports, and torch's builds for CPUs do not bring

# torchtitan takes a machine without accelerators for one with CUDA, and asks the device for its memory.
_CPU = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("device_count", "is_available", "set_device", "synchronize")},
    current_device=lambda: 0,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=2**30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
with (
    mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
    mock.patch("torch._utils._get_device_module", return_value=_CPU),
):
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig, ConfigManager, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    import autoshard.integrations.torchtitan as integration
    from autoshard.integrations.torchtitan.experts import prepare_experts
    from autoshard.integrations.torchtitan.parallelize import device_mesh

LENGTH, BATCH = 16, 4

SHARDS = {"data_parallel_shard_degree": 2}
COPIES = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}


def fast_links() -> Cluster:
    """CPUs with links so fast that the planner shards even tiny models, as in `tests.training`."""
    cluster, link = Cluster.preset("cpu"), Link(bandwidth=1e12, latency=1e-9)
    device = dataclasses.replace(cluster.device, kernel_overhead=1e-9)
    return dataclasses.replace(cluster, inside=link, between=link, device=device)


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Documents(BaseDataLoader):
    """Tokens by chance, packed as documents of several lengths, with labels that do not count."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 0
        infinite: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.vocabulary = config.vocabulary
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.total = dp_world_size * local_batch_size
        self.step = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            text = torch.randint(0, self.vocabulary, (self.total, LENGTH + 1), generator=generator)
            lengths = torch.randint(3, LENGTH, (self.total, 1), generator=generator)
            places = torch.arange(LENGTH).expand(self.total, LENGTH)
            positions = torch.where(places < lengths, places, places - lengths)
            labels = text[:, 1:].masked_fill(places == lengths - 1, IGNORE_INDEX)
            yield {"input": text[self.rows, :-1], "positions": positions[self.rows]}, labels[self.rows]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Recorder(MetricsProcessor):
    """Keeps the losses and gradient norms that the trainer reports."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.validation: list[float] = []

    def log(self, step: int, loss: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def log_validation(self, loss: float, step: int, extra_metrics: Any = None) -> None:
        self.validation.append(loss)


class DenseAttention(FlexAttention):
    """FlexAttention by a mask of all scores, since torch has no backward of its own on CPUs."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    # torchtitan places the arguments by their names.
    def forward(self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, **options: Any) -> Any:  # noqa: N803
        q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
        mask = torch.nn.attention.flex_attention.create_mask(
            attention_masks.mask_mod, q.shape[0], 1, LENGTH, LENGTH, device="cpu"
        )
        scale, gqa = options.get("scale"), options.get("enable_gqa", False)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of torchtitan's trainer.

    Attributes:
        name: module and function of the configuration.
        layers: the layers of the model that are kept.
        steps: the last step.
        parallelism, training: changes of these settings.
        validation: True to validate after every step.
        folder: of checkpoints, after every second step; empty for none.
        load_step: the step to go on from; -1 for the last one there is.
        reference: True to leave autoshard out.
    """

    name: str
    layers: int = 2
    steps: int = 2
    parallelism: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    validation: bool = False
    folder: str = ""
    load_step: int = -1
    reference: bool = False

    @property
    def config(self) -> Trainer.Config:
        module, function = self.name.split(".")
        config: Trainer.Config = getattr(import_module(f"torchtitan.models.{module}.config_registry"), function)()
        assert config.model_spec is not None
        model = config.model_spec.model
        del model.layers[self.layers :]
        for _, experts, _, _ in model.traverse(GroupedExperts.Config):
            experts.hidden_dim = 32
        if self.reference:
            for _, _, owner, attribute in list(model.traverse(FlexAttention.Config)):
                setattr(owner, attribute, DenseAttention.Config())
        ranks = 2 if self.parallelism in (SHARDS, COPIES) and not self.reference else 1
        config.tokenizer = NoTokenizer.Config()
        config.dataloader = Documents.Config(vocabulary=model.vocab_size)
        config.metrics = Recorder.Config(log_freq=1)
        config.validator = Validator.Config(enable=self.validation, freq=1, steps=1, dataloader=config.dataloader)
        config.optimizer.implementation = "foreach"  # fused is for GPUs
        config.activation_checkpoint = FullAC.Config() if self.validation and not self.reference else None
        config.dump_folder = self.folder
        config.checkpoint = CheckpointManager.Config(
            enable=bool(self.folder), interval=2, load_step=self.load_step, last_save_model_only=False
        )
        config.training = dataclasses.replace(
            config.training,
            seq_len=LENGTH,
            local_batch_size=BATCH // ranks,
            global_batch_size=2 * BATCH,  # two backwards for a step
            steps=self.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        )
        config.training = dataclasses.replace(config.training, **self.training)
        config.lr_scheduler.warmup_steps = 0
        config.debug.seed = 3
        config.debug.enable_structured_logging = False
        if self.reference:
            return config
        config.parallelism = dataclasses.replace(config.parallelism, **self.parallelism)
        return integration.with_autoshard(config, cluster=fast_links())


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run reported for every step, its plan, and the error about a head that is called outside of the model."""

    losses: list[float]
    norms: list[float]
    validation: list[float]
    plan: str
    error: str


def run(jobs: list[Job]) -> list[Result]:
    return [_run(job) for job in jobs]


def _run(job: Job) -> Result:
    # The trainer compiles the function that makes masks; a compiler for the CPU is not needed here.
    torch.compiler.set_stance("force_eager")
    trainer = job.config.build()
    # torchtitan 0.3 sets the time limits of groups by a function that torch up to 2.13 does not have.
    with (
        mock.patch.object(torch.distributed, "set_timeout", _set_pg_timeout, create=True),
        mock.patch.object(time, "sleep"),
    ):
        trainer.train()
    trainer.close()
    recorder = trainer.metrics_processor
    assert isinstance(recorder, Recorder)
    model, error = trainer.model_parts[0], ""
    if not job.reference:
        # As the trainer does for a ChunkedLossWrapper.
        model._skip_lm_head = True
        with pytest.raises(PlanError) as refusal:
            model(torch.zeros(BATCH, LENGTH, dtype=torch.int64))
        error = str(refusal.value)
    plan = str(getattr(model, "sharding_plan", None))
    return Result(recorder.losses, recorder.norms, recorder.validation, plan, error)


JOBS = {
    "llama3": Job("llama3.llama3_debugmodel", layers=1, steps=3, parallelism=SHARDS),
    "deepseek_v3": Job("deepseek_v3.deepseek_v3_debugmodel_mtp", parallelism=SHARDS),
    "qwen3": Job("qwen3.qwen3_moe_debug", layers=1, parallelism=TENSOR),
    "bfloat16": Job(
        "llama3.llama3_debugmodel",
        layers=1,
        validation=True,
        parallelism=COPIES,
        training={"mixed_precision_param": "bfloat16"},
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, Result]]:
    """The jobs on two processes, and on one without autoshard; `resumed` goes on after two steps, on another mesh."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    jobs = {name: dataclasses.replace(job, folder=folder * (name == "llama3")) for name, job in JOBS.items()}
    resumed = dataclasses.replace(
        jobs["llama3"], parallelism={**TENSOR, "spmd_backend": "partial_dtensor"}, load_step=2
    )
    references = [dataclasses.replace(job, folder="", reference=True) for job in jobs.values()]
    with (
        Workers(2) as two,
        Workers(1) as one,
        ThreadPoolExecutor() as threads,
    ):
        expected = threads.submit(one.run, run, references)
        ranks = two.run(run, [*jobs.values(), resumed])
        assert ranks[0] == ranks[1]
        names = [*jobs, "resumed"]
        whole = [*expected.result()[0], ranks[0][0]]
        return {name: pair for name, *pair in zip(names, ranks[0], whole, strict=True)}


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3", "qwen3"])
def test_the_trainer_on_two_processes_equals_one_process(name: str, results: dict[str, tuple[Result, Result]]) -> None:
    """In float32, which the trainer's loss is in whatever the model is in."""
    planned, whole = results[name]
    assert planned.losses == pytest.approx(whole.losses, rel=1e-6)
    # torch adds the squares of half a million elements in float32.
    assert planned.norms == pytest.approx(whole.norms, rel=2e-4)


def test_rows_of_experts_are_sent_to_their_ranks(results: dict[str, tuple[Result, Result]]) -> None:
    for name in ("deepseek_v3", "qwen3"):
        assert "all_to_all" in results[name][0].plan, results[name][0].plan


def test_mixed_precision(results: dict[str, tuple[Result, Result]]) -> None:
    planned, whole = results["bfloat16"]
    assert planned.losses == pytest.approx(whole.losses, rel=1e-3)
    assert planned.losses != pytest.approx(whole.losses, rel=0)


def test_full_activation_checkpointing_recomputes_layers(results: dict[str, tuple[Result, Result]]) -> None:
    assert "recomputed" in results["bfloat16"][0].plan
    assert "recomputed" not in results["llama3"][0].plan


def test_validation(results: dict[str, tuple[Result, Result]]) -> None:
    planned, whole = results["bfloat16"]
    assert len(planned.validation) == 2
    assert planned.validation == pytest.approx(whole.validation, rel=1e-3)


def test_a_loss_that_calls_the_head_itself_is_refused(results: dict[str, tuple[Result, Result]]) -> None:
    assert "config.loss.loss_fn" in results["llama3"][0].error


def test_a_checkpoint_resumes_on_another_mesh(results: dict[str, tuple[Result, Result]]) -> None:
    resumed, uninterrupted = results["resumed"]
    assert resumed.losses == pytest.approx(uninterrupted.losses[2:], rel=1e-6)
    assert resumed.norms == pytest.approx(uninterrupted.norms[2:], rel=2e-4)


def test_the_command_line_finds_configurations() -> None:
    name = "autoshard.integrations.torchtitan"
    arguments = ["--module", name, "--config", "llama3_8b", "--parallelism.tensor_parallel_degree", "2"]
    config = ConfigManager().parse_args(arguments)
    assert config.parallelism.tensor_parallel_degree == 2
    assert config.training.disable_cuda_graphs
    assert isinstance(config.loss, CrossEntropyLoss.Config)
    assert config.model_spec.parallelize_fn.func is integration.parallelize
    assert config.model_spec.pipelining_fn is None
    with pytest.raises(ValueError, match="'qwen3_14b'"):
        ConfigManager().parse_args(["--module", name, "--config", "qwen3_7b"])


def test_a_configuration_stays_as_it_was() -> None:
    config = llama3.config_registry.llama3_debugmodel()
    planned = integration.with_autoshard(config, recompute="none")
    assert isinstance(config.loss, ChunkedLossWrapper.Config)
    assert not config.training.disable_cuda_graphs
    assert config.model_spec.parallelize_fn is llama3.parallelize_llama
    assert planned.model_spec.parallelize_fn.keywords == {"plan": None, "recompute": "none"}
    assert planned.model_spec.model is config.model_spec.model
    with pytest.raises(PlanError, match="no model_spec"):
        integration.with_autoshard(dataclasses.replace(config, model_spec=None))


def model_of(spec: ModelSpec) -> torch.nn.Module:
    with torch.device("meta"):
        return spec.model.build()


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return model_of(llama3.model_registry("debugmodel"))


def parallelize(model: torch.nn.Module, **changes: Any) -> None:
    """Call it with settings that are all supported, but for the changes."""
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    degrees |= {name: changes.pop(name) for name in [*changes] if name in degrees}
    dims = ParallelDims(
        **degrees,
        world_size=math.prod(size for name, size in degrees.items() if name != "ep"),
        spmd_backend=changes.pop("spmd_backend", "spmd_types"),
    )
    arguments: dict[str, Any] = {
        "training": TrainingConfig(disable_cuda_graphs=True),
        "parallelism": ParallelismConfig(),
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
    }
    integration.parallelize(model, parallel_dims=dims, **arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 2}, "pipeline_parallel_degree=2: set it to 1"),
        ({"cp": 2}, "context_parallel_degree=2: set it to 1"),
        ({"ep": 2, "tp": 2}, "expert_parallel_degree=2: set it to 1"),
        ({"spmd_backend": "full_dtensor"}, "set it to 'spmd_types'"),
        ({"training": TrainingConfig()}, "Set --training.disable_cuda_graphs"),
        ({"training": TrainingConfig(enable_cpu_offload=True)}, "Set memory_limit"),
        ({"compile_config": CompileConfig(enable=True, backend="eager")}, "compile.backend='eager'"),
        ({"compile_config": CompileConfig(enable=True, enable_async_tensor_parallel=True)}, "leave it out"),
    ],
)
def test_settings_that_are_refused(llama: torch.nn.Module, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        parallelize(llama, **changes)


@pytest.mark.parametrize(
    ("degrees", "backend", "axes"),
    [
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "spmd_types", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ({"dp_shard": 4, "tp": 2}, "partial_dtensor", {"fsdp": 4, "tp": 2}),
        ({"tp": 8}, "spmd_types", {"tp": 8}),
    ],
)
def test_the_mesh_of_a_job(degrees: dict[str, int], backend: Any, axes: dict[str, int]) -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=8)
    sizes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1) | degrees
    mesh = device_mesh(ParallelDims(**sizes, world_size=8, spmd_backend=backend))
    assert dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) == axes


def test_models_that_are_refused() -> None:
    with pytest.raises(PlanError, match="Linear is called in its own way"):
        parallelize(torch.nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"layers\.0\.attention\.inner_attention is VarlenAttention"):
        parallelize(model_of(llama3.model_registry("debugmodel", attn_backend="varlen")))


def test_options_of_the_trainer_are_refused(llama: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match="inputs: the trainer of torchtitan decides"):
        parallelize(llama, inputs="global")


def test_routers_score_in_float32() -> None:
    """As torchtitan's autocast does on GPUs."""
    layers = model_of(qwen3.model_registry("debugmodel_moe")).layers
    router = layers["0"].moe.router.to_empty(device="cpu").bfloat16()
    torch.nn.init.normal_(router.gate.weight)
    x = torch.randn(1, 3, router.gate.in_features).bfloat16()
    expected = torch.nn.functional.linear(x.float(), router.gate.weight.float()).softmax(-1)
    prepare_experts(router)
    assert torch.equal(router(x)[2], expected)


def test_without_torchtitan_the_import_tells_what_to_install() -> None:
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if "torchtitan" in name]:
            del sys.modules[name]
        sys.modules["torchtitan"] = None  # type: ignore[assignment]
        with pytest.raises(ImportError, match=r"pip install 'autoshard\[torchtitan\]'"):
            import_module("autoshard.integrations.torchtitan")
