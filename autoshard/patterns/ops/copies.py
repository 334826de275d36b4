"""Views that copy: what functionalisation makes of views where nothing may share memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import aten
from autoshard.patterns.registry import rule_for, rule_maker
from autoshard.patterns.rule import OpCall, Rule

_VIEWS = (
    "alias",
    "as_strided",
    "detach",
    "diagonal",
    "expand",
    "narrow",
    "permute",
    "select.int",
    "slice.Tensor",
    "split.Tensor",
    "split_with_sizes",
    "squeeze",
    "squeeze.dim",
    "squeeze.dims",
    "t",
    "transpose.int",
    "unbind.int",
    "unfold",
    "unsqueeze",
    "view",
    "view.dtype",
    "view_as_complex",
    "view_as_real",
)


def _copy_rule_maker(view: Any) -> Callable[[OpCall], Rule | None]:
    """The rule of a view, whose local program then copies."""

    def maker(call: OpCall) -> Rule | None:
        rule = rule_for(replace(call, op=view))
        return None if rule is None else add_copies(rule)

    def add_copies(rule: Rule) -> Rule:
        def local(program: LocalCall) -> Any:
            viewing = copy.copy(program)
            viewing.call = replace(program.call, op=view)
            results = viewing.run() if rule.local is None else rule.local(viewing)
            several = isinstance(results, (tuple, list))
            copies = [program.emit.clone(each) for each in (results if several else [results])]
            return tuple(copies) if several else copies[0]

        return replace(rule, local=local, free=False, variants=tuple(map(add_copies, rule.variants)))

    return maker


for _view in _VIEWS:
    _name, _, _overload = _view.partition(".")
    rule_maker(f"aten.{_name}_copy.{_overload or 'default'}")(
        _copy_rule_maker(getattr(getattr(aten, _name), _overload or "default"))
    )
