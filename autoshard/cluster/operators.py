"""Which operators take their time alike: what is measured for one of a family stands for all of it."""

from __future__ import annotations

_FAMILIES = {
    "mm": ("addmm", "linear", "matmul", "mv", "addmv", "dot", "vdot", "_addmm_activation", "_scaled_mm", "_grouped_mm"),
    "bmm": ("baddbmm", "addbmm"),
    "convolution": ("conv2d",),
    "convolution_backward": (),
    "attention": (
        "scaled_dot_product_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "attention_backward": (
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    ),
    "batch_norm": (
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit",
        "native_batch_norm",
        "cudnn_batch_norm",
    ),
    "batch_norm_backward": ("native_batch_norm_backward", "cudnn_batch_norm_backward"),
    "layer_norm": ("native_layer_norm", "native_group_norm", "rms_norm"),
    "layer_norm_backward": ("native_layer_norm_backward", "native_group_norm_backward", "rms_norm_backward"),
    "softmax": ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp"),
    "softmax_backward": ("_softmax_backward_data", "_log_softmax_backward_data"),
    "max_pool": ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
    "max_pool_backward": ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"),
    "gelu": ("gelu", "erf"),
    "gelu_backward": ("gelu_backward",),
    "silu": ("silu", "sigmoid", "silu_backward", "mish", "hardswish"),
    "exp": ("exp", "log", "log1p", "expm1", "sin", "cos", "softplus"),
    "tanh": ("tanh",),
    "sum": ("sum", "mean", "amax", "amin", "var", "norm", "linalg_vector_norm"),
    "copy": ("clone", "contiguous", "_to_copy"),
    "view": ("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "_unsafe_view"),
    "cat": ("cat", "stack", "constant_pad_nd", "slice_backward", "select_backward", "slice_scatter", "select_scatter"),
    "index": ("embedding", "index", "_unsafe_index", "index_select", "gather"),
    "index_put": ("embedding_dense_backward", "index_put", "_unsafe_index_put", "index_add", "scatter", "scatter_add"),
}

_FAMILY_OF = {name: name for name in _FAMILIES} | {name: one for one, names in _FAMILIES.items() for name in names}


def family(operator: str, default: str) -> str:
    """The family of an operator, by its name without namespace and overload; `default` where it has none."""
    return _FAMILY_OF.get(operator, default)
