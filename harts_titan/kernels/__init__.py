"""Triton kernels of the model; loaded only by CUDA code."""
