"""The replacements of torch's functions in captures, in order."""

from __future__ import annotations

from torch.nn import functional

from autoshard.capture.replacements import Replacements, install
from autoshard.operators.attention.flex_attention import capturable_flex_attention
from autoshard.operators.attention.masks import replace_position_masks
from autoshard.operators.composites import CALLED_AS, attend, replace_composites
from autoshard.operators.large_losses.loss_in_pieces import compute_large_losses_in_pieces
from autoshard.operators.routed.routing import replace_routing

install(
    Replacements(
        functions=CALLED_AS,
        called_code={functional.scaled_dot_product_attention: attend},
        contexts=(capturable_flex_attention,),
        in_graphs=(replace_composites, replace_routing),
        with_constants=(replace_position_masks,),
        large_losses=compute_large_losses_in_pieces,
    )
)
