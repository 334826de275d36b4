"""The private torch names that this room uses, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef  # what torch.library.custom_op returns
from torch._ops import (
    OpOverload,  # the type of an operator such as torch.ops.aten.mm.default
    OpOverloadPacket,  # the type of torch.ops.aten.mm, all overloads of one name
)

collectives = torch.ops._c10d_functional
"""Collectives as operators on tensors, which a graph can hold."""

__all__ = ["CustomOpDef", "OpOverload", "OpOverloadPacket", "collectives", "overload_for"]


def overload_for(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """The overload that torch would call with these arguments; `RuntimeError` if there is none."""
    # torch resolves overloads so when it traces a call of a packet
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return getattr(packet, name)
