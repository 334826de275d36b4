"""FlexAttention as attention that can be captured on the CPU, where torch refuses its backward.

Masks and biases depend on positions, and are computed for all of them. A call becomes `scaled_dot_product_attention`
with a mask, which `masks` may replace by a flag, and uses fused kernels. A call that changes scores in another way (a
soft cap), or returns logsumexp or maximal scores, is computed by matrix products.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autoshard.capture import outside_modes
from autoshard.capture.capture_errors import running_line
from autoshard.errors import CaptureError
from autoshard.operators._torch import FakeTensor, pytree

aten = torch.ops.aten

_Modification = Callable[..., Tensor]

# Read before the code of torch's function is replaced.
_BLOCK_MASK = inspect.signature(torchs.create_block_mask)


@contextlib.contextmanager
def capturable_flex_attention() -> Iterator[None]:
    """Context in which torch's `flex_attention` and `create_block_mask` run the code of this file."""
    # Replace the code of the function objects: models have imported them by name, or wrapped them in `torch.compile`,
    # whose function `torch.export` runs unchanged.
    replacements: dict[Any, Any] = {torchs.flex_attention: _to_flex_attention, torchs.create_block_mask: _to_block_mask}
    codes = {function: function.__code__ for function in replacements}
    for function, replacement in replacements.items():
        function.__code__ = replacement.__code__
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code


# The code of these two runs with the globals of torch's module, so it has to import what it calls.


def _to_flex_attention(*args: Any, **kwargs: Any) -> Any:
    from autoshard.operators.attention.flex_attention import flex_attention

    return flex_attention(*args, **kwargs)


def _to_block_mask(*args: Any, **kwargs: Any) -> Any:
    from autoshard.operators.attention.flex_attention import create_block_mask

    return create_block_mask(*args, **kwargs)


