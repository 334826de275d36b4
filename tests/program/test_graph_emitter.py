"""Recorded programs: nodes with the shapes of local tensors.

Local shapes as expressions.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoshard.program._torch import FakeTensorMode
from autoshard.program.graph_emitter import GraphEmitter, supports_layout
from autoshard.size import DynamicSize, at, ceil_div, is_dynamic, symbol
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives

aten = torch.ops.aten


@pytest.fixture
def emit() -> GraphEmitter:
    return GraphEmitter(MeshShape.of({"x": 2, "y": 3}), ("gx", "gy"), FakeTensorMode(), torch.device("cpu"))


def test_a_call_is_a_node_with_the_shape_that_it_makes(emit: GraphEmitter) -> None:
    x = emit.placeholder("x", (4, 6), torch.float64)
    y = emit.call(aten.sum.dim_IntList, x, [1], True)
    assert emit.shape(y) == (4, 1)
    assert emit.dtype(y) is torch.float64
    assert emit.device(y) == torch.device("cpu")
    assert [node.op for node in emit.graph.nodes] == ["placeholder", "call_function"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, ["x", "x"]),
        (aten.add.Tensor, ["x", "row"]),
        (aten.bmm.default, ["x", "turned"]),
        (aten.cat.default, [["x", "x"], 1]),
        (aten.clone.default, ["x"]),
        (aten.clone.default, ["part"]),
        (aten.constant_pad_nd.default, ["x", [0, 2, 1, 0]]),
        (aten.div.Scalar, ["x", 3]),
        (aten.div.Tensor, ["x", "places"]),
        (aten.index_select.default, ["x", 2, "places"]),
        (aten.mm.default, ["row", "row"]),
        (aten.mul.Scalar, ["places", 0.5]),
        (aten.mul.Tensor, ["row", "turned"]),
        (aten.neg.default, ["part"]),
        (aten.reshape.default, ["x", [-1, 4]]),
        (aten.sub.Tensor, ["x", "part"]),
        (aten.sum.dim_IntList, ["x", [1], True]),
        (aten.sum.dim_IntList, ["places", [0]]),
    ],
)
def test_results_are_those_of_real_tensors_and_of_the_fake_mode(
    emit: GraphEmitter, op: Any, args: list[Any], order: tuple[int, ...]
) -> None:
    x = torch.ones(4, 4, 4, dtype=torch.float32).permute(order)
    reals = {"x": x, "turned": x.mT, "part": x[:, :, :1].expand(4, 4, 4), "row": x[0], "places": torch.arange(4)}

    def emitted(name: str) -> Any:
        node = emit.placeholder(name, reals[name].shape, reals[name].dtype)
        with emit._mode:
            layout = torch.empty_strided(reals[name].shape, reals[name].stride(), dtype=reals[name].dtype)
        node.meta["val"] = layout
        return node

    def replaced(make: Any) -> list[Any]:
        return pytree.tree_map(lambda leaf: make(leaf) if isinstance(leaf, str) else leaf, args)

    fake = emit.call(op, *replaced(emitted)).meta["val"]
    with emit._mode:
        of_mode = op(*pytree.tree_map_only(fx.Node, lambda node: node.meta["val"], replaced(emitted)))
    for expected in (op(*replaced(reals.__getitem__)), of_mode):
        assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert fake.device == of_mode.device


def test_results_of_collectives_are_those_of_the_fake_mode(emit: GraphEmitter) -> None:
    x = emit.call(aten.permute.default, emit.placeholder("x", (4, 6), torch.bfloat16, torch.device("cuda:1")), [1, 0])
    for op, args in (
        (collectives.all_gather_into_tensor.default, [2, "gx"]),
        (collectives.all_reduce.default, ["sum", "gx"]),
        (collectives.all_to_all_single.default, [[4, 2], [1, 5], "gx"]),
        (collectives.reduce_scatter_tensor.default, ["sum", 3, "gy"]),
        (collectives.wait_tensor.default, []),
    ):
        fake = emit.call(op, x, *args).meta["val"]
        with emit._mode:
            expected = op(x.meta["val"], *args)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            expected.shape, expected.stride(), torch.bfloat16, torch.device("cuda:1"),
        ), op  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.expand.default, [[5, 1, 4, 6]]),
        (aten.permute.default, [[2, 0, 1]]),
        (aten.select.int, [1, 2]),
        (aten.slice.Tensor, [2, 1, 6, 2]),
        (aten.slice.Tensor, [1]),
        (aten.transpose.int, [0, 2]),
        (aten.unsqueeze.default, [-1]),
        (aten.view.default, [[1, 2, 2, -1]]),
        (aten.view.default, [[4, 1, 6, 1]]),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_views_lie_in_memory_as_those_of_real_tensors(
    emit: GraphEmitter, op: Any, args: list[Any], order: tuple[int, ...]
) -> None:
    shape = tuple((1, 4, 6)[order.index(dim)] for dim in range(3))
    real = torch.empty(shape, dtype=torch.bfloat16).permute(order)
    node = emit.call(aten.permute.default, emit.placeholder("x", shape, torch.bfloat16), list(order))
    try:
        expected = op(real, *args)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            emit.call(op, node, *args)
        return
    fake = emit.call(op, node, *args).meta["val"]
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
        expected.shape, expected.stride(), torch.bfloat16, torch.device("cpu"),
    )  # fmt: skip
    assert fake.fake_mode is emit.placeholder("y", (), torch.int64).meta["val"].fake_mode


def test_several_results_are_nodes_of_their_own_and_none_stays_none(emit: GraphEmitter) -> None:
    x = emit.placeholder("x", (4, 6), torch.float32)
    normal, mean, scale = emit.call(aten.native_layer_norm.default, x, [6], None, None, 1e-5)
    assert [emit.shape(value) for value in (normal, mean, scale)] == [(4, 6), (4, 1), (4, 1)]
    gradients = emit.call(
        aten.native_layer_norm_backward.default, x, x, [6], mean, scale, None, None, [True, False, False]
    )
    assert gradients[1:] == (None, None)
    assert emit.shape(gradients[0]) == (4, 6)


def test_kernels_that_want_rows_get_rows(emit: GraphEmitter) -> None:
    x = emit.call(aten.permute.default, emit.placeholder("x", (6, 4, 2), torch.float32), [1, 0, 2])
    emit.call(aten.neg.default, x)
    emit.call(aten.native_group_norm.default, x, None, None, 4, 6, 2, 2, 1e-5)
    emit.call(aten.view_as_complex.default, x)  # the last dim is in order, which is enough
    names = [node.target for node in emit.graph.nodes if node.op == "call_function" and "getitem" not in node.name]
    assert names[1:] == [
        aten.neg.default,
        aten.clone.default,
        aten.native_group_norm.default,
        aten.view_as_complex.default,
    ]


def test_nodes_carry_the_phase_that_they_are_emitted_in(emit: GraphEmitter) -> None:
    x = emit.placeholder("x", (4,), torch.float32)
    first = emit.call(aten.neg.default, x)
    emit.phase = "backward"
    second = emit.call(aten.split.Tensor, first, 2)
    assert first.meta["partitioner_tag"] == "is_forward"
    assert {part.meta["partitioner_tag"] for part in second} == {"is_backward"}


def test_coordinates_and_seed_are_inputs_of_the_program(emit: GraphEmitter) -> None:
    emit.add_rank_inputs()
    names = [node.target for node in emit.graph.nodes]
    assert names == ["coordinate_x", "coordinate_y", "host_coordinate_x", "host_coordinate_y", "seed"]
    assert emit.coordinate(1).target == "coordinate_y"
    assert emit.shape(emit.seed()) == ()
    assert emit.dtype(emit.coordinate(0)) is torch.int64
    assert (emit.group(0), emit.group(1)) == ("gx", "gy")


def test_every_random_operator_has_a_stream_of_its_own(emit: GraphEmitter) -> None:
    assert len({emit.stream() for _ in range(5)}) == 5


def test_strides_are_those_of_the_operators(emit: GraphEmitter) -> None:
    x = emit.placeholder("x", (4, 6), torch.float32)
    assert emit.is_contiguous(x)
    assert not emit.is_contiguous(emit.call(aten.t.default, x))


def test_no_kernel_is_told_to_write_rows_that_writes_columns(emit: GraphEmitter) -> None:
    """What is emitted as contiguous is so where it runs: collectives and kernels that want rows get no other tensor.

    Every operator of several tensors, on tensors that lie in rows and in columns.
    """
    told, tried = [], set()
    for op, args in _operators_of_several_tensors():
        tensors = [index for index, arg in enumerate(args) if isinstance(arg, Tensor)]
        for turned in tensors[:2]:
            laid = [arg.mT.contiguous().mT if index == turned else arg for index, arg in enumerate(args)]
            try:
                real = op(*laid)
            except (RuntimeError, ValueError, IndexError, NotImplementedError):  # not an operator of such tensors
                break
            tried.add(op)
            nodes = [_placeholder_like(emit, arg) if isinstance(arg, Tensor) else arg for arg in laid]
            results = list(zip(pytree.tree_leaves(real), pytree.tree_leaves(emit.call(op, *nodes)), strict=False))
            told += [
                (str(op), turned)
                for value, node in results
                if isinstance(value, Tensor)
                and value.ndim > 1
                and isinstance(node, fx.Node)
                and emit.is_contiguous(node)
                and not value.is_contiguous()
            ]
    assert not told
    assert len(tried) > 80
    assert tried > {aten.elu_backward.default, aten.hardtanh_backward.default, aten.xlogy.Tensor}


def _placeholder_like(emit: GraphEmitter, tensor: Tensor) -> fx.Node:
    node = emit.placeholder("x", tensor.shape, tensor.dtype)
    with emit._mode:
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return node


def _operators_of_several_tensors() -> Iterator[tuple[Any, list[Any]]]:
    """Elementwise operators and gradients, with tensors of one shape and numbers that many of them take."""
    numbers = {"number": 0.5, "float": 0.5, "bool": True, "int": 1}
    # `dir` names only what somebody has asked for.
    names = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    for name in sorted(names):
        packet = getattr(aten, name)
        for op in (getattr(packet, overload) for overload in getattr(packet, "overloads", list)()):
            schema = op._schema
            required = [argument for argument in schema.arguments if not argument.has_default_value()]
            kinds = [str(argument.type) for argument in required]
            elementwise = torch.Tag.pointwise in op.tags or name.endswith("_backward")
            if not elementwise or schema.is_mutable or kinds.count("Tensor") < 2 or op in _WANTS_OTHER_NUMBERS:
                continue
            if all(kind == "Tensor" or kind in numbers for kind in kinds) and not any(
                one.kwarg_only for one in required
            ):
                masks = ["mask" in argument.name for argument in required]
                yield (
                    op,
                    [
                        _tensor(mask) if kind == "Tensor" else numbers[kind]
                        for kind, mask in zip(kinds, masks, strict=True)
                    ],
                )


_WANTS_OTHER_NUMBERS = {
    aten._embedding_bag_backward.default,  # the process ends where indices are not those of a table
    aten.embedding_dense_backward.default,
    aten.equal.default,  # not a tensor
    aten.masked_select_backward.default,  # as many rows as a mask says: no program has it
}


def _tensor(mask: bool) -> Tensor:
    numbers = torch.linspace(0.1, 0.9, 30, dtype=torch.float64).view(5, 6)
    return numbers > 0.5 if mask else numbers


def test_numbers_among_the_results_are_no_nodes(emit: GraphEmitter) -> None:
    """Torch's partitioner asks every node that it saves for a tensor."""
    query = emit.placeholder("query", (2, 8, 4, 16), torch.float32)
    options = (None, None, None, None, None, 0.0, 0, True)
    result, logarithms, *_, longest, keys = emit.call(
        aten._efficient_attention_forward.default, query, query, query, *options
    )
    assert (longest, keys) == (None, None)
    assert emit.shape(logarithms) == (2, 4, 32)
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in (result, logarithms))
    assert len(emit.graph.find_nodes(op="call_function", target=operator.getitem)) == 4


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (2, 3, 4, 1), (2, 3, 1, 4), (1, 3, 2, 2, 2)], ids=str)
def test_batch_norm_with_dims_of_length_one_has_the_same_gradients_in_every_order_that_suits_it(
    shape: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, tangent = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    weight, mean, variance = (torch.rand(3, dtype=torch.float64, generator=generator) + 0.5 for _ in range(3))

    def gradients(tangent: Tensor, x: Tensor) -> list[Tensor]:
        operands = [
            each if supports_layout(aten.native_batch_norm_backward.default, each) else each.contiguous()
            for each in (tangent, x)
        ]
        saved = torch.empty(0, dtype=torch.float64)
        return list(
            aten.native_batch_norm_backward(*operands, weight, mean, variance, saved, saved, False, 1e-5, [True] * 3)
        )

    expected = gradients(tangent, x)
    found = [gradients(each, x) for each in _laid_out(tangent)] + [gradients(tangent, each) for each in _laid_out(x)]
    for each in found:
        assert all(torch.allclose(ours, theirs, 1e-12, 1e-12) for ours, theirs in zip(each, expected, strict=True))


def _laid_out(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in all orders of its dims, those of length one with strides that say nothing."""
    for order in itertools.permutations(range(tensor.ndim)):
        other = tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.ndim)])
        for stride in (1, 3):
            strides = [stride if size == 1 else old for size, old in zip(other.shape, other.stride(), strict=True)]
            yield other.as_strided(other.shape, strides)


def test_names_of_calls_have_no_capitals(emit: GraphEmitter) -> None:
    """A placeholder with capitals gets a second variable in the code of its graph, which keeps its tensor alive."""
    x = emit.placeholder("x", (4, 6), torch.float32)
    emit.call(aten.sum.dim_IntList, emit.call(aten.add.Tensor, x, x), [1])
    assert [node.name for node in emit.graph.nodes] == ["x", "add_tensor", "sum_dim_intlist"]


BATCH, SEQ = symbol("batch"), symbol("seq")
SIZES = {BATCH: 11, SEQ: 13}
ELSEWHERE = {BATCH: 6, SEQ: 5}


@pytest.fixture
def symbolic() -> GraphEmitter:
    return GraphEmitter(MeshShape.of({"x": 4}), ("gx",), FakeTensorMode(), torch.device("cpu"), SIZES)


def local(symbolic: GraphEmitter) -> Any:
    rows = ceil_div(DynamicSize.of(BATCH, SIZES), 4)
    return symbolic.placeholder("x", (rows, DynamicSize.of(SEQ, SIZES), 8), torch.float32)


def test_shapes_follow_from_operators(symbolic: GraphEmitter) -> None:
    value = local(symbolic)
    rows, seq, _ = symbolic.shape(value)
    flat = symbolic.call(aten.view.default, value, [rows * seq, 8])
    both = symbolic.call(aten.cat.default, [flat, flat])
    gathered = symbolic.call(collectives.all_gather_into_tensor.default, both, 4, "gx")
    assert symbolic.shape(gathered) == (3 * 13 * 2 * 4, 8)
    assert at(symbolic.shape(gathered), ELSEWHERE) == (2 * 5 * 2 * 4, 8)
    assert tuple(gathered.meta["val"].shape) == (312, 8)


def test_results_of_several_tensors(symbolic: GraphEmitter) -> None:
    value = local(symbolic)
    first, second = symbolic.call(aten.split_with_sizes.default, value, [3, 5], 2)
    assert at(symbolic.shape(first), ELSEWHERE) == (2, 5, 3)
    assert at(symbolic.shape(second), ELSEWHERE) == (2, 5, 5)


def test_numbers_in_arguments_make_shapes_too(symbolic: GraphEmitter) -> None:
    counted = symbolic.call(aten.arange.default, ceil_div(DynamicSize.of(SEQ, SIZES), 4), device=torch.device("cpu"))
    (length,) = symbolic.shape(counted)
    assert is_dynamic(length)
    assert at(length, ELSEWHERE) == 2


def test_what_is_fixed_stays_plain(symbolic: GraphEmitter) -> None:
    weight = symbolic.placeholder("w", (8, 6), torch.float32)
    value = symbolic.call(aten.matmul.default, local(symbolic), weight)
    assert not any(map(is_dynamic, symbolic.shape(symbolic.call(aten.t.default, weight))))
    assert at(symbolic.shape(value), ELSEWHERE) == (2, 5, 6)
