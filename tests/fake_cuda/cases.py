"""What the fake ranks run: models of the zoo, each on a mesh, in one of two types, with a kernel for attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tests import models
from tests.kernels.choice import AMPERE, EFFICIENT, HOPPER, MATH
from tests.numerics import MODELS

WORLD = 8
MESHES: dict[str, dict[str, int]] = {
    "line": {"a": 8},
    "square": {"a": 2, "b": 4},
    "cube": {"a": 2, "b": 2, "c": 2},
}
PIPELINES: dict[str, dict[str, int]] = {"rows": {"pp": 2, "a": 4}, "columns": {"a": 4, "pp": 2}}
"""Meshes with a pipeline: both ranks are on its first stage, or one on each."""
PIPELINED = ("hf_gpt2", "hf_llama")
KERNELS = {0: {"line": HOPPER, "square": AMPERE, "cube": (EFFICIENT, MATH)}, 3: dict.fromkeys(MESHES, (MATH,))}
"""What GPUs prefer for attention, by rank and mesh: ranks must come to the same program all the same."""
RANKS = tuple(KERNELS)  # on hosts of four devices or more, their devices have these numbers
ALIKE = (
    *("hf_opt", "hf_gemma", "hf_qwen3", "hf_qwen3_moe", "hf_roberta", "hf_albert", "resnet18", "wide_resnet"),
    *("hf_vit", "hf_clip", "hf_whisper", "gnmt"),
)
"""Models with the operators of GPT-2, Llama, Mixtral, BERT, VGG, Swin and LSTM."""
REPEATED = ("hf_gpt2", "hf_llama", "hf_bert")
"""Models of several layers, which have the same operators: here they have one."""
MOVED = ("mlp", "hf_llama", "unet", "lstm")
"""Models every second of whose values is moved to the host."""
NAMES = tuple(name for name in MODELS if name not in ALIKE)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a mesh."""

    model: str
    mesh: str

    @property
    def plan(self) -> str:
        """The name of the file with its plan."""
        return f"{self.model}-{self.mesh}.json"

    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes."""
        return (MESHES | PIPELINES)[self.mesh]


def build(model: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in bfloat16, a third of them in float32, on every mesh some; and the arguments of a call."""
    single = NAMES.index(model) // len(MESHES) % 3 == 2
    module, inputs = models.ZOO[model](
        dtype=torch.float32 if single else torch.bfloat16, **({"layers": 1} if model in REPEATED else {})
    )
    return module, inputs


def cases(rank: int = RANKS[-1]) -> list[Case]:
    """Return the cases of a rank: a mesh for every model, another one for the next.

    The first rank has those whose attention it computes otherwise than the other, one on every mesh.
    """
    made = [Case(model, mesh) for model, mesh in zip(NAMES, itertools.cycle(MESHES), strict=False)]
    return [case for case in made if case.model in REPEATED] if rank == RANKS[0] else made


def pipelines() -> list[Case]:
    """Every mesh with a pipeline, and a model for it, another one for the next mesh."""
    return [Case(model, mesh) for model, mesh in zip(PIPELINED, PIPELINES, strict=True)]
