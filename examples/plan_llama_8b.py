"""Plan Llama-3-8B for 64 H100s on a laptop: python examples/plan_llama_8b.py

Nothing is allocated and no process group is needed: the model lies on the meta device, the mesh is a description, and
the cluster is known by its data sheet. The plan is saved; `autoshard.parallelize(..., plan=plan)` applies it there.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    use_cache=False,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=8, help="size of the data axis")
    parser.add_argument("--tp", type=int, default=8, help="size of the tensor axis, inside one host")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 4096 tokens in the global batch")
    parser.add_argument("--memory", default="60GiB", help="budget per device")
    parser.add_argument("--output", default="llama-3-8b.plan.json")
    args = parser.parse_args()

    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_3_8B).to(torch.bfloat16)
        tokens = torch.empty(args.batch, 4096, dtype=torch.long)

    plan = autoshard.plan(
        model,
        {"dp": args.dp, "tp": args.tp},
        example_kwargs={"input_ids": tokens, "labels": tokens},
        cluster="h100",
        memory_limit=args.memory,
        time_limit=240.0,
    )
    print(plan)
    print(plan.explain("model.layers.0.self_attn*"))
    plan.save(args.output)
    print(f"saved to {args.output}")


if __name__ == "__main__":
    main()
