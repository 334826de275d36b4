"""The module at work: its parameters, its steps, its files, and the agreement of its ranks.

A step: `step.py`; under autograd: `step_function.py`; its tensors: `program_tensors.py`, `call_outputs.py`,
`output_links.py`; gradients of parameters: `parameter_gradients.py`, added up: `gradient_sums.py`. Calls:
`module_runtime.py`, `call_programs.py`, `program_maker.py`; unequal inputs: `calls.py`; calls that differ between
ranks: `call_order.py`, `rank_agreement.py`; other methods: `forward_methods.py`, `part_calls.py`; loaders:
`data_loader.py`.

Parameters: `shards.py`, `materialize.py`; files: `safetensors.py`, `checkpoint.py`, `hub_methods.py`; copies of
modules: `copies.py`. In-place changes: `in_place_changes.py`; of parameters by users: `placed_tensor.py`,
`operator_effects.py`. Optimizers: `optimizers.py`, `adafactor.py`; their state on the host: `host_states.py`.
"""
