"""Running a local step under autograd: tensors of the user's world in, tensors of the user's world out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import sympy
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import storage_of
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep, ProgramTensor
from autoshard.program.split import Halves
from autoshard.runtime._torch import is_view, local_tensors, per_rank
from autoshard.runtime.gradient_sums import GradientSums
from autoshard.runtime.seeds import Seeds, coordinates_on
from autoshard.runtime.shards import coordinate_of, local_of, wrap
from autoshard.size import Sizes, at, evaluate
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import true_local_shape
from autoshard.specs.tensors import pad_to

_SEED_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio of 2**64: its multiples differ in many bits


class Ranks:
    """What differs from rank to rank, as values that a program takes: coordinates and groups of a device mesh.

    Args:
        device_mesh: the mesh.
        device: where the program runs.
        part: number of the program among those that run side by side on other ranks: each draws numbers of its own.
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
        """The seed of one step, on the CPU: see `Seeds`. Zero for a program that draws nothing."""
        if not draws:
            return self._no_seed
        return self._seeds.draw() ^ (self._part * _SEED_STRIDE % 2**62)

    def arguments(self, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a program takes behind its tensors, in the order of `GraphEmitter.ranks`."""
        return (*self.coordinates, *self.host_coordinates, seed)


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """A local step ready to run.

    Attributes:
        step: its inputs and outputs.
        halves: its graphs.
        ranks: this rank's coordinates.
        general: makes the program in which every output has a gradient, for callers that differentiate more than the
            loss; None where this is that program.
        later: where what is left of a backward is put, if gradients of parameters are to wait until somebody calls it:
            the halves have parts then.
        sums: where gradients are added up over several backwards before they are reduced; the halves may have a
            reduction then.
    """

    step: LocalStep
    halves: Halves
    ranks: Ranks
    general: Callable[[], LocalProgram] | None = None
    later: list[Callable[[], None]] | None = None
    sums: GradientSums | None = None

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Run the forward half; gradients flow to what requires them if the step has a backward half.

        Args:
            tensors: for every input that is no tangent: DTensors for parameters, local tensors for the rest.
            sizes: the call's dynamic sizes, if there are any.

        Returns:
            Local tensors, in the order of the step's forward outputs.
        """
        if self.halves.backward is None:
            with torch.no_grad():
                return list(self.forward(self.local(tensors, sizes), sizes)[0])
        histories = [_history(tensor) for tensor in tensors if tensor.requires_grad]
        return list(_ProgramFunction.apply(self, sizes, histories, *tensors))

    def local(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """The tensors as the program takes them: local, and padded where a dim does not divide."""
        return [
            self._pad(local_of(tensor) if isinstance(tensor, DTensor) else tensor, at(border, sizes))
            for tensor, border in zip(tensors, self.step.inputs, strict=False)
        ]

    def _pad(self, tensor: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        if not border.is_padded(self.ranks.mesh):
            return tensor
        return _pad_local(tensor, border.local_shape(self.ranks.mesh))

    def forward(
        self, locals_: Sequence[torch.Tensor], sizes: Sizes, seed: torch.Tensor | None = None
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Outputs, without padding, and saved tensors of the forward half."""
        seed = self.ranks.seed(self.halves.draws) if seed is None else seed
        numbers = _numbers(self.halves.forward_sizes, sizes)
        with _without_autocast():
            results = self.halves.forward(*locals_, *self.ranks.arguments(seed), *numbers)
        borders = self.step.forward_outputs
        outputs = [self._unpad(result, at(border, sizes)) for result, border in zip(results, borders, strict=False)]
        return outputs, results[len(borders) :]

    def _unpad(self, tensor: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        """What leaves the program, without padding, in memory that nothing else looks at."""
        if not border.is_padded(self.ranks.mesh):
            return tensor
        return _unpad_local(tensor, border, self.ranks.mesh, coordinate_of(self.ranks.device_mesh)).clone()

    def backward(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> list[torch.Tensor]:
        """Local gradients, in the order of the step's gradient outputs.

        The list of saved tensors is emptied, so that each is freed once it has been read for the last time.
        """
        assert self.halves.backward is not None
        return _run_graph(self.halves.backward, self.arguments(saved, tangents, sizes))

    def backward_of_inputs(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Local gradients of inputs, by their place among the step's gradient outputs; and what makes the others of.

        That is: what the second part of the backward half takes.
        """
        assert self.halves.parts is not None
        first, second = self.halves.parts
        arguments = self.arguments(saved, tangents, sizes)
        kept = [arguments[place] for place in second.takes]
        taken = [arguments[place] for place in first.takes]
        arguments.clear()
        made = _run_graph(first.graph, taken)
        return dict(zip(first.makes, made, strict=False)), [*kept, *made[len(first.makes) :]]

    def arguments(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> list[torch.Tensor | int | float]:
        """What the backward half takes; the list of saved tensors is emptied."""
        whole = [
            torch.zeros(at(border, sizes).local_shape(self.ranks.mesh), dtype=border.dtype, device=self.ranks.device)
            if tangent is None
            else self._pad(tangent, at(border, sizes))
            for tangent, border in zip(tangents, self.step.tangents, strict=True)
        ]
        arguments = [*saved, *whole, *_numbers(self.halves.backward_sizes, sizes)]
        saved.clear()
        return arguments


def _run_graph(graph: Any, arguments: list[Any]) -> list[torch.Tensor]:
    """The results of a graph; the list is emptied, so that what nobody needs any more is freed on the way."""
    with _without_autocast():
        if isinstance(graph, fx.GraphModule):
            return list(graph(arguments))
        taken = tuple(arguments)  # compiled
        arguments.clear()
        return list(graph(*taken))


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Context in which operators run as they stand in a graph, which has the casts of the capture in it."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _numbers(expressions: Sequence[sympy.Expr], sizes: Sizes) -> list[int | float]:
    """What expressions are at these sizes."""
    values = [evaluate(expression, sizes) for expression in expressions]
    return [int(value) if value.is_Integer else float(value) for value in values]


class _ProgramFunction(torch.autograd.Function):
    """The two halves as one differentiable operation on DTensor parameters and local inputs."""

    @staticmethod
    def forward(
        ctx: Any, program: LocalProgram, sizes: Sizes, histories: list[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        locals_ = program.local(tensors, sizes)
        seed = program.ranks.seed(program.halves.draws)
        outputs, saved = program.forward(locals_, sizes, seed)
        outputs = _without_views(outputs)
        ctx.program, ctx.sizes, ctx.seed, ctx.histories = program, sizes, seed, histories
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved, *_saved_parameters(tensors, locals_, saved))
        ctx.count = len(saved)
        waits = program.later is not None or program.sums is not None
        ctx.parameters = [tensor if waits and isinstance(tensor, DTensor) else None for tensor in tensors]
        ctx.whole = None if program.general is None else _inputs_before_step(program, locals_)
        ctx.versions = None if program.general is None else _versions(tensors)
        borders = program.step.forward_outputs
        tangents = {border.name for border in program.step.tangents}
        plain = [
            tensor
            for tensor, border in zip(outputs, borders, strict=True)
            if border.kind == "mutation"
            or not tensor.is_floating_point()
            or (program.general is None and border.name not in tangents)  # nothing that is trained leads there
        ]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            results = _gradients(ctx, gradients)
        if torch.is_grad_enabled():  # create_graph=True
            results = _LastDerivative.apply(len(ctx.histories), *ctx.histories, *results)
        return (None, None, None, *results)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise InputError(
            "a parallelised module has no derivative in forward mode (torch.autograd.forward_ad, torch.func.jvp): its "
            "programs are a forward and a backward. Take gradients by backward or torch.autograd.grad."
        )


class _LastDerivative(torch.autograd.Function):
    """The identity of gradients, to be differentiated no further: autograd would take them for constants.

    It takes tensors of what the gradients depend on first, so that whoever asks for a derivative by these comes here.
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
    """Outputs that may be changed in place: autograd refuses that of views that a function returns.

    One that shares its memory with another output stays a view: the other's history would not know of the change.
    """
    if not any(map(is_view, tensors)):
        return list(tensors)
    memory = [storage_of(local_tensors(tensor)[0]) for tensor in tensors]
    return [
        tensor.detach() if is_view(tensor) and memory.count(own) == 1 else tensor  # its changes are counted on
        for tensor, own in zip(tensors, memory, strict=True)
    ]


def _history(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that autograd knows to come from this one, and that keeps none of its memory where others do not."""
    if tensor.is_leaf or tensor.ndim == 0 or isinstance(tensor, DTensor):
        return tensor
    return tensor.narrow(0, 0, 0).sum()


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Gradients of the tensors that a program was run with, from those of its outputs."""
    program: LocalProgram = ctx.program
    names = [border.name for border in program.step.forward_outputs]
    given = dict(zip(names, gradients, strict=True))
    expected = [border.name for border in program.step.tangents]
    step = program.step
    if any(gradient is not None and name not in expected for name, gradient in given.items()):
        step, results = _differentiate_all(ctx, program, given)
    else:
        saved = list(ctx.saved_tensors[: ctx.count])
        ctx.maybe_clear_saved_tensors()  # unless the graph is to be kept
        tangents = [given[name] for name in expected]
        names = [border.name for border in program.step.outputs if border.kind == "gradient"]
        parameters = _ParameterGradients(program, ctx.parameters)
        if program.later is None:
            made = parameters.backward(saved, tangents, ctx.sizes)
        else:
            made, others = program.backward_of_inputs(saved, tangents, ctx.sizes)
            program.later.append(lambda: parameters.backward_of_parameters(others))
        results = {names[place]: gradient for place, gradient in made.items()}
    arrived = {name for name, gradient in given.items() if gradient is not None}
    takes_part = {name for name, sources in step.gradient_sources.items() if sources & arrived}
    primals = [border for border in program.step.inputs if border.kind != "tangent"]
    return [
        _autograd_gradient(program, at(border, ctx.sizes), results[border.name])
        if border.name in results and border.name in takes_part  # autograd leaves the gradient of all else as it is
        else None
        for border in primals
    ]


@dataclass(frozen=True, slots=True)
class _ParameterGradients:
    """Those that a program was run with, beside its inputs, and what becomes of their gradients behind autograd's back.

    Gradients are named by their places among the step's gradient outputs.
    """

    program: LocalProgram
    tensors: Sequence[DTensor | None]

    @torch.no_grad()
    def backward(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> dict[int, torch.Tensor]:
        """Run the backward half: the gradients that are there at once."""
        whole = self.program.halves.backward
        assert whole is not None
        arguments = self.program.arguments(saved, tangents, sizes)
        return self._run(lambda: dict(enumerate(_run_graph(whole, arguments))), arguments)

    @torch.no_grad()
    def backward_of_parameters(self, kept: list[Any]) -> None:
        """Run the second part of the backward half on what was kept for it."""
        assert self.program.halves.parts is not None
        _, second = self.program.halves.parts
        self._accumulate(self._run(lambda: dict(zip(second.makes, _run_graph(second.graph, kept), strict=True)), kept))

    def _run(self, run: Callable[[], dict[int, torch.Tensor]], arguments: list[Any]) -> dict[int, torch.Tensor]:
        """Gradients of one run of what makes them, but for those that are added up; the last run reduces these."""
        reduction, sums = self.program.halves.reduction, self.program.sums
        if reduction is None or sums is None:
            return run()
        if not sums.is_last_backward:
            made = run()
            sums.add([made.pop(place) for place in reduction.places])
            return made
        last, end = reduction.last, reduction.end
        every = [*arguments, *sums.take()]
        arguments.clear()
        taken = [every[place] for place in last.takes]
        every.clear()
        results = _run_graph(last.graph, taken)
        if end is not None:
            handed = results[len(last.makes) :]
            sums.defer(lambda: self._accumulate(dict(zip(end.makes, _run_graph(end.graph, handed), strict=True))))
        return dict(zip(last.makes, results, strict=False))

    @torch.no_grad()
    def _accumulate(self, made: dict[int, torch.Tensor]) -> None:
        """Add gradients to `.grad`, as the end of a backward does, hooks and all; they are freed one by one."""
        step = self.program.step
        names = [border.name for border in step.outputs if border.kind == "gradient"]
        pairs = zip(step.inputs, self.tensors, strict=False)
        held = {border.name: (border, parameter) for border, parameter in pairs if parameter is not None}
        for place in list(made):
            border, parameter = held[names[place]]
            torch.autograd.backward([parameter], [_autograd_gradient(self.program, border, made.pop(place))])


def _saved_parameters(
    tensors: Sequence[torch.Tensor], locals_: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The parameters whose local tensors the backward half reads.

    Autograd refuses to run the backward when a saved tensor was changed meanwhile. It sees that on the DTensor, where
    an optimizer changes it, and not on the local tensor in it.
    """
    held = {id(tensor) for tensor in saved}
    return [
        tensor
        for tensor, local in zip(tensors, locals_, strict=True)
        if isinstance(tensor, DTensor) and id(local) in held
    ]


def _versions(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """The parameters, and how often each has been changed in place."""
    return [(tensor, tensor._version) for tensor in tensors if isinstance(tensor, DTensor)]


def _inputs_before_step(program: LocalProgram, locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of the step as they were before it, for a backward that this program has not: buffers may change."""
    changed = {border.name for border in program.step.outputs if border.kind == "mutation"}
    return [
        tensor.clone() if border.name in changed else tensor
        for tensor, border in zip(locals_, program.step.inputs, strict=False)
    ]


def _differentiate_all(
    ctx: Any, program: LocalProgram, given: dict[str, torch.Tensor | None]
) -> tuple[LocalStep, dict[str, torch.Tensor]]:
    """Gradients when more than the loss was differentiated: the general program, forward again and backward."""
    assert program.general is not None
    assert ctx.whole is not None
    if any(tensor._version != version for tensor, version in ctx.versions):
        raise InputError(
            "a gradient arrived for an output besides the loss, and parameters were changed since the forward: they "
            "were modified by an inplace operation, such as an optimizer's step. Call backward before it."
        )
    general = program.general()
    _, saved = general.forward(ctx.whole, ctx.sizes, ctx.seed)
    gradients = general.backward(list(saved), [given[border.name] for border in general.step.tangents], ctx.sizes)
    names = (border.name for border in general.step.outputs if border.kind == "gradient")
    return general.step, dict(zip(names, gradients, strict=True))


def _autograd_gradient(
    program: LocalProgram, border: ProgramTensor, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """A gradient as autograd takes it: a DTensor for a parameter, without padding."""
    if gradient is None:
        return None
    if border.is_padded(program.ranks.mesh):
        gradient = _unpad_local(gradient, border, program.ranks.mesh, coordinate_of(program.ranks.device_mesh))
    if border.kind != "parameter":
        return gradient
    return wrap(gradient, program.ranks.device_mesh, border.spec, border.shape, border.dtype)


@per_rank
def _pad_local(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return pad_to(tensor, shape)


@per_rank
def _unpad_local(
    tensor: torch.Tensor, border: ProgramTensor, mesh: MeshShape, coordinate: Sequence[int]
) -> torch.Tensor:
    sizes = true_local_shape(border.shape, border.spec, mesh, coordinate)
    return tensor[tuple(slice(size) for size in sizes)].contiguous()
