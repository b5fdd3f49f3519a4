"""Triton kernels and FlashAttention-4 calls; loaded only by CUDA code."""
