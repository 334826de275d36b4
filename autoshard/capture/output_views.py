"""Outputs that are views of an input or a buffer, such as a buffer that `forward` changes in place and returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.capture._torch import storage_of


@dataclass(frozen=True, slots=True)
class OutputView:
    """An output that is a view of an input or a buffer.

    Attributes:
        kind: `"input"` or `"buffer"`.
        name: the name of the input or buffer.
        layout: sizes, strides and offset of the view, for a contiguous input or buffer; None: the whole tensor itself.
    """

    kind: str
    name: str
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the view of an input or buffer; None if that has another layout in memory than at the capture."""
        if self.layout is None:
            return tensor
        if not tensor.is_contiguous():
            return None
        size, stride, offset = self.layout
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def find_output_views(
    outputs: Mapping[str, fx.Node], sources: Iterable[tuple[str, str, fx.Node]]
) -> Iterator[tuple[str, OutputView]]:
    """Yield the names of outputs that are views of a buffer or an input, with these views.

    Args:
        outputs: nodes of an exported graph, in which tensors are changed in place.
        sources: kinds, names and placeholders of the inputs of the graph.
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
        source_layout = (tuple(source.shape), tuple(source.stride()), source.storage_offset())
        # As texts: a comparison of symbolic sizes would be recorded as a condition on them.
        if str(layout) == str(source_layout):
            yield output, OutputView(kind, name, None)
        elif all(isinstance(number, int) for number in (*layout[0], *layout[1], layout[2])):
            yield output, OutputView(kind, name, layout)
