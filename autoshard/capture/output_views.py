"""Outputs that look at the memory of an input or a buffer: what `forward` changes in place, and returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.capture._torch import storage_of


@dataclass(frozen=True, slots=True)
class OutputView:
    """The memory that an output of a call looks at.

    Attributes:
        kind: of the tensor whose memory it is: `"input"` or `"buffer"`.
        name: of that tensor.
        layout: sizes, strides and offset in that memory, in which the tensor lies in order; None: it is that tensor.
    """

    kind: str
    name: str
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The view of a tensor of the kind that was captured; None where it lies otherwise in memory."""
        if self.layout is None:
            return tensor
        if not tensor.is_contiguous():
            return None
        size, stride, offset = self.layout
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def find_output_views(
    outputs: Mapping[str, fx.Node], sources: Iterable[tuple[str, str, fx.Node]]
) -> Iterator[tuple[str, OutputView]]:
    """The outputs, by name, that look at the memory of a buffer or an input.

    Args:
        outputs: nodes of an exported graph, in which tensors are changed in place.
        sources: kinds, names and placeholders of what the graph takes.
    """
    held = {
        storage_of(node.meta["val"]): (kind, name, node.meta["val"])
        for kind, name, node in sources
        if kind in ("input", "buffer")
    }
    for output, node in outputs.items():
        value = node.meta["val"]
        kind, name, source = held.get(storage_of(value), ("", "", value))
        if not kind or value.dtype != source.dtype:
            continue
        layout = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
        if _is_same_layout(layout, (tuple(source.shape), tuple(source.stride()), source.storage_offset())):
            yield output, OutputView(kind, name, None)
        elif all(isinstance(number, int) for number in (*layout[0], *layout[1], layout[2])):
            yield output, OutputView(kind, name, layout)


def _is_same_layout(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two layouts are equal, symbols by their names: a comparison of these would be a condition on sizes."""
    return str(one) == str(other)