def create_block_mask(*args: Any, **kwargs: Any) -> Any:
    """Return torch's `BlockMask` without evaluating `mask_mod`: all blocks are partial, decided by the mask."""
    bound = _BLOCK_MASK.bind(*args, **kwargs)
    bound.apply_defaults()
    mask_mod, samples, heads, *lengths = (bound.arguments[name] for name in ("mask_mod", "B", "H", "Q_LEN", "KV_LEN"))
    block = bound.arguments["BLOCK_SIZE"]
    sizes = (block, block) if isinstance(block, int) else tuple(block)
    queries, keys = (-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    indices = torch.arange(keys, dtype=torch.int32).expand(samples or 1, heads or 1, queries, keys)
    return torchs.BlockMask.from_kv_blocks(
        torch.full(indices.shape[:3], keys, dtype=torch.int32),
        indices,
        BLOCK_SIZE=sizes,
        # With torch's `noop_mask`, `_check_blocks` would count the blocks, which are fake tensors here.
        mask_mod=_keep_all if mask_mod is torchs.noop_mask else mask_mod,
        seq_lengths=tuple(lengths),
        compute_q_blocks=False,
    )


def _keep_all(*position: Tensor) -> Tensor:
    return position[0].new_ones((), dtype=torch.bool)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: _Modification | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return `torch.nn.attention.flex_attention.flex_attention`, ignoring `kernel_options`.

    Raises:
        CaptureError: the call is not valid in torch, or cannot be captured.
    """
    _check(query, key, value, block_mask, enable_gqa, return_lse and return_aux is not None)
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    key, value = (each.expand(query.shape[0], *each.shape[1:]) for each in (key, value))
    hides = block_mask is not None and block_mask.mask_mod not in (torchs.noop_mask, _keep_all)
    mask = _evaluate_at_positions(block_mask.mask_mod, shape) if hides else None
    bias, is_sum = _score_bias(score_mod, shape, query)
    wants_aux = return_aux is not None and (return_aux.lse or return_aux.max_scores)
    if is_sum and not return_lse and not wants_aux:
        if bias is not None:
            hidden = torch.full((), -math.inf, dtype=bias.dtype)
            mask = (bias if mask is None else torch.where(mask, bias, hidden)).to(query.dtype)
        out = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
        return out if return_aux is None else (out, torchs.AuxOutput(None, None))
    changed = None if score_mod is None or (is_sum and bias is None) else score_mod
    out, logsumexp, max_scores = _reference_attention(query, key, value, changed, mask, scale)
    if return_aux is not None:
        aux = torchs.AuxOutput(logsumexp if return_aux.lse else None, max_scores if return_aux.max_scores else None)
        return out, aux
    return (out, logsumexp) if return_lse else out


def _flex_attention_error(predicate: str) -> CaptureError:
    return CaptureError(f"{running_line()}: flex_attention {predicate}.")


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool, has_two_flags: bool) -> None:
    shapes = ", ".join(str(list(each.shape)) for each in (query, key, value))
    if any(each.is_nested for each in (query, key, value)):
        raise _flex_attention_error(
            "of nested tensors: no plan can be made for sizes that differ by sample. Pad the samples"
        )
    if any(each.dim() != 4 for each in (query, key, value)):
        raise _flex_attention_error(f"takes query, key and value of four dims, not {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise _flex_attention_error(
            f"takes query, key and value of one element type, not {query.dtype}, {key.dtype}, {value.dtype}: cast them"
        )
    if has_two_flags:
        raise _flex_attention_error("takes return_lse or return_aux, not both")
    heads, groups = query.shape[1], key.shape[1]
    if heads % groups if enable_gqa else heads != groups:
        raise _flex_attention_error(f"cannot share key heads among query heads: {shapes}, enable_gqa={enable_gqa}")
    if key.shape[0] != query.shape[0] and (block_mask is None or key.shape[0] != 1):
        raise _flex_attention_error(f"takes query, key and value of one batch size, not {shapes}")
    if block_mask is not None:
        _check_blocks(block_mask, query.shape[2], key.shape[2])


# The lengths of torch's default mask.
_ANY_LENGTHS = (1, 1)


def _check_blocks(block_mask: Any, queries: int, keys: int) -> None:
    lengths = tuple(block_mask.seq_lengths)
    if lengths not in ((queries, keys), _ANY_LENGTHS):
        raise _flex_attention_error(
            f"has {queries} queries and {keys} keys, but its block mask is of lengths {lengths}"
        )
    if block_mask.mask_mod is torchs.noop_mask and not _keeps_all_blocks(block_mask):
        raise _flex_attention_error(
            "under a block mask without mask_mod: what it hides is said by its blocks alone, which a captured graph "
            "does not hold. Say it by mask_mod"
        )


def _keeps_all_blocks(block_mask: Any) -> bool:
    """Return True if a mask hides no block."""
    counts = [each for each in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks) if each is not None]
    if any(isinstance(each, FakeTensor) for each in counts):
        return False  # unknown counts may hide some
    blocks = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    with outside_modes():
        return bool((sum(counts) == blocks).all())


def _evaluate_at_positions(function: _Modification, shape: Sequence[int], *scores: Tensor) -> Tensor:
    """Return a function of sample, head, query and key at all positions, `[1 or b, 1 or h, 1 or s, 1 or t]`.

    Args:
        function: of 0-d tensors, as FlexAttention calls it.
        shape: the numbers of samples, heads, queries and keys.
        scores: broadcast to `[b, h, s, t]`, passed to the function first.
    """
    grid = _grid(shape)
    with _PerPositionMode(*scores, *grid) as positions:
        values = function(*scores, *grid)
    return _with_dims(positions.current(values))


def _grid(shape: Sequence[int]) -> list[Tensor]:
    """Return the positions along each of four dims, as tensors that broadcast to all dims."""
    return [torch.arange(size).view([-1 if dim == at else 1 for at in range(4)]) for dim, size in enumerate(shape)]


def _with_dims(value: Tensor) -> Tensor:
    """Return a number as a tensor of four dims."""
    return value if value.dim() else value.view(1, 1, 1, 1)


class _PerPositionMode(TorchFunctionMode):
    """Mode in which a function called once on tensors `[b, h, s, t]` acts as if called for each position.

    As FlexAttention's kernels, it supports element-wise functions of numbers, and numbers read from tensors.
    """

    # `torch.vmap` supports more, but adds nodes to an exported graph that no pass can read.

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self._values = list(values)
        # An in-place change may broadcast a tensor to more positions than it has: the new value is a separate tensor.
        self._changed: dict[int, Tensor] = {}

    def current(self, tensor: Tensor) -> Tensor:
        """Return the value of a tensor that may have been changed in place."""
        return self._changed.get(id(tensor), tensor)

    def _is_value(self, tensor: Any) -> bool:
        return any(tensor is each for each in self._values)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        changed = args[0] if args and _out_of_place(func) else None
        func = _out_of_place(func) or func
        args, kwargs = pytree.tree_map_only(Tensor, self.current, (args, kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self._is_value, tensors)):
            return func(*args, **kwargs)
        if func is Tensor.__getitem__:
            result = self._read(*args)
        else:
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor) or _name(func) in _FACTORIES:
                return result
            # Values have four dims of positions; tensors that are equal at all positions are 0-d.
            if not _is_elementwise(func) or any(each.dim() > (4 if self._is_value(each) else 0) for each in tensors):
                raise _flex_attention_error(
                    f"with a score_mod or mask_mod that calls {_name(func)}: only element-wise functions of numbers "
                    "are known in one, and numbers read from a tensor by index"
                )
        self._values.append(result)
        if changed is None:
            return result
        self._values.append(changed)
        self._changed[id(changed)] = result
        return changed

    def _read(self, tensor: Tensor, index: Any) -> Tensor:
        """Return the elements of a tensor at an index that depends on the position."""
        indices = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(each, (Tensor, int)) for each in indices):
            raise _flex_attention_error("with a score_mod or mask_mod that reads a tensor by other than numbers")
        places = [torch.full([1] * 4, each) if isinstance(each, int) else _with_dims(each) for each in indices]
        # Dims of an element of a value come after those of the position.
        if self._is_value(tensor):
            places = [*_grid(tensor.shape[:4]), *places]
        result: Tensor = aten.index.Tensor(tensor, places)
        return result


_IN_PLACE = frozenset(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "floordiv", "mod", "pow"))
_CASTS = frozenset({"to", "type", "float", "double", "half", "bfloat16", "int", "long", "bool", "type_as"})
_FACTORIES = frozenset({"new_ones", "new_zeros", "new_full", "new_tensor"})


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _out_of_place(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the out-of-place form of a function that changes its first argument; None for any other function."""
    name = _name(func)
    if name in _IN_PLACE:
        return getattr(Tensor, f"__{name[3:]}")
    if name.endswith("_") and not name.endswith("__"):
        return getattr(Tensor, name[:-1], None)
    return None


def _is_elementwise(func: Callable[..., Any]) -> bool:
    name = _name(func)
    packet = getattr(aten, name, None)
    # Python's operators are element-wise, except `@`.
    if name in _CASTS or name.startswith("__"):
        return name not in ("__matmul__", "__rmatmul__")
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads())


