r"""torchtitan's trainer on plans of autoshard: no FSDP, no tensor-parallel table, the rest of the trainer as it is.

A run of one of torchtitan's own configurations starts with torchtitan's own command, with this module as `--module`:

    torchrun --nproc-per-node 8 -m torchtitan.train --module autoshard.integrations.torchtitan \
        --config llama3_8b --parallelism.tensor_parallel_degree 2

`--config` is the name of any configuration of torchtitan's llama3, deepseek_v3 and qwen3. All other flags of torchtitan
stay. For options of autoshard, write a configuration function in a module of your own, and name that:

    # my_configs.py
    from autoshard.integrations.torchtitan import with_autoshard
    from torchtitan.models.llama3.config_registry import llama3_8b

    def llama3_8b_planned():
        return with_autoshard(llama3_8b(), memory_limit="60GiB", recompute="auto")

    torchrun ... -m torchtitan.train --module my_configs --config llama3_8b_planned

`model_spec` and `parallelize` are the same for a `Trainer.Config` that you build yourself. They leave to you what
`with_autoshard` also sets: a loss other than `ChunkedLossWrapper`, and `training.disable_cuda_graphs`.

The trainer's own degrees give the mesh: `data_parallel_replicate_degree`, `data_parallel_shard_degree` and
`tensor_parallel_degree` are the sizes of its axes. Every rank reads its own batch over the two data axes, as always;
what else lies on which axis is for the plan to decide, whatever the names of the axes say. The plan is
`trainer.model_parts[0].sharding_plan`.

| setting of torchtitan | what it does here |
|---|---|
| `training.mixed_precision_param`, `mixed_precision_reduce` | as in FSDP2 (`mp_policy`) |
| `activation_checkpoint` | full: `recompute="full"`; none: `"none"`; else `"auto"`, as the memory limit asks |
| `compile.enable` with `"model"` | `compile=True`: inductor compiles the local programs |
| `debug.seed` | initial weights are those that one device draws by this seed |
| `parallelism.enable_sequence_parallel`, `fsdp_reshard_after_forward`, `enable_fsdp_symm_mem` | nothing |
| `expert_parallel_degree` | 1: a plan sends tokens to experts over any axis |
| pipelines, context parallelism, CPU offload, CUDA graphs, async TP, varlen attention, `"full_dtensor"` | refused |

The memory of a plan is that of the model with its outputs; the loss, which the trainer computes outside of the model,
needs its own: leave room for logits in float32 in `memory_limit`.

Tried with torchtitan 0.3.0, whose modules differ from those of earlier releases, and torch 2.13. Two things that
torchtitan needs are not in every torch:

* It imports triton, which torch's builds for CPUs do not bring: `pip install triton`.
* Its loop calls `torch.distributed.set_timeout` after the first step. torch 2.13 has this function under a private name
  alone, and every run ends there in an AttributeError, with or without autoshard. Until you have a torch with it, write
  `torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout` at the top of a module of your
  own configurations.
"""

try:
    import torchtitan  # noqa: F401

    from autoshard.integrations.torchtitan.config_registry import model_spec, with_autoshard
    from autoshard.integrations.torchtitan.parallelize import parallelize
except ImportError as error:
    advice = {
        "torchtitan": "install it: pip install 'autoshard[torchtitan]'.",
        "triton": "torchtitan imports triton, which torch's builds for CPUs do not bring: pip install triton.",
    }.get(error.name or "", "this module was tried with torchtitan 0.3.0: pip install 'torchtitan==0.3.0'.")
    raise ImportError(f"autoshard.integrations.torchtitan: {error}; {advice}", name=error.name) from error

__all__ = ["model_spec", "parallelize", "with_autoshard"]
