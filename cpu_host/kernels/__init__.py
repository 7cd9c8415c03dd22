"""The CUDA kernels of ``csrc/`` compiled for the CPU, behind the interface of the compiled library."""
