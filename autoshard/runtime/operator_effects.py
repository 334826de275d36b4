"""The effects of an operator on its arguments, derived from its schema and tags."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments, and the elements of lists among them: operators do not nest tensors deeper."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


@dataclass(frozen=True, slots=True)
class Effect:
    """Effects of an operator on its arguments.

    Attributes:
        draws: True if it draws random numbers.
        writes: the positions and names of the arguments that it writes.
        is_elementwise: True if each element that it writes depends on no other element.
        is_view: True if its results share memory with the first argument.
        is_wrong: True if torch gives wrong results on shards.
        reshapes: True if it changes the shape of an argument in place.
        keeps_pieces: True if it is correct on any piece of a tensor, though not elementwise.
    """

    draws: bool
    writes: tuple[tuple[int, str], ...]
    is_elementwise: bool
    is_view: bool
    is_wrong: bool
    reshapes: bool
    keeps_pieces: bool

    def written_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments that the operator writes."""
        values = (args[place] if place < len(args) else kwargs.get(name) for place, name in self.writes)
        return list(leaves_of(tuple(values), {}))


# Elementwise in-place operators that torch does not tag; those on lists of tensors are elementwise, too.
_ELEMENTWISE = ("copy_", "zero_", "fill_", "_foreach_", "_fused_", "_amp_foreach_")

# Operators that return as many elements as they take, at the same positions, and norms over all elements.
_PIECEWISE = {
    *("alias", "clone", "detach", "detach_", "empty_like", "full_like", "ones_like", "zeros_like", "_to_copy"),
    *("linalg_vector_norm", "_foreach_norm"),
}


@functools.lru_cache(maxsize=1 << 12)
def effect_of(func: Any) -> Effect:
    """Return the effect of an operator."""
    schema, tags, name = func._schema, func.tags, func._schema.name.partition("::")[2]
    aliases = [(k, each.name, each.alias_info) for k, each in enumerate(schema.arguments) if each.alias_info]
    writes = tuple((k, argument) for k, argument, alias in aliases if alias.is_write)
    return Effect(
        draws=torch.Tag.nondeterministic_seeded in tags,
        writes=writes,
        is_elementwise=not any(each.is_out for each in schema.arguments)
        and (torch.Tag.pointwise in tags or name.startswith(_ELEMENTWISE)),
        is_view=not writes and bool(aliases),
        is_wrong=_WRONG.search(name) is not None,
        reshapes=torch.Tag.inplace_view in tags and name != "detach_",
        keeps_pieces=name in _PIECEWISE,
    )


# Torch's rules give different numbers: gradients of means are too large by the number of ranks, means over uneven
# shards average the ranks' means, and convolutions confuse channels with rows.
_WRONG = re.compile(r"(mse|smooth_l1|huber|soft_margin)_loss|binary_cross_entropy|convolution")
