"""Compare memory with time for GPT-2 on eight GPUs: python examples/frontier.py

The cost frontier (TensorOpt) holds every plan that is worth its memory, from the smallest peak to the shortest step. No
GPU is needed: the model is on the meta device and the mesh is a description. The program prints the plans as a table,
selects some, and draws the curve if matplotlib is installed. It takes a minute or two; `--layers 2` is quicker.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autoshard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, help="number of layers; GPT-2 has twelve")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 1024 tokens in the global batch")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument(
        "--gaps", type=int, default=3, help="number of gaps between plans that are searched more closely"
    )
    parser.add_argument("--output", default="frontier.png", help="file of the picture; its suffix selects the format")
    args = parser.parse_args()

    config = GPT2Config(n_layer=args.layers, vocab_size=50304, use_cache=False)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
        tokens = torch.empty(args.batch, 1024, dtype=torch.long)

    frontier = autoshard.frontier(
        model,
        {"x": args.devices},
        example_kwargs={"input_ids": tokens, "labels": tokens},
        cluster="a100",
        output_placements="planned",
        gaps=args.gaps,
    )
    print(frontier, "\n")

    # Selecting a plan costs nothing; `autoshard.parallelize(model, mesh, ..., plan=...)` applies it.
    turning = frontier.turning_point
    middle = (frontier[0].memory.peak + frontier[-1].memory.peak) // 2
    for text, plan in {
        "fastest": frontier[-1],
        "leanest": frontier[0],
        "where more memory stops paying": turning,
        f"fastest within {middle / 2**30:.2f} GiB": frontier.at(memory=middle),
        "leanest within 105% of the fastest step": frontier.at(step_seconds=1.05 * frontier[-1].step_seconds),
    }.items():
        whole = sum(placements[0].is_replicate() for placements in plan.placements.values())
        print(
            f"{text:40}  {plan.memory.peak / 2**30:6.2f} GiB  {1e3 * plan.step_seconds:7.2f} ms  "
            f"{whole} of {len(plan.placements)} parameters and buffers whole"
        )

    if importlib.util.find_spec("matplotlib") is None:
        print("\nTo see the curve, install matplotlib: pip install 'autoshard[plot]'")
    else:
        frontier.plot(args.output)
        print(f"\nThe curve is in {args.output}")


if __name__ == "__main__":
    main()
