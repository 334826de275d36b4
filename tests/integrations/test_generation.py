"""Tokens that models of transformers generate on two processes, beside those of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import CaptureError, InputError
from autoshard.runtime.module_runtime import RUNTIME
from tests.runtime.meshes import simulated_mesh
from tests.training import fast_links
from tests.workers import Workers

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from autoshard.integrations.generation import ShardedCache, prepare_generation
from tests.integrations.hugging_face import GPT2, LLAMA, VOCABULARY, Words, gpt2, llama

Call = dict[str, Any]


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    # In float32: torch has no product of rows by groups in float64.
    return MixtralForCausalLM(MixtralConfig(**LLAMA.to_diff_dict(), num_local_experts=4))


def one_head() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**{**GPT2.to_diff_dict(), "n_head": 1})).double()


def prompt(rows: int, length: int, padding: int = 0) -> Call:
    """Tokens, of which the first row's first ones are padding."""
    tokens = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = tokens[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 4}


SAMPLING = {"do_sample": True, "temperature": 0.8}
LENGTHS = {"input_ids": {1: "length"}, "position_ids": {1: "length"}}

# Model, options, the dim of keys in shards, and calls with the number of programs that the model has after each: one
# for the prompt, and one for a token.
CASES: dict[str, tuple[Callable[[], PreTrainedModel], Mapping[str, Any], int, list[tuple[Call, int]]]] = {
    "heads in shards, and prompts of all lengths": (
        llama,
        {"dynamic": LENGTHS},
        1,
        [
            (prompt(1, 3), 2),
            ({**prompt(1, 3), **SAMPLING, "max_new_tokens": 3}, 2),
            ({**prompt(1, 4), "cache_implementation": "static", "max_new_tokens": 2}, 2),
        ],
    ),
    "rows in shards": (
        one_head,
        {},
        0,
        [
            (prompt(2, 4, padding=2), 2),
            ({**prompt(2, 4, padding=1), **SAMPLING}, 2),
            ({**prompt(1, 4), "num_beams": 2}, 3),
            ({**prompt(2, 4), "prefill_chunk_size": 2}, 5),
        ],
    ),
    "experts": (mixtral, {}, 0, [(prompt(2, 3), 2), (prompt(2, 3), 2)]),
    "compiled": (gpt2, {"compile": True}, 1, [(prompt(1, 3), 2), ({**prompt(1, 3), **SAMPLING}, 2)]),
}
# Inductor takes seconds for every kernel.
MARKED_CASES = [pytest.param(case, marks=[pytest.mark.slow] if case == "compiled" else []) for case in CASES]


def _generate(model: Any, call: Call) -> Tensor:
    """The tokens, by one seed; of a parallelised model, with its cache."""
    torch.manual_seed(3)
    return model.generate(**call)  # type: ignore[no-any-return]


def _generate_on_ranks(case: str) -> list[tuple[Tensor, int, list[str], list[float]]]:
    """Of every call the tokens, the number of programs, and how keys lie and which part of them a rank has."""
    build, options, _, calls = CASES[case]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    model = build().eval()
    autoshard.parallelize(model, mesh, cluster=fast_links(), search=autoshard.Search(effort="fast"), **options)
    prepare_generation(model)
    results = []
    for call, _ in calls:
        result = _generate(model, {**call, "return_dict_in_generate": True})
        keys = [layer.keys for layer in result.past_key_values.layers]
        parts = [key.to_local().numel() / key.numel() for key in keys]
        programs = len(model.__dict__[RUNTIME]._programs)
        results.append((result.sequences, programs, [str(key.placements) for key in keys], parts))
    assert model.sharding_plan.memory.held["input"] < 0.6 * _cache_bytes(result.past_key_values)
    compiled = {served.program.compiled for served in model.__dict__[RUNTIME]._programs.values()}
    assert compiled == {options.get("compile", False)}
    return results


def _cache_bytes(cache: ShardedCache) -> int:
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("case", MARKED_CASES)
def test_tokens_are_those_of_one_device(case: str, two: Workers) -> None:
    build, _, dim, calls = CASES[case]
    alone = build().eval()
    expected = [_generate(alone, call) for call, _ in calls]
    for ours in two.run(_generate_on_ranks, case):
        for (tokens, programs, placements, parts), theirs, (_, count) in zip(ours, expected, calls, strict=True):
            assert torch.equal(tokens, theirs)
            assert programs == count
            assert set(placements) == {f"(Shard(dim={dim}),)"}
            assert set(parts) == {0.5}


def _without_preparation(model: Any, call: Call) -> None:
    model.generate(**call)


def _with_preparation(model: Any, call: Call) -> None:
    prepare_generation(model)
    model.generate(**call)


REFUSED: dict[str, tuple[Callable[[Any, Call], None], Call, type[Exception], str]] = {
    "not prepared": (_without_preparation, {}, CaptureError, r"prepare_generation\(model\) before model.generate"),
    "another kind": (_with_preparation, {"cache_implementation": "dynamic"}, InputError, "'dynamic': .* is static"),
    "a cache of one device": (
        _with_preparation,
        {"past_key_values": DynamicCache()},
        InputError,
        "DynamicCache, which",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_caches_are_refused(case: str) -> None:
    generate, arguments, kind, message = REFUSED[case]
    with simulated_mesh(x=2) as mesh:
        model = autoshard.parallelize(llama().eval(), mesh)
        with pytest.raises(kind, match=message):
            generate(model, {**prompt(1, 2), **arguments})


def test_models_with_caches_of_other_kinds_are_refused() -> None:
    size = {"vocab_size": VOCABULARY, "d_model": 8}
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=8, state_size=2, num_hidden_layers=1))
    others = {
        "T5ForConditionalGeneration has an encoder": (T5ForConditionalGeneration(T5Config(**size, num_layers=1)), {}),
        "the cache of mamba has LinearAttentionLayer": (mamba, {}),
        "Words has no generate": (Words(), {}),
        "whole logits of a whole batch": (llama(), {"inputs": "local"}),
        "without output_placements": (llama(), {"output_placements": "planned"}),
    }
    with simulated_mesh(x=2) as mesh:
        for message, (model, options) in others.items():
            with pytest.raises(InputError, match="is not parallelised"):
                prepare_generation(model)
            autoshard.parallelize(model, mesh, **options)
            with pytest.raises(InputError, match=message):
                prepare_generation(model)
