"""Windows over a dim, whose elements become the last dim, and the way back.

Windows that follow each other without gap or overlap cut the dim in two factors, like a view. Others share elements:
then the dim must be whole.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.build import NamedDims, build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta


def _window_dims(
    full: TensorMeta, cut: TensorMeta, dim: int, step: int
) -> tuple[dict[str, int], NamedDims, NamedDims, list[str]]:
    """Sizes, the dims of the whole tensor and of its windows, and what can't be sharded."""
    sizes = {f"d{index}": size for index, size in enumerate(full.shape)}
    sizes |= {"windows": cut.shape[dim] if full.shape else 1, "window": cut.shape[-1]}
    source = [[f"d{index}"] for index in range(len(full.shape))]
    target = [["windows"] if index == dim else names for index, names in enumerate(source)] + [["window"]]
    if full.shape and sizes["window"] == step and full.shape[dim] == sizes["windows"] * step:
        source[dim] = ["windows", "window"]
        del sizes[f"d{dim}"]
        return sizes, source, target, []
    return sizes, source, target, [f"d{dim}", "windows", "window"]


@rule_maker("aten.unfold")
def _unfold(call: OpCall) -> Rule:
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    dim = call.arg("dimension") % max(1, len(operand.shape))
    sizes, source, target, whole = _window_dims(operand, result, dim, call.arg("step"))

    def local(program: LocalCall) -> Any:
        return program.run(**_local_window(program))

    return build(sizes, [source], [target], whole=whole, linear=[{0}], local=local, free=True, uneven=True)


def _local_window(call: LocalCall) -> dict[str, Any]:
    """Size of the local windows, and the step between them; a window is sharded only where the step is its size."""
    size = call.size("window") if call.axes("window") else call.arg("size")
    return {"size": size, "step": size if call.axes("window") else call.arg("step")}


@rule_maker("aten.unfold_backward")
def _unfold_backward(call: OpCall) -> Rule | None:
    """None where windows of one row are broadcast to all, as the inverse of a Fourier transform does with its own."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    dim = call.arg("dim") % max(1, len(result.shape))
    if any(own != whole for at, (own, whole) in enumerate(zip(operand.shape, result.shape, strict=False)) if at != dim):
        return None
    sizes, source, target, whole = _window_dims(result, operand, dim, call.arg("step"))

    def local(program: LocalCall) -> Any:
        return program.run(input_sizes=list(program.result_shape()), **_local_window(program))

    return build(sizes, [target], [source], whole=whole, linear=[{0}], local=local, uneven=True)
