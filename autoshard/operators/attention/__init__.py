"""Attention: the operator, its kernels, masks by flags, FlexAttention, and its rules."""
