r"""torchtitan's trainer with autoshard plans: no FSDP, no tensor-parallel table, the rest of the trainer unchanged.

Start a run of one of torchtitan's own configurations with torchtitan's own command, and this module as `--module`:

    torchrun --nproc-per-node 8 -m torchtitan.train --module autoshard.integrations.torchtitan \
        --config llama3_8b --parallelism.tensor_parallel_degree 2

`--config` is the name of any torchtitan configuration of llama3, deepseek_v3 and qwen3. All other flags of torchtitan
still apply. For options of autoshard, write a configuration function in your own module, and name it:

    # my_configs.py
    from autoshard.integrations.torchtitan import with_autoshard
    from torchtitan.models.llama3.config_registry import llama3_8b

    def llama3_8b_planned():
        return with_autoshard(llama3_8b(), memory_limit="60GiB", recompute="auto")

    torchrun ... -m torchtitan.train --module my_configs --config llama3_8b_planned

`model_spec` and `parallelize` do the same for your own `Trainer.Config`. They do not set what `with_autoshard` also
sets: a loss other than `ChunkedLossWrapper`, and `training.disable_cuda_graphs`.

The trainer's own degrees give the mesh: `data_parallel_replicate_degree`, `data_parallel_shard_degree` and
`tensor_parallel_degree` are the sizes of its axes. Every rank reads its own batch over the two data axes, as always;
the plan decides all other uses of the axes, whatever their names say. The plan is
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

The memory of a plan includes the model and its outputs, but not the loss, which the trainer computes outside the model:
leave room for logits in float32 in `memory_limit`.

Tested with torchtitan 0.3.0, whose modules differ from those of earlier releases, and torch 2.13. torchtitan needs two
things that not every torch has:

* It imports triton, which torch's CPU builds do not include: `pip install triton`.
* Its loop calls `torch.distributed.set_timeout` after the first step. torch 2.13 has this function only under a private
  name, and every run ends there in an AttributeError, with or without autoshard. Until your torch has it, put
  `torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout` at the top of your own
  configuration module.
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
