"""The list of test_quantizing_mutations.py: what is bent in the GEMM that quantizes, one thing at a time.

What it shares with the GEMM and the quantizer is bent in their lists.
"""

TOKENS = "csrc/gemm_skinny/quantizing_tokens.cuh"
KERNEL = "csrc/gemm_skinny/kernel.cuh"
LOOP = "csrc/gemm_skinny/mainloop.cuh"

# name: (file, text that occurs exactly once, replacement)
MUTATIONS = {
    # programmatic dependent launch
    "dependency wait": (KERNEL, "  ptx::wait_for_dependencies();\n", ""),
    "numbers only after the wait": (
        KERNEL,
        "  ptx::wait_for_dependencies();\n",
        "  Tokens early(params, block, range.first, lane);\n  ptx::wait_for_dependencies();\n",
    ),
    # what is read
    "first unit of a warp": (TOKENS, "byte_(2 * first * kUnitK +", "byte_(2 * (first / kWarps) * kUnitK +"),
    "lane of the numbers": (TOKENS, "16 * (lane % 4))", "16 * (lane % 4 ^ 1))"),
    "end of a row": (TOKENS, "byte_ + 64 * i < last_byte_ ? byte_ + 64 * i : last_byte_", "byte_ + 64 * i"),
    "last numbers of a row": (TOKENS, "last_byte_(2 * params.k - 16)", "last_byte_(2 * params.k - 32)"),
    "tokens past m": (
        TOKENS,
        "8 * tile + lane / 4 < block.count ? 8 * tile + lane / 4 : block.count - 1",
        "8 * tile + lane / 4",
    ),
    "row stride": (TOKENS, "token * params.activation_stride", "token * 2 * params.k"),
    "units go on": (TOKENS, "byte_ += 2 * kWarps * kUnitK;", "byte_ += kWarps * kUnitK;"),
    "word of a load": (TOKENS, "pairs[2] = loaded.z;", "pairs[2] = loaded.y;"),
    "later units are quantized": (LOOP, "Tokens::kFinishIsFree || left > 1", "Tokens::kFinishIsFree"),
    # the scale of a block
    "halves of a block": (TOKENS, "shuffle_xor(half, 1)", "shuffle_xor(half, 2)"),
    "the other half": (TOKENS, "(half, ptx::shuffle_xor(half, 1))", "(half, half)"),
    "lanes of the other blocks": (TOKENS, "shuffle_xor(bytes, 2)", "shuffle_xor(bytes, 1)"),
    "place of a scale": (TOKENS, "scale.byte << (8 * i)", "scale.byte << (8 * (i ^ 1))"),
    "scales of the first step": (TOKENS, "0x5140u", "0x4150u"),
    "scales of the second step": (TOKENS, "0x7362u", "0x6372u"),
    "lane of a step's scales": (TOKENS, "lane_ % 2 == 0", "lane_ / 2 % 2 == 0"),
    # the codes
    "register of the codes": (TOKENS, "unit.codes[i / 2][tile].reg[i % 2]", "unit.codes[i / 2][tile].reg[i % 2 ^ 1]"),
    "step of the codes": (TOKENS, "unit.codes[i / 2][tile].reg[i % 2]", "unit.codes[i / 2 ^ 1][tile].reg[i % 2]"),
}
