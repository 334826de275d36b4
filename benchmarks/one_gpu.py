"""Training steps on one GPU, measured beside predicted: python benchmarks/one_gpu.py [--models NAME ...] [--json OUT]

Each model trains as it is, and parallelised on a mesh of one device over NCCL; both in eager mode and compiled. There
are no collectives: what shows is the kernels that a program calls, what the host adds, and the memory. Several of these
programs may share a GPU: one of them measures at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard

WARM, STEPS = 3, 10
Model = tuple[nn.Module, dict[str, Tensor]]


@dataclass(slots=True)
class Run:
    """A model trained in one way: seconds of forward and backward, bytes at the peak of a step with AdamW."""

    model: str
    way: str
    seconds: float = 0.0
    predicted_seconds: float | None = None
    update_seconds: float = 0.0
    predicted_update: float | None = None
    host_seconds: float = 0.0
    peak: int = 0
    predicted_peak: int | None = None
    loss: float = 0.0
    gradient: float = 0.0
    prepared_in: float = 0.0
    error: str = ""


def language_model(config: Any, batch: int, length: int, kind: Any = transformers.AutoModelForCausalLM) -> Model:
    tokens = torch.randint(config.vocab_size, (batch, length), device="cuda")
    return kind.from_config(config), {"input_ids": tokens, "labels": tokens}


def llama() -> Model:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=32000, use_cache=False)
    return language_model(config, 4, 2048)


def gpt2() -> Model:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False, **dropout)
    return language_model(config, 8, 1024)


def bert() -> Model:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return language_model(config, 32, 512, transformers.AutoModelForMaskedLM)


def mixtral() -> Model:
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=8, num_local_experts=8, use_cache=False)
    return language_model(config, 8, 1024)


def resnet() -> Model:
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    labels = torch.randint(1000, (128,), device="cuda")
    return model, {"pixel_values": torch.randn(128, 3, 224, 224, device="cuda"), "labels": labels}


MODELS: dict[str, Callable[[], Model]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "mixtral": mixtral,
    "resnet": resnet,
}
# Options of `autoshard.parallelize` by the name of the way; None for the model as it is.
WAYS: dict[str, dict[str, Any] | None] = {
    "torch": None,
    "autoshard": {},
    "autoshard, recompute": {"recompute": "full"},
    "torch, compiled": None,
    "autoshard, compiled": {"compile": True},
}


@contextlib.contextmanager
def alone_on_gpu() -> Iterator[None]:
    """Context in which no other of these programs measures."""
    with (Path(tempfile.gettempdir()) / "autoshard_one_gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure(name: str, way: str, mesh: DeviceMesh, cluster: str) -> Run:
    run = Run(name, way)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    module.to("cuda", torch.bfloat16).train()
    inputs = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inputs.items()}
    optimizer = torch.optim.AdamW(module.parameters())
    start = time.perf_counter()
    call: Callable[..., Any] = torch.compile(module) if way == "torch, compiled" else module
    options = WAYS[way]
    if options is not None:
        autoshard.parallelize(module, mesh, (), inputs, cluster=cluster, optimizer="adamw", **options)
        plan = module.sharding_plan
        run.predicted_seconds, run.predicted_peak = plan.step_seconds, plan.memory.peak
        run.predicted_update = getattr(plan, "update_seconds", None)
        optimizer = torch.optim.AdamW(module.parameters())

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = call(**inputs).loss
        loss.backward()
        return loss.detach()

    run.loss = train().item()
    run.gradient = float(sum(local(weight.grad).double().square().sum() for weight in module.parameters())) ** 0.5
    run.prepared_in = time.perf_counter() - start
    with alone_on_gpu():
        for _ in range(WARM):
            train()
            optimizer.step()
        # The optimizer has its state now.
        torch.cuda.reset_peak_memory_stats()
        run.update_seconds = statistics.median(seconds(train, optimizer.step)[1] for _ in range(3))
        run.peak = torch.cuda.max_memory_allocated() - before
        timed = [seconds(train) for _ in range(STEPS)]
        run.seconds = statistics.median(step for step, _, _ in timed)
        run.host_seconds = statistics.median(host for _, _, host in timed)
    return run


def seconds(train: Callable[[], object], update: Callable[[], object] = lambda: None) -> tuple[float, float, float]:
    """Return the seconds of a step and of its update, and those in which the host queues the step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    train()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    middle = time.perf_counter()
    update()
    torch.cuda.synchronize()
    return middle - start, time.perf_counter() - middle, queued - start


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def table(runs: list[Run], cluster: str) -> Table:
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, predicted by {cluster}"
    made = Table(*("model", "way", "step, ms", "predicted", "host", "update", "peak, GiB", "predicted"), title=title)
    for run in runs:
        if run.error:
            made.add_row(run.model, run.way, run.error[-60:])
            continue
        planned = ["", ""] if run.predicted_seconds is None or run.predicted_peak is None else [
            f"{1e3 * run.predicted_seconds:.1f}", f"{run.predicted_peak / 2**30:.3f}"
        ]  # fmt: skip
        made.add_row(
            run.model, run.way, f"{1e3 * run.seconds:.1f}", planned[0], f"{1e3 * run.host_seconds:.1f}",
            f"{1e3 * run.update_seconds:.1f}", f"{run.peak / 2**30:.3f}", planned[1],
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cluster", default="h100", help="a preset, or a file of calibrate")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("x",))
    runs: list[Run] = []
    for name in options.models:
        for way in options.ways:
            try:
                runs.append(measure(name, way, mesh, options.cluster))
            except Exception:
                runs.append(Run(name, way, error=traceback.format_exc()))
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    Console(width=140).print(table(runs, options.cluster))
    dist.destroy_process_group()
    if any(run.error for run in runs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
