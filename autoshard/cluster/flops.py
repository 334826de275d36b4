"""Floating-point operations of the operators whose time is compute, not memory traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoshard.cluster._torch import OpOverload

Shape = Sequence[int]


def flops(op: OpOverload, operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object] = ()) -> float:
    """Return the floating-point operations of one call; a multiply and its add are two.

    Args:
        op: an ATen operator.
        operands: global shapes of its tensor operands, in the order of its schema, absent ones left out.
        results: global shapes of its tensor results; absent ones left out.
        args: the call's arguments as written in the graph: masks, transposition and gradients that are left out.

    Returns:
        The count for matrix products, convolutions, attention and recurrence, forward and backward; 0.0 for every
        other operator, which is priced by its bytes.
    """
    count = _COUNTS.get(op.overloadpacket.__name__)
    return float(count(operands, results, args)) if count is not None else 0.0


# Position of no argument: the operator computes all scores, whatever the mask.
_NEVER = 1 << 10

_Count = Callable[[Sequence[Shape], Sequence[Shape], Sequence[object]], int]


def _product(position: int) -> _Count:
    """Count a matrix product whose left matrix is the operand at `position`; its last dim is contracted."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        return 2 * math.prod(results[0]) * operands[position][-1]

    return count


def _attention(causal: int) -> _Count:
    """Count scores, and the weighted sum of values; `causal` is the position of the flag `is_causal`."""
    return _fused_attention(0, causal, 1, 1)


def _attention_backward(causal: int) -> _Count:
    """Count scores again and gradients of queries and keys, as wide as keys; gradients of values and weights."""
    return _fused_attention(1, causal, 3, 2)


def _fused_attention(first: int, causal: int, by_key: int, by_value: int) -> _Count:
    """Count attention: operands from `first` on; `by_key` products as wide as keys, `by_value` as wide as values."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        queries, keys, values = operands[first : first + 3]
        rows, columns = queries[-2], keys[-2]
        scores = rows * columns
        if _is_set(args, causal):
            # Kernels leave out the blocks above the diagonal. A mask given as a tensor is not known to be causal.
            scores -= columns * columns // 2 if rows > columns else rows * columns - rows * rows // 2
        return 2 * math.prod(queries[:-2]) * scores * (by_key * queries[-1] + by_value * values[-1])

    return count


def _captured_attention(first: int, causal: int, by_key: int, by_value: int) -> _Count:
    """Count attention of captured graphs; a flag at `causal` and a window behind it leave keys out."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        queries, keys, values = operands[first : first + 3]
        rows, columns = queries[-2], keys[-2]
        scores = rows * columns
        # Fewer queries than keys may be the last ones, as with a cache of keys: they see all keys.
        if _is_set(args, causal) and rows == columns:
            window = args[causal + 1]
            width = min(window or columns, columns) if isinstance(window, int) else columns
            scores = rows * width - width * width // 2
        return 2 * math.prod(queries[:-2]) * scores * (by_key * queries[-1] + by_value * values[-1])

    return count


def _is_set(args: Sequence[object], position: int) -> bool:
    return len(args) > position and args[position] is True


def _convolution(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count a product of a channel's weight with every element of the result, or of the input where transposed."""
    source, weight = operands[:2]
    # Graphs leave trailing default arguments out.
    transposed = len(args) > 6 and bool(args[6])
    return 2 * math.prod(source if transposed else results[0]) * math.prod(weight[1:])


def _convolution_backward(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count the forward once for the gradient of the input and once for the weight's, each if `output_mask` asks."""
    gradient, source, weight = operands[:3]
    transposed = len(args) > 7 and bool(args[7])
    mask = args[10] if len(args) > 10 else (True, True, True)
    assert isinstance(mask, Sequence)
    forward = 2 * math.prod(source if transposed else gradient) * math.prod(weight[1:])
    return forward * sum(map(bool, mask[:2]))


def _grouped_product(products: int) -> _Count:
    """Count every row times the matrix of its group, `products` times."""

    def count(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
        left, right = operands[:2]
        # Two stacks of matrices are a batch; rows sorted by group meet one matrix each, whatever the number of groups.
        batch = left[0] if len(left) == len(right) == 3 else 1
        return 2 * products * batch * left[-2] * left[-1] * right[-1]

    return count


def _steps(operands: Sequence[Shape], results: Sequence[Shape], args: Sequence[object]) -> int:
    """Count the state times its weight, once per time step of the gates."""
    gates, state = operands[:2]
    return 2 * math.prod(gates) * state[-1]


def _steps_backward(state: int) -> _Count:
    """Count the gates' gradient times the weight; the gradient of the state is the result at `state`."""

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
    "scaled_dot_product_attention": _attention(causal=5),
    "_scaled_dot_product_attention_math": _attention(causal=_NEVER),
    "_scaled_dot_product_flash_attention": _attention(causal=4),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(causal=4),
    "_scaled_dot_product_efficient_attention": _attention(causal=6),
    "_scaled_dot_product_cudnn_attention": _attention(causal=6),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(causal=11),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward(causal=7),
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(causal=11),
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward(causal=14),
}
