"""Branches of the user's code that warn, log or print, and do nothing else: found in its source."""

from __future__ import annotations

import ast
import linecache

from autoshard.capture.capture_errors import running_frame


def is_reporting_only() -> bool:
    """Whether the user's line that is running asks for no more than whether to warn, to log or to print."""
    frame = running_frame()
    if frame is None:
        return False
    number = frame.lineno or 0
    around = [node for node in _statements(frame.filename) if node.lineno <= number <= (node.end_lineno or 0)]
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
    except SyntaxError:  # a notebook's cell may have commands of its own
        return []
    return [node for node in ast.walk(module) if isinstance(node, ast.stmt)]


_READ_ONLY_METHODS = frozenset(
    {"abs", "all", "amax", "amin", "any", "detach", "isfinite", "isinf", "isnan", "max", "mean", "min", "norm", "sum"}
)


def _is_read_only(node: ast.AST) -> bool:
    """Whether a part of a test keeps nothing, and calls no code that might: it may be skipped, or another one run."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in _READ_ONLY_METHODS
    return not isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))


_LOG_METHODS = frozenset({"warn", "warning", "error", "info", "debug", "critical", "exception", "warning_once"})


def _is_report(statement: ast.stmt) -> bool:
    """Whether a statement is a call such as `warnings.warn(...)`, `self.logger.info(...)` or `print(...)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return isinstance(statement, ast.Pass)
    owner, _, name = ast.unparse(call.func).rpartition(".")
    logs = owner.rpartition(".")[2].lower()
    return (name == "print" and not owner) or (name in _LOG_METHODS and (logs == "warnings" or "log" in logs))
