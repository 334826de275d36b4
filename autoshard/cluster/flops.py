"""Floating-point operations of the operators that compute more than they move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoshard.cluster._torch import OpOverload

Shape = Sequence[int]


def flops(op: OpOverload, operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object] = ()) -> float:
    """Floating-point operations of one call; a multiply and its add are two.

    Args:
        op: an ATen operator.
        operands: global shapes of its tensor operands, in the order of its schema, absent ones left out.
        results: global shapes of its tensor results; absent ones left out.
        args: the call's arguments as written in the graph, for what the shapes do not tell.

    Returns:
        The count for matrix products, convolutions, attention and recurrence, forward and backward; 0.0 for every
        other operator, whose time is that of its bytes.
    """
    count = _COUNTS.get(op.overloadpacket.__name__)
    return float(count(operands, results, args)) if count is not None else 0.0


_NEVER = 1 << 10
"""No argument: an operator that computes all scores, whatever the mask."""

_Count = Callable[[Sequence[Shape], Sequence[Shape], Sequence[object]], int]


def _product(position: int) -> _Count:
    """Count of a matrix product whose left matrix is the operand at `position`: its last dim is contracted."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        return 2 * math.prod(results[0]) * operands[position][-1]

    return count


def _attention(queries: Shape, keys: Shape, values: Shape, *, causal: bool) -> tuple[int, int]:
    """Operations of one product with the width of a key, and with the width of a value.

    Fused kernels leave out the blocks above the diagonal of a causal mask, which a mask that is a tensor does not tell.
    """
    rows, columns = queries[-2], keys[-2]
    seen = rows * columns
    if causal:
        seen -= columns * columns // 2 if rows > columns else rows * columns - rows * rows // 2
    pairs = math.prod(queries[:-2]) * seen
    return 2 * pairs * queries[-1], 2 * pairs * values[-1]


def _attention_forward(causal: int) -> _Count:
    """Scores, and the weighted sum of values; `causal`: position of the argument that says so."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        by_key, by_value = _attention(*operands[:3], causal=_is_set(args, causal))
        return by_key + by_value

    return count


def _attention_backward(causal: int) -> _Count:
    """Scores again, gradients of queries and keys; gradients of values and of weights."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        by_key, by_value = _attention(*operands[1:4], causal=_is_set(args, causal))
        return 3 * by_key + 2 * by_value

    return count


def _captured_attention(first: int, causal: int, by_key: int, by_value: int) -> _Count:
    """Attention of captured graphs: operands from `first` on; products as wide as keys, and as values.

    A causal call and its window, the arguments from `causal` on, leave keys out. Not where there are fewer queries than
    keys: they may be the last ones, which see all of them.
    """

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        queries, keys, values = operands[first : first + 3]
        rows, columns = queries[-2], keys[-2]
        seen = rows * columns
        if _is_set(args, causal) and rows == columns:
            window = args[causal + 1]
            width = min(window or columns, columns) if isinstance(window, int) else columns
            seen = rows * width - width * width // 2
        return 2 * math.prod(queries[:-2]) * seen * (by_key * queries[-1] + by_value * values[-1])

    return count


def _is_set(args: Sequence[object], position: int) -> bool:
    return len(args) > position and args[position] is True


def _convolution(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Every element of the result, or of the input where transposed, meets the weight of its channel once."""
    source, weight = operands[:2]
    transposed = len(args) > 6 and bool(args[6])
    return 2 * math.prod(source if transposed else results[0]) * math.prod(weight[1:])


def _convolution_backward(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """One forward's worth for the gradient of the input and one for that of the weight, as `output_mask` asks."""
    gradient, source, weight = operands[:3]
    transposed = len(args) > 7 and bool(args[7])
    mask = args[10] if len(args) > 10 else (True, True, True)
    assert isinstance(mask, Sequence)
    once = 2 * math.prod(source if transposed else gradient) * math.prod(weight[1:])
    return once * sum(bool(wanted) for wanted in mask[:2])


def _grouped_product(products: int) -> _Count:
    """Rows, each times the matrix of its group, `products` times; the groups are not multiplied over."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        left, right = operands[:2]
        batch = left[0] if len(left) == len(right) == 3 else 1
        return 2 * products * batch * left[-2] * left[-1] * right[-1]

    return count


def _steps(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """The state times its weight, once per time step of the gates."""
    gates, state = operands[:2]
    return 2 * math.prod(gates) * state[-1]


def _steps_backward(state: int) -> _Count:
    """The gates' gradient times the weight; the gradient of the state is the result at `state`."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        return 2 * math.prod(results[0]) * results[state][-1]

    return count


_COUNTS: dict[str, _Count] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "_scaled_mm"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), _product(1)),
    "_grouped_mm": _grouped_product(1),
    "grouped_mm_fallback": _grouped_product(1),
    "grouped_mm_fallback_backward": _grouped_product(2),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("lstm_steps", "gru_steps", "rnn_steps"), _steps),
    **dict.fromkeys(("lstm_steps_backward", "rnn_steps_backward"), _steps_backward(1)),
    "gru_steps_backward": _steps_backward(2),
    "attention": _captured_attention(0, 5, 1, 1),
    "attention_backward": _captured_attention(1, 8, 3, 2),
    "scaled_dot_product_attention": _attention_forward(causal=5),
    "_scaled_dot_product_attention_math": _attention_forward(causal=_NEVER),
    "_scaled_dot_product_flash_attention": _attention_forward(causal=4),
    "_scaled_dot_product_flash_attention_for_cpu": _attention_forward(causal=4),
    "_scaled_dot_product_efficient_attention": _attention_forward(causal=6),
    "_scaled_dot_product_cudnn_attention": _attention_forward(causal=6),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(causal=11),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward(causal=7),
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(causal=11),
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward(causal=14),
}
