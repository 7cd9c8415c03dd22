"""Kernels of others that ``benchmarks/gemm.py`` measures beside ours."""
