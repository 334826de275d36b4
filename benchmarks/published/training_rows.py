"""Measured training steps, as their sources give them."""

from __future__ import annotations

from typing import Any

from published.training import Products, Recomputation, Source, TrainingRow

_HALF = (
    "Selective recomputation by operator runs every second matrix product again and keeps attention; here it is the "
    "mean of no layer and all layers run again."
)
TORCHTITAN = Source(
    "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "H100 with 96 GB of HBM2e at 2.4 TB/s and a power limit of 500 W, eight per host with NVLink, 400 Gb/s per GPU",
    "bfloat16; float32 parameters and reductions",
    f"Sequences of 8192 tokens (the model's; the document does not say). {_HALF}",
)
TORCHTITAN_A100 = Source(
    "torchtitan, docs/performance.md",
    "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
    "A100 80 GB; the network is not stated",
    "bfloat16; float32 parameters and reductions",
    "Sequences of 8192 tokens for Llama 3 and 4096 for Llama 2 (half as long, it says). Selective recomputation by "
    "layer is every second one. Whether models were compiled is not stated.",
)
TORCHTITAN_405B = Source(
    "torchtitan, docs/performance.md of 2024",
    "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md",
    "H100 with 94 GB (HBM2e, 500 W, as in torchtitan's later document); the network is not stated",
    "bfloat16; float32 parameters and reductions",
    "Sequences of 8192 tokens. Whether the model was compiled is not stated. TP 8, of 128 GPUs with 16 FSDP ranks.",
)
FMS = Source(
    "fms-fsdp, README.md",
    "https://github.com/foundation-model-stack/fms-fsdp/blob/0d319983c4b3b7f7b3b5e2c5e7f746746b6f73a9/README.md",
    "A100 80 GB, 400 Gb/s per host of eight (the blog's words: 400Gbps inter-node)",
    "bfloat16, reductions too (fms_fsdp/policies/mixed_precision.py); float32 parameters",
    "Sequences of 4096 tokens, as the blog has them.",
)
PYTORCH_BLOG = Source(
    "PyTorch blog, Maximizing training throughput using PyTorch FSDP",
    "https://pytorch.org/blog/maximizing-training/",
    "96 H100 80 GB, 800 Gb/s per host of eight",
    "bfloat16, reductions too (fms-fsdp's policy); float32 parameters",
    "Which models were sharded inside hosts (HSDP) the blog does not state; here those that fms-fsdp's README names.",
)
FOUNDRY = Source(
    "LLM Foundry, scripts/train/benchmarking/README.md",
    "https://github.com/mosaicml/llm-foundry/blob/061f2c7ce64e655100286584a7629e2a09f827ba/scripts/train/"
    "benchmarking/README.md",
    "H100 80 GB; A100 80 GB and 40 GB with 1600 Gb/s per host (RoCE)",
    "amp_bf16; float32 parameters. What FSDP gathers is float32 or bfloat16, by version; here bfloat16",
    "MPT with FlashAttention in Triton, learned positions, biases: NumParams of the table says so.",
)
MEGATRON = Source(
    "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (2021)",
    "https://arxiv.org/abs/2104.04473",
    "Selene: DGX A100 80 GB, eight 200 Gb/s ports per host",
    "fp16 with float32 master weights; here bfloat16, which costs the same",
    "Table 1 gives TFLOP/s; tokens follow by the paper's Equation 3. It does not give microbatches (here 4 samples, in "
    "pipelines 1, as in Table 2) nor stages per rank (here 1, with 1F1B; Megatron interleaves). Read in transcriptions "
    "of the table, of which two agree.",
)
KORTHIKANTI = Source(
    "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022)",
    "https://arxiv.org/abs/2205.05198",
    "DGX A100 80 GB, eight 200 Gb/s ports per host",
    "fp16 with float32 master weights; here bfloat16, which costs the same",
    "Tables 3 and 5. The present work recomputes attention's scores alone, 2 % of the arithmetic, and nothing here. "
    "Read in a transcription of the tables.",
)
EXAMPLES = Source(
    "NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md",
    "https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/ConvNets/resnet50v1.5/README.md",
    "DGX A100 80 GB; DGX-1 with V100 16 GB",
    "AMP: fp16 products, float32 parameters and reductions; float32 where it says so",
    "Images of 224 by 224, channels last; batches of configs.yml beside it. DDP's batch norms see one GPU's images; "
    "ours would exchange statistics, so group norms stand in their place.",
)

