"""Runs of a local step under autograd, from and to the tensors that the user knows."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import sympy
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import storage_of
from autoshard.capture.nodes import base_of
from autoshard.capture.output_history import OutputHistories
from autoshard.capture.output_taps import TAP
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep, ProgramTensor
from autoshard.program.split import Halves
from autoshard.reshard.reductions import DeferredReduction
from autoshard.runtime._torch import DTensorSpec, dtensor, dtensor_spec_of, is_view, local_tensors, per_rank
from autoshard.runtime.call_order import CallOrder
from autoshard.runtime.gradient_sums import Accumulation, GradientSums, OpenSums
from autoshard.runtime.rank_agreement import Seeds, coordinates_on
from autoshard.runtime.shards import coordinate_of, local_of, written_out
from autoshard.size import Sizes, at, evaluate, is_dynamic
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import true_local_shape
from autoshard.specs.tensors import pad_to

# The golden ratio of 2**64: its multiples differ in many bits.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class Ranks:
    """Arguments of programs that differ from rank to rank: coordinates and groups of a device mesh.

    Args:
        device_mesh: the mesh.
        device: where the program runs.
        part: number of the program among those that run side by side on other ranks, which draw other random numbers.
        seeds: those of the mesh's steps, which all its programs may share.
    """

    def __init__(
        self, device_mesh: DeviceMesh, device: torch.device, part: int = 0, seeds: Seeds | None = None
    ) -> None:
        self.device_mesh = device_mesh
        self._part = part
        self._seeds = Seeds(device_mesh) if seeds is None else seeds
        self.mesh = MeshShape.of(device_mesh)
        self.device = device
        self.groups = tuple(device_mesh.get_group(axis).group_name for axis in range(self.mesh.ndim))
        self.coordinates = coordinates_on(device_mesh, device)
        self.host_coordinates = coordinates_on(device_mesh, torch.device("cpu"))
        self._no_seed = torch.zeros((), dtype=torch.int64, device="cpu")

    def seed(self, draws: bool) -> torch.Tensor:
        """Return the seed of one step, on the CPU; zero for a program that draws no random numbers."""
        if not draws:
            return self._no_seed
        return self._seeds.draw() ^ (self._part * _SEED_STRIDE % 2**62)

    def arguments(self, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the arguments behind a program's tensors, in the order of `GraphEmitter.add_rank_inputs`."""
        return (*self.coordinates, *self.host_coordinates, seed)


