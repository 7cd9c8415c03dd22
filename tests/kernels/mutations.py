"""The list of test_mutations.py: what is taken away or bent, one thing at a time."""

KERNEL = "csrc/gemm_skinny/"
MODEL = "csrc/emulation/mma_model.cc"

# name: (file, text that occurs exactly once, replacement)
MUTATIONS = {
    # the operands' way into the instruction
    "selector of A": (KERNEL + "mainloop.cuh", "mma_nvfp4<kStep, kStep>", "mma_nvfp4<0, kStep>"),
    "selector of B": (KERNEL + "mainloop.cuh", "mma_nvfp4<kStep, kStep>", "mma_nvfp4<kStep, 0>"),
    "lane of token codes": (KERNEL + "tokens.cuh", "4 * (lane % 4)),", "4 * (lane % 4 ^ 1)),"),
    "k block of token scales": (KERNEL + "tokens.cuh", "k_tile_(2 * first + lane % 2)", "k_tile_(2 * first)"),
    "half of token codes": (KERNEL + "tokens.cuh", ".reg[i % 2] = ptx", ".reg[i % 2 ^ 1] = ptx"),
    "matrix order": (KERNEL + "mainloop.cuh", "2 * (matrix % 2)", "2 * (matrix / 2)"),
    "chunk of a step": (KERNEL + "mainloop.cuh", "2 * kStep + matrix / 2", "2 * kStep"),
    "lane of weight scales": (KERNEL + "mainloop.cuh", "lane / 4, 2 * (t % 2))", "lane / 4, 2 * (t / 2))"),
    "step of weight scales": (KERNEL + "mainloop.cuh", "scale_offset(t / 2,", "scale_offset(0,"),
    "word of weight scales": (
        KERNEL + "mainloop.cuh",
        "? weight_scales.x : weight_scales.y",
        "? weight_scales.x : weight_scales.x",
    ),
    # the model of the instruction
    "model: nibble order": (MODEL, "a_register) >> (4 * (k % 8))", "a_register) >> (4 * (k % 8 ^ 1))"),
    "model: lane of B": (MODEL, "word(4 * column + quad_lane,", "word(4 * column + (quad_lane ^ 1),"),
    "model: register of A": (MODEL, "row / 8 + 2 * (k / 32);", "2 * (row / 8) + k / 32;"),
    "model: scale lane of A": (MODEL, "2 * select_a + row / 8, 6)", "2 * select_a, 6)"),
    "model: scale byte": (MODEL, "select_b, 7) >> (8 * (k / 16))", "select_b, 7) >> (8 * (k / 32))"),
    # edges
    "padding bytes of weight scales": (KERNEL + "mainloop.cuh", "weight_scales.x &= weight_mask;", ""),
    "padding bytes of token scales": (
        KERNEL + "mainloop.cuh",
        "tokens.scales[tile] &= token_mask;",
        "(void)token_mask;",
    ),
    "tail of a weight row": (KERNEL + "weights.cuh", "left < 0 ? 0 : left > 16 ? 16 : left", "left < 0 ? 0 : 16"),
    "end of a weight row": (KERNEL + "weights.cuh", "left < 0 ? 0 : left > 16 ? 16 : left", "left > 16 ? 16 : 8"),
    "end of a token row": (
        KERNEL + "tokens.cuh",
        "byte_ + 16 * i < last_byte_ ? byte_ + 16 * i : last_byte_",
        "byte_ + 16 * i",
    ),
    "end of the token scales": (KERNEL + "tokens.cuh", "k_tile_ < last_tile_ ? k_tile_ : last_tile_", "k_tile_"),
    "rows past n": (KERNEL + "weights.cuh", "row < params.n ? row : params.n - 1", "row"),
    "tokens past m": (
        KERNEL + "tokens.cuh",
        "8 * tile + lane / 4 < block.count ? 8 * tile + lane / 4 : block.count - 1",
        "8 * tile + lane / 4",
    ),
    "scales of the second half of a 128-row block": (
        KERNEL + "tokens.cuh",
        "block.first % kScaleTileRows + token",
        "token",
    ),
    "scales of later 128-row blocks": (KERNEL + "tokens.cuh", "block.first / kScaleTileRows, 0", "0, 0"),
    "first token of a block": (
        KERNEL + "tokens.cuh",
        "static_cast<int64_t>(block.first) * params",
        "int64_t{0} * params",
    ),
    "first output of a block": (
        KERNEL + "epilogue.cuh",
        "2 * first_token * params",
        "2 * (first_token / 128 * 128) * params",
    ),
    "scale tiles past k": (KERNEL + "weights.cuh", "tiles_left_ > kAhead * kScaleTileStep ? 16 : 0", "16"),
    "columns past n": (KERNEL + "epilogue.cuh", "inside_(column_ < params.n)", "inside_(true)"),
    "outputs past m": (KERNEL + "reduce.cuh", "if (global_pair / kPairsPerToken >= m) continue;", ""),
    # the ring
    "wait for a stage": (KERNEL + "mainloop.cuh", "ptx::cp_async_wait<kStages - 1>();", ""),
    "depth of the wait": (KERNEL + "mainloop.cuh", "cp_async_wait<kStages - 1>", "cp_async_wait<kStages>"),
    "commit of the first stages": (KERNEL + "kernel.cuh", "    ptx::cp_async_commit();\n", ""),
    "commit of a refill": (KERNEL + "mainloop.cuh", "    ptx::cp_async_commit();  //", "    //"),
    "lanes meet after the wait": (KERNEL + "mainloop.cuh", "    ptx::sync_warp();  // the other", "    // the other"),
    "lanes meet before a refill": (KERNEL + "mainloop.cuh", "    ptx::sync_warp();  // nobody", "    // nobody"),
    "stage wraps": (KERNEL + "mainloop.cuh", "== ring + kStages * kUnitBytes ?", "== ring + 2 * kUnitBytes ?"),
    "weights go on": (KERNEL + "mainloop.cuh", "weights.advance();", ""),
    # the reduction
    "warps meet before the sum": (KERNEL + "reduce.cuh", "    ptx::sync_block();\n    for", "    for"),
    "warps meet between passes": (KERNEL + "reduce.cuh", "if (pass > 0) ptx::sync_block();", ""),
    "every warp counts": (KERNEL + "reduce.cuh", "kRingBytes, kWarps);", "kRingBytes, kWarps - 1);"),
    "peers have started": (KERNEL + "cluster_inbox.cuh", "if (!alone()) ptx::cluster_wait();", ""),
    "peers announce themselves": (KERNEL + "cluster_inbox.cuh", "    ptx::cluster_arrive_relaxed();\n", ""),
    "mbarrier is published": (KERNEL + "cluster_inbox.cuh", "      ptx::publish_mbarrier();\n", ""),
    "bytes are expected": (KERNEL + "cluster_inbox.cuh", "(live_ * 8) << shift_", "(live_ * 8) << (shift_ - 1)"),
    "sums have arrived": (KERNEL + "reduce.cuh", "  inbox.wait_for_sums();\n", ""),
    "place of a source": (KERNEL + "cluster_inbox.cuh", "slot(rank_, pair & (run_ - 1))", "slot(0, pair & (run_ - 1))"),
    "owner of a pair": (KERNEL + "cluster_inbox.cuh", "pair >> (kLog2Pairs - shift_)", "pair >> (kLog2Pairs - 1)"),
    # the epilogue
    "alpha of the second column": ("csrc/gemm/output.cuh", "column + 1 : 0", "column : 0"),
    "bias": ("csrc/gemm/output.cuh", "+ bias.y", ""),
    # programmatic dependent launch
    "dependency wait": (KERNEL + "kernel.cuh", "  ptx::wait_for_dependencies();\n", ""),
    "dependents are let go": (KERNEL + "kernel.cuh", "  ptx::launch_dependents();", ""),
    "tokens only after the wait": (
        KERNEL + "kernel.cuh",
        "  ptx::wait_for_dependencies();\n",
        "  const Epilogue early(params, block.first, tile, thread);\n  ptx::wait_for_dependencies();\n",
    ),
}
