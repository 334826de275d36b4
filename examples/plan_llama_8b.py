"""Plan Llama-3-8B for 64 H100s on a laptop: python examples/plan_llama_8b.py

Nothing is allocated and no process group is needed: the model is on the meta device, the mesh is a description, and
the cluster is a preset. It takes less than half a minute on two cores. The plan is saved; on the cluster,
`autoshard.parallelize(..., plan=autoshard.ShardingPlan.load(path))` applies it.
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
    parser.add_argument("--dp", type=int, default=8, help="size of the data parallel axis")
    parser.add_argument("--tp", type=int, default=8, help="size of the tensor parallel axis, inside one host")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 4096 tokens in the global batch")
    parser.add_argument("--memory", default="60GiB", help="memory limit per device")
    parser.add_argument(
        "--layers", type=int, default=LLAMA_3_8B.num_hidden_layers, help="number of layers; fewer are quicker"
    )
    parser.add_argument("--output", default="llama-3-8b.plan.json", help="file of the plan")
    args = parser.parse_args()

    LLAMA_3_8B.num_hidden_layers = args.layers
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_3_8B).to(torch.bfloat16)
        tokens = torch.empty(args.batch, 4096, dtype=torch.long)

    plan = autoshard.plan(
        model,
        {"dp": args.dp, "tp": args.tp},
        example_kwargs={"input_ids": tokens, "labels": tokens},
        cluster="h100",
        memory_limit=args.memory,
        output_placements="planned",  # the logits stay sharded; whole, they are 17 GB
        search=autoshard.Search(time_limit=240.0),
    )
    print(plan)
    print(f"\nOne module in detail:\n\n{plan.explain('model.layers.0.mlp.down_proj')}\n")
    plan.save(args.output)
    print(f"Saved. Look at it with `autoshard show {args.output}`, or in a browser with `autoshard html`.")


if __name__ == "__main__":
    main()
