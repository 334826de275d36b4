"""Outputs that training does not read, left out of the graph of a call that computes gradients of a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from autoshard.capture.export import Exported
from autoshard.capture.returned_objects import Constant
from autoshard.errors import HintError
from autoshard.names import matching_paths, suggestion


def without_unread_outputs(exported: Exported, globs: Sequence[str]) -> Exported:
    """Return the graph of a training call without some outputs, in whose place the call returns None.

    Nothing changes where no parameter or input requires a gradient, nor where no floating scalar, a loss, is returned:
    gradients then come from the other outputs.

    Args:
        exported: the forward graph of a call with gradients; changed.
        globs: names of outputs, or globs over them.

    Raises:
        HintError: there is no such output, or no loss is left.
    """
    returned = [leaf for leaf in exported.result.leaves if isinstance(leaf, str)]
    nodes = dict(zip(exported.result.names, exported.outputs, strict=True))
    if not any(item.fake.requires_grad for item in exported.inputs) or not any(map(_is_loss, nodes.values())):
        return exported
    unread = set(_names_of(globs, returned))
    kept = {name: node for name, node in nodes.items() if name not in unread}
    if not any(map(_is_loss, kept.values())):
        raise HintError(
            f"unread_outputs={tuple(globs)!r} leaves no loss, of which gradients are: the outputs are "
            f"{', '.join(returned)}. Name those alone that training does not read."
        )
    exported.graph.output_node().args = ((*kept.values(), *(node for _, node in exported.assigned)),)
    result = exported.result
    leaves = tuple(Constant(None) if leaf in unread else leaf for leaf in result.leaves)
    views = {name: view for name, view in result.views.items() if name not in unread}
    return replace(exported, outputs=tuple(kept.values()), result=replace(result, leaves=leaves, views=views))


def _is_loss(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.ndim == 0 and value.is_floating_point())


def _names_of(globs: Sequence[str], returned: Sequence[str]) -> Iterator[str]:
    for glob in globs:
        found = matching_paths(glob, returned)
        if not found:
            raise HintError(
                f"unread_outputs={tuple(globs)!r}: there is no output {glob!r}; the outputs are "
                f"{', '.join(returned)}. {suggestion(glob, returned)}"
            )
        yield from found
