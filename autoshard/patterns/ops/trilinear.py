"""The product of three tensors that `torch.nn.Bilinear` is made of: dims are broadcast, some of them summed over."""

from __future__ import annotations

from autoshard.patterns.notation import bind
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten._trilinear.default")
def trilinear(call: OpCall) -> Rule:
    """Every dim is a loop; `expand1`, ... are the dims that an operand lacks, `sumdim` those that the result does."""
    lacking = [call.arg(f"expand{operand}") for operand in (1, 2, 3)]
    names = [f"d{dim}" for dim in range(len(call.operands[0].shape) + len(lacking[0]))]
    lacking.append(call.arg("sumdim"))
    *operands, result = (" ".join(name for dim, name in enumerate(names) if dim not in absent) for absent in lacking)
    return bind(f"{', '.join(operands)} -> {result}", call, linear="0, 1, 2")
