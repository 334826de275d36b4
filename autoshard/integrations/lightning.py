"""Strategies for Lightning: `AutoshardStrategy` for the Trainer, `AutoshardFabricStrategy` for Fabric.

    trainer = lightning.Trainer(strategy=AutoshardStrategy({"dp": 2, "tp": 4}, example=batch))
    fabric = lightning.Fabric(strategy=AutoshardFabricStrategy({"dp": 2, "tp": 4}, example=batch))

`autoshard.integrations.pytorch_lightning` has the same strategies for `pytorch_lightning` and `lightning_fabric`.
"""

from __future__ import annotations

from autoshard.integrations.lightning_strategies.fabric import FabricStrategy
from autoshard.integrations.lightning_strategies.trainer import TrainerStrategy

try:
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricBase
    from lightning.pytorch.strategies import ModelParallelStrategy as TrainerBase
except ImportError as error:
    raise ImportError(
        "autoshard.integrations.lightning needs Lightning 2.6 or later (tried with 2.6.6): pip install "
        "'autoshard[lightning]'."
    ) from error


class AutoshardStrategy(TrainerStrategy, TrainerBase):
    __doc__ = TrainerStrategy.__doc__


class AutoshardFabricStrategy(FabricStrategy, FabricBase):
    __doc__ = FabricStrategy.__doc__


__all__ = ["AutoshardFabricStrategy", "AutoshardStrategy"]
