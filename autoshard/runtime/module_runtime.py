"""What stands in for a module's `forward` once it is parallelised: programs by call signature."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree

from autoshard.capture.call_layout import signature_of, without_omitted_arguments
from autoshard.capture.capture_errors import running_line
from autoshard.capture.conditions import check_conditions
from autoshard.capture.dynamic import Dynamic, may_be_dynamic
from autoshard.capture.global_hooks import warn_of_global_hooks
from autoshard.capture.joint import JointGraph
from autoshard.capture.python_state import check_invalidating_effects
from autoshard.cluster.worker_shares import apportion
from autoshard.errors import InputError
from autoshard.program.localize import ProgramTensor
from autoshard.runtime import _torch
from autoshard.runtime.call_sizes import MOST_PROGRAMS, CallSizes
from autoshard.runtime.call_tensors import describe_call, names_of_leaves, shapes_of_call, without_dynamic_sizes
from autoshard.runtime.constants import place_constant
from autoshard.runtime.host_groups import HostGroups
from autoshard.runtime.in_place_changes import check_changes, write_back
from autoshard.runtime.rank_agreement import check_ranks_agree, is_alone, is_first_rank
from autoshard.runtime.same_inputs import check_same_inputs
from autoshard.runtime.shards import to_mesh_device
from autoshard.runtime.step import LocalProgram
from autoshard.runtime.uneven_inputs import check_blocks, even_shapes, gather_shapes, local_shares, whole_shapes
from autoshard.size import Sizes, at
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import is_even
from autoshard.specs.spec import Spec

ADVICE = (
    'All ranks call the module alike: with inputs="global" each passes the whole batch, with inputs="local" its own '
    "rows of it, as many as the others. Drop what is over at the end of an epoch (drop_last=True of a DataLoader). "
    "The last ranks may pass fewer rows, those that Shard makes, only where the batch of the example does not divide "
    "and the plan splits it: input_placements asks for that."
)
"""The end of an error about ranks whose calls differ."""

Tangents = Literal["loss", "all"]
RUNTIME = "_autoshard_runtime"
"""Attribute of a parallelised module that runs it."""

Prepare = Callable[[tuple[Any, ...], dict[str, Any], bool, Tangents, Hashable, bool], tuple[JointGraph, LocalProgram]]


@dataclass(slots=True, eq=False)
class CallProgram:
    """One call signature.

    Attributes:
        graph: its graph.
        program: its program.
        held: where the program's tensors are found in the module.
        compared: whether the ranks have compared what they passed to the first call.
        others: what serves the signature where other flags, numbers, submodules or hooks are set.
    """

    graph: JointGraph
    program: LocalProgram
    locations: tuple[tuple[dict[str, Any], str] | torch.Tensor | None, ...]
    compared: bool = False
    others: tuple[CallProgram, ...] = ()

    def candidates(self) -> tuple[CallProgram, ...]:
        """All that serve the signature."""
        return (self, *self.others)

    def put_before(self, others: Iterable[CallProgram]) -> CallProgram:
        """This, asked first, and the others behind it."""
        self.others = tuple(served for served in others if served is not self)
        for served in self.others:
            served.others = ()
        return self


class Runtime:
    """Runs a parallelised module.

    Args:
        module: the module; its parameters are DTensors.
        device_mesh: the mesh.
        prepare: makes graph and program for a call that was not met before. Its arguments are those of the call,
            with tensors of global shape, whether gradients are wanted, of which outputs, the call's signature, and
            whether the sizes that may be dynamic are to be.
        inputs: `"global"`: every rank passes whole tensors; `"local"`: its own shards.
        dynamic: for inputs by name, the dims whose sizes calls may change, as `autoshard.plan` takes them.

    Attributes:
        forward_before: the `forward` that `install` replaced, which captures run; None before.
        only_call: where the module is a part of another one, which calls it in one way alone, that call with tensors of
            global shapes: nobody has to find out what local inputs are shards of, and outputs are local tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        prepare: Prepare,
        inputs: Literal["global", "local"],
        dynamic: Dynamic | None = None,
    ) -> None:
        self.module = module
        self.device_mesh = device_mesh
        self.mesh = MeshShape.of(device_mesh)
        self.inputs = inputs
        self.dynamic = dynamic or {}
        self.hosts = HostGroups(device_mesh)
        self.input_placements: dict[str, tuple[Placement, ...]] = {}
        self.uneven_inputs = False
        self.shares: tuple[int, tuple[int, ...]] | None = None  # a mesh axis, and what its ranks take of the batch
        self.forward_before: Callable[..., Any] | None = None
        self.only_call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._prepare = prepare
        self._has_warned = False  # of hooks for all modules
        self._programs: dict[Hashable, CallProgram] = {}
        self._sizes = CallSizes(type(module).__name__, self.dynamic, quiet=not is_first_rank(device_mesh))
        self.owners: dict[str, nn.Module] = {}  # of the parameters that were placed, by their names

    def __deepcopy__(self, memo: object) -> Runtime:
        raise InputError(
            "a parallelised module cannot be deep-copied: its programs and process groups are bound to this object. "
            "Copy the module before parallelize and parallelize the copy with the same plan."
        )

    def record_inputs(self, borders: Sequence[ProgramTensor]) -> None:
        """Remember how a program takes its inputs: local ones arrive so in other calls too."""
        for border in borders:
            if border.kind == "input":
                self.input_placements[border.name] = border.spec.placements
                self.uneven_inputs |= not is_even(border.shape, border.spec, self.mesh)

    def install(self) -> None:
        """Put this runtime in the place of the module's `forward`."""
        self.forward_before = self.module.forward

        @functools.wraps(self.forward_before)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        self.module.forward = forward
        self.module.__dict__[RUNTIME] = self
        _torch.support_anomaly_detection()
        for name, part in self.module.named_modules():
            if callable(getattr(part, _RESIZE, None)):
                part.__dict__[_RESIZE] = functools.partial(_refuse_resize, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        grad = torch.is_grad_enabled() and wants_gradient(self.module, args, kwargs)
        if grad and _torch.allows_mutation():
            raise InputError(
                f"{running_line()} calls a parallelised module in allow_mutation_on_saved_tensors of "
                "torch.autograd.graph, which tells saved tensors apart by where they lie in memory: DTensors, such as "
                "the parameters, have no such place. Call the module outside of it, and change copies: y = y.clone()."
            )
        self._has_warned = self._has_warned or warn_of_global_hooks()
        counts = None
        whole_args, whole_kwargs = args, kwargs
        self._compare_sizes(args, kwargs, grad)
        if self.only_call is not None:
            whole_args, whole_kwargs = self.only_call
        elif self.inputs == "local":
            (whole_args, whole_kwargs), counts = self._with_global_shapes((args, kwargs))
        served, sizes = self.program_for_call(whole_args, whole_kwargs, grad)
        if not served.compared:
            self._compare(served, args, kwargs)
        return self._run(served, self._with_shares(served, sizes, counts), args, kwargs)

    def _compare_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> None:
        """Have the ranks compare the sizes of every call, where sizes that differ would not ask for a new program.

        A rank cannot compare new sizes alone, so known ones are compared, too: by one number from host to host. Local
        inputs in shards of different lengths have an exchange of their own.

        Raises:
            InputError: ranks pass other sizes, on every rank.
        """
        free = self.inputs == "local" or self.dynamic
        if self.only_call is not None or self._takes_uneven_shards() or not free or is_alone(self.device_mesh):
            return
        said = describe_call(self.module, args, kwargs, grad)
        if self.hosts.differ(repr(said)):
            check_ranks_agree(self.device_mesh, said, ADVICE)

    def _takes_uneven_shards(self) -> bool:
        """Whether ranks may be given shards of different lengths: they tell each other how long theirs are."""
        return self.inputs == "local" and (self.uneven_inputs or self.shares is not None)

    def _compare(self, served: CallProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the ranks compare the first batch of a signature, where they are to pass the same."""
        if self.inputs == "global" and self.only_call is None:
            names = [border.name for border in served.program.step.inputs if border.kind == "input"]
            given = served.graph.flatten_inputs(args, kwargs)
            inputs = {name: tensor for name, tensor in zip(names, given, strict=False) if not tensor.is_meta}
            check_same_inputs(self.device_mesh, inputs)
        served.compared = True

    def describe_new_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool, signature: Hashable
    ) -> dict[str, str]:
        """What all ranks must have in common before they make a program for a call, in words."""
        known = self._programs.get(signature)
        changed = {} if known is None else dict(known.graph.changes(args, kwargs))
        return describe_call(self.module, args, kwargs, grad) | changed

    def _with_shares(self, served: CallProgram, sizes: Sizes, counts: Sequence[int] | None) -> Sizes:
        """The sizes of a call with what this rank takes of the batch, where its program has such sizes.

        Args:
            served: what serves the call.
            sizes: its dynamic sizes.
            counts: rows that the ranks were given; None where they are given the whole batch.
        """
        shared = served.program.step.shared
        if shared is None:
            if counts is not None:
                assert self.shares is not None
                check_blocks(counts, self.mesh.names[self.shares[0]])
            return sizes
        assert self.shares is not None
        if counts is None:
            counts = apportion(sizes[shared.whole], self.shares[1])
            if min(counts) < 1:
                raise InputError(
                    f"a batch of {sum(counts)} leaves a rank without a row in the shares {list(self.shares[1])}: pass "
                    "a larger batch."
                )
        return {**sizes, **shared.sizes(counts, self.device_mesh.get_local_rank(shared.axis))}

    def program_for_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> tuple[CallProgram, Sizes]:
        """What serves a call whose tensors have global shapes, made if there is none yet, and its dynamic sizes.

        Calls that the dynamic graph is not for, with sizes outside its range or a batch of one, have graphs of their
        own.
        """
        shapes = dict(shapes_of_call(self.module, (args, kwargs))) if self.dynamic else {}
        dynamic = without_omitted_arguments(self.module, self.dynamic, shapes)
        if dynamic and may_be_dynamic(dynamic, shapes):
            masked_args, masked_kwargs = without_dynamic_sizes(self.module, (args, kwargs), dynamic)
            signature = signature_of(self.module, masked_args, masked_kwargs, grad)
            served = self._matching_program(signature, args, kwargs)
            served = served or self.prepare(args, kwargs, grad, "loss", signature, True)
            assert served.graph.dynamic is not None
            sizes = served.graph.dynamic.sizes_of(shapes)
            if served.graph.dynamic.serves(sizes):
                return served, sizes
        signature = signature_of(self.module, args, kwargs, grad)
        served = self._matching_program(signature, args, kwargs)
        served = served or self.prepare(args, kwargs, grad, "loss", signature, False)
        return served, {} if served.graph.dynamic is None else served.graph.dynamic.example

    def _matching_program(
        self, signature: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallProgram | None:
        """What serves a call of a signature with the flags, numbers, submodules and hooks that the module has now."""
        first = self._programs.pop(signature, None)
        if first is None:
            return None
        self._programs[signature] = first  # the last that was used
        if first.graph.serves(args, kwargs):
            return first
        found = next((served for served in first.others if served.graph.serves(args, kwargs)), None)
        if found is not None:
            self._programs[signature] = found.put_before(first.candidates())
        return found

    def programs_for(self, signature: Hashable) -> tuple[CallProgram, ...]:
        """All that serve calls of a signature, in whatever state of the module."""
        return self._programs[signature].candidates() if signature in self._programs else ()

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad: bool,
        tangents: Tangents,
        signature: Hashable,
        dynamic: bool,
    ) -> CallProgram:
        """Capture, plan and partition a call whose tensors have global shapes; serve calls of the signature with it."""
        self._check_parameters()
        known = self.programs_for(signature)
        check_invalidating_effects([served.graph.state for served in known])
        check_conditions([served.graph.state.conditions for served in known])
        start = time.perf_counter()
        graph, program = self._prepare(args, kwargs, grad, tangents, signature, dynamic)
        if not known and self.only_call is None:
            shapes = dict(shapes_of_call(self.module, (args, kwargs)))
            self._sizes.record(self._call_kind(args, kwargs, grad), shapes, time.perf_counter() - start)
        served = CallProgram(graph, program, tuple(self._location(graph, border) for border in program.step.inputs))
        # One that serves the same state is replaced: it was made for fewer gradients.
        others = [other for other in known if not other.graph.serves(args, kwargs)]
        self._programs[signature] = served.put_before(others)
        if len(self._programs) > MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        self.owners = dict(_owners(self.module))
        return served

    def _call_kind(self, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Hashable:
        """All of a call that is neither a size nor a plain value."""
        call = (args, kwargs)
        leaves = zip(names_of_leaves(self.module, call), pytree.tree_leaves(call), strict=True)
        tensors = [(name, leaf.dtype, leaf.ndim) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
        return grad, self.module.training, tuple(tensors)

    def _check_parameters(self) -> None:
        """`InputError` if a parameter that was placed has a plain one in its place; those of new modules are placed."""
        for name, owner in _owners(self.module):
            _, _, leaf = name.rpartition(".")
            if self.owners.get(name) is owner and not isinstance(owner._parameters[leaf], DTensor):
                raise _replaced_error(name, owner._parameters[leaf])

    def _location(self, graph: JointGraph, border: ProgramTensor) -> tuple[dict[str, Any], str] | torch.Tensor | None:
        """Where to find an input of the program: a table of the module and its key, or the tensor itself."""
        if border.kind in ("parameter", "buffer"):
            owner, _, name = border.name.rpartition(".")
            module = self.module.get_submodule(owner)
            return (module._parameters if border.kind == "parameter" else module._buffers), name
        if border.kind == "constant":
            item = next(item for item in graph.inputs if item.kind == "constant" and item.name == border.name)
            return place_constant(self.module, item, self.device_mesh)
        return None

    def _run(self, served: CallProgram, sizes: Sizes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program, step = served.program, served.program.step
        given = iter(served.graph.flatten_inputs(args, kwargs))
        known = []  # the tensors that the user knows
        for border, place in zip(step.inputs, served.locations, strict=True):
            if isinstance(place, tuple):
                held = place[0].get(place[1])
                if held is None or (border.kind == "parameter" and not isinstance(held, DTensor)):
                    raise _replaced_error(border.name, held)
                # An attribute may be set anew between calls: by the call before, or by the user, on any device.
                known.append(to_mesh_device(held.detach(), self.device_mesh) if border.kind == "constant" else held)
            elif place is not None:
                known.append(place)
            elif border.kind == "input":
                known.append(next(given))
        pairs = zip(known, step.inputs, strict=False)
        tensors = [self._input(tensor, border) if border.kind == "input" else tensor for tensor, border in pairs]
        if any(tensor.is_meta for tensor in tensors):
            raise _meta_tensor_error(step.inputs, tensors)
        check_changes(step, known)
        results = program(tensors, sizes)
        borders = list(zip(step.forward_outputs, results, strict=True))
        served.graph.result.check([result for border, result in borders if border.kind == "output"])
        outputs = []
        for border, result in borders:
            if border.kind == "mutation":
                write_back(step, border, result, known)
            else:
                outputs.append(self._output(result, at(border, sizes)))
        self._restore_views(served, outputs, known)
        attributes, kept = served.graph.result.assigned_tensors(outputs)
        for path, value in attributes.items():
            owner, _, name = path.rpartition(".")
            setattr(self.module.get_submodule(owner), name, value)
        served.graph.state.apply_effects(kept)
        return served.graph.unflatten_outputs(outputs)

    def _input(self, tensor: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        """An input as the program takes it: this rank's local tensor."""
        if isinstance(tensor, DTensor):
            return tensor.redistribute(self.device_mesh, border.spec.placements).to_local()
        return tensor.contiguous()  # the layout that was captured

    def _output(self, local: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        """An output as the user gets it: plain where it is whole, a DTensor where it was left sharded."""
        if self.only_call is not None or (border.spec.is_replicated and not self.planned_outputs):
            return local
        stride = torch.empty(border.shape, device="meta").stride()
        return DTensor.from_local(
            local,
            self.device_mesh,
            border.spec.placements,
            run_check=False,
            shape=torch.Size(border.shape),
            stride=stride,
        )

    planned_outputs = False

    def _restore_views(self, served: CallProgram, outputs: list[torch.Tensor], known: Sequence[torch.Tensor]) -> None:
        """Let outputs that are views of what the call changes in place be such, so that they see later changes too."""
        step, result = served.program.step, served.graph.result
        if not result.views or self.only_call is not None or self.planned_outputs:
            return
        changed = {border.name for border in step.forward_outputs if border.kind == "mutation"}
        held = {(border.kind, border.name): tensor for border, tensor in zip(step.inputs, known, strict=False)}
        for place, name in enumerate(result.names):
            view = result.views.get(name)
            if view is None or view.name not in changed:
                continue
            source = held[view.kind, view.name]
            looking = None if isinstance(source, DTensor) else view.of(source)
            if looking is not None and looking.shape == outputs[place].shape:
                outputs[place] = looking

    def _with_global_shapes(
        self, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[int] | None]:
        """The call with this rank's shards replaced by meta tensors of the global shapes they are shards of.

        Where the ranks of an axis hold shares of their own of the batch, also how many rows each was given.
        """
        leaves, structure = pytree.tree_flatten(call)
        local = {
            name or str(place): (place, leaf)
            for place, (name, leaf) in enumerate(zip(names_of_leaves(self.module, call), leaves, strict=True))
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
        }
        own = {name: leaf.shape for name, (_, leaf) in local.items()}
        placements = {name: self._placements(name) for name in local}
        counts = shares = None
        if self._takes_uneven_shards():
            tables = gather_shapes(own, self.hosts)
            if self.shares is not None:
                counts = local_shares(tables, placements, self.device_mesh, self.shares[0])
                shares = self.shares[0], counts
            shapes = whole_shapes(tables, placements, self.device_mesh, shares)
        else:
            shapes = even_shapes(own, placements, self.device_mesh)
        for name, (place, leaf) in local.items():
            like = torch.empty(shapes[name], dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)
            leaves[place] = like
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return (args, kwargs), counts

    def _placements(self, name: str) -> tuple[Placement, ...]:
        """How an input lies: as planned; an input that no plan has met lies as the first one does."""
        if name in self.input_placements:
            return self.input_placements[name]
        default = Spec.all_replicated(self.mesh.ndim).placements
        return next(iter(self.input_placements.values()), default)


def _owners(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold parameters, by the parameters' names."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield (f"{path}.{name}" if path else name), part


def _replaced_error(name: str, held: torch.Tensor | None) -> InputError:
    """What to say of a parameter or buffer that is not what the programs know."""
    what = (
        "deleted, or replaced by what is no parameter," if held is None else f"replaced by a plain {_tensor_text(held)}"
    )
    return InputError(
        f"{name} was {what} since autoshard.parallelize, and the programs of the module read the one that they placed "
        f"on the mesh. Fill that instead, with numbers of the same shape: model.load_state_dict({{{name!r}: value}}, "
        "strict=False); or replace the whole submodule, whose parameters are placed at the next call."
    )


def _tensor_text(tensor: torch.Tensor) -> str:
    kind = "Parameter" if isinstance(tensor, nn.Parameter) else "tensor"
    return f"{kind} of shape {tuple(tensor.shape)}"


def _meta_tensor_error(borders: Sequence[ProgramTensor], tensors: Sequence[torch.Tensor]) -> InputError:
    """What to say of a call with tensors on the meta device."""
    border = next(border for border, tensor in zip(borders, tensors, strict=False) if tensor.is_meta)
    if border.kind == "input":
        return InputError(f"the input {border.name} is on the meta device and has no numbers: pass a real tensor.")
    return InputError(
        f"the {border.kind} {border.name} is on the meta device and has no numbers: call autoshard.materialize(model), "
        "or autoshard.load_safetensors, first."
    )


_RESIZE = "resize_token_embeddings"  # what language models call the change of their vocabulary


def _refuse_resize(name: str, *args: Any, **kwargs: Any) -> None:
    path = f"{name}.{_RESIZE}" if name else _RESIZE
    raise InputError(
        f"{path}: the embeddings of a parallelised module lie on its mesh, and its programs are made for their sizes. "
        f"Call {_RESIZE} before autoshard.parallelize."
    )


def wants_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a parameter of the module or a tensor of the call requires a gradient."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return True
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs)))
