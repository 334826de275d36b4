"""What torch's own registry of sharding strategies, DTensor's, offers for a call on one mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.patterns._torch import (
    DTensorSpec,
    OpOverload,
    OpStrategy,
    TupleStrategy,
    dtensor_meta,
    mesh_strategy_function,
    one_device_strategy,
    outside_modes,
    schema_of,
    single_axis_strategy_function,
)
from autoshard.patterns.rule import OpCall, TensorMeta


@dataclass(frozen=True, slots=True)
class TorchStrategy:
    """Placements on one axis.

    Attributes:
        operands: of every tensor operand, in the order of `OpCall.operands`; dims may count from the end.
        results: of every result; None for a result that is no tensor.
        strided: the shards may as well be strided ones.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement | None, ...]
    strided: bool = False


def is_registered(op: OpOverload) -> bool:
    """Whether torch has strategies for an operator: its own, or some that `register_sharding` added."""
    return single_axis_strategy_function(op) is not None or mesh_strategy_function(op) is not None


def torch_strategies(call: OpCall) -> tuple[TorchStrategy, ...]:
    """The strategies of torch for a call, each once; none where none are registered.

    Torch is asked about a mesh of one device, which divides every dim: which sizes of an axis divide what, is another
    question.

    Raises:
        Exception: whatever the registered function raises on a call that it does not expect.
    """
    with outside_modes():
        found = (
            _single_axis_strategies(call)
            if single_axis_strategy_function(call.op)
            else _mesh_strategies(call)
            if mesh_strategy_function(call.op)
            else ()
        )
        return tuple(dict.fromkeys(found))


def _single_axis_strategies(call: OpCall) -> Iterator[TorchStrategy]:
    """From a function that speaks of one axis: results first, then operands, shards of any kind as placeholders."""
    placer = single_axis_strategy_function(call.op)
    assert placer is not None
    args, kwargs = _arguments(call, lambda meta: dtensor_meta(meta.shape, meta.dtype), tuple)
    for row in placer(call.op, args, kwargs):
        strided = any(not isinstance(each, Placement) and each is not None for each in row)
        places = [each if isinstance(each, Placement) or each is None else Shard(each.dim) for each in row]
        results = len(call.op._schema.returns)
        yield _strategy(call, places[:results], places[results:], strided)


def _mesh_strategies(call: OpCall) -> Iterator[TorchStrategy]:
    """From a function that speaks of a whole mesh, asked about every placement of every operand."""
    placer = mesh_strategy_function(call.op)
    assert placer is not None
    answer = placer(schema_of(call.op, *_arguments(call, _any_placement, TupleStrategy)))
    for spec in answer.strategies if isinstance(answer, OpStrategy) else ():
        made = spec.output_specs
        outs = [made] * len(call.op._schema.returns) if made is None or isinstance(made, DTensorSpec) else list(made)
        ins = outs[:1] * len(call.operands) if spec.input_specs is None else spec.input_specs
        yield _strategy(call, _axis_placements(outs), _axis_placements(ins), False)


def _axis_placements(specs: Sequence[DTensorSpec | None]) -> list[Placement | None]:
    """The placements on the one axis."""
    return [None if spec is None else spec.placements[0] for spec in specs]


def _any_placement(meta: TensorMeta) -> OpStrategy:
    """An operand that may be replicated, sharded in any dim, or a partial sum."""
    placements = [Replicate(), *(Shard(dim) for dim in range(len(meta.shape))), Partial()]
    return one_device_strategy(dtensor_meta(meta.shape, meta.dtype), placements)


def _arguments(
    call: OpCall, operand: Callable[[TensorMeta], Any], operands: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors, and lists that hold tensors, replaced."""

    def replace(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return operand(value)
        if not isinstance(value, tuple):
            return value
        items = [replace(item) for item in value]
        return operands(items) if any(isinstance(item, TensorMeta) for item in value) else items

    return tuple(map(replace, call.args)), {name: replace(value) for name, value in call.kwargs}


def _strategy(
    call: OpCall, results: list[Placement | None], operands: list[Placement | None], strided: bool
) -> TorchStrategy:
    """A strategy with one placement for every operand: those of arguments that are no tensors are left out.

    Raises:
        ValueError: there are more or fewer operands than the call has.
    """
    # `register_sharding` asks for a None at every argument that is no tensor.
    ins = tuple(placement for placement in operands if placement is not None)
    if len(ins) != len(call.operands):
        raise ValueError(f"it places {len(ins)} operands of a call with {len(call.operands)}.")
    # An operator with one result that is a list of tensors places all of them alike; one without any has none to place.
    outs = tuple(results) if len(results) == len(call.results) else (*results, None)[:1] * len(call.results)
    pairs = zip(outs, call.results, strict=True)
    return TorchStrategy(ins, tuple(None if meta is None else placement for placement, meta in pairs), strided)
