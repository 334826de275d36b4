"""Reads of tensor values by Python while `forward` is exported, answered from the example."""

from __future__ import annotations

import ast
import linecache
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributions import distribution
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autoshard.capture._torch import FakeTensor, OpOverload, is_all_true, outside_functions, pytree, traced_node
from autoshard.capture.capture_errors import ModelError, running_frame, running_line, shape_error
from autoshard.capture.nodes import closure, is_random
from autoshard.capture.python.conditions import InputProgram, ModuleTensor, NoNumbersError, numbers_of
from autoshard.errors import CaptureError, InputError, warn_caller

aten = torch.ops.aten

READS = (
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.item,
    Tensor.tolist,
    Tensor.is_nonzero,
    torch.is_nonzero,
)
"""Functions that return values of a tensor to Python."""

# The file of the code that validates distributions.
_DISTRIBUTION = str(distribution.__file__)

_BOOL_CONVERSIONS = frozenset({Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero})


@dataclass(frozen=True, slots=True)
class RuntimeCheck:
    """A flag that a run computes, and the value that the captured graph assumes.

    Attributes:
        line: the user's line that reads it, such as `model.py:12 (if not x.isfinite().all():)`.
        wanted: the value that the graph assumes.
        message: of the error that the line raises otherwise; empty if it takes another branch.
        error: the type of that error.
        decides: True if any result or effect of `forward` depends on the flag.
    """

    line: str
    wanted: bool
    message: str = ""
    error: type[Exception] = InputError
    decides: bool = True

    def fail(self) -> None:
        """Raise the error of a run in which the flag has another value; warn if nothing depends on it."""
        if not self.decides:
            warn_caller(
                f"{self.line} asks for numbers that forward computes, and the answer is {not self.wanted} in this "
                "call. Nothing that is computed depends on it. What the line does then, such as a warning, is left out."
            )
            return
        if self.message:
            raise self.error(f"{self.message} ({self.line})")
        raise self.error(
            f"{self.line} asks for numbers that forward computes. The graph was captured for the answer "
            f"{self.wanted}, which all ordinary numbers give, and in this call it is {not self.wanted}: look for what "
            "is not finite, or too large, in the inputs and the parameters. Where both answers are to be served, write "
            "the branch as torch.where."
        )


