"""SGLang's own NVFP4 operators of 0.5.9 to 0.5.15, for machines on which SGLang's code for them cannot run.

Same names, arguments, results and layouts as ``sgl_kernel`` and ``sglang.jit_kernel.nvfp4``; a backend of ours
quantizes and multiplies. ``choice`` says where they count, ``quantizers`` and ``matmul`` are the operators, ``runner``
is the function that calls those for experts, ``registration`` makes the entries of ``torch.ops.sgl_kernel``.
``host/operators.py`` puts them where SGLang calls.
"""
