"""Objects that no graph can return, such as key-value caches: `forward` returns None in their place."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import pytree
from autoshard.capture.containers import leaf_name, leaves_by_path, record_dataclasses

_PLAIN = (torch.Tensor, bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool, type(None))


class OpaqueOutputs:
    """A forward hook that replaces objects other than tensors, plain values and known containers by None.

    Hugging Face models return their key-value cache beside the loss by default. A training step has no use for it, and
    a graph returns tensors alone.

    Attributes:
        found: path in the output -> name of the type that was replaced.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output with None for such objects; the output itself if no tensor would be left."""
        recorded = record_dataclasses(output)
        leaves = leaves_by_path(recorded)
        opaque = {leaf_name(path): type(leaf).__name__ for path, leaf in leaves if not isinstance(leaf, _PLAIN)}
        if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
            return output
        if not opaque:
            return recorded
        self.found.update(opaque)
        return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else None, recorded)

    def warn(self, model: str) -> None:
        """Warn of the replaced objects, if there are any."""
        if self.found:
            left_out = ", ".join(f"{path} ({kind})" for path, kind in self.found.items())
            warnings.warn(
                f"{model} returns what no graph can hold: {left_out}. The parallelised module returns None there. Ask "
                "the model not to make it (Hugging Face: use_cache=False for the key-value cache), or register the "
                "type with torch.utils._pytree.register_pytree_node to keep it.",
                stacklevel=2,
            )