@dataclass(frozen=True, eq=False)
class RunnableStep:
    """A local step ready to run.

    Attributes:
        step: its inputs and outputs.
        halves: its graphs.
        ranks: this rank's coordinates.
        general: makes the program in which every output has a gradient, for callers that differentiate more than the
            loss; None where this is that program.
        later: a list to which a backward appends the function that computes gradients of parameters, if these are
            computed later; the halves have parts then.
        sums: the sums of gradients that are added up over several backwards before they are reduced, if any.
        split: makes other halves of the step, by `compile` and `reduced` of `split_again`; None if there are no others.
        compiled: True if the halves are compiled.
        accumulation: what the module's backwards in `autoshard.no_sync` add up; None if its programs are run otherwise.
        order: of the module's calls; None without.
        histories: the autograd state that one device gives to the outputs; None if it is that of the program.
        between: makes the program of the gradients of outputs for other outputs; None where there is none.
    """

    step: LocalStep
    halves: Halves
    ranks: Ranks
    general: Callable[[], RunnableStep] | None = None
    later: list[Callable[[], None]] | None = None
    sums: GradientSums | None = None
    split: Callable[[bool, DeferredReduction | None], Halves] | None = None
    compiled: bool = False
    accumulation: Accumulation | None = None
    order: CallOrder | None = None
    histories: OutputHistories | None = None
    between: Callable[[], RunnableStep] | None = None

    def with_sums(self) -> RunnableStep:
        """Return the program whose backwards add up gradients in `autoshard.no_sync`; itself if it reduces none."""
        if self.halves.backward is None or self.split is None or self.accumulation is None:
            return self
        halves = self.split(self.compiled, "step")
        return self if halves.reduction is None else replace(self, halves=halves, sums=OpenSums(self.accumulation))

    def with_compiler(self) -> RunnableStep:
        """Return the program with compiled halves."""
        if self.compiled or self.split is None:
            return self
        return replace(self, halves=self.split(True, None), compiled=True)

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Run the forward half under autograd, and return its local outputs in the order of the step.

        Args:
            tensors: for every input that is no tangent: DTensors for parameters, local tensors for the rest.
            sizes: the call's dynamic sizes, if there are any.
        """
        if self.halves.backward is None:
            with torch.no_grad():
                return list(self.forward(self.local(tensors, sizes), sizes)[0])
        histories = [_history(tensor) for tensor in tensors if tensor.requires_grad]
        return list(_ProgramFunction.apply(self, sizes, histories, *tensors))

    def local(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Return the tensors as the program takes them: local, and padded where a dim does not divide."""
        pairs = zip(tensors, self.step.inputs, strict=False)
        return [self._pad(local_of(tensor), at(border, sizes)) for tensor, border in pairs]

    @functools.cached_property
    def _may_pad(self) -> bool:
        """True if tensors of the program may be padded: most programs have none that are, and need not look."""
        borders = (*self.step.inputs, *self.step.outputs)
        dynamic = any(is_dynamic(size) for border in borders for size in border.shape)
        return dynamic or any(border.is_padded(self.ranks.mesh) for border in borders)

    def _is_padded(self, border: ProgramTensor) -> bool:
        return self._may_pad and border.is_padded(self.ranks.mesh)

    def _pad(self, tensor: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        if not self._is_padded(border):
            return tensor
        return _pad_local(tensor, border.local_shape(self.ranks.mesh))

    def forward(
        self, locals_: Sequence[torch.Tensor], sizes: Sizes, seed: torch.Tensor | None = None
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return outputs, without padding, and saved tensors of the forward half."""
        seed = self.ranks.seed(self.halves.draws) if seed is None else seed
        numbers = _numbers(self.halves.forward_sizes, sizes)
        with _without_autocast():
            results = self.halves.forward(*locals_, *self.ranks.arguments(seed), *numbers)
        borders = self.step.forward_outputs
        outputs = [
            # A copy, since the part without padding may be a view of another tensor of the program.
            self.unpad(result, border).clone() if self._is_padded(border) else result
            for result, border in zip(results, at(borders, sizes), strict=False)
        ]
        for place, copies in self._shared_outputs:
            outputs[place] = outputs[place].clone() if copies else outputs[place].detach()
        return outputs, results[len(borders) :]

    @functools.cached_property
    def _shared_outputs(self) -> list[tuple[int, bool]]:
        """The places of outputs in memory of an input or an earlier output, and True for those to be copied.

        Simplification of the graph makes one tensor of equal ones. Of these, one device has several: a change of one
        changes no other then, unless it is a view.
        """
        if self.histories is None:
            return []
        memory, shared = self.histories.memory, []
        nodes = self.step.graph_module.graph.find_nodes(op="placeholder")
        first = {node: (border.kind, border.name) for node, border in zip(nodes, self.step.inputs, strict=False)}
        results: Any = self.step.graph_module.graph.output_node().args[0]
        returned: set[fx.Node] = set()
        for place, (node, border) in enumerate(zip(results, self.step.forward_outputs, strict=False)):
            if border.kind != "output":
                continue
            key = (border.kind, border.name)
            original = first.setdefault(base_of(node), key)
            copies = original is not key and memory.get(original) != memory.get(key, -1)
            if copies or node in returned:
                shared.append((place, copies))
            returned.add(node)
        return shared

    def unpad(self, tensor: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        if not self._is_padded(border):
            return tensor
        return _unpad_local(tensor, border, self.ranks.mesh, coordinate_of(self.ranks.device_mesh))

    def backward(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> list[torch.Tensor]:
        """Return local gradients, in the order of the step; the list of saved tensors is emptied."""
        assert self.halves.backward is not None
        return _run_graph(self.halves.backward, self.arguments(saved, tangents, sizes))

    def backward_of_inputs(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Return local gradients of inputs, by place among all gradients, and the arguments of the second part."""
        assert self.halves.parts is not None
        first, second = self.halves.parts
        arguments = self.arguments(saved, tangents, sizes)
        second_arguments = [arguments[place] for place in second.takes]
        first_arguments = [arguments[place] for place in first.takes]
        arguments.clear()
        results = _run_graph(first.graph, first_arguments)
        return dict(zip(first.makes, results, strict=False)), [*second_arguments, *results[len(first.makes) :]]

    def arguments(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> list[torch.Tensor | int | float]:
        """Return the arguments of the backward half; the list of saved tensors is emptied."""
        padded = [
            torch.zeros(at(border, sizes).local_shape(self.ranks.mesh), dtype=border.dtype, device=self.ranks.device)
            if tangent is None
            else self._pad(written_out(tangent), at(border, sizes))
            for tangent, border in zip(tangents, self.step.tangents, strict=True)
        ]
        arguments = [*saved, *padded, *_numbers(self.halves.backward_sizes, sizes)]
        # The arguments alone refer to saved tensors now, so that each is freed after its last use.
        saved.clear()
        return arguments


def _run_graph(graph: Any, arguments: list[Any]) -> list[torch.Tensor]:
    """Return the results of a graph; the list is emptied, so that arguments are freed after their last use."""
    with _without_autocast():
        if isinstance(graph, fx.GraphModule):
            return list(graph(arguments))
        # Compiled code takes no list.
        unpacked = tuple(arguments)
        arguments.clear()
        return list(graph(*unpacked))


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Return a context without autocast: a graph contains the casts of the capture."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _numbers(expressions: Sequence[sympy.Expr], sizes: Sizes) -> list[int | float]:
    """Return the values of expressions at these sizes."""
    values = [evaluate(expression, sizes) for expression in expressions]
    return [int(value) if value.is_Integer else float(value) for value in values]


class _ProgramFunction(torch.autograd.Function):
    """The two halves as one differentiable operation on DTensor parameters and local inputs."""

    @staticmethod
    def forward(
        ctx: Any, program: RunnableStep, sizes: Sizes, histories: list[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        locals_ = program.local(tensors, sizes)
        seed = program.ranks.seed(program.halves.draws)
        outputs, saved = program.forward(locals_, sizes, seed)
        outputs = _without_views(outputs)
        ctx.program, ctx.sizes, ctx.seed, ctx.histories = program, sizes, seed, histories
        # Gradients that do not arrive stay None: zeros would be computed with, and would make a `.grad` where there is
        # none.
        ctx.set_materialize_grads(False)
        # Autograd refuses to run a backward whose saved tensors were changed since. An optimizer changes the DTensor
        # of a parameter, and not the version of the local tensor in it, so DTensors of saved locals are saved, too.
        held = {id(tensor) for tensor in saved}
        pairs = zip(tensors, locals_, strict=True)
        parameters = [tensor for tensor, local in pairs if isinstance(tensor, DTensor) and id(local) in held]
        ctx.save_for_backward(*saved, *parameters)
        ctx.count = len(saved)
        ctx.specs = [dtensor_spec_of(tensor) if isinstance(tensor, DTensor) else None for tensor in tensors]
        waits = program.later is not None or program.sums is not None
        ctx.parameters = [tensor if waits and isinstance(tensor, DTensor) else None for tensor in tensors]
        ctx.whole, ctx.versions = None, []
        if program.general is not None or program.between is not None:
            # These programs run forward again, from the inputs before the step: buffers may change.
            former = program.step.former_values
            inputs = zip(locals_, program.step.inputs, strict=False)
            ctx.whole = [tensor.clone() if border.name in former else tensor for tensor, border in inputs]
            ctx.versions = [(tensor, tensor._version) for tensor in tensors if isinstance(tensor, DTensor)]
        tangents = {border.name for border in program.step.tangents}
        plain = [
            tensor
            for tensor, border in zip(outputs, program.step.forward_outputs, strict=True)
            if border.kind == "mutation"
            or not (tensor.is_floating_point() or tensor.is_complex())
            or (program.histories is not None and border.name not in program.histories.differentiable)
            # The general program has a tangent for every output that requires a gradient.
            or (program.general is None and border.name not in tangents)
        ]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        try:
            with torch.no_grad():
                results = _gradients(ctx, gradients)
        except RuntimeError as error:
            if ctx.program.order is not None:
                ctx.program.order.raise_failure(error)
            raise
        # With create_graph=True.
        if torch.is_grad_enabled():
            results = _LastDerivative.apply(len(ctx.histories), *ctx.histories, *results)
        return (None, None, None, *results)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise InputError(
            "a parallelised module has no derivative in forward mode (torch.autograd.forward_ad, torch.func.jvp): its "
            "programs are a forward and a backward. Take gradients by backward or torch.autograd.grad."
        )


class _LastDerivative(torch.autograd.Function):
    """The identity of gradients, with an error for its derivative: autograd would take them for constants.

    Its first arguments are the tensors that the gradients depend on, so that a derivative by these comes here.
    """

    @staticmethod
    def forward(ctx: Any, histories: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in tensors[histories:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
        raise InputError(
            "a gradient of a parallelised module is differentiated again (create_graph=True, as for a penalty on "
            "gradients), and its programs hold first derivatives alone. Compute what depends on the gradient in "
            "forward: there torch.autograd.grad(outputs, inputs, create_graph=True) is part of the step, and its loss "
            "can be returned. If the gradient is meant as a constant, use gradient.detach()."
        )


def _without_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Detach outputs that are views, since autograd refuses to change views that a function returns in place."""
    if not any(map(is_view, tensors)):
        return list(tensors)
    memory = [storage_of(local_tensors(tensor)[0]) for tensor in tensors]
    # An output that shares memory with another one stays a view: the other's history would not know of a change.
    return [
        tensor.detach() if is_view(tensor) and memory.count(storage) == 1 else tensor
        for tensor, storage in zip(tensors, memory, strict=True)
    ]


def _history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the autograd history of this one that does not keep its memory alive."""
    if tensor.is_leaf or tensor.ndim == 0 or isinstance(tensor, DTensor):
        return tensor
    return tensor.narrow(0, 0, 0).sum()


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients of the tensors that a program was run with, from those of its outputs."""
    program: RunnableStep = ctx.program
    step = program.step
    gradient_of_output = dict(zip((border.name for border in step.forward_outputs), gradients, strict=True))
    expected = [border.name for border in step.tangents]
    if program.accumulation is not None:
        program.accumulation.forget_zeroed()
    sums = program.sums if isinstance(program.sums, OpenSums) else None
    # Parameters that take part in the sums alone get gradients, too.
    summed = set() if sums is None else set(sums.names)
    if any(gradient is not None and name not in expected for name, gradient in gradient_of_output.items()):
        step, results = _differentiate_all(ctx, program, gradient_of_output)
    else:
        if program.general is not None and program.order is not None:
            # Other ranks may be about to make the general program.
            program.order.begin_known({})
        saved = list(ctx.saved_tensors[: ctx.count])
        # Frees them after their last use, unless the graph is to be kept.
        ctx.maybe_clear_saved_tensors()
        tangents = [gradient_of_output[name] for name in expected]
        parameters = _ParameterGradients(program, ctx.parameters)
        if program.later is None:
            local_gradients = parameters.backward(saved, tangents, ctx.sizes)
        else:
            local_gradients, rest = program.backward_of_inputs(saved, tangents, ctx.sizes)
            program.later.append(lambda: parameters.backward_of_parameters(rest))
        results = {step.gradients[place].name: gradient for place, gradient in local_gradients.items()}
    arrived = {name for name, gradient in gradient_of_output.items() if gradient is not None}
    # Autograd leaves `.grad` as it is for None, where zeros would make it a tensor.
    takes_part = summed | {name for name, sources in step.gradient_sources.items() if sources & arrived}
    if sums is not None and not sums.is_last_backward:
        _ParameterGradients(program, ctx.parameters).keep_sums(sums, takes_part)
    elif program.accumulation is not None and not program.accumulation.active:
        # Of other programs, or of this one where another program ran its backward.
        program.accumulation.reduce_rest()
    return [
        _autograd_gradient(program, at(border, ctx.sizes), results[border.name], spec)
        if border.name in results and border.name in takes_part
        else None
        for border, spec in zip(program.step.inputs, ctx.specs, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class _ParameterGradients:
    """Gradients of the parameters of a program, some of which are computed and accumulated without autograd.

    Gradients are named by their places among the step's gradients; `tensors` are the parameters among the inputs.
    """

    program: RunnableStep
    tensors: Sequence[DTensor | None]

    @torch.no_grad()
    def backward(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> dict[int, torch.Tensor]:
        """Run the backward half, and return the gradients that do not wait for further backwards."""
        graph = self.program.halves.backward
        assert graph is not None
        arguments = self.program.arguments(saved, tangents, sizes)
        return self._run(lambda: dict(enumerate(_run_graph(graph, arguments))), arguments)

    @torch.no_grad()
    def backward_of_parameters(self, kept: list[Any]) -> None:
        """Run the second part of the backward half on its arguments."""
        assert self.program.halves.parts is not None
        _, second = self.program.halves.parts
        self._accumulate(self._run(lambda: dict(zip(second.makes, _run_graph(second.graph, kept), strict=True)), kept))

    def _run(self, run: Callable[[], dict[int, torch.Tensor]], arguments: list[Any]) -> dict[int, torch.Tensor]:
        """Return the gradients of one run but those that are added up; the last run reduces these."""
        reduction, sums = self.program.halves.reduction, self.program.sums
        if reduction is None or sums is None:
            return run()
        if not sums.is_last_backward:
            gradients = run()
            sums.add([gradients.pop(place) for place in reduction.places])
            return gradients
        if sums.is_empty:
            gradients = run()
            return gradients | self._reduce([gradients[place] for place in reduction.places])
        # Another graph runs instead, which takes the sums, too.
        last, end = reduction.last, reduction.end
        candidates = [*arguments, *sums.take()]
        arguments.clear()
        last_arguments = [candidates[place] for place in last.takes]
        candidates.clear()
        results = _run_graph(last.graph, last_arguments)
        if end is not None:
            pending = results[len(last.makes) :]

            def await_rest() -> dict[int, torch.Tensor]:
                return dict(zip(end.makes, _run_graph(end.graph, pending), strict=True))

            if isinstance(sums, OpenSums):
                return dict(zip(last.makes, results, strict=False)) | await_rest()
            # Other stages of the rank compute while these reductions run.
            sums.defer(lambda: self._accumulate(await_rest()))
        return dict(zip(last.makes, results, strict=False))

    def _reduce(self, gradients: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return gradients, reduced, in the order in which they are added up; the list is emptied."""
        reduction = self.program.halves.reduction
        assert reduction is not None
        return dict(zip(reduction.places, _run_graph(reduction.alone, gradients), strict=True))

    def keep_sums(self, sums: OpenSums, takes_part: Set[str]) -> None:
        """Keep the sums to which a backward added gradients; a small parameter gets a gradient of zeros as witness."""
        step, mesh, reduction = self.program.step, self.program.ranks.mesh, self.program.halves.reduction
        assert reduction is not None
        deferred = [step.gradients[place] for place in reduction.places]
        deferred = [border for border in deferred if border.name in takes_part]
        if not deferred:
            return
        smallest = min(deferred, key=lambda border: math.prod(border.local_shape(mesh)))
        border, witness = self._parameters()[smallest.name]
        if witness.grad is None:
            # Here, since autograd would set it only behind all backwards of the pass.
            zeros = torch.zeros(border.local_shape(mesh), dtype=border.dtype, device=self.program.ranks.device)
            witness.grad = _autograd_gradient(self.program, border, zeros, dtensor_spec_of(witness))
        sums.keep({border.name for border in deferred}, witness, lambda: self._reduce_sums(sums))

    @torch.no_grad()
    def _reduce_sums(self, sums: OpenSums) -> None:
        """Reduce sums by themselves, and add them to `.grad`."""
        names, step = set(sums.names), self.program.step
        gradients = self._reduce(sums.take())
        self._accumulate(
            {place: gradient for place, gradient in gradients.items() if step.gradients[place].name in names}
        )

    def _parameters(self) -> dict[str, tuple[ProgramTensor, DTensor]]:
        pairs = zip(self.program.step.inputs, self.tensors, strict=False)
        return {border.name: (border, parameter) for border, parameter in pairs if parameter is not None}

    @torch.no_grad()
    def _accumulate(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add gradients to `.grad` and run hooks, as the end of a backward does; each is freed after that."""
        step = self.program.step
        parameters = self._parameters()
        for place in list(gradients):
            border, parameter = parameters[step.gradients[place].name]
            spec = dtensor_spec_of(parameter)
            torch.autograd.backward([parameter], [_autograd_gradient(self.program, border, gradients.pop(place), spec)])


def _differentiate_all(
    ctx: Any, program: RunnableStep, gradient_of_output: dict[str, torch.Tensor | None]
) -> tuple[LocalStep, dict[str, torch.Tensor]]:
    """Return gradients where more than the loss is differentiated: the general program runs both halves."""
    assert program.general is not None
    _check_unchanged(ctx, "a gradient arrived for an output besides the loss")
    general = program.general()
    _, saved = general.forward(ctx.whole, ctx.sizes, ctx.seed)
    gradients = general.backward(
        list(saved), [gradient_of_output[border.name] for border in general.step.tangents], ctx.sizes
    )
    return general.step, dict(zip((border.name for border in general.step.gradients), gradients, strict=True))


def _check_unchanged(ctx: Any, what: str) -> None:
    """Raise an `InputError` if parameters were changed since the forward, which another program is to run again."""
    assert ctx.whole is not None
    if any(tensor._version != version for tensor, version in ctx.versions):
        raise InputError(
            f"{what}, and parameters were changed since the forward: they were modified by an inplace operation, such "
            "as an optimizer's step. Call backward before it."
        )


def is_program(node: Any) -> bool:
    """Return True for the node of autograd that is a run of a program."""
    return isinstance(getattr(node, "program", None), RunnableStep)


def gradients_between(ctx: Any, name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients for outputs of a run, by name, of which others are computed, from that of one output.

    Args:
        ctx: the run, a node of autograd.
        name: of the output.
        gradient: of the output; whole.

    Raises:
        AutoshardError: there is no such program.
    """
    program: RunnableStep = ctx.program
    if program.between is None:
        raise InputError("outputs are not whole, or sizes are dynamic")
    _check_unchanged(ctx, "a gradient of an output for another one is asked for")
    with torch.no_grad():
        between = program.between()
        mesh, device = program.ranks.mesh, program.ranks.device
        borders = [border for border in between.step.inputs if border.kind != "tangent"]
        taps = [
            torch.zeros(border.local_shape(mesh), dtype=border.dtype, device=device)
            for border in borders[len(ctx.whole) :]
        ]
        _, saved = between.forward([*ctx.whole, *taps], ctx.sizes, ctx.seed)
        tangents = [gradient if border.name == name else None for border in between.step.tangents]
        results = between.backward(list(saved), tangents, ctx.sizes)
    if torch.is_grad_enabled():
        results = list(_LastDerivative.apply(len(ctx.histories) + 1, *ctx.histories, gradient, *results))
    return {
        border.name.removeprefix(TAP): result
        for border, result in zip(between.step.gradients, results, strict=True)
        if border.name.startswith(TAP)
    }


def _autograd_gradient(
    program: RunnableStep, border: ProgramTensor, gradient: torch.Tensor | None, spec: DTensorSpec | None
) -> torch.Tensor | None:
    """Return a gradient as autograd takes it: without padding, and a DTensor of the spec of its parameter."""
    if gradient is None:
        return None
    gradient = program.unpad(gradient, border)
    return gradient if spec is None else dtensor(gradient, spec)


@per_rank
def _pad_local(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return pad_to(tensor, shape)


@per_rank
def _unpad_local(
    tensor: torch.Tensor, border: ProgramTensor, mesh: MeshShape, coordinate: Sequence[int]
) -> torch.Tensor:
    sizes = true_local_shape(border.shape, border.spec, mesh, coordinate)
    return tensor[tuple(slice(size) for size in sizes)].contiguous()
