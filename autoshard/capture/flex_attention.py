"""FlexAttention as attention that can be captured on the CPU, where torch refuses its backward.

Masks and what is added to the scores depend on positions, and are computed for all of them. So a call becomes
`scaled_dot_product_attention` under a mask, which `masks` may say by a flag, and keeps its fused kernels. What changes
scores otherwise (a soft cap), and what asks for logarithms or maxima of the scores, is spelt out in matrix products.
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

from autoshard.capture._torch import FakeTensor, outside_modes, pytree
from autoshard.capture.capture_errors import running_line
from autoshard.errors import CaptureError

aten = torch.ops.aten

_Modification = Callable[..., Tensor]

_BLOCK_MASK = inspect.signature(torchs.create_block_mask)


@contextlib.contextmanager
def capturable_flex_attention() -> Iterator[None]:
    """Context in which `flex_attention` and `create_block_mask` are those of this file, whoever imported torch's.

    Compiled or not: `torch.export` runs what `torch.compile` wraps.
    """
    replaced: dict[Any, Any] = {torchs.flex_attention: _to_flex_attention, torchs.create_block_mask: _to_block_mask}
    codes = {function: function.__code__ for function in replaced}
    for function, ours in replaced.items():
        function.__code__ = ours.__code__
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code


# Their code runs among the names of torch's file.


def _to_flex_attention(*args: Any, **kwargs: Any) -> Any:
    from autoshard.capture.flex_attention import flex_attention

    return flex_attention(*args, **kwargs)


def _to_block_mask(*args: Any, **kwargs: Any) -> Any:
    from autoshard.capture.flex_attention import create_block_mask

    return create_block_mask(*args, **kwargs)


def create_block_mask(*args: Any, **kwargs: Any) -> Any:
    """`torch.nn.attention.flex_attention.create_block_mask`, all of whose blocks are left to the mask to decide."""
    given = _BLOCK_MASK.bind(*args, **kwargs)
    given.apply_defaults()
    mask_mod, samples, heads, *lengths = (given.arguments[name] for name in ("mask_mod", "B", "H", "Q_LEN", "KV_LEN"))
    block = given.arguments["BLOCK_SIZE"]
    sizes = (block, block) if isinstance(block, int) else tuple(block)
    queries, keys = (-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    indices = torch.arange(keys, dtype=torch.int32).expand(samples or 1, heads or 1, queries, keys)
    return torchs.BlockMask.from_kv_blocks(
        torch.full(indices.shape[:3], keys, dtype=torch.int32),
        indices,
        BLOCK_SIZE=sizes,
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
    """`torch.nn.attention.flex_attention.flex_attention`; `kernel_options` say nothing of the numbers.

    Raises:
        CaptureError: the call has no meaning in torch, or one that a graph of positions cannot have.
    """
    _check(query, key, value, block_mask, enable_gqa, return_lse and return_aux is not None)
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    key, value = (each.expand(query.shape[0], *each.shape[1:]) for each in (key, value))
    mask = None if block_mask is None else _mask(block_mask, shape)
    bias, is_sum = _score_bias(score_mod, shape, query)
    if is_sum and not return_lse and return_aux is None:
        if bias is not None:
            hidden = torch.full((), -math.inf, dtype=bias.dtype)
            mask = (bias if mask is None else torch.where(mask, bias, hidden)).to(query.dtype)
        return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    changed = None if score_mod is None or (is_sum and bias is None) else score_mod
    return _results(*_reference_attention(query, key, value, changed, mask, scale), return_lse, return_aux)


def _flex_attention_error(why: str) -> CaptureError:
    return CaptureError(f"{running_line()}: flex_attention {why}.")


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool, asked_twice: bool) -> None:
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
    if asked_twice:
        raise _flex_attention_error("takes return_lse or return_aux, not both")
    heads, groups = query.shape[1], key.shape[1]
    if heads % groups if enable_gqa else heads != groups:
        raise _flex_attention_error(f"cannot share key heads among query heads: {shapes}, enable_gqa={enable_gqa}")
    if key.shape[0] != query.shape[0] and (block_mask is None or key.shape[0] != 1):
        raise _flex_attention_error(f"takes query, key and value of one batch size, not {shapes}")
    if block_mask is not None:
        _check_blocks(block_mask, query.shape[2], key.shape[2])


_ANY_LENGTHS = (1, 1)
"""The lengths of the mask that torch makes where there is none."""


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
    """Whether a mask hides no block; one whose numbers are not known may."""
    counts = [each for each in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks) if each is not None]
    if any(isinstance(each, FakeTensor) for each in counts):
        return False
    blocks = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    with outside_modes():
        return bool((sum(counts) == blocks).all())


def _mask(block_mask: Any, shape: Sequence[int]) -> Tensor | None:
    """Truth values that keep a score, `[1 or b, 1 or h, 1 or s, 1 or t]`."""
    if block_mask.mask_mod in (torchs.noop_mask, _keep_all):
        return None
    return _evaluate_at_positions(block_mask.mask_mod, shape)


def _evaluate_at_positions(function: _Modification, shape: Sequence[int], *scores: Tensor) -> Tensor:
    """What a function of sample, head, query and key gives for all of them, `[1 or b, 1 or h, 1 or s, 1 or t]`.

    Args:
        function: of 0-d tensors, as FlexAttention calls it.
        shape: how many there are of each.
        scores: broadcast to `[b, h, s, t]`, handed to the function first.
    """
    grid = _grid(shape)
    with _PerPositionMode(*scores, *grid) as positions:
        values = function(*scores, *grid)
    return _with_dims(positions.current(values))


def _grid(shape: Sequence[int]) -> list[Tensor]:
    """Positions along each of four dims, as tensors that are broadcast to all of them."""
    return [torch.arange(size).view([-1 if dim == at else 1 for at in range(4)]) for dim, size in enumerate(shape)]


def _with_dims(value: Tensor) -> Tensor:
    """A number as a tensor of four dims."""
    return value if value.dim() else value.view(1, 1, 1, 1)


class _PerPositionMode(TorchFunctionMode):
    """While active, tensors `[b, h, s, t, ...]` behave as `[...]` does to a function that is called for each position.

    FlexAttention's kernels know element-wise functions of numbers, and numbers read from tensors; so does this.
    `torch.vmap` knows more, but leaves what no pass over an exported graph can read.
    """

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self._values = list(values)
        self._changed: dict[int, Tensor] = {}

    def current(self, tensor: Tensor) -> Tensor:
        """The value of a tensor that may have been changed in place; it may have more positions than the tensor had."""
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
        """Elements of a tensor, each position its own."""
        given = index if isinstance(index, tuple) else (index,)
        if any(not isinstance(each, (Tensor, int)) for each in given):
            raise _flex_attention_error("with a score_mod or mask_mod that reads a tensor by other than numbers")
        places = [torch.full([1] * 4, each) if isinstance(each, int) else _with_dims(each) for each in given]
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
    """What gives, as a new tensor, what a function makes of its first argument; None for one that changes nothing."""
    name = _name(func)
    if name in _IN_PLACE:
        return getattr(Tensor, f"__{name[3:]}")
    if name.endswith("_") and not name.endswith("__"):
        return getattr(Tensor, name[:-1], None)
    return None


def _is_elementwise(func: Callable[..., Any]) -> bool:
    name = _name(func)
    packet = getattr(aten, name, None)
    if name in _CASTS or name.startswith("__"):  # operators of Python, which are element-wise but for `@`
        return name not in ("__matmul__", "__rmatmul__")
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads())


def _score_bias(score_mod: _Modification | None, shape: Sequence[int], query: Tensor) -> tuple[Tensor | None, bool]:
    """What a modification adds to the scores, and whether that is all it does to them.

    Nothing is None. A modification that adds gives that for a score of zero.
    """
    if score_mod is None:
        return None, True
    score, sums = torch.zeros([1] * 4, dtype=_wide(query)), _ScoreTracker()
    sums.add(score)

    def tracked_score_mod(*arguments: Tensor) -> Tensor:
        with sums:
            result = score_mod(*arguments)
        sums.finish(result)
        return result

    bias = _evaluate_at_positions(tracked_score_mod, shape, score)
    return bias if sums.is_changed else None, sums.is_sum


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


_ADDITIONS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_})
_SUBTRACTIONS = frozenset({torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_})
_FILLS = frozenset({torch.masked_fill, Tensor.masked_fill})


class _ScoreTracker(TorchFunctionMode):
    """While active, follows scores through the functions that add to them or hide them.

    Attributes:
        is_sum: whether what a modification returned is scores that something was added to, if anything.
        is_changed: whether something was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_sum, self.is_changed = True, False
        self._scores: list[Tensor] = []

    def add(self, score: Tensor) -> None:
        """Follow another tensor."""
        self._scores.append(score)

    def finish(self, result: Tensor) -> None:
        """Note what a modification returned."""
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
            self.add(result)
        elif isinstance(result, Tensor):
            self.is_sum = False
        return result

    def _keeps(self, func: Callable[..., Any], args: tuple[Any, ...], place: int) -> bool:
        """Whether a call gives the score at a place of its arguments, and something more, or hides it."""
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
    """Result, logarithms of the sums of exponentials, and greatest scores; what attends to nothing has zeros."""
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
        greatest = scores.detach().amax(-1)
        alone = (greatest == -math.inf).unsqueeze(-1)
        scores = scores.masked_fill(alone, 0)
        weights = scores.softmax(-1).masked_fill(alone, 0)
        logsumexp = scores.logsumexp(-1).masked_fill(alone.squeeze(-1), -math.inf)
        return weights.to(dtype) @ value, logsumexp, greatest


def _results(out: Tensor, logsumexp: Tensor, greatest: Tensor, return_lse: bool, asked: Any) -> Any:
    """What the caller asked for, as torch returns it."""
    if asked is not None:
        aux = torchs.AuxOutput(logsumexp if asked.lse else None, greatest if asked.max_scores else None)
        return out, aux
    return (out, logsumexp) if return_lse else out
