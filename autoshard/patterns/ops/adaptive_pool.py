"""Pooling to a given size, to random windows, and back: leading dims (batch, channels) are independent.

A mean over windows of one size, which lie side by side, may be sharded by positions too.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import bind_named, factor_names, shape_of
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta

_IMAGES = (("2d", "h! w!", "y! x!"), ("3d", "t! h! w!", "z! y! x!"))

for _kind, _large, _small in _IMAGES:
    rule(f"aten.adaptive_max_pool{_kind}.default", f"... {_large} -> ... {_small}, ... {_small}")
    rule(
        f"aten.adaptive_max_pool{_kind}_backward.default",
        f"... {_small}, ... {_large}, ... {_small} -> ... {_large}",
        linear="0",
    )
    rule(f"aten.fractional_max_pool{_kind}.default", f"... {_large}, ... r! -> ... {_small}, ... {_small}")
    rule(
        f"aten.fractional_max_pool{_kind}_backward.default",
        f"... {_small}, ... {_large}, ... {_small} -> ... {_large}",
        linear="0",
    )
    rule(f"aten.max_unpool{_kind}.default", f"... {_small}, ... {_small} -> ... {_large}")


def _image_dims(call: OpCall) -> tuple[str, str, dict[str, int]]:
    """Dims of the operand and of the pooled image, and sizes of names; e are the positions of a window."""
    whole = shape_of(call, "self")
    pooled = call.arg("grad_output") if "backward" in call.op.name() else call.results[0]
    assert isinstance(pooled, TensorMeta)
    spatial = 3 if "3d" in call.op.name() else 2
    large = factor_names("b", len(whole) - spatial)
    small, sizes = list(large), dict[str, int]()
    for dim in range(len(whole) - spatial, len(whole)):
        windows = pooled.shape[dim]
        if windows > 1 and whole[dim] % windows == 0:
            large.append(f"(x{dim} e{dim}!)")
            small.append(f"x{dim}")
            sizes |= {f"x{dim}": windows, f"e{dim}": whole[dim] // windows}
        else:
            large.append(f"p{dim}!")
            small.append(f"q{dim}!")
    return " ".join(large), " ".join(small), sizes


@rule_maker("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_mean_pool(call: OpCall) -> Rule:
    """Means of windows."""
    large, small, sizes = _image_dims(call)
    return bind_named(
        call, {"self": large}, [small], linear=[{"self"}], sizes=sizes, local=_adaptive_mean_pool, uneven=True
    )


def _adaptive_mean_pool(call: LocalCall) -> Any:
    return call.run(output_size=list(call.result_shape()[-len(call.arg("output_size")) :]))


@rule_maker("aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default")
def adaptive_mean_pool_backward(call: OpCall) -> Rule:
    """The gradient of the operand, of which only the shape is looked at."""
    large, small, sizes = _image_dims(call)
    return bind_named(call, {"grad_output": small, "self": large}, [large], linear=[{"grad_output"}], sizes=sizes)
