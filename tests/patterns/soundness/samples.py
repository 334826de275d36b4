"""Functions with arguments to record operators from: torch's own samples, and some with dims that many sizes divide."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.patterns.soundness._torch import larger_samples, op_db, tree_leaves
from tests.patterns.soundness.record import RecordedOperator, record

_FALLBACK = (torch.float32, torch.complex128, torch.int64, torch.bool)
_BESIDES = (torch.int64, torch.bool, torch.complex128, torch.bfloat16)
_SPARSE = ("sparse", "to_sparse")
_NOT_HERE = frozenset(
    {
        "chalf",  # complex numbers of half precision, which hardly an operator takes
        "jiterator_2inputs_2outputs",  # these need a GPU
        "jiterator_4inputs_with_extra_args",
        "jiterator_binary",
        "jiterator_binary_return_by_ref",
        "jiterator_unary",
    }
)


def opinfo_names() -> list[str]:
    """Names of the entries of torch's operator database that are recorded here."""
    return sorted({info.name for info in op_db if not any(word in info.name for word in _SPARSE)} - _NOT_HERE)


@functools.cache
def _infos() -> dict[str, list[Any]]:
    """The entries of torch's operator database, by name; it takes long to ask one for its name."""
    found: dict[str, list[Any]] = {}
    for info in op_db:
        found.setdefault(info.name, []).append(info)
    return found


def opinfo_calls(name: str, most: int = 20) -> Iterator[RecordedOperator]:
    """What torch's samples of one function call, forward and backward.

    Args:
        name: of an entry of torch's operator database.
        most: of how many samples in double precision; of those of each other type a quarter as many are taken.
    """
    for info in _infos()[name]:
        supported = info.supported_dtypes("cpu")
        main = next((dtype for dtype in (torch.float64, *_FALLBACK) if dtype in supported), None)
        for dtype in dict.fromkeys((main, *_BESIDES)):
            if dtype in supported:
                for calls in _of_dtype(info, dtype, most if dtype is main else most // 4):
                    yield from calls


def _of_dtype(info: Any, dtype: torch.dtype, most: int) -> Iterator[list[RecordedOperator]]:
    """The calls of every sample; with torch's own sizes where larger ones do not go together."""
    try:
        with larger_samples():
            recorded = list(_record_samples(info, dtype, most))
    except (RuntimeError, IndexError, ValueError):
        try:
            recorded = list(_record_samples(info, dtype, most))
        except NotImplementedError:  # a type that the operator takes and its backward does not
            recorded = []
    yield from recorded


def _record_samples(info: Any, dtype: torch.dtype, most: int) -> Iterator[list[RecordedOperator]]:
    torch.default_generator.manual_seed(0)  # the same numbers whatever was sampled before
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    # `info.sample_inputs` is the same, and looks through the whole stack for the name of a test of torch's own.
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, grad), most):
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
        if all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, Tensor)):
            function = _differentiable(info.op, sample.output_process_fn_grad)
            yield record(function, (sample.input, *sample.args), sample.kwargs, info.name)


