"""Train the GPT of train_gpt.py as a pipeline: torchrun --nproc-per-node 4 examples/train_gpt_pipeline.py

The mesh axis `pp` is the pipeline. It has two stages, each on two processes that share the batch.
`autoshard.parallelize` cuts the captured graph, shards every stage, and chooses the schedule and the number of
microbatches by simulation.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from train_gpt import batches, make_model, standard_library, train

import autoshard

BATCH = 8


def train_pipeline(pipeline: autoshard.PipelineModule, text: Tensor, steps: int) -> list[float]:
    """Run a training loop whose step is `train_step` and return the loss of every step."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3, fused=True)
    losses = []
    for tokens, targets in islice(batches(text, BATCH), steps):
        losses.append(pipeline.train_step(tokens, targets).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--trace", help="write the predicted step as a trace for Perfetto to this path")
    options = parser.parse_args()
    steps, layers = options.steps, options.layers

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    text = standard_library()

    model: nn.Module = make_model(layers)
    pipeline = autoshard.parallelize(model, mesh, example_args=next(batches(text, BATCH)))
    assert isinstance(pipeline, autoshard.PipelineModule)
    if first:
        print(pipeline.sharding_plan)
        if options.trace:
            pipeline.sharding_plan.trace(options.trace)
    losses = train_pipeline(pipeline, text, steps)

    if first:
        alone = train(make_model(layers), text, steps, "one process   ", quiet=False, batch=BATCH)
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
        print(f"\nloss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"largest relative difference in loss between the pipeline and one process: {difference:.1e}")
    dist.barrier()  # the others wait for the first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
