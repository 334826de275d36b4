"""Work to be timed: calls of operators of every family at growing sizes, and collectives of groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoshard.cluster._torch import OpOverload, collectives
from autoshard.cluster.cost import flops
from autoshard.cluster.measurements import BYTES, FLOPS, INTENSITY, Grouping

aten = torch.ops.aten

# Window, step and padding that image models pool by.
_POOL = ([3, 3], [2, 2], [1, 1])
# The other two sizes of a product whose third is small.
_NARROW = 512


@dataclass(frozen=True, slots=True)
class SampleCall:
    """An operator with its positional arguments, and those by keyword (`named`)."""

    op: OpOverload
    args: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return self.op(*self.args, **self.named)

    def amounts(self) -> tuple[float, float]:
        """Return operations, and bytes read and written; runs the call once."""
        operands, results = list(_tensors(self.args)), list(_tensors(self()))
        work = flops(self.op, [tensor.shape for tensor in operands], [tensor.shape for tensor in results], self.args)
        return work, sum(tensor.nbytes for tensor in (*operands, *results))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True, slots=True)
class Sample:
    """Calls of one family.

    Attributes:
        family: as in `measurements`.
        amounts_are: unit of the curve: `FLOPS`, `BYTES` or `INTENSITY`.
        sizes: of the calls, rising; larger ones take longer.
        make: returns the call of a size.
    """

    family: str
    amounts_are: str
    sizes: Sequence[int]
    make: Callable[[int], SampleCall]


def samples(dtype: torch.dtype, device: torch.device) -> list[Sample]:
    """Return the samples of one dtype: matrix products, convolutions and attention by operations; others by bytes."""
    maker = _Maker(dtype, device)
    powers = [2**power for power in range(2, 14)]
    # Up to tensors larger than all caches. Accelerators need larger ones than CPUs to be busy.
    elements = [4**power for power in range(5, 12 if device.type == "cpu" else 14)]

    def shallow(make: Callable[..., SampleCall]) -> Callable[[int], SampleCall]:
        return lambda channels: make(channels, side=32, images=256 // channels)

    def short(make: Callable[..., SampleCall]) -> Callable[[int], SampleCall]:
        return lambda length: make(length, batch=2048 // length, width=32)

    # By intensity: about constant bytes, with growing operations per byte.
    products = [
        Sample("mm", FLOPS, powers, lambda size: maker.product((size, size), (size, size))),
        Sample("mm", INTENSITY, powers[:7], lambda size: maker.product((_NARROW, size), (size, _NARROW))),
        Sample("bmm", FLOPS, powers[:9], lambda size: maker.product((16, size, size), (16, size, size))),
        Sample("convolution", FLOPS, powers[:5], maker.convolution),
        Sample("convolution", INTENSITY, powers[1:6], shallow(maker.convolution)),
        Sample("convolution_backward", FLOPS, powers[:5], maker.convolution_backward),
        Sample("convolution_backward", INTENSITY, powers[1:6], shallow(maker.convolution_backward)),
        Sample("attention", FLOPS, powers[2:10], maker.attention),
        Sample("attention", INTENSITY, powers[1:7], short(maker.attention)),
        Sample("attention_backward", FLOPS, powers[2:10], maker.attention_backward),
        Sample("attention_backward", INTENSITY, powers[1:7], short(maker.attention_backward)),
    ]
    return products + [Sample(family, BYTES, elements, make) for family, make in maker.by_bytes().items()]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Calls on tensors of one dtype and device; `size` is a number of elements, or the sizes of a product."""

    dtype: torch.dtype
    device: torch.device

    @property
    def columns(self) -> int:
        """Elements of a row that norms and softmax reduce."""
        # Short rows leave the threads of an accelerator idle: norms of 256 elements reach a quarter of its bandwidth.
        return 256 if self.device.type == "cpu" else 2048

    @property
    def channels(self) -> int:
        """Channels of an image that batch norm and pooling take."""
        # CUDA's batch norm runs one block of threads for each channel.
        return 16 if self.device.type == "cpu" else 256

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device).to(self.dtype)

    def rows(self, size: int) -> torch.Tensor:
        return self.tensor(max(1, size // self.columns), self.columns)

    def numbers(self, count: int, below: int) -> torch.Tensor:
        return torch.randint(below, (count,), device=self.device)

    # By operations

    def product(self, left: Sequence[int], right: Sequence[int]) -> SampleCall:
        op = aten.mm.default if len(left) == 2 else aten.bmm.default
        return SampleCall(op, (self.tensor(*left), self.tensor(*right)))

    def convolution(self, size: int, side: int | None = None, images: int = 4) -> SampleCall:
        """Return a convolution of images of `size` channels and `side` pixels a row, by default `size`."""
        side = side or size
        source, weight = self.tensor(images, size, side, side), self.tensor(size, size, 3, 3)
        return SampleCall(aten.convolution.default, (source, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))

    def convolution_backward(self, size: int, side: int | None = None, images: int = 4) -> SampleCall:
        # The result of the forward is used as its gradient, of the same shape.
        forward = self.convolution(size, side, images)
        source, weight = forward.args[:2]
        settings = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        return SampleCall(aten.convolution_backward.default, (forward(), source, weight, *settings))

    def attention(self, size: int, batch: int = 4, width: int = 64) -> SampleCall:
        on_cpu = self.device.type == "cpu"
        op = aten._scaled_dot_product_flash_attention_for_cpu if on_cpu else aten._scaled_dot_product_flash_attention
        query, key, value = (self.tensor(batch, 4, size, width) for _ in range(3))
        return SampleCall(op.default, (query, key, value))

    def attention_backward(self, size: int, batch: int = 4, width: int = 64) -> SampleCall:
        forward = self.attention(size, batch, width)
        query, key, value = forward.args
        results = forward()
        # The result is used as its gradient, of the same shape. The GPU's kernel also returns the largest lengths (in
        # results[:6]) and the seed and offset of dropout, which its backward takes after the flags.
        if self.device.type == "cpu":
            op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return SampleCall(op, (results[0], query, key, value, *results, 0.0, False))
        op = aten._scaled_dot_product_flash_attention_backward.default
        return SampleCall(op, (results[0], query, key, value, *results[:6], 0.0, False, *results[6:8]))

    # By bytes

    def by_bytes(self) -> dict[str, Callable[[int], SampleCall]]:
        """Return family -> function from a number of elements to a call of about that size."""

        def unary(op: OpOverload) -> Callable[[int], SampleCall]:
            return lambda size: SampleCall(op, (self.rows(size),))

        def binary(op: OpOverload) -> Callable[[int], SampleCall]:
            return lambda size: SampleCall(op, (self.rows(size), self.rows(size)))

        return {
            "add": binary(aten.add.Tensor),
            "exp": unary(aten.exp.default),
            "tanh": unary(aten.tanh.default),
            "silu": unary(aten.silu.default),
            "gelu": unary(aten.gelu.default),
            "gelu_backward": binary(aten.gelu_backward.default),
            "softmax": lambda size: SampleCall(aten._softmax.default, (self.rows(size), -1, False)),
            "softmax_backward": lambda size: SampleCall(
                aten._softmax_backward_data.default, (self.rows(size), self.rows(size), -1, self.dtype)
            ),
            "layer_norm": self.layer_norm,
            "layer_norm_backward": self.layer_norm_backward,
            "batch_norm": self.batch_norm,
            "batch_norm_backward": self.batch_norm_backward,
            "max_pool": lambda size: SampleCall(aten.max_pool2d_with_indices.default, (self.images(size), *_POOL)),
            "max_pool_backward": self.max_pool_backward,
            "sum": lambda size: SampleCall(aten.sum.dim_IntList, (self.rows(size), [0])),
            "copy": self.copy,
            "view": lambda size: SampleCall(aten.view.default, (self.rows(size), [-1])),
            "cat": lambda size: SampleCall(aten.cat.default, ([self.rows(size), self.rows(size)], 1)),
            "index": self.index,
            "index_put": self.index_put,
        }

    def images(self, size: int) -> torch.Tensor:
        """Return about `size` elements as four images, with an even number of pixels a row."""
        side = max(2, round((size / 4 / self.channels) ** 0.5) // 2 * 2)
        return self.tensor(4, self.channels, side, side)

    def layer_norm(self, size: int) -> SampleCall:
        parameters = (self.tensor(self.columns), self.tensor(self.columns))
        return SampleCall(aten.native_layer_norm.default, (self.rows(size), [self.columns], *parameters, 1e-5))

    def layer_norm_backward(self, size: int) -> SampleCall:
        forward = self.layer_norm(size)
        source, shape, weight, bias, _ = forward.args
        result, mean, scale = forward()
        mask = [True, True, True]
        return SampleCall(
            aten.native_layer_norm_backward.default, (result, source, shape, mean, scale, weight, bias, mask)
        )

    def batch_norm(self, size: int) -> SampleCall:
        channels = [self.tensor(self.channels) for _ in range(4)]
        return SampleCall(
            aten._native_batch_norm_legit_functional.default, (self.images(size), *channels, True, 0.1, 1e-5)
        )

    def batch_norm_backward(self, size: int) -> SampleCall:
        forward = self.batch_norm(size)
        source, weight, _, mean, variance = forward.args[:5]
        result, saved_mean, saved_scale = forward()[:3]
        settings = (mean, variance, saved_mean, saved_scale, True, 1e-5, [True, True, True])
        return SampleCall(aten.native_batch_norm_backward.default, (result, source, weight, *settings))

    def max_pool_backward(self, size: int) -> SampleCall:
        source = self.images(size)
        result, places = aten.max_pool2d_with_indices.default(source, *_POOL)
        settings = (*_POOL, [1, 1], False)
        return SampleCall(aten.max_pool2d_with_indices_backward.default, (result, source, *settings, places))

    def copy(self, size: int) -> SampleCall:
        """Return a copy that transposes heads and positions, as attention does."""
        heads = self.tensor(max(1, size // self.columns), 4, self.columns // 4).transpose(0, 1)
        return SampleCall(aten.clone.default, (heads,), {"memory_format": torch.contiguous_format})

    def index(self, size: int) -> SampleCall:
        table = self.rows(size // 2)
        return SampleCall(aten.embedding.default, (table, self.numbers(max(1, size // self.columns), len(table))))

    def index_put(self, size: int) -> SampleCall:
        rows = max(1, size // 2 // self.columns)
        gradient = self.rows(size)
        return SampleCall(
            aten.embedding_dense_backward.default, (gradient, self.numbers(len(gradient), rows), rows, -1, False)
        )


KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "shift")


def groupings(devices: int) -> list[Grouping]:
    """Return all groupings, with groups larger than one, by an axis of some mesh of `devices`."""
    sizes = [size for size in range(devices, 1, -1) if devices % size == 0]
    return [
        Grouping(size, stride)
        for size in sizes
        for stride in range(1, devices // size + 1)
        if devices // size % stride == 0
    ]


@contextlib.contextmanager
def group(grouping: Grouping) -> Iterator[dist.ProcessGroup]:
    """Context with this process's group of a grouping of all processes, which enter and leave it together."""
    local, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in grouping.groups(dist.get_world_size())])
    assert local is not None
    try:
        yield local
    finally:
        # A group must not be destroyed while another of its processes is in a collective.
        dist.barrier()
        dist.destroy_process_group(local)


def make_collective(
    kind: str, bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a function that starts a collective on `bytes` per rank, rounded up to equal parts for all ranks.

    The result has to be awaited.
    """
    size, name = group.size(), group.group_name
    # float32 elements, as many for every rank
    rows = max(1, -(-bytes // 4 // size)) * size
    tensor = torch.ones(rows, device=device)
    rank, ranks = group.rank(), range(size)
    # Splits of an all-to-all in which each rank sends everything to the next.
    received, sent = ([rows * (peer == (rank + step) % size) for peer in ranks] for step in (-1, 1))
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (collectives.all_gather_into_tensor.default, size),
        "all_reduce": (collectives.all_reduce.default, "sum"),
        "reduce_scatter": (collectives.reduce_scatter_tensor.default, "sum", size),
        "all_to_all": (collectives.all_to_all_single.default, *[[rows // size] * size] * 2),
        # All goes to the next rank.
        "shift": (collectives.all_to_all_single.default, received, sent),
    }
    op, *settings = arguments[kind]
    return lambda: op(tensor, *settings, name)


def make_blocking(start: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function that starts a collective and waits for it."""
    return lambda: collectives.wait_tensor.default(start())


def make_matmul(device: torch.device) -> Callable[[], object]:
    """Return a function with a short computation, after which a collective can start."""
    left, right = torch.rand(2, 256, 256, device=device)
    return lambda: torch.mm(left, right)


def chain_calls(*works: Callable[[], object]) -> Callable[[], None]:
    """Return a function that runs pieces of work one after another."""

    def run() -> None:
        for work in works:
            work()

    return run
