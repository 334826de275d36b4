"""Padding by a constant: dims that are not padded are free, and others where their padding can be split, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.cut import common_inner_size
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


def _padding(pad: Sequence[int], ndim: int, dim: int) -> tuple[int, int]:
    """Padding before and after a dim; `pad` counts from the last dim."""
    index = 2 * (ndim - 1 - dim)
    return (pad[index], pad[index + 1]) if index < len(pad) else (0, 0)


@rule_maker("aten.constant_pad_nd")
def _pad(call: OpCall) -> Rule:
    """Padding of the last dims: of each, the factor inside size and padding stays local."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    ndim = len(operand.shape)
    pad = call.arg("pad")
    sizes: dict[str, int] = {}
    source, target, whole = [], [], []
    for dim, size in enumerate(operand.shape):
        before, after = _padding(pad, ndim, dim)
        inner = common_inner_size(size, before, after)
        sizes |= {f"d{dim}": inner, f"operand_parts{dim}": size // inner}
        sizes[f"result_parts{dim}"] = result.shape[dim] // inner
        if before or after:
            whole += [f"operand_parts{dim}", f"result_parts{dim}"]
        else:
            inner = size
            sizes |= {f"d{dim}": size, f"operand_parts{dim}": 1, f"result_parts{dim}": 1}
        source.append([f"operand_parts{dim}", f"d{dim}"])
        target.append([f"result_parts{dim}", f"d{dim}"])

    def local(program: LocalCall) -> Any:
        names = [f"d{ndim - 1 - index // 2}" for index in range(len(pad))]
        return program.run(
            pad=[amount * program.size(name) // sizes[name] for name, amount in zip(names, pad, strict=True)]
        )

    linear: list[set[int]] = [{0}] if call.arg("value") == 0 else []
    return build(sizes, [source], [target], whole=whole, linear=linear, local=local, uneven=True)
