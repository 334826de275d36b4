"""`TrainingRow`: a training step that somebody measured, with all that a prediction of it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from published.training_models import MODELS, Model

Sharding = Literal["DDP", "FSDP", "HSDP"]
Recomputation = Literal["none", "half", "full"]
Products = Literal["bfloat16", "float16", "float32"]
Unit = Literal["tokens/s/GPU", "samples/s", "seconds a step", "TFLOP/s/GPU"]

PER_HOST = 8


@dataclass(frozen=True)
class Source:
    """Where rows were read.

    Attributes:
        title: of the document.
        link: to it.
        devices: the machines that it tells of.
        precision: of the products and of what the optimizer updates.
        assumed: what it does not say, and what differs here.
    """

    title: str
    link: str
    devices: str
    precision: str
    assumed: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One measured step.

    Attributes:
        key: names the row on the command line.
        source: where it stands.
        place: table or heading there.
        model: a key of `MODELS`.
        cluster: name of the library's preset.
        devices: how many GPUs.
        sharding: of parameters over the data parallel devices: whole, in shards over all, or in shards inside hosts.
        tensor: devices of one tensor parallel group, which is Megatron's layout.
        pipeline: ranks of one pipeline.
        virtual: stages of a pipeline's rank.
        microbatch: samples of one device, or tensor parallel group, in one run of the step.
        accumulation: runs whose gradients are added up in one step; in a pipeline its microbatches.
        sequence: tokens of a sample; 0 for images.
        recomputation: what the backward half runs again: nothing, about half of the layers' arithmetic, all layers.
        products: dtype of matrix products and convolutions.
        reduced: dtype in which gradients are reduced.
        compiled: whether the model went through `torch.compile`.
        published: the figure, in its `unit`.
        unit: "samples/s" are those of all devices.
        network: share of the preset's network that a GPU has.
        held_out: kept to check against: nobody looked at this row while prices were made.
        slow: whether the prediction takes longer than three minutes.
        reason: why the prediction is further than 15 % from the figure.
    """

    key: str
    source: Source
    place: str
    model: str
    cluster: str
    devices: int
    sharding: Sharding = "FSDP"
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    microbatch: int
    accumulation: int = 1
    sequence: int
    recomputation: Recomputation = "none"
    products: Products = "bfloat16"
    reduced: Products = "float32"
    compiled: bool = False
    published: float
    unit: Unit = "tokens/s/GPU"
    network: float = 1.0
    held_out: bool = False
    slow: bool = False
    reason: str = ""

    @property
    def data(self) -> int:
        """Data parallel devices, or tensor parallel groups, or pipelines of these."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def batch(self) -> int:
        """Samples of a step on all devices."""
        return self.data * self.microbatch * self.accumulation

    @property
    def amount(self) -> int:
        """Tokens of a step on all devices; images where there are no sequences."""
        return self.batch * max(1, self.sequence)

    @property
    def mesh(self) -> Mapping[str, int]:
        """Mesh axes of more than one device; tensor parallel groups lie inside hosts."""
        inside = PER_HOST if self.sharding == "HSDP" else self.data
        sizes = {"pp": self.pipeline, "replicas": self.data // inside, "dp": inside, "tp": self.tensor}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def throughput(self) -> float:
        """Tokens, or images, per second and GPU, as published."""
        match self.unit:
            case "tokens/s/GPU":
                return self.published
            case "samples/s":
                return self.published * max(1, self.sequence) / self.devices
            case "seconds a step":
                return self.amount / self.published / self.devices
            case "TFLOP/s/GPU":
                return self.published * 1e12 / flops_per_token(self.built, self.sequence)

    @property
    def built(self) -> Model:
        """The model's figures."""
        return MODELS[self.model]

    @property
    def layout(self) -> str:
        """The parallelism in words."""
        tensor = f"TP {self.tensor}" if self.tensor > 1 else ""
        stages = f" x {self.virtual} stages" if self.virtual > 1 else ""
        pipeline = f"PP {self.pipeline}{stages}" if self.pipeline > 1 else ""
        data = f"{self.sharding} {self.data}" if self.data > 1 else ""
        return ", ".join(part for part in (data, tensor, pipeline) if part)


def flops_per_token(model: Model, sequence: int) -> float:
    """Operations of a token of a GPT whose layers are run again in the backward half.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    Equation 3: 96 B s l h^2 (1 + s / 6h + V / 16lh) for a batch of B sequences of s tokens.
    """
    width, layers = model.width, model.layers
    return 96 * layers * width**2 * (1 + sequence / (6 * width) + model.vocabulary / (16 * layers * width))