_LOADING = (
    "Images are loaded by the host, for which eight GPUs wait: one alone does {} images a second by the same table, "
    "and eight together {} times as many. No loading is predicted."
)
_TRITON = (
    "Attention is FlashAttention 1 in Triton there (github.com/mosaicml/llm-foundry/issues/57), {} of the step that is "
    "predicted at the rates of FlashAttention 2, which is 1.3 to 2.5 times as fast (Dao 2023, Section 4.1)."
)


def _titan(key: str, devices: int, published: float, **own: Any) -> TrainingRow:
    return TrainingRow(
        key=key,
        source=TORCHTITAN,
        place="Table 1" if devices == 8 else "Table 3",
        model="llama-3-8b",
        cluster="h100_500w",
        devices=devices,
        microbatch=2,
        sequence=8192,
        recomputation="half",
        published=published,
        **own,
    )


def _titan_a100(
    key: str, model: str, microbatch: int, recomputation: Recomputation, published: float, **own: Any
) -> TrainingRow:
    return TrainingRow(
        key=key,
        source=TORCHTITAN_A100,
        place="Llama 3 performance" if model.startswith("llama-3") else "Llama 2 performance",
        model=model,
        cluster="a100",
        devices=64,
        microbatch=microbatch,
        sequence=8192 if model.startswith("llama-3") else 4096,
        recomputation=recomputation,
        published=published,
        **own,
    )


def _ibm(key: str, model: str, source: Source, microbatch: int, published: float, **own: Any) -> TrainingRow:
    """A row of fms-fsdp or of the blog: hosts of A100 have 400 of a DGX's 1600 Gb/s, hosts of H100 800 of 3200."""
    old = source is FMS
    return TrainingRow(
        key=key,
        source=source,
        place="table" if old else "Table 1",
        model=model,
        cluster="a100" if old else "h100",
        devices=128 if old else 96,
        network=0.25,
        reduced="bfloat16",
        microbatch=microbatch,
        sequence=4096,
        published=published,
        **own,
    )


def _mpt(
    key: str,
    cluster: str,
    model: str,
    shape: tuple[int, int, int, int],
    recomputation: Recomputation,
    published: float,
    **own: Any,
) -> TrainingRow:
    """A row of LLM Foundry's tables; `shape`: GPUs, tokens of a sequence, microbatch, microbatches."""
    devices, sequence, microbatch, accumulation = shape
    return TrainingRow(
        key=key,
        source=FOUNDRY,
        place=f"{cluster[:4].upper()} {'40' if cluster.endswith('40') else '80'}GB",
        model=model,
        cluster=cluster,
        devices=devices,
        microbatch=microbatch,
        accumulation=accumulation,
        sequence=sequence,
        recomputation=recomputation,
        published=published,
        **own,
    )


def _narayanan(
    model: str, layout: tuple[int, int, int], batch: int, published: float, *, held_out: bool = False, reason: str = ""
) -> TrainingRow:
    """A row of Table 1; `layout`: tensor parallel devices, pipeline ranks, GPUs."""
    tensor, pipeline, devices = layout
    microbatch = 1 if pipeline > 1 else 4
    return TrainingRow(
        key=f"megatron-{model.removeprefix('gpt-')}",
        source=MEGATRON,
        place="Table 1",
        model=model,
        cluster="a100",
        devices=devices,
        sharding="DDP",
        tensor=tensor,
        pipeline=pipeline,
        microbatch=microbatch,
        accumulation=batch * tensor * pipeline // (devices * microbatch),
        sequence=2048,
        recomputation="full",
        published=published,
        unit="TFLOP/s/GPU",
        held_out=held_out,
        reason=reason,
    )


