"""The list of test_tiled_mutations.py: what is taken away or bent in the tiled GEMM, one thing at a time."""

KERNEL = "csrc/gemm_tiled/"
CHUNK_TAIL = "bytes_left_ < 0 ? 0 : bytes_left_ > 16 ? 16 : bytes_left_"

# name: (file, text that occurs exactly once, replacement)
MUTATIONS = {
    # the operands' way into the instruction
    "selector of A": (KERNEL + "mainloop.cuh", "mma_nvfp4<kStep, kStep>", "mma_nvfp4<0, kStep>"),
    "selector of B": (KERNEL + "mainloop.cuh", "mma_nvfp4<kStep, kStep>", "mma_nvfp4<kStep, 0>"),
    "selector of the second tile of B": (
        KERNEL + "mainloop.cuh",
        "mma_nvfp4<kStep, kStep + 2>",
        "mma_nvfp4<kStep, kStep>",
    ),
    "matrix order of A": (KERNEL + "mainloop.cuh", "8 * (matrix % 2) + row", "8 * (matrix / 2) + row"),
    "chunk of A": (KERNEL + "mainloop.cuh", "+ row, matrix / 2)", "+ row, matrix % 2)"),
    "tile of B": (KERNEL + "mainloop.cuh", "column_row(matrix / 2, row)", "column_row(matrix % 2, row)"),
    "chunk of B": (KERNEL + "mainloop.cuh", ", row), matrix % 2)", ", row), matrix / 2)"),
    "second k64 step": (KERNEL + "mainloop.cuh", "address ^ (2 * kStep * 16)", "address ^ (kStep * 16)"),
    "lane of token scales": (KERNEL + "mainloop.cuh", "g + 8 * (t % 2)", "g + 8 * (t / 2)"),
    "step of token scales": (KERNEL + "mainloop.cuh", "scale_offset(t / 2,", "scale_offset(t % 2,"),
    "lane of column scales": (KERNEL + "mainloop.cuh", "column_row(t / 2, g)", "column_row(t % 2, g)"),
    "step of column scales": (KERNEL + "mainloop.cuh", "scale_offset(t % 2,", "scale_offset(t / 2,"),
    "columns of the two tiles of B": (KERNEL + "strip.cuh", "2 * tile + column % 2", "2 * tile + (column + 1) % 2"),
    "order of the scale words": (
        KERNEL + "mainloop.cuh",
        "words.y & mask, words.z & mask",
        "words.z & mask, words.y & mask",
    ),
    # edges
    "padding bytes of token scales": (KERNEL + "mainloop.cuh", "blocks - kStepBlocks * (lane_ % 4 / 2)", "8"),
    "padding bytes of column scales": (KERNEL + "mainloop.cuh", "blocks - kStepBlocks * (lane_ % 2)", "8"),
    "tail of a row": (KERNEL + "operand.cuh", CHUNK_TAIL, "bytes_left_ < 0 ? 0 : 16"),
    "end of a row": (KERNEL + "operand.cuh", CHUNK_TAIL, "bytes_left_ > 16 ? 16 : 8"),
    "first half of a chunk": (KERNEL + "operand.cuh", "bytes < 8 ? bytes : 8", "8"),
    "second half of a chunk": (KERNEL + "operand.cuh", "bytes < 16 ? 0 : 8", "8"),
    "rows past the end": (KERNEL + "operand.cuh", "row < rows_left_ ? inside : 0", "inside"),
    "scale tiles past k": (KERNEL + "operand.cuh", "tiles_left_ > 0 ? 16 : 0", "16"),
    "threads without scales": (KERNEL + "operand.cuh", "if (copies_scales_) {", "{"),
    "half a 128-row block": (KERNEL + "strip.cuh", "+ strip % 2 * kQuarterRows;", ";"),
    "scales of half a 128-row block": (KERNEL + "operand.cuh", "+ first % 2 * kQuarterRows * 16", ""),
    "swizzle eight rows further": (KERNEL + "operand.cuh", "^ (p / 8 % 2 * 16)", "^ 0"),
    "the second strip of a tile": (KERNEL + "operand.cuh", "return p / kQuarterRows * kStripBytes;", "return 0;"),
    "tiles without rows": (
        KERNEL + "kernel.cuh",
        "if (first_row(first_m) >= params.m || first_row(first_n) >= params.n) turns = 0;",
        "",
    ),
    "columns past n": (KERNEL + "epilogue.cuh", "if (!inside(q)) continue;", ""),
    "tokens past m": (KERNEL + "epilogue.cuh", "if (token >= params_.m) continue;", ""),
    "alpha past n": (KERNEL + "epilogue.cuh", "inside(q) ? column_ + q * kScaleQuarterRows : 0", "column_ + q * 32"),
    "bands": (KERNEL + "kernel.cuh", "ptx::block_index_z() * ptx::grid_width() + ", ""),
    # the ring
    "wait for a stage": (KERNEL + "kernel.cuh", "    ptx::cp_async_wait<0>();\n", ""),
    "depth of the wait": (KERNEL + "kernel.cuh", "cp_async_wait<0>", "cp_async_wait<1>"),
    "commit of the first stage": (KERNEL + "kernel.cuh", "(ring);\n  ptx::cp_async_commit();\n", "(ring);\n"),
    "commit of a refill": (KERNEL + "kernel.cuh", "    }\n    ptx::cp_async_commit();\n", "    }\n"),
    "warps meet before a stage": (KERNEL + "kernel.cuh", "    sync_group<kShape>();\n", ""),
    "warps of a wide tile meet": (
        KERNEL + "kernel.cuh",
        "    ptx::sync_block();\n  } else",
        "    ptx::sync_warp();\n  } else",
    ),
    "the other stage": (KERNEL + "kernel.cuh", "stage == ring ? ring + stage_bytes(kShape) : ring", "ring"),
    "units go on": (KERNEL + "operand.cuh", "    codes_ += kUnitStep * kUnitRowBytes;\n", ""),
    "scales go on": (KERNEL + "operand.cuh", "    scales_ += kUnitStep * kSteps * kScaleTileBytes;\n", ""),
    "bytes are counted down": (KERNEL + "operand.cuh", "    bytes_left_ -= kUnitStep * kUnitRowBytes;\n", ""),
    "scale tiles are counted down": (KERNEL + "operand.cuh", "    tiles_left_ -= kUnitStep * kSteps;\n", ""),
    "blocks are counted down": (KERNEL + "kernel.cuh", "    blocks -= kSlices * kUnitBlocks;\n", ""),
    "units of a slice": (KERNEL + "kernel.cuh", "(units - slice + kSlices - 1) / kSlices", "(units - slice) / kSlices"),
    # slices of K
    "rings are free before the sum": (
        KERNEL + "kernel.cuh",
        "    ptx::sync_block();  // all rings",
        "    // all rings",
    ),
    "slices meet before the sum": (KERNEL + "epilogue.cuh", "  ptx::sync_block();\n", ""),
    "every slice counts": (KERNEL + "epilogue.cuh", "from < kSlices", "from < kSlices - 1"),
    "the own mma tile": (KERNEL + "kernel.cuh", "epilogue.store(slice, total)", "epilogue.store(0, total)"),
    # the epilogue
    "second half of an mma tile": (KERNEL + "epilogue.cuh", "kScaleQuarterRows + 8 * half", "kScaleQuarterRows"),
    "columns of a lane": (KERNEL + "epilogue.cuh", "+ 4 * (lane % 4)", "+ 4 * (lane % 4 ^ 1)"),
    "alpha of the second column": ("csrc/gemm/output.cuh", "column + 1 : 0", "column : 0"),
    "bias": ("csrc/gemm/output.cuh", "+ bias.y", ""),
    # programmatic dependent launch
    "dependency wait": (KERNEL + "kernel.cuh", "  ptx::wait_for_dependencies();\n", ""),
    "dependents are let go": (KERNEL + "kernel.cuh", "  ptx::launch_dependents();", ""),
    "tokens only after the wait": (
        KERNEL + "kernel.cuh",
        "  ptx::wait_for_dependencies();\n",
        "  const Epilogue early(params, first_m, first_n, lane);\n  ptx::wait_for_dependencies();\n",
    ),
}
