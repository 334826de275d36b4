"""The programs of a parallelised module's calls, by signature and by the module's state that a program depends on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.dynamic import dynamic_signature
from autoshard.capture.joint import JointGraph
from autoshard.capture.python.conditions import check_conditions
from autoshard.capture.python.state import check_invalidating_effects
from autoshard.runtime.call_order import CallOrder
from autoshard.runtime.call_outputs import CallOutputs
from autoshard.runtime.calls import (
    MOST_PROGRAMS,
    CallSizes,
    NewCall,
    PinsByName,
    describe_call,
    pins_of,
    with_numbers,
    without_numbers,
)
from autoshard.runtime.gradient_sums import Accumulation
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.program_tensors import Location, locate, replaced_error
from autoshard.runtime.rank_agreement import check_ranks_agree, is_first_rank
from autoshard.runtime.step import RunnableStep
from autoshard.size import Sizes

# The end of an error about calls that differ between ranks.
ADVICE = (
    'All ranks call the module alike: with inputs="global" each passes the whole batch, with inputs="local" its own '
    "rows of it, as many as the others, or, at the end of an epoch, the parts that Shard makes of fewer, the last ones "
    "shorter or empty. autoshard.shard_dataloader gives every rank its part; or drop what is over (drop_last=True of a "
    "DataLoader)."
)


@dataclass(slots=True, eq=False)
class CallProgram:
    """The graph and program of a call signature.

    Attributes:
        graph: the graph of the call.
        program: the program of the graph.
        locations: for every input of the program, a place in the module, a tensor, or None for arguments.
        texts: what must be the same on all ranks in calls of the signature, as for `CallOrder.begin_known`.
        compared: True if the ranks have compared the inputs of the first call.
        others: programs of the signature for other flags, numbers, submodules or hooks of the module.
        with_sums: the program whose backwards accumulate gradients; None before the first call in `autoshard.no_sync`.
    """

    graph: JointGraph
    program: RunnableStep
    locations: tuple[Location, ...]
    texts: Mapping[str, str]
    compared: bool = False
    others: tuple[CallProgram, ...] = ()
    with_sums: RunnableStep | None = None

    def accumulating_program(self, active: bool) -> RunnableStep:
        """Return the program to run: in `autoshard.no_sync`, or while sums exist, the accumulating one."""
        if self.with_sums is None:
            if not active:
                return self.program
            self.with_sums = self.program.with_sums()
        sums = self.with_sums.sums
        return self.with_sums if active or (sums is not None and not sums.is_empty) else self.program

    def candidates(self) -> tuple[CallProgram, ...]:
        """Return all programs of the signature."""
        return (self, *self.others)

    def put_before(self, programs: Iterable[CallProgram]) -> CallProgram:
        """Put this program in front of others of the signature, and return it."""
        self.others = tuple(served for served in programs if served is not self)
        for served in self.others:
            served.others = ()
        return self


class CallPrograms:
    """The programs of the calls of a module.

    Args:
        maker: makes programs of new calls, and has the module and its mesh.

    Attributes:
        maker: as given.
        table: signature of a call -> its program, the least recently used first.
        input_placements: the placements of inputs in programs, which local inputs also have in other calls.
        only_call: for a part of another module that calls it in only one way: this call, with tensors of global shapes.
            Shapes are not exchanged then, and outputs are local tensors.
        owners: the modules that hold the placed parameters, by the parameters' names.
        accumulation: the gradients that were accumulated in `autoshard.no_sync`.
        order: the order of the calls of the module, its copies and its other methods.
    """

    def __init__(self, maker: ProgramMaker) -> None:
        self.maker = maker
        self.table: dict[Hashable, CallProgram] = {}
        self.input_placements: dict[str, tuple[Placement, ...]] = {}
        self.only_call: BoundCall | None = None
        self.owners: dict[str, nn.Module] = {}
        self.accumulation = Accumulation()
        self.order = CallOrder(ADVICE)
        self._module, self._device_mesh = maker.module, maker.device_mesh
        self._dynamic, self._inputs = maker.target.dynamic or {}, maker.target.inputs
        # If this module is a copy: the programs of the original's calls, by the fingerprints of their graphs.
        self._original_programs: dict[Hashable, dict[str, RunnableStep]] = {}
        quiet = not is_first_rank(self._device_mesh)
        self._sizes = CallSizes(type(self._module).__name__, self._dynamic, quiet=quiet)

    def for_copy(self, maker: ProgramMaker, owners: dict[str, nn.Module]) -> CallPrograms:
        """Return an empty table for a copy of the module, which shares the programs of calls with equal graphs.

        Args:
            maker: makes the programs of the copy.
            owners: the modules of the copy that hold its placed parameters, by the parameters' names.
        """
        copied = CallPrograms(maker)
        copied.input_placements = dict(self.input_placements)
        copied.order, copied.owners = self.order, owners
        copied._original_programs = self._programs_by_fingerprint()
        return copied

    def for_call(self, call: BoundCall, input_pins: PinsByName | None = None) -> tuple[CallProgram, Sizes]:
        """Return the program, new or known, of a call whose tensors have global shapes, and the call's dynamic sizes.

        The pins apply to a new program, as in `NewCall`.
        """
        signature = dynamic_signature(call, self._dynamic) if self._dynamic else None
        if signature is not None:
            served = self._serve(NewCall(call, signature, True, input_pins=input_pins))
            assert served.graph.dynamic is not None
            sizes = served.graph.dynamic.sizes_of(call.shapes)
            if served.graph.dynamic.serves(sizes):
                return served, sizes
        # Calls outside the range of the dynamic graph, such as a batch of one, have separate graphs.
        served = self._serve(NewCall(call, call.signature, False, input_pins=input_pins))
        return served, {} if served.graph.dynamic is None else served.graph.dynamic.example

    def _serve(self, call: NewCall) -> CallProgram:
        """Return the program of a call for the current flags, numbers, submodules and hooks of the module."""
        first = self.table.pop(call.signature, None)
        if first is None:
            return self._prepare(call)
        # At the end, so that the first entry of the table is the least recently used.
        self.table[call.signature] = first
        match = next((served for served in first.candidates() if served.graph.serves(call.bound)), None)
        if match is None:
            return self._prepare(call)
        if match is not first:
            self.table[call.signature] = match.put_before(first.candidates())
        self.order.begin_known(match.texts)
        return match

    def _prepare(self, call: NewCall) -> CallProgram:
        """Make the program of a call, and store it for the signature."""
        # The caller may be in inference mode; tensors made there could not be changed or differentiated in later steps.
        with torch.inference_mode(False), torch.set_grad_enabled(call.bound.grad):
            return self._make(call)

    def _make(self, call: NewCall) -> CallProgram:
        # A plain parameter must not replace a placed one; parameters of new modules are placed.
        for name, owner in _owners(self._module):
            parameter = owner._parameters[name.rpartition(".")[2]]
            if self.owners.get(name) is owner and not isinstance(parameter, DTensor):
                raise replaced_error(name, parameter)
        first = self.table.get(call.signature)
        earlier = () if first is None else first.candidates()
        check_invalidating_effects([served.graph.state for served in earlier])
        check_conditions([served.graph.state.conditions for served in earlier])
        start = time.perf_counter()
        texts = describe_call(call.bound)
        changed = {} if first is None else dict(first.graph.changes(call.bound))
        if call.tangents == "all":
            changed["the outputs that are differentiated"] = "others than the loss"
        # In these two cases ranks compare the sizes of every call, so only the state of the module can differ.
        common = {} if self._dynamic or self._inputs == "local" else texts
        self.order.begin_new(common, changed)
        check_ranks_agree(self._device_mesh, texts | changed, ADVICE)
        programs = dict(self._original_programs.get(call.signature, {}))
        programs |= {served.graph.fingerprint: served.program for served in earlier}
        if call.input_pins is None:
            pins = pins_of(call.bound.tensors, self._device_mesh)
            call = replace(call, input_pins={**(self.input_placements if self._inputs == "local" else {}), **pins})
        assert call.input_pins is not None
        graph, program = self.maker.make(call, programs, call.input_pins)
        for border in program.step.inputs:
            if border.kind == "input":
                self.input_placements[border.name] = border.spec.placements
        if not earlier and self.only_call is None:
            self._sizes.record(call.bound.kind, call.bound.shapes, time.perf_counter() - start)
        # If the graph depends on numbers in its inputs, further programs need the same numbers.
        like = with_numbers if graph.state.conditions.inputs else without_numbers
        again = replace(call, bound=call.bound.map_tensors(like))
        program = replace(
            program,
            general=self._general_program(again, graph),
            accumulation=self.accumulation,
            order=self.order,
            histories=graph.histories,
            between=self._between_program(again, graph),
        )
        locations = locate(self._module, graph, program.step.inputs, self._device_mesh)
        # Drop a program of the same state that has fewer gradients.
        others = (old for old in earlier if not old.graph.serves(call.bound))
        served = CallProgram(graph, program, locations, common).put_before(others)
        self.table[call.signature] = served
        if len(self.table) > MOST_PROGRAMS:
            del self.table[next(iter(self.table))]
        self.owners = dict(_owners(self._module))
        return served

    def _general_program(self, call: NewCall, graph: JointGraph) -> Callable[[], RunnableStep] | None:
        """Return a function that makes the program with gradients of all outputs; None if this call has it."""
        if call.tangents == "all" or not graph.tangent_outputs or _differentiates_all(graph):
            return None
        general = replace(call, tangents="all")

        def make_program() -> RunnableStep:
            with graph.state.guards.captured_values():
                return self._prepare(general).program

        return make_program

    def _between_program(self, call: NewCall, graph: JointGraph) -> Callable[[], RunnableStep] | None:
        """Return a function that makes the program of gradients of outputs for other outputs; None if there is none."""
        inner = {name for ancestors in graph.histories.ancestors.values() for name in ancestors}
        names = tuple(name for name in graph.result.names if name in inner and name not in graph.histories.same)
        is_whole = self.only_call is None and CallOutputs.of(self.maker).form == "whole"
        if not names or not is_whole or graph.dynamic is not None or not graph.tangent_outputs:
            return None
        between = replace(call, tangents=names)

        @functools.cache
        def make_program() -> RunnableStep:
            texts = describe_call(between.bound)
            changed = {"the outputs whose gradients are asked for": ", ".join(names)}
            self.order.begin_new({} if self._dynamic or self._inputs == "local" else texts, changed)
            check_ranks_agree(self._device_mesh, texts | changed, ADVICE)
            assert between.input_pins is not None
            with graph.state.guards.captured_values():
                return self.maker.make(between, {}, between.input_pins)[1]

        return make_program

    def _programs_by_fingerprint(self) -> dict[Hashable, dict[str, RunnableStep]]:
        """Return the programs of every signature by the fingerprints of their graphs."""
        known = {signature: dict(programs) for signature, programs in self._original_programs.items()}
        for signature, first in self.table.items():
            for served in first.candidates():
                # The general program is made by this runtime and for this module.
                program = replace(served.program, general=None, between=None)
                known.setdefault(signature, {})[served.graph.fingerprint] = program
        return known


def _owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names of parameters and the modules that hold them."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield (f"{path}.{name}" if path else name), part


def _differentiates_all(graph: JointGraph) -> bool:
    """Return True if the program of a graph starts its backward half from every output that has a gradient."""
    return graph.histories.differentiable <= set(graph.tangent_outputs)
