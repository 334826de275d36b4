"""Does Llama-3-8B train on eight devices of 24 GiB, or of 80?: python examples/will_it_fit.py

Nothing is allocated and no process group is needed: the model is on the meta device and the mesh is a description. For
every size of device the program prints if a plan fits and what the device holds at the peak, or what would help if no
plan fits. With all 32 layers it takes some minutes.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.units import format_bytes

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
    parser.add_argument(
        "--memory", nargs="+", default=["24GiB", "80GiB"], help="memory of one device; several sizes are tried"
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument(
        "--layers", type=int, default=LLAMA_3_8B.num_hidden_layers, help="number of layers; fewer are quicker"
    )
    args = parser.parse_args()

    LLAMA_3_8B.num_hidden_layers = args.layers
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_3_8B).to(torch.bfloat16)
        tokens = torch.empty(args.batch, args.sequence, dtype=torch.long)

    for memory in args.memory:
        print(f"\n{args.devices} devices of {memory}")
        try:
            plan = autoshard.plan(
                model,
                {"dp": args.devices},
                example_kwargs={"input_ids": tokens, "labels": tokens},
                cluster="a100",
                memory_limit=memory,
                optimizer=args.optimizer,
                output_placements="planned",  # the logits stay sharded
                search=autoshard.Search(time_limit=600.0),
            )
        except autoshard.BudgetError as error:
            print(f"No: {error}")
            continue
        held = plan.memory
        print(f"Yes: {format_bytes(held.peak)} at the peak, a step of {plan.step_seconds:.3f} s ({plan.method}).")
        print(f"The peak is in the {held.phase} of {held.module or 'the model'}, while {held.operator} runs:")
        for kind, amount in held.held.items():
            print(f"  {kind:14} {format_bytes(amount):>10}")
        print("The largest tensors then:")
        for tensor in held.largest:
            print(f"  {format_bytes(tensor.bytes):>10}  {tensor.kind:14} {tensor.name}")


if __name__ == "__main__":
    main()
