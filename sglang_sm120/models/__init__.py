"""What a model is made of, read from its small files only: configuration, quantization, safetensors headers.

Nothing here needs torch, SGLang or a GPU, opens a network connection, or runs code of a checkpoint.
"""
