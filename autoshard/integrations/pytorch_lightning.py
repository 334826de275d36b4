"""The strategies of `autoshard.integrations.lightning` for the packages `pytorch_lightning` and `lightning_fabric`.

Lightning is published under two names with different classes: a Trainer accepts strategies of its own package.
"""

from __future__ import annotations

from autoshard.integrations.lightning_strategies.fabric import FabricStrategy
from autoshard.integrations.lightning_strategies.trainer import TrainerStrategy

try:
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy as FabricBase
    from pytorch_lightning.strategies import ModelParallelStrategy as TrainerBase
except ImportError as error:
    raise ImportError(
        "autoshard.integrations.pytorch_lightning needs pytorch_lightning 2.6 or later (tried with 2.6.6): pip install "
        "'autoshard[pytorch-lightning]'. For the package lightning, import autoshard.integrations.lightning."
    ) from error


class AutoshardStrategy(TrainerStrategy, TrainerBase):
    __doc__ = TrainerStrategy.__doc__


class AutoshardFabricStrategy(FabricStrategy, FabricBase):
    __doc__ = FabricStrategy.__doc__


__all__ = ["AutoshardFabricStrategy", "AutoshardStrategy"]