class DataReads(TorchFunctionMode):
    """Mode in which `forward` reads values of inputs from the example, and of buffers from the module.

    Such reads are those of branches, Python numbers, and sizes of results. Each is a condition of the graph. A read of
    a flag that the graph computes is answered with the value that all ordinary numbers give, if there is one, and
    checked at every run. torch handles all other reads.

    Args:
        examples: the tensors of the example by name; those on the meta device and fake ones have no data.
        note_number: called with every other number that is read, and its tensor.

    Attributes:
        assumptions: flags in the graph under construction, tensors of one element, that every run has to check.
        program: the reads from inputs and buffers.
        running: True while `forward` runs; the mode handles no other code.
    """

    def __init__(
        self, examples: Mapping[str, Tensor], note_number: Callable[[Any, Tensor], None] = lambda *_: None
    ) -> None:
        super().__init__()
        self._note_number = note_number
        self.assumptions: list[tuple[Tensor, RuntimeCheck]] = []
        self._examples = examples
        self.program = InputProgram({})
        self.running = False
        # torch passes the called function: a method and the function of that name are different.
        self._handlers: dict[Any, Callable[..., Any]] = {
            **{read: partial(self._number, read) for read in READS},
            torch._assert: self._assert,
            is_all_true: self._validate,
            Tensor.unsqueeze_: self._unsqueeze,
            Tensor.__getitem__: self._item,
            Tensor.__setitem__: self._set_item,
            **dict.fromkeys((torch.equal, Tensor.equal), self._equal),
            **dict.fromkeys((torch.masked_select, Tensor.masked_select), self._masked_select),
            **dict.fromkeys((torch.nonzero, Tensor.nonzero), self._nonzero),
            **dict.fromkeys((torch.argwhere, Tensor.argwhere), self._nonzero),
            torch.where: self._where,
            torch.tensor: self._tensor,
            **{function: partial(self._call_data_dependent, function) for function in _DATA_DEPENDENT},
            **{function: partial(self._call_with_sizes, function, first) for function, first in _WITH_SIZES.items()},
            **dict.fromkeys((torch.repeat_interleave, Tensor.repeat_interleave), self._repeat_interleave),
            **{function: partial(self._call_decomposition, *how) for function, how in _WITH_ERRORS.items()},
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func) if self.running else None
        return (handler or func)(*args, **(kwargs or {}))

    def begin(self, inputs: Mapping[str, Tensor], held: Iterable[tuple[Tensor, ModuleTensor]] = ()) -> None:
        """Begin to answer the reads of a call.

        Args:
            inputs: its input tensors, by name.
            held: fake buffers, and tensors in attributes, with those of the user's module.
        """
        nodes: dict[fx.Node, tuple[str | ModuleTensor, Tensor | None]] = dict(self._nodes(inputs))
        untraced = {}
        for fake, each in held:
            traced = traced_node(fake)
            if traced is None:
                untraced[id(fake)] = each
            else:
                nodes[traced[0]] = each, each.numbers()
        self.program = InputProgram(nodes, untraced)
        self.assumptions, self.running = [], True

    def _copy(self, tensor: object) -> fx.Node | None:
        """Return the program's node for a tensor computed from inputs and constants only; None for any other."""
        traced = traced_node(tensor) if isinstance(tensor, FakeTensor) else None
        return None if traced is None else self.program.copy(*traced)

    def _nodes(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[fx.Node, tuple[str, Tensor | None]]]:
        """Yield the nodes of inputs, with their names and the example's tensors (None without data)."""
        for name, tensor in inputs.items():
            traced = traced_node(tensor)
            if traced is not None:
                yield traced[0], (name, numbers_of(self._examples.get(name)))

    def _copy_or_none(self, tensor: object) -> fx.Node | None:
        """Return the program's node for a tensor as `_copy` does; None also if the example has no data."""
        try:
            return self._copy(tensor)
        except NoNumbersError:
            return None

    def _read(self, copy: fx.Node) -> Tensor:
        """Return the value of a node of the program, which becomes a condition of the graph."""
        self.program.read(copy, running_line())
        value: Tensor = self.program.value(copy)
        return value

    def _answer(self, tensor: object) -> fx.Node | None:
        """Return the program's node for a tensor as `_copy` does, or raise an error for an example without data."""
        try:
            return self._copy(tensor)
        except NoNumbersError as error:
            if isinstance(error.source, ModuleTensor):
                raise CaptureError(
                    f"{running_line()} asks for the numbers in {error}, which has none: it is on the meta device, or a "
                    "DTensor. Make the module with real buffers, or take the branch or the number out of forward: keep "
                    "it as a plain Python number."
                ) from error
            raise CaptureError(
                f"{running_line()} asks for the numbers in the input {error}, and the example has none, or not all of "
                'them: it is fake, on the meta device, a DTensor, or the shard of inputs="local". Give an example of '
                "real tensors, or take the branch or the number out of forward: pass it as a plain Python argument."
            ) from error

    def _number(self, read: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return a Python value of a tensor."""
        copy = self._answer(tensor)
        if copy is None:
            if read in _BOOL_CONVERSIONS:
                return self._assume_answer(tensor)
            number = read(tensor, *args, **kwargs)
            self._note_number(number, tensor)
            return number
        if read in _BOOL_CONVERSIONS:
            # The condition is the truth of the number, not the number: calls with other numbers share the graph.
            copy = copy if tensor.dtype is torch.bool else self.program.call(aten.ne.Scalar, copy, 0)
        elif tensor.is_floating_point() and not self.program.is_fixed(copy):
            if read is not Tensor.__int__:
                raise CaptureError(
                    f"{running_line()} takes a Python float from the numbers in an input. Each batch has another, and "
                    "would need a graph of its own: keep it a tensor (leave out .item()), or pass it as a plain Python "
                    "argument."
                )
            copy = self.program.call(aten.trunc.default, copy)  # `int` only needs the integer part
        with outside_functions():
            return read(self._read(copy), *args, **kwargs)

    def _assume_answer(self, tensor: Tensor) -> bool:
        """Return the answer for ordinary numbers, which every run checks."""
        traced = traced_node(tensor) if isinstance(tensor, FakeTensor) and tensor.dtype is torch.bool else None
        answer = None if traced is None else ordinary_answer(traced[0])
        # torch's own error names the line.
        if answer is None:
            return bool(tensor)
        check = RuntimeCheck(running_line(), answer, decides=not is_reporting_only())
        self.assumptions.append((tensor.detach().reshape(()), check))
        return answer

    def _assert(self, condition: Any, message: str = "") -> None:
        if not (self._number(Tensor.__bool__, condition) if isinstance(condition, Tensor) else condition):
            # Wrapped, since torch.export would report a plain AssertionError as an internal failure.
            raise ModelError(AssertionError(message))

    def _validate(self, valid: Tensor) -> Tensor | bool:
        """Answer that the arguments of a distribution, or a sample, are valid, which every run checks."""
        caller = sys._getframe(1)
        while caller.f_back is not None and caller.f_code.co_name == "__torch_function__":
            caller = caller.f_back
        copy = self._copy_or_none(valid)
        # The answer for a value computed from constants only is final.
        if caller.f_code.co_filename != _DISTRIBUTION or (copy is not None and self.program.is_fixed(copy)):
            return is_all_true(valid)
        what = type(caller.f_locals.get("self")).__name__
        message = (
            f"{what} of torch.distributions: a parameter or a value does not satisfy its constraint. On one device, "
            "the error names both"
        )
        check = RuntimeCheck(running_line(), True, message, ValueError)
        self.assumptions.append((valid.detach().all(), check))
        return True

    def _unsqueeze(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # torch.export does not terminate if an input is changed by `unsqueeze_`.
        traced = traced_node(tensor)
        if traced is not None and traced[0].op == "placeholder":
            raise shape_error(lambda what: f"{running_line()} {what}")
        return tensor.unsqueeze_(*args, **kwargs)

    def _equal(self, first: Tensor, second: Tensor) -> bool:
        # Known without data, so no condition.
        if first.shape != second.shape:
            return False
        copies = self._answer(first), self._answer(second)
        if None in copies:
            return torch.equal(first, second)
        return bool(self._read(self.program.call(aten.all.default, self.program.call(aten.eq.Tensor, *copies))))

    def _positions(self, mask: Tensor) -> Tensor | None:
        """Return indices of non-zero elements, as many as in the example; None if their number is unknown."""
        copy = self._copy_or_none(mask)  # without it, torch makes the size a symbol, which is refused if needed
        if copy is None:
            return None
        count = int(self._read(self.program.call(aten.count_nonzero.default, copy)))
        positions: Tensor = aten.nonzero_static.default(mask, size=count)
        return positions

    def _indices(self, index: Any) -> Any:
        """Return an index with masks replaced by positions."""
        indices: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, slice):
                part = slice(*map(self._bound, (part.start, part.stop, part.step)))
            is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and part.ndim > 0
            positions = self._positions(part) if is_mask else None
            indices += [part] if positions is None else positions.unbind(1)
        return tuple(indices) if isinstance(index, tuple) or len(indices) > 1 else indices[0]

    def _bound(self, bound: Any) -> Any:
        """Return a bound of a slice, which may be a tensor, as an integer."""
        return self._number(Tensor.__index__, bound) if isinstance(bound, FakeTensor) and _is_integer(bound) else bound

    def _item(self, tensor: Tensor, index: Any) -> Tensor:
        return tensor[self._indices(index)]

    def _set_item(self, tensor: Tensor, index: Any, value: Any) -> None:
        # Writing a number under a mask needs no positions, no size, and thus no condition.
        tensor[self._indices(index) if isinstance(value, Tensor) and value.ndim else index] = value

    def _masked_select(self, tensor: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        mask, tensor = mask.expand(shape), tensor.expand(shape)
        positions = self._positions(mask)
        return torch.masked_select(tensor, mask, **kwargs) if positions is None else tensor[positions.unbind(1)]

    def _nonzero(self, tensor: Tensor, *, as_tuple: bool = False, **kwargs: Any) -> Any:
        positions = self._positions(tensor) if tensor.ndim else None
        if positions is None:
            return torch.nonzero(tensor, as_tuple=as_tuple, **kwargs)  # type: ignore[call-overload]
        return positions.unbind(1) if as_tuple else positions

    def _where(self, condition: Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.where(condition, *args, **kwargs) if args or kwargs else self._nonzero(condition, as_tuple=True)

    def _repeat_interleave(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        repeats = args[0] if args else kwargs.get("repeats", tensor)
        if isinstance(repeats, Tensor) and repeats.ndim == 1 and repeats.shape[0] != 1 and "output_size" not in kwargs:
            copy = self._copy_or_none(repeats)
            if copy is not None:
                kwargs["output_size"] = int(self._read(self.program.call(aten.sum.default, copy)))
        return torch.repeat_interleave(tensor, *args, **kwargs)

    def _tensor(self, data: Any, *args: Any, **kwargs: Any) -> Tensor:
        # torch would read the values of tensors in a list one by one; stacked, they stay tensors.
        rows = data if isinstance(data, (list, tuple)) else ()
        if not rows or not all(isinstance(row, FakeTensor) and row.ndim == 0 for row in rows):
            return torch.tensor(data, *args, **kwargs)
        stacked = torch.stack([row.detach() for row in rows])
        return stacked.to(kwargs.get("dtype") or stacked.dtype).requires_grad_(kwargs.get("requires_grad", False))

    def _call_with_sizes(self, function: Callable[..., Any], first: int, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose arguments from `first` on are sizes, which may be tensors."""
        # Factories read all tensor arguments; other functions may take some as operands.
        reads_all = function in _FACTORIES
        sizes = pytree.tree_map_only(
            FakeTensor,
            lambda size: self._number(Tensor.item, size) if reads_all or _is_integer(size) else size,
            (args[first:], kwargs),
        )
        return function(*args[:first], *sizes[0], **sizes[1])

    def _call_data_dependent(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the example's results of a function with data-dependent result sizes."""
        copies = [self._answer(argument) if isinstance(argument, FakeTensor) else argument for argument in args]
        if copies[0] is None:
            return function(*args, **kwargs)
        copy = self.program.call(function, *copies, **kwargs)
        results = self.program.value(copy)
        if isinstance(results, Tensor):
            return self._literal(copy)
        return tuple(self._literal(self.program.call(operator.getitem, copy, place)) for place in range(len(results)))

    def _literal(self, copy: fx.Node) -> Tensor:
        """Return a constant with the value of a node of the program, which becomes a condition of the graph."""
        value = self._read(copy)
        # From plain numbers, since the export does not know the tensor of the program.
        return torch.tensor(value.tolist(), dtype=value.dtype).reshape(value.shape)

    def _call_decomposition(self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """Return a decomposition by a function that does not raise errors; every run checks for its failure."""
        # Functions that raise read the values at once. Their forms with `info` compute the same.
        result, info = function(*args, **kwargs)
        check = RuntimeCheck(
            running_line(),
            True,
            f"{name}: the input is singular, or has no such decomposition",
            torch.linalg.LinAlgError,  # type: ignore[attr-defined]
        )
        self.assumptions.append(((info.detach() == 0).all(), check))
        return result


# Functions with data-dependent result sizes, other than positions of a mask.
_DATA_DEPENDENT = (
    *(torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive),
    *(torch.bincount, Tensor.bincount),
)

# Factory functions whose sizes may be passed as tensors -> the number of arguments before the sizes.
_FACTORIES: dict[Any, int] = {
    **dict.fromkeys((torch.arange, torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.linspace), 0),
    **dict.fromkeys((Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full), 1),
}
# These, and functions that take sizes, steps or positions besides operands.
_WITH_SIZES: dict[Any, int] = {
    **_FACTORIES,
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view, Tensor.expand, Tensor.repeat, Tensor.unfold), 1),
    **dict.fromkeys((torch.tile, Tensor.tile, torch.unflatten, Tensor.unflatten, torch.roll, Tensor.roll), 1),
    **dict.fromkeys((torch.narrow, Tensor.narrow, torch.split, Tensor.split, torch.topk, Tensor.topk), 1),
    **dict.fromkeys((functional.pad, functional.interpolate), 1),
}


def _is_integer(tensor: Tensor) -> bool:
    return tensor.ndim == 0 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


# Functions that raise an error for some values -> their forms that return it as a second result.
_WITH_ERRORS: dict[Any, tuple[Callable[..., Any], str]] = {
    **dict.fromkeys((torch.linalg.inv, torch.inverse, Tensor.inverse), (torch.linalg.inv_ex, "linalg.inv")),
    torch.linalg.cholesky: (torch.linalg.cholesky_ex, "linalg.cholesky"),
    torch.linalg.solve: (torch.linalg.solve_ex, "linalg.solve"),
}

# Operands on which a flag is evaluated: their common answer is that of a run without infinities or the like.
_ORDINARY = (0.0, 1.0, -1.0, 0.5, 100.0, -100.0)


def ordinary_answer(node: fx.Node) -> bool | None:
    """Return the value of a flag if all ordinary numbers give the same one, as they do for `isfinite`.

    Args:
        node: of one flag, in a graph under construction, without data.

    Returns:
        The flag; None if it depends on the numbers.
    """
    # Flags are computed from flags, down to numeric operands, which are replaced by ordinary numbers.
    sources = closure([node], lambda source: source.all_input_nodes if _is_flag(source) else [])
    flags = sorted(filter(_is_flag, sources))
    if not all(isinstance(source.meta.get("val"), Tensor) for source in sources):
        return None  # a size is compared, and no size is ordinary
    answers = set()
    for number in _ORDINARY:
        try:
            answers.add(_answer_to(node, flags, sources.difference(flags), number))
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None  # an operator refuses such numbers, or sizes are symbolic
    return answers.pop() if len(answers) == 1 else None


def _is_flag(node: fx.Node) -> bool:
    """Return True if a node is an operator whose results are flags."""
    value = node.meta.get("val")
    is_operator = isinstance(node.target, OpOverload) and node.target.namespace == "aten" and not is_random(node)
    return is_operator and isinstance(value, Tensor) and value.dtype is torch.bool


def _answer_to(node: fx.Node, flags: Sequence[fx.Node], operands: Collection[fx.Node], number: float) -> bool:
    """Return the flag if all operands are `number`; operands that are flags are True if it is positive."""
    with outside_functions(), torch.no_grad():
        # An expanded operand takes the memory of one number, whatever its shape.
        values: dict[fx.Node, Any] = {}
        for operand in operands:
            like = operand.meta["val"]
            value = number > 0 if like.dtype is torch.bool else number
            shape = tuple(map(int, like.shape))
            values[operand] = torch.tensor(value, dtype=torch.float64).to(like.dtype).expand(shape)
        for flag in flags:
            args, kwargs = fx.map_arg((flag.args, flag.kwargs), values.__getitem__)
            values[flag] = flag.target(*args, **kwargs)  # type: ignore[operator]
        return bool(values[node])


def is_reporting_only() -> bool:
    """Return True if the running line of the user only decides about a warning, a log or a print."""
    frame = running_frame()
    if frame is None:
        return False
    number = frame.f_lineno
    # The innermost statement at the line has to be the `if`, and the line has to belong to its test.
    around = [node for node in _statements(frame.f_code.co_filename) if node.lineno <= number <= (node.end_lineno or 0)]
    innermost = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)
    return (
        isinstance(innermost, ast.If)
        and innermost.test.lineno <= number <= (innermost.test.end_lineno or 0)
        and all(map(_is_read_only, ast.walk(innermost.test)))
        and not innermost.orelse
        and all(_is_report(statement) for statement in innermost.body)
    )


def _statements(filename: str) -> list[ast.stmt]:
    try:
        module = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # a notebook's cell may have magic commands
        return []
    return [node for node in ast.walk(module) if isinstance(node, ast.stmt)]


_READ_ONLY_METHODS = frozenset(
    {"abs", "all", "amax", "amin", "any", "detach", "isfinite", "isinf", "isnan", "max", "mean", "min", "norm", "sum"}
)


def _is_read_only(node: ast.AST) -> bool:
    """Return True if a part of a test has no effects, so that running it or not makes no difference."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in _READ_ONLY_METHODS
    return not isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))


_LOG_METHODS = frozenset({"warn", "warning", "error", "info", "debug", "critical", "exception", "warning_once"})


def _is_report(statement: ast.stmt) -> bool:
    """Return True if a statement is a call such as `warnings.warn(...)`, `self.logger.info(...)` or `print(...)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return isinstance(statement, ast.Pass)
    owner, _, name = ast.unparse(call.func).rpartition(".")
    logs = owner.rpartition(".")[2].lower()
    return (name == "print" and not owner) or (name in _LOG_METHODS and (logs == "warnings" or "log" in logs))