def _score_bias(score_mod: _Modification | None, shape: Sequence[int], query: Tensor) -> tuple[Tensor | None, bool]:
    """Return the bias that a modification adds to the scores, None for no bias, and False if it is anything else."""
    if score_mod is None:
        return None, True
    # If the modification only adds a bias, its value at score 0 is the bias.
    score = torch.zeros([1] * 4, dtype=_wide(query))
    tracker = _ScoreTracker(score)

    def tracked_score_mod(*arguments: Tensor) -> Tensor:
        with tracker:
            result = score_mod(*arguments)
        tracker.finish(result)
        return result

    bias = _evaluate_at_positions(tracked_score_mod, shape, score)
    return bias if tracker.is_changed else None, tracker.is_sum


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


_ADDITIONS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_})
_SUBTRACTIONS = frozenset({torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_})
_FILLS = frozenset({torch.masked_fill, Tensor.masked_fill})


class _ScoreTracker(TorchFunctionMode):
    """Mode that tracks scores through functions that add to them or mask them.

    Attributes:
        is_sum: True if the result of a modification is the scores plus a bias, or unchanged.
        is_changed: True if there is a bias.
    """

    def __init__(self, score: Tensor) -> None:
        super().__init__()
        self.is_sum, self.is_changed = True, False
        self._scores = [score]

    def finish(self, result: Tensor) -> None:
        """Record the result of a modification."""
        self.is_sum &= self._is_score(result)

    def _is_score(self, value: Any) -> bool:
        return any(value is each for each in self._scores)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        places = [place for place, leaf in enumerate(pytree.tree_leaves((args, kwargs))) if self._is_score(leaf)]
        if not places:
            return func(*args, **kwargs)
        keeps = len(places) == 1 and not kwargs and self._keeps(func, args, places[0])
        result = func(*args, **kwargs)
        if keeps:
            self.is_changed = True
            self._scores.append(result)
        # Any other function of a score, such as a product or comparison, may affect the result untracked.
        elif isinstance(result, Tensor):
            self.is_sum = False
        return result

    def _keeps(self, func: Callable[..., Any], args: tuple[Any, ...], place: int) -> bool:
        """Return True if a call adds to the score at a place of its arguments, or replaces it by minus infinity."""
        if func in _ADDITIONS or func in _SUBTRACTIONS:
            return len(args) == 2 and (place == 0 or func in _ADDITIONS)
        if func in (torch.where, Tensor.where):
            return len(args) == 3 and place == (1 if func is torch.where else 0) and _is_hiding(args[2])
        return func in _FILLS and len(args) == 3 and place == 0 and _is_hiding(args[2])


def _is_hiding(value: Any) -> bool:
    return isinstance(value, float) and value == -math.inf


def _reference_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: _Modification | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, logsumexp and maximal scores; the output of a query that attends to nothing is zero."""
    # Autocast would also compute the products of scores in 16 bits: use it only for the dtype of operands and output.
    lowered = torch.is_autocast_enabled("cpu") and query.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if lowered else query.dtype
    surrounding = torch.autocast("cpu", enabled=False) if lowered else contextlib.nullcontext()
    with surrounding:
        query, key, value = (each.to(dtype) for each in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        scores = query.to(_wide(query)) @ key.to(_wide(query)).transpose(-2, -1) * scale
        if score_mod is not None:
            scores = _evaluate_at_positions(score_mod, scores.shape, scores)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        max_scores = scores.detach().amax(-1)
        # Softmax of a row of -inf is nan, and so is its gradient: use zeros for such rows.
        hidden = (max_scores == -math.inf).unsqueeze(-1)
        scores = scores.masked_fill(hidden, 0)
        weights = scores.softmax(-1).masked_fill(hidden, 0)
        logsumexp = scores.logsumexp(-1).masked_fill(hidden.squeeze(-1), -math.inf)
        return weights.to(dtype) @ value, logsumexp, max_scores
