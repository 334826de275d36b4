"""The `forward` of a parallelised module: its installation, and the work of a call before and after its program."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.capture_errors import running_line
from autoshard.capture.joint import warn_of_global_hooks
from autoshard.cluster.worker_shares import apportion
from autoshard.errors import InputError
from autoshard.runtime import _torch
from autoshard.runtime.call_outputs import CallOutputs, ReturnedParameters
from autoshard.runtime.call_programs import ADVICE, CallProgram, CallPrograms
from autoshard.runtime.calls import (
    PlacementsByName,
    Shapes,
    check_blocks,
    describe_call,
    even_shapes,
    gather_shapes,
    local_shares,
    pins_of,
    split_dims,
    whole_shapes,
    with_global_shapes,
)
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.copies import bound_forward, pickle_error, share_specs
from autoshard.runtime.hub_methods import replace_hub_methods
from autoshard.runtime.in_place_changes import check_changes, write_back
from autoshard.runtime.optimizers import prepare_optimizers, replace_in_optimizers
from autoshard.runtime.output_links import link_outputs
from autoshard.runtime.part_calls import check_calls, checks_of, uncheck_method
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.program_tensors import find_tensors, local_inputs
from autoshard.runtime.rank_agreement import check_ranks_agree, check_same_inputs, is_alone
from autoshard.runtime.shards import place_buffers
from autoshard.runtime.step import RunnableStep
from autoshard.runtime.step_function import refuse_transforms, run_step
from autoshard.size import Sizes, at

# The attribute of a parallelised module that holds its runtime.
RUNTIME = "_autoshard_runtime"


class Replacement(Protocol):
    """Runs a method of a parallelised module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call in code that `torch.compile` traces."""


class Runtime:
    """Runs a parallelised module.

    Args:
        maker: makes programs of new calls, and has the module and its mesh.

    Attributes:
        maker: as given.
        programs: the programs of the module's calls.
        methods_before: the replaced methods, which captures run: the module or submodule, the name, and the method. The
            first is `forward` of the module, once `install` has replaced it.
    """

    def __init__(self, maker: ProgramMaker) -> None:
        self.module, self.device_mesh, self.mesh = maker.module, maker.device_mesh, maker.mesh
        self.inputs, self.data_axes = maker.target.inputs, maker.target.data_axes
        self.dynamic = maker.target.dynamic or {}
        self.maker = maker
        self.programs = CallPrograms(maker)
        self.methods_before: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        self._compiles = False
        self._outputs = CallOutputs.of(maker)
        self._returned_parameters = ReturnedParameters()
        # True once the runtime has warned about global hooks.
        self._has_warned = False
        self._forward: MethodType | None = None

    def start(self, example: BoundCall) -> None:
        """Plan and place the parameters if the example has arguments; else replicate them and plan at the first call.

        Raises:
            InputError: the ranks' options, plans or examples differ; nothing was changed.
        """
        # Weak: a replaced parameter that only the module held disappears; one that remains has another owner.
        before = WeakTensorKeyDictionary({parameter: name for name, parameter in self.module.named_parameters()})
        given = "one" if example.has_arguments else "none"
        check_ranks_agree(
            self.device_mesh,
            {"whether an example call is given": given, **self.maker.option_texts()},
            "Call parallelize with the same arguments on all ranks.",
        )
        with contextlib.ExitStack() as undo:
            # Before the capture, because every call compares hooks and methods with those of the capture.
            undo.callback(check_calls(self.module))
            if example.has_arguments:
                self.programs.for_call(example)
            else:
                self.maker.replicate_parameters()
            undo.pop_all()
        place_buffers(self.module, self.device_mesh)
        install_hooks(self.module)
        self.install()
        # Other objects, such as an earlier optimizer, hold the remaining parameters.
        left = {old: self.module.get_parameter(name) for old, name in before.items() if not isinstance(old, DTensor)}
        replace_in_optimizers(left)
        prepare_optimizers(self.module, self.programs.accumulation.check_reduced, hosted=_names_on_host)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Return the runtime of a copy of the module, with the same plan, programs, planner and process groups."""
        if self.programs.only_call is not None:
            raise InputError("a stage of a pipeline cannot be deep-copied: copy the module before parallelize.")
        registered = [name for _, name, _ in self.methods_before[1:]]
        if registered:
            raise InputError(
                f"a deep copy of the module would run {', '.join(registered)} on the original: "
                "autoshard.register_forward_method was called for it. Copy the module first, then register the methods "
                "of both."
            )
        current = vars(self.module).get("forward")
        if current != self._forward:
            raise InputError(
                f"forward of {type(self.module).__name__} was replaced by {current!r} since autoshard.parallelize, and "
                "a deep copy of the module would call the original through it. Replace forward before parallelize, or "
                "copy the module before parallelize and parallelize the copy with the same plan."
            )
        # While a module is being copied, its copy is in the memo. To copy only a runtime, copy its module, too.
        module = copy.deepcopy(self.module, memo)
        if id(self) in memo:
            copied: Runtime = memo[id(self)]
            return copied
        share_specs(self.module, memo)
        copied = memo[id(self)] = Runtime(self.maker.for_module(module))
        owners = {name: memo[id(owner)] for name, owner in self.programs.owners.items() if id(owner) in memo}
        copied.programs = self.programs.for_copy(copied.maker, owners)
        forward_before = self.methods_before[0][2]
        copied.methods_before = [(module, "forward", copy.deepcopy(forward_before, memo))]
        copied._forward = copy.deepcopy(self._forward, memo)
        copied._has_warned = self._has_warned
        prepare_optimizers(module, copied.programs.accumulation.check_reduced, hosted=_names_on_host)
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise pickle_error("a parallelised module")

    def install(self) -> None:
        """Replace the module's `forward` by this runtime."""
        self.methods_before.append((self.module, "forward", self.module.forward))
        self._forward = bound_forward(self.module, RUNTIME)
        self.module.forward = self._forward
        self.module.__dict__[RUNTIME] = self
        _torch.support_anomaly_detection()
        replace_hub_methods(self.module)

    def counted_no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of `autoshard.no_sync` if the plan accounts for the sums, otherwise an empty context."""
        counted = self.maker.target.options.accumulate > 1
        return self.programs.accumulation.without_reductions() if counted else contextlib.nullcontext()

    def replace_method(self, owner: nn.Module, name: str, replacement: Replacement) -> None:
        """Replace a method of the module or of a submodule; captures run the original method."""
        uncheck_method(owner, name)
        before = getattr(owner, name)

        @wraps(before)
        def method(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return replacement.call_compiled(*args, **kwargs)
            return replacement(*args, **kwargs)

        self.methods_before.append((owner, name, before))
        setattr(owner, name, method)
        if name == "forward":
            for check in checks_of(owner):
                check.allowed = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_transforms()
        call = BoundCall.of(self.module, args, kwargs)
        if call.grad and _torch.allows_mutation():
            raise InputError(
                f"{running_line()} calls a parallelised module in allow_mutation_on_saved_tensors of "
                "torch.autograd.graph, which tells saved tensors apart by where they lie in memory: DTensors, such as "
                "the parameters, have no such place. Call the module outside of it, and change copies: y = y.clone()."
            )
        self._has_warned = self._has_warned or warn_of_global_hooks()
        whole, counts = call, None
        if self.programs.only_call is not None:
            whole = replace(self.programs.only_call, grad=call.grad)
        elif self.inputs == "local":
            self._decide_input_placements(call)
            whole, counts = self._with_global_shapes(call, self._compare_sizes(call))
        elif self.dynamic:
            self._compare_sizes(call)
        served, sizes = self.programs.for_call(whole)
        try:
            if not served.compared:
                self._compare(served, call)
            return self._run(served, self._with_shares(served, sizes, counts), call)
        except RuntimeError as error:
            self.programs.order.raise_failure(error)
            raise

    # Dynamo would trace the runtime, exchanges between ranks included, and fail.
    @torch.compiler.disable(reason="the programs of a parallelised module are compiled one by one")
    def call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call in code traced by `torch.compile`: from now on programs are compiled, as with `compile=True`."""
        self._compiles = True
        return self(*args, **kwargs)

    def _decide_input_placements(self, call: BoundCall) -> None:
        """Decide the placements of local inputs that no earlier call had."""
        shapes = call.shapes
        if shapes.keys() <= self.programs.input_placements.keys():
            return
        # A rank's whole batch may be one row.
        placements = self.maker.target.input_pins(self.mesh, shapes, may_be_one=True)
        self.programs.input_placements = placements | self.programs.input_placements

    def _compare_sizes(self, call: BoundCall) -> bool:
        """Return True if ranks pass shards of different lengths; raise an `InputError` on every rank if calls differ
        in anything else.
        """
        if is_alone(self.device_mesh):
            return False
        split = {
            name: [dim for dim, _ in split_dims(self.programs.input_placements[name], tensor.ndim, self.mesh)]
            for name, tensor in (call.tensors.items() if self.inputs == "local" else ())
            if not isinstance(tensor, DTensor)
        }
        # A rank with new sizes does not know whether the others have them, too, so every call is compared: digests
        # first, between hosts, and texts only if digests differ.
        texts = describe_call(call, split)
        with_lengths = [repr(describe_call(call))] if split else []
        differs, *is_uneven = self.maker.hosts.differ(repr(texts), *with_lengths)
        if differs:
            check_ranks_agree(self.device_mesh, texts, ADVICE)
        return any(is_uneven)

    def _compare(self, served: CallProgram, call: BoundCall) -> None:
        """Compare the first batch of a signature over all ranks that must pass the same."""
        if self.programs.only_call is None:
            names = [border.name for border in served.program.step.inputs if border.kind == "input"]
            tensors = call.tensors_of(served.graph.call)
            inputs = {name: tensor for name, tensor in zip(names, tensors, strict=False) if not tensor.is_meta}
            placements = (
                {name: self.programs.input_placements[name] for name in inputs} if self.inputs == "local" else None
            )
            check_same_inputs(self.device_mesh, inputs, placements)
        served.compared = True

    def _with_shares(self, served: CallProgram, sizes: Sizes, counts: Sequence[int] | None) -> Sizes:
        """Return the dynamic sizes of a call, with this rank's share of the batch if its program has shares.

        The counts are the rows passed by each rank, or None if each passed the whole batch.
        """
        shared = served.program.step.shared
        if shared is None and counts is None:
            return sizes
        assert self.maker.shares is not None
        axis, shares = self.maker.shares
        if shared is None:
            assert counts is not None
            check_blocks(counts, self.mesh.names[axis])
            return sizes
        if counts is None:
            counts = apportion(sizes[shared.whole], shares)
            if min(counts) < 1:
                raise InputError(
                    f"a batch of {sum(counts)} leaves a rank without a row in the shares {list(shares)}: pass a "
                    "larger batch."
                )
        return {**sizes, **shared.sizes(counts, self.device_mesh.get_local_rank(shared.axis))}

    def place_inputs(self, call: BoundCall, names: Collection[str]) -> PlacementsByName:
        """Make the program of a call without gradients, and return the placements of some inputs, such as a cache.

        The first program of the module also places its parameters. All ranks call this together.

        Args:
            call: without gradients, with tensors of global shapes, which may be on the meta device.
            names: the inputs, `DTensor`s with any placements. The plan decides the returned placements, unless an
                earlier program did.

        Raises:
            AutoshardError: as for a call.
        """
        free = dict.fromkeys(names, (None,) * self.mesh.ndim)
        with torch.no_grad():
            pins = pins_of(call.tensors, self.device_mesh)
            served, _ = self.programs.for_call(call, input_pins={**pins, **free})
        inputs = {border.name: border for border in served.program.step.inputs if border.kind == "input"}
        return {name: inputs[name].spec.placements for name in names}

    def _run(self, served: CallProgram, sizes: Sizes, call: BoundCall) -> Any:
        if self._compiles and not served.program.compiled:
            served.program, served.with_sums = served.program.with_compiler(), None
        self._returned_parameters.check()
        program = served.accumulating_program(self.programs.accumulation.active)
        step = program.step
        # The user's tensors, in the order of the program's inputs.
        sources = find_tensors(step, served.locations, call.tensors_of(served.graph.call), self.device_mesh)
        tensors = local_inputs(step, sources, self.device_mesh)
        check_changes(step, sources)
        with _gradients_of(program):
            results = run_step(program, tensors, sizes)
        borders = list(zip(step.forward_outputs, results, strict=True))
        # Before anything is changed: check the capture's assumptions, such as that all numbers are finite.
        served.graph.result.check([result for border, result in borders if border.kind == "output"])
        write_back(step, {border.name: result for border, result in borders if border.kind == "mutation"}, sources)
        outputs = [result for border, result in borders if border.kind != "mutation"]
        if self.programs.only_call is None:
            shown = at([border for border, _ in borders if border.kind != "mutation"], sizes)
            with _gradients_of(program):
                outputs = [self._outputs.wrap(output, border) for output, border in zip(outputs, shown, strict=True)]
            self._outputs.restore_views(step, served.graph.result, outputs, sources)
            with _gradients_of(program):
                self._outputs.forbid_changes(served.graph, outputs)
            if served.graph.histories.ancestors:
                names = served.graph.result.names
                with _gradients_of(program):
                    linked = link_outputs(served.graph.histories, dict(zip(names, outputs, strict=True)))
                outputs = [linked.get(name, output) for name, output in zip(names, outputs, strict=True)]
            self._outputs.restore_same(step, served.graph, outputs, sources)
            self._returned_parameters.watch(step, served.graph, outputs, sources)
        # A call does not run the Python code of `forward`, so its assignments are applied afterwards.
        served.graph.state.apply_effects(served.graph.result.assigned_tensors(outputs))
        return served.graph.result.unflatten(outputs, (call.args, call.kwargs))

    def _with_global_shapes(self, call: BoundCall, is_uneven: bool) -> tuple[BoundCall, list[int] | None]:
        """Return the call with this rank's shards replaced by meta tensors of global shapes.

        If the ranks of an axis have unequal shares of the batch, also return the number of rows of each. If shards have
        different lengths, or there are shares, all ranks exchange their shapes.
        """
        counts: list[int] | None = None

        def global_shapes(local_shapes: dict[str, tuple[int, ...]]) -> Shapes:
            nonlocal counts
            if not is_uneven and self.maker.shares is None:
                return even_shapes(local_shapes, self.programs.input_placements, self.mesh)
            tables, shares = gather_shapes(local_shapes, self.maker.hosts), None
            if self.maker.shares is not None:
                axis = self.maker.shares[0]
                counts = local_shares(tables, self.programs.input_placements, self.device_mesh, axis)
                shares = axis, counts
            return whole_shapes(tables, self.programs.input_placements, self.device_mesh, shares)

        return with_global_shapes(call, global_shapes), counts


def _names_on_host(module: nn.Module) -> tuple[str, ...]:
    """Return the names of parameters with optimizer state on the host."""
    return runtime_of(module, "an optimizer's step").maker.hosted or ()


def _gradients_of(program: RunnableStep) -> contextlib.AbstractContextManager[object]:
    """Return a context with gradients for programs with them: `forward` may enable them where its caller does not."""
    return contextlib.nullcontext() if program.halves.backward is None else torch.enable_grad()


def runtime_of(module: nn.Module, function: str) -> Runtime:
    """Return the runtime of a parallelised module; raise an `InputError` that names the function if there is none."""
    runtime = module.__dict__.get(RUNTIME)
    if not isinstance(runtime, Runtime):
        raise InputError(
            f"{type(module).__name__} is not parallelised, or is a pipeline: {function} is for the module that "
            "autoshard.parallelize returned for a mesh without a pipeline axis. Call parallelize first."
        )
    return runtime