def _differentiable(op: Callable[..., Any], processed: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function behind what its samples say is needed for a defined gradient, such as the sign of eigenvectors."""
    return lambda *args, **kwargs: processed(op(*args, **kwargs))


def own_calls() -> Iterator[RecordedOperator]:
    """What the functions below call."""
    for name, (function, arguments) in own_functions().items():
        yield from record(function, arguments, {}, name)


def _x(*shape: int, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + 13 * sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def _indices(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def own_functions() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Functions of neural networks whose samples in torch have sizes that nothing divides."""
    x, image = _x(4, 12, 24), _x(4, 12, 6, 8)
    rows, classes = _x(12, 24), _indices(24, 12)
    heads = (_x(4, 12, 8, 6), _x(4, 12, 8, 6), _x(4, 12, 8, 6))
    return {
        "linear": (F.linear, (x, _x(12, 24), _x(12))),
        "matmul": (torch.matmul, (_x(4, 6, 12), _x(4, 12, 8))),
        "bilinear": (F.bilinear, (_x(4, 6), _x(4, 12), _x(8, 6, 12), _x(8))),
        "einsum": (lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), heads[:2]),
        "attention": (F.scaled_dot_product_attention, heads),
        "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads),
        "softmax": (lambda t: t.softmax(-1), (x,)),
        "log_softmax": (lambda t: t.log_softmax(1), (x,)),
        "layer_norm": (lambda t, w, b: F.layer_norm(t, (24,), w, b), (x, _x(24), _x(24))),
        "rms_norm": (lambda t, w: F.rms_norm(t, (24,), w), (x, _x(24))),
        "group_norm": (lambda t, w, b: F.group_norm(t, 4, w, b), (image, _x(12), _x(12))),
        "batch_norm": (lambda t, w, b: F.batch_norm(t, None, None, w, b, training=True), (image, _x(12), _x(12))),
        "conv1d": (lambda t, w, b: F.conv1d(t, w, b, padding=1), (_x(4, 12, 24), _x(8, 12, 3), _x(8))),
        "conv2d": (lambda t, w, b: F.conv2d(t, w, b, stride=2), (image, _x(8, 12, 2, 2), _x(8))),
        "grouped conv2d": (lambda t, w: F.conv2d(t, w, groups=4), (image, _x(8, 3, 3, 3))),
        "transposed conv2d": (lambda t, w: F.conv_transpose2d(t, w, stride=2), (image, _x(12, 8, 2, 2))),
        "max_pool2d": (lambda t: F.max_pool2d(t, 2), (image,)),
        "avg_pool2d": (lambda t: F.avg_pool2d(t, 2), (image,)),
        "adaptive pool": (lambda t: F.adaptive_avg_pool2d(t, (3, 4)), (image,)),
        "nearest": (lambda t: F.interpolate(t, scale_factor=2, mode="nearest"), (image,)),
        "bilinear upsampling": (lambda t: F.interpolate(t, scale_factor=2.0, mode="bilinear"), (image,)),
        "embedding": (lambda i, w: F.embedding(i, w, padding_idx=3), (_indices(12, 4, 6), _x(12, 8))),
        "embedding_bag": (lambda i, w: F.embedding_bag(i, w, mode="mean"), (_indices(12, 4, 6), _x(12, 8))),
        "cross_entropy": (F.cross_entropy, (rows, classes)),
        "weighted cross_entropy": (
            lambda r, c, w: F.cross_entropy(r, c, w, ignore_index=5, label_smoothing=0.1),
            (rows, classes, _x(24, grad=False).abs()),
        ),
        "binary cross_entropy": (F.binary_cross_entropy_with_logits, (rows, _x(12, 24, grad=False).sigmoid())),
        "mse_loss": (F.mse_loss, (rows, _x(12, 24, grad=False))),
        "mean": (lambda t: t.mean((0, 2)), (x,)),
        "var": (lambda t: t.var(1), (x,)),
        "logsumexp": (lambda t: t.logsumexp(-1), (x,)),
        "max": (lambda t: t.max(-1), (x,)),
        "cumsum": (lambda t: t.cumsum(1), (x,)),
        "sort": (lambda t: t.sort(-1), (x,)),
        "topk": (lambda t: t.topk(4, -1), (x,)),
        "gather": (lambda t, i: t.gather(1, i), (x, _indices(12, 4, 6, 24))),
        "scatter_add": (lambda t, i, s: t.scatter_add(1, i, s), (x, _indices(12, 4, 6, 24), _x(4, 6, 24))),
        "index": (lambda t, i: t[:, i], (x, _indices(12, 8))),
        "index_put": (lambda t, i, v: t.index_put((i,), v, accumulate=True), (rows, _indices(12, 6), _x(6, 24))),
        "cat": (lambda a, b: torch.cat([a, b], 1), (x, _x(4, 6, 24))),
        "split": (lambda t: t.split([6, 18], -1), (x,)),
        "chunked view": (lambda t: t.view(4, 12, 3, 8).transpose(1, 2).reshape(12, 96), (x,)),
        "expand": (lambda t: t[:, :, None].expand(4, 12, 6, 24).reshape(4, 72, 24), (x,)),
        "rotary": (lambda t: torch.cat([-t[..., 12:], t[..., :12]], -1), (x,)),
        "triu": (lambda t: t.triu(1), (x,)),
        "pad": (lambda t: F.pad(t, (0, 2, 1, 1)), (x,)),
        "roll": (lambda t: t.roll(2, 1), (x,)),
        "flip": (lambda t: t.flip(1), (x,)),
        "repeat": (lambda t: t.repeat(1, 2, 1), (x,)),
        "dropout": (lambda t: F.dropout(t, 0.25), (x,)),
        "fft": (lambda t: torch.fft.rfft(t, dim=1).abs(), (x,)),
        "solve": (torch.linalg.solve, (_x(4, 6, 6), _x(4, 6, 12))),
    }
