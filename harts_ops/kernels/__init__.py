"""Triton kernels and fla calls, one module per operator; loaded only by CUDA code."""
