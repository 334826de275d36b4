"""Attention, in the forms that people write it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.block import HEAD, Block, Registry, join_heads, split_heads

BLOCKS = Registry()
QKV = {"query": "WW", "key": "WW", "value": "WW", "out": "WW"}


def _heads(p: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split_heads(p, x @ p.query), split_heads(p, x @ p.key), split_heads(p, x @ p.value)


def _causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


@BLOCKS.block(**QKV)
def kernel(p: Block, x: Tensor) -> Tensor:
    return join_heads(F.scaled_dot_product_attention(*_heads(p, x))) @ p.out


@BLOCKS.block(**QKV)
def causal_kernel(p: Block, x: Tensor) -> Tensor:
    return join_heads(F.scaled_dot_product_attention(*_heads(p, x), is_causal=True)) @ p.out


@BLOCKS.block(**QKV)
def masked_kernel(p: Block, x: Tensor) -> Tensor:
    mask = _causal(x) & ((x[:, :, 0] > -1.5) | (x[:, :, 1] > 0))[:, None, None, :]
    mask = mask | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    return join_heads(F.scaled_dot_product_attention(*_heads(p, x), attn_mask=mask)) @ p.out


@BLOCKS.block(fused="WT", out="WW")
def fused_qkv(p: Block, x: Tensor) -> Tensor:
    query, key, value = (split_heads(p, one) for one in (x @ p.fused).chunk(3, -1))
    scores = (query @ key.mT / HEAD**0.5).masked_fill(~_causal(x), float("-inf"))
    return join_heads(scores.softmax(-1) @ value) @ p.out


@BLOCKS.block(fused="WT", out="WW")
def interleaved_qkv(p: Block, x: Tensor) -> Tensor:
    query, key, value = (x @ p.fused).unflatten(-1, (p.heads, 3, HEAD)).permute(3, 0, 2, 1, 4).unbind(0)
    return join_heads((query @ key.mT / HEAD**0.5).softmax(-1) @ value) @ p.out


@BLOCKS.block(query="WHD", key="WHD", value="WHD", out="HDW")
def einsum(p: Block, x: Tensor) -> Tensor:
    query, key, value = (torch.einsum("btw,whd->bthd", x, one) for one in (p.query, p.key, p.value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key).softmax(-1)
    return torch.einsum("bhqk,bkhd,hdw->bqw", scores, value, p.out)


@BLOCKS.block(query="WW", key="WD", value="WD", out="WW")
def of_one_key_head(p: Block, x: Tensor) -> Tensor:
    key, value = (x @ p.key)[:, None], (x @ p.value)[:, None]
    return join_heads((split_heads(p, x @ p.query) @ key.mT).softmax(-1) @ value) @ p.out


@BLOCKS.block(query="WW", key="WD", value="WD", out="WW")
def expanded_keys(p: Block, x: Tensor) -> Tensor:
    key, value = ((x @ one)[:, None].expand(-1, p.heads, -1, -1) for one in (p.key, p.value))
    query = split_heads(p, x @ p.query)
    return join_heads(F.scaled_dot_product_attention(query, key, value, is_causal=True)) @ p.out


@BLOCKS.block(**QKV)
def rotary(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10.0 ** torch.arange(HEAD // 2, device=x.device)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turn(one: Tensor) -> Tensor:
        first, second = one.chunk(2, -1)
        return one * cos + torch.cat([-second, first], -1) * sin

    return join_heads(F.scaled_dot_product_attention(turn(query), turn(key), value, is_causal=True)) @ p.out


@BLOCKS.block(**QKV)
def complex_rotary(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10.0 ** torch.arange(HEAD // 2, device=x.device)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turn(one: Tensor) -> Tensor:
        pairs = torch.view_as_complex(one.unflatten(-1, (HEAD // 2, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    return join_heads((turn(query) @ turn(key).mT).softmax(-1) @ value) @ p.out


@BLOCKS.block(**QKV)
def linear_biases(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    places = torch.arange(x.shape[1], device=x.device)
    slopes = 2.0 ** -torch.arange(1, p.heads + 1, device=x.device)
    bias = -(places[:, None] - places).abs() * slopes[:, None, None]
    return join_heads((query @ key.mT + bias).softmax(-1) @ value) @ p.out


@BLOCKS.block(table="HF", **QKV)
def relative_biases(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    places = torch.arange(x.shape[1], device=x.device)
    bias = p.table[:, (places[:, None] - places).clamp(-5, 5) + 5]
    return join_heads((query @ key.mT + bias).softmax(-1) @ value) @ p.out


@BLOCKS.block(**QKV)
def window(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    places = torch.arange(x.shape[1], device=x.device)
    near = (places[:, None] - places).abs() <= 1
    scores = torch.where(near, query @ key.mT, torch.finfo(x.dtype).min)
    return join_heads(scores.softmax(-1) @ value) @ p.out


@BLOCKS.block(**QKV)
def window_in_place(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    out = torch.zeros_like(value)
    for start in range(0, x.shape[1], 2):
        part = slice(start, start + 2)
        out[:, :, part] = (query[:, :, part] @ key[:, :, part].mT).softmax(-1) @ value[:, :, part]
    return join_heads(out) @ p.out


@BLOCKS.block(**QKV)
def sliding_rows_in_place(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    out = torch.empty_like(query)
    for place in range(x.shape[1]):
        seen = slice(max(0, place - 2), place + 1)
        scores = query[:, :, place : place + 1] @ key[:, :, seen].mT / HEAD**0.5
        out[:, :, place] = (scores.softmax(-1) @ value[:, :, seen])[:, :, 0]
    return join_heads(out) @ p.out


@BLOCKS.block(fused="WT", out="WW")
def sliding_blocks_in_place(p: Block, x: Tensor) -> Tensor:
    query, key, value = (x @ p.fused).unflatten(-1, (3, p.heads, HEAD)).unbind(2)
    out = x.new_zeros(*x.shape[:2], p.heads, HEAD)
    for start in range(0, x.shape[1], 2):
        first, end = max(0, start - 2), min(x.shape[1], start + 3)
        scores = torch.einsum("bqhd,bkhd->bhqk", query[:, start : start + 2], key[:, first:end])
        far = torch.arange(start, start + 2)[:, None] - torch.arange(first, end)
        weights = scores.masked_fill_(far.to(x.device).abs() > 2, float("-inf")).softmax(-1)
        out[:, start : start + 2].copy_(torch.einsum("bhqk,bkhd->bqhd", weights, value[:, first:end]))
    return out.view(x.shape) @ p.out


@BLOCKS.block(**QKV)
def sliding_sums_in_place(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    out, total = torch.zeros_like(x), torch.zeros_like(query[..., :1])
    heads = split_heads(p, out)
    for shift in range(3):
        rows = slice(shift, x.shape[1])
        before = slice(0, x.shape[1] - shift)
        weights = (query[:, :, rows] * key[:, :, before]).sum(-1, keepdim=True).tanh().exp()
        heads[:, :, rows].add_(weights * value[:, :, before])
        total[:, :, rows].add_(weights)
    heads.div_(total)
    return out @ p.out


@BLOCKS.block(**QKV)
def sliding_chunks(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    padded = F.pad(key, (0, 0, 1, 1)).unfold(2, 3, 1), F.pad(value, (0, 0, 1, 1)).unfold(2, 3, 1)
    scores = torch.einsum("bhtd,bhtdk->bhtk", query, padded[0]).softmax(-1)
    return join_heads(torch.einsum("bhtk,bhtdk->bhtd", scores, padded[1])) @ p.out


@BLOCKS.block(**QKV)
def shifted_windows(p: Block, x: Tensor) -> Tensor:
    batch, time, width = x.shape
    rolled = x.roll(-1, 1).reshape(batch * time // 2, 2, width)
    query, key, value = _heads(p, rolled)
    out = join_heads((query @ key.mT).softmax(-1) @ value) @ p.out
    return out.reshape(batch, time, width).roll(1, 1)


@BLOCKS.block(**QKV)
def linear_kernel(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    query, key = F.elu(query) + 1, F.elu(key) + 1
    state = torch.einsum("bhtd,bhte->bhde", key, value)
    scale = torch.einsum("bhtd,bhd->bht", query, key.sum(2))
    return join_heads(torch.einsum("bhtd,bhde->bhte", query, state) / scale[..., None]) @ p.out


@BLOCKS.block(**QKV)
def linear_causal(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    state = (key[..., :, None] * value[..., None, :]).cumsum(2)
    return join_heads((query[..., None, :] @ state)[..., 0, :]) @ p.out * 0.1


@BLOCKS.block(query="DW", **{name: shape for name, shape in QKV.items() if name != "query"})
def pooled_by_latents(p: Block, x: Tensor) -> Tensor:
    scores = (p.query @ (x @ p.key).mT).softmax(-1)
    latents = scores @ (x @ p.value)
    return ((x @ latents.mT).softmax(-1) @ latents) @ p.out


@BLOCKS.block(scale="H", **QKV)
def of_cosines(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    return join_heads((scores * p.scale.exp()[:, None, None]).softmax(-1) @ value) @ p.out


@BLOCKS.block(sinks="H", **QKV)
def with_sinks(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    scores = query @ key.mT
    sinks = p.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return join_heads(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value) @ p.out


@BLOCKS.block(mix="H", **QKV)
def difference(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    first = (query[..., :2] @ key[..., :2].mT).softmax(-1)
    second = (query[..., 2:] @ key[..., 2:].mT).softmax(-1)
    return join_heads((first - p.mix[:, None, None] * second) @ value) @ p.out


@BLOCKS.block(**QKV)
def scores_in_place(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    scores = query @ key.mT
    scores /= HEAD**0.5
    scores.masked_fill_(~_causal(x), -1e9)
    scores -= scores.amax(-1, keepdim=True).detach()
    weights = scores.exp_()
    return join_heads(weights / weights.sum(-1, keepdim=True) @ value) @ p.out


@BLOCKS.block(**QKV)
def best_keys_only(p: Block, x: Tensor) -> Tensor:
    query, key, value = _heads(p, x)
    scores = query @ key.mT
    least = scores.topk(3, -1).values[..., -1:]
    return join_heads(scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ value) @ p.out


@BLOCKS.block(**QKV)
def over_width(p: Block, x: Tensor) -> Tensor:
    query, key, value = (split_heads(p, x @ one).mT for one in (p.query, p.key, p.value))
    return join_heads(((F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT).softmax(-1) @ value).mT) @ p.out


@BLOCKS.block(down="WD", up="DF", query="WW", out="WW")
def latent(p: Block, x: Tensor) -> Tensor:
    key, value = (split_heads(p, one) for one in (x @ p.down @ p.up).split(p.width, -1))
    return join_heads(F.scaled_dot_product_attention(split_heads(p, x @ p.query), key, value)) @ p.out