def _korthikanti(
    key: str,
    model: str,
    layout: tuple[int, int, int],
    recomputation: Recomputation,
    published: float,
    *,
    held_out: bool = False,
    reason: str = "",
) -> TrainingRow:
    """A row of Tables 3 and 5; `layout`: pipeline ranks, stages of each, batch."""
    pipeline, virtual, batch = layout
    microbatch = 1 if pipeline > 1 else batch
    return TrainingRow(
        key=key,
        source=KORTHIKANTI,
        place="Tables 3 and 5",
        model=model,
        cluster="a100",
        devices=8 * pipeline,
        sharding="DDP",
        tensor=8,
        pipeline=pipeline,
        virtual=virtual,
        microbatch=microbatch,
        accumulation=batch // microbatch,
        sequence=2048,
        recomputation=recomputation,
        published=published,
        unit="seconds a step",
        held_out=held_out,
        reason=reason,
    )


def _resnet(key: str, cluster: str, microbatch: int, products: Products, published: float, **own: Any) -> TrainingRow:
    return TrainingRow(
        key=key,
        source=EXAMPLES,
        place="Training performance",
        model="resnet-50",
        cluster=cluster,
        devices=8,
        sharding="DDP",
        microbatch=microbatch,
        sequence=0,
        products=products,
        published=published,
        unit="samples/s",
        **own,
    )


