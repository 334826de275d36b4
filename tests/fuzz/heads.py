"""What ends a random model: from `[batch, time, width]` and targets to a loss, and what else a call returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.block import Block, Registry

HEADS = Registry()
CLASSES = 12


@dataclass
class Result:
    """What some models return."""

    loss: Tensor
    logits: Tensor


torch.export.register_dataclass(Result)


@HEADS.block(weight="WW")
def cross_entropy(p: Block, x: Tensor, target: Tensor) -> Any:
    logits = x @ p.weight
    return {"loss": F.cross_entropy(logits.flatten(0, 1), target.flatten() % p.width), "logits": logits}


@HEADS.block(weight="WW")
def next_token(p: Block, x: Tensor, target: Tensor) -> Any:
    logits = x @ p.weight
    target = torch.where(target == 3, -100, target % p.width)
    loss = F.cross_entropy(logits[:, :-1].mT, target[:, 1:], ignore_index=-100, label_smoothing=0.1)
    return loss, logits


@HEADS.block(weight="WW")
def likelihood_by_hand(p: Block, x: Tensor, target: Tensor) -> Any:
    logs = (x @ p.weight).log_softmax(-1)
    return Result(-logs.gather(-1, target[..., None] % p.width).mean(), logs)


@HEADS.block(weight="WW")
def classes_of_samples(p: Block, x: Tensor, target: Tensor) -> Any:
    logits = x.mean(1) @ p.weight
    return {"loss": F.nll_loss(logits.log_softmax(-1), target[:, 0] % p.width), "probabilities": logits.softmax(-1)}


@HEADS.block(weight="WW", temperature="1")
def contrastive(p: Block, x: Tensor, target: Tensor) -> Any:
    first, second = F.normalize(x[:, 0] @ p.weight, dim=-1), F.normalize(x.mean(1), dim=-1)
    logits = first @ second.mT * p.temperature.exp()
    labels = torch.arange(x.shape[0], device=x.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.mT, labels)) / 2


@HEADS.block(weight="W")
def ranking(p: Block, x: Tensor, target: Tensor) -> Any:
    scores = (x * p.weight).sum((1, 2))
    return F.margin_ranking_loss(
        scores[:, None], scores[None], (target[:, :1] > target[:, 0]).to(x.dtype) * 2 - 1, margin=0.3
    )


@HEADS.block(weight="WW")
def triplets(p: Block, x: Tensor, target: Tensor) -> Any:
    rows = x @ p.weight
    return F.triplet_margin_loss(rows[:, 0], rows[:, 1], rows[:, 2])


@HEADS.block(weight="WW")
def redundancy(p: Block, x: Tensor, target: Tensor) -> Any:
    first, second = (x[:, 0] @ p.weight, x[:, 1] @ p.weight)
    cross = first.mT @ second / x.shape[0]
    return (cross - torch.eye(p.width, dtype=x.dtype, device=x.device)).square().mean()


@HEADS.block(mean="WW", deviation="WW")
def gaussian(p: Block, x: Tensor, target: Tensor) -> Any:
    mean, logs = x @ p.mean, (x @ p.deviation).clamp(-3, 3)
    divergence = -0.5 * (1 + logs - mean.square() - logs.exp()).sum(-1).mean()
    return {"loss": F.gaussian_nll_loss(mean, x.detach(), logs.exp()) + 0.1 * divergence, "mean": mean}


@HEADS.block(weight="WW")
def robust(p: Block, x: Tensor, target: Tensor) -> Any:
    out = x @ p.weight
    return F.smooth_l1_loss(out, target[..., None].to(x.dtype).expand_as(out)) + F.l1_loss(out, x) * 0.1


@HEADS.block(weight="WW")
def many_labels(p: Block, x: Tensor, target: Tensor) -> Any:
    logits = x.amax(1) @ p.weight
    labels = F.one_hot(target % p.width, p.width).amax(1).to(x.dtype)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / x.shape[0]


@HEADS.block(weight="WW")
def focal(p: Block, x: Tensor, target: Tensor) -> Any:
    losses = F.cross_entropy((x @ p.weight).mT, target % p.width, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / (losses > 0).sum()


@HEADS.block(weight="WW")
def distillation(p: Block, x: Tensor, target: Tensor) -> Any:
    with torch.no_grad():
        teacher = (x * 2).softmax(-1)
    return F.kl_div((x @ p.weight).log_softmax(-1), teacher, reduction="batchmean")


@HEADS.block(weight="WW")
def weighted_by_mask(p: Block, x: Tensor, target: Tensor) -> Any:
    mask = (target > 2).to(x.dtype)
    losses = (x @ p.weight).square().mean(-1)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


@HEADS.block(weight="WW")
def with_auxiliary_loss(p: Block, x: Tensor, target: Tensor) -> Any:
    chances = (x @ p.weight).softmax(-1)
    share = F.one_hot(chances.argmax(-1), p.width).to(x.dtype).mean((0, 1))
    return (
        chances.square().sum(-1).mean()
        + p.width * (share * chances.mean((0, 1))).sum()
        + x.logsumexp(-1).square().mean()
    )


@HEADS.block(weight="WW")
def triangles(p: Block, x: Tensor, target: Tensor) -> Any:
    gram = torch.einsum("btw,bsw->bts", x @ p.weight, x)
    rows, columns = torch.tril_indices(x.shape[1], x.shape[1], -1, device=x.device)
    return gram[:, rows, columns].tanh().square().mean(), gram, None, 3


@HEADS.block(weight="WW")
def no_loss(p: Block, x: Tensor, target: Tensor) -> Any:
    return x @ p.weight


@HEADS.block(weight="WW")
def beside_its_detached_copy(p: Block, x: Tensor, target: Tensor) -> Any:
    out = x @ p.weight
    with torch.no_grad():
        equal = x @ p.weight
    return {"target": out.detach(), "out": out, "equal": equal, "again": out}


@HEADS.block(weight="WW")
def complex_numbers(p: Block, x: Tensor, target: Tensor) -> Any:
    spectrum = torch.fft.rfft(x @ p.weight)
    return spectrum, spectrum.conj().imag


@HEADS.block(weight="WW")
def views_of_one_another(p: Block, x: Tensor, target: Tensor) -> Any:
    out = x @ p.weight
    return {"whole": out, "first": out[:, 0], "turned": out.mT, "pieces": out.chunk(2, -1)[1]}


@HEADS.block(weight="WW")
def under_enable_grad(p: Block, x: Tensor, target: Tensor) -> Any:
    with torch.no_grad():
        frozen = x @ p.weight
        with torch.enable_grad():
            out = frozen.tanh() * (x @ p.weight)
    return [out, frozen]
