"""`save_pretrained` of a parallelised model of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard
from transformers import GPT2Config, GPT2LMHeadModel

import autoshard
from autoshard.errors import InputError
from tests.memory_tracker import first_rank
from tests.training import fast_links


def test_save_pretrained_takes_whole_tensors_and_changes_nothing(tmp_path: Path) -> None:
    """Files are those of one device; the call after it is the one before."""
    config = GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.int64)}
    with first_rank({"tp": 2}) as mesh:
        hints = {"transformer.h.*.mlp.c_fc.weight": Shard(1)}
        autoshard.parallelize(model, mesh, (), inputs, hints=hints, cluster=fast_links())
        with pytest.raises(InputError, match=r"state = autoshard.full_state_dict\(model\), and call"):
            model.save_pretrained(tmp_path)
        model(**inputs)
        before = vars(model.config).copy()
        model.save_pretrained(tmp_path, state_dict=whole)
        assert vars(model.config) == before
        model(**inputs)
        assert len(model._autoshard_runtime.programs.table) == 1
        assert not next(iter(model._autoshard_runtime.programs.table.values())).others
    saved = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in whole.items())