ALL = (
    _titan("titan-8b-compiled", 8, 6667, compiled=True),
    _titan("titan-8b-eager", 8, 5762),
    _titan("titan-8b-128-compiled", 128, 6514, compiled=True),
    _titan("titan-8b-128-eager", 128, 5605, held_out=True),
    TrainingRow(
        key="titan-405b-tp",
        source=TORCHTITAN_405B,
        place="Llama 3.1 performance",
        model="llama-3-405b",
        cluster="h100_500w",
        devices=128,
        tensor=8,
        microbatch=2,
        sequence=8192,
        recomputation="full",
        published=109,
    ),
    _titan_a100("titan-a100-8b", "llama-3-8b", 1, "half", 2904),
    _titan_a100("titan-a100-70b", "llama-3-70b", 1, "full", 331),
    _titan_a100("titan-a100-13b", "llama-2-13b", 2, "none", 2162),
    _titan_a100("titan-a100-13b-half", "llama-2-13b", 2, "half", 1914, held_out=True),
    _titan_a100("titan-a100-llama-2-70b", "llama-2-70b", 2, "full", 353, held_out=True),
    _ibm("fms-7b", "llama-2-7b", FMS, 2, 3760, sharding="HSDP"),
    _ibm("fms-70b", "llama-2-70b", FMS, 6, 380, recomputation="full"),
    _ibm("fms-13b", "llama-2-13b", FMS, 1, 1700, sharding="HSDP", held_out=True),
    _ibm("blog-h100-7b", "llama-2-7b", PYTORCH_BLOG, 2, 7500, sharding="HSDP", held_out=True),
    _ibm("blog-h100-70b", "llama-2-70b", PYTORCH_BLOG, 2, 800, recomputation="full", held_out=True),
    _mpt("mpt-1b-h100", "h100", "mpt-1b", (8, 2048, 14, 1), "none", 45455, reason=_TRITON.format("16%")),
    _mpt("mpt-7b-h100", "h100", "mpt-7b", (8, 2048, 6, 1), "none", 10643, reason=_TRITON.format("9%")),
    _mpt("mpt-13b-h100", "h100", "mpt-13b", (8, 2048, 2, 1), "none", 4792),
    _mpt("mpt-30b-h100", "h100", "mpt-30b", (8, 2048, 3, 21), "full", 2002),
    _mpt("mpt-70b-h100", "h100", "mpt-70b", (64, 2048, 8, 4), "full", 1039, reason=_TRITON.format("5%")),
    _mpt("mpt-3b-h100", "h100", "mpt-3b", (16, 2048, 10, 3), "none", 24142, held_out=True),
    _mpt(
        "mpt-7b-h100-8k", "h100", "mpt-7b", (8, 8192, 8, 2), "full", 6935, held_out=True, reason=_TRITON.format("29%")
    ),
    _mpt("mpt-13b-h100-64", "h100", "mpt-13b", (64, 2048, 2, 1), "none", 4800, held_out=True),
    _mpt("mpt-70b-h100-32", "h100", "mpt-70b", (32, 2048, 2, 16), "full", 882, held_out=True),
    _mpt("mpt-1b-a100", "a100", "mpt-1b", (8, 2048, 14, 4), "none", 20513),
    _mpt("mpt-7b-a100", "a100", "mpt-7b", (8, 2048, 6, 2), "none", 4641),
    _mpt("mpt-13b-a100", "a100", "mpt-13b", (8, 2048, 2, 3), "none", 2262),
    _mpt("mpt-30b-a100", "a100", "mpt-30b", (8, 2048, 3, 21), "full", 916),
    _mpt("mpt-125m-a100", "a100", "mpt-125m", (8, 2048, 32, 2), "none", 141737, held_out=True),
    _mpt(
        "mpt-7b-a100-8k", "a100", "mpt-7b", (8, 8192, 8, 2), "full", 3206, held_out=True, reason=_TRITON.format("23%")
    ),
    _mpt("mpt-70b-a100-64", "a100", "mpt-70b", (64, 2048, 8, 4), "full", 410, held_out=True),
    _narayanan("gpt-1.7b", (1, 1, 32), 512, 137),
    _narayanan("gpt-3.6b", (2, 1, 64), 512, 138, held_out=True),
    _narayanan("gpt-7.5b", (4, 1, 128), 512, 142),
    _narayanan("gpt-18b", (8, 1, 256), 1024, 135),
    _narayanan("gpt-39b", (8, 2, 512), 1536, 138),
    _narayanan("gpt-76b", (8, 4, 1024), 1792, 140, held_out=True),
    _narayanan("gpt-146b", (8, 8, 1536), 2304, 148),
    _narayanan("gpt-310b", (8, 16, 1920), 2160, 155, held_out=True),
    _narayanan("gpt-530b", (8, 35, 2520), 2520, 163, held_out=True),
    _narayanan("gpt-1t", (8, 64, 3072), 3072, 163, held_out=True),
    _korthikanti("korthikanti-22b-full", "gpt-22b", (1, 1, 4), "full", 1.42),
    _korthikanti("korthikanti-22b", "gpt-22b", (1, 1, 4), "none", 1.10, held_out=True),
    _korthikanti("korthikanti-175b-full", "gpt-175b", (8, 3, 64), "full", 18.13),
    _korthikanti("korthikanti-175b", "gpt-175b", (8, 3, 64), "none", 13.75, held_out=True),
    _resnet("resnet-a100", "a100", 256, "float16", 16621, reason=_LOADING.format("2,470", "6.72")),
    _resnet("resnet-v100", "v100", 256, "float16", 8322, reason=_LOADING.format("1,200", "6.93")),
    _resnet("resnet-v100-float32", "v100", 112, "float32", 2855, held_out=True),
)
ROWS = {row.key: row for row in ALL}
LEFT_OUT = (
    "Rows with products in float8, which no model here is captured with: torchtitan's with Float8 (8B at 8,532 and "
    "8,380, 70B on FSDP 32 x TP 8 at 829, 405B on FSDP 8 x TP 8 x PP 8 at 100 and 128 tokens/s/GPU), LLM Foundry's FP8 "
    "table, and those of NVIDIA's [NeMo](https://github.com/NVIDIA/NeMo/blob/main/docs/source/performance/"
    "performance_summary.md) and [Megatron Bridge](https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/"
    "performance-summary.md).",
    "ResNet-50 in TF32 on A100 (7,248 images/s on 8): no price tells TF32 from float32.",
    "Rows of fms-fsdp and of its blog for 34B: neither says how many key heads the model has.",
)
"""Measured rows that are not predicted, and why."""
