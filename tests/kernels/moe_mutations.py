"""The list of test_moe_mutations.py: what is taken away or bent in the mixture-of-experts kernels, one thing at a time.

What they share with the skinny GEMM and the quantizer is bent in the lists of those.
"""

ROUTING = "csrc/moe/routing.cuh"
BLOCK = "csrc/moe/block_routing.cuh"
WEIGHTS = "csrc/moe/weights.cuh"
ROWS = "csrc/moe/quantized_rows.cuh"
ACTIVATION = "csrc/moe/activation.cuh"
SUMS = "csrc/moe/sums.cuh"
GATE_UP = "csrc/moe/gate_up.cuh"
DOWN = "csrc/moe/down.cuh"

# name: (file, text that occurs exactly once, replacement)
MUTATIONS = {
    # programmatic dependent launch
    "gate/up: dependency wait": (GATE_UP, "  ptx::wait_for_dependencies();\n", ""),
    "gate/up: dependents are let go": (GATE_UP, "  ptx::launch_dependents();\n", ""),
    "down: dependency wait": (DOWN, "  ptx::wait_for_dependencies();\n", ""),
    "down: dependents are let go": (DOWN, "  ptx::launch_dependents();\n", ""),
    "down: activations only after the wait": (
        DOWN,
        "  ptx::wait_for_dependencies();\n",
        "  DownItem early;\n  if (left > 0) DownTokens(params, tokens, item, lane).load(early);\n"
        "  ptx::wait_for_dependencies();\n",
    ),
    # routing
    "first expert of the rank": (ROUTING, " - static_cast<uint32_t>(params.first_expert)", ""),
    "experts past the last": (ROUTING, "return id < static_cast<uint32_t>(params.experts) ?", "return id < 1000000u ?"),
    "bits start as zero": (ROUTING, "    ptx::store_shared_u32(active + 4 * word, 0);\n", ""),
    "bits are cleared before they are set": (
        ROUTING,
        "  }\n  ptx::sync_block();\n  constexpr int kAtOnce",
        "  }\n  constexpr int kAtOnce",
    ),
    "bits are set before they are read": (
        ROUTING,
        "  }\n  ptx::sync_block();\n}\n\n/// How many",
        "  }\n}\n\n/// How many",
    ),
    "experts of all words": (ROUTING, "count += ptx::count_bits", "count = ptx::count_bits"),
    "longer shares in front": (ROUTING, "(index < longer ? index : longer)", "longer"),
    "experts in front are passed over": (ROUTING, "for (; index > 0; --index) bits &= bits - 1;", ""),
    "words in front are passed over": (ROUTING, "    index -= count;\n", ""),
    "counts of the warps are complete": (ROUTING, "  ptx::sync_block();\n  Place place", "  Place place"),
    "first slot of a token": (ROUTING, "== expert) pair = candidate;", "== expert && pair < 0) pair = candidate;"),
    "list is complete": (ROUTING, "    found += place.total;\n    ptx::sync_block();\n", "    found += place.total;\n"),
    # weights
    "end of a row, 8 bytes": (WEIGHTS, "left_ > 0 ? 8 : 0", "8"),
    "end of a row, second 8 bytes": (WEIGHTS, "left_ > 8 ? 8 : 0", "left_ > 0 ? 8 : 0"),
    "end of a row, 16 bytes": (WEIGHTS, "rows_[q], left_ > 0 ? 16 : 0", "rows_[q], 16"),
    "scale words past K": (WEIGHTS, "step < tiles_left_ ? 4 : 0", "4"),
    "scale chunks past K": (WEIGHTS, "tiles_left_ > 0 ? 16 : 0", "16"),
    "codes left go along": (WEIGHTS, "    left_ -= kUnits * skinny::kUnitRowBytes;\n", ""),
    "codes go back along K": (WEIGHTS, " * half_k_ - units * skinny::kUnitRowBytes;", " * half_k_;"),
    "codes left come back": (WEIGHTS, "    left_ += units * skinny::kUnitRowBytes;\n", ""),
    "rows of a lower tile": (GATE_UP, "codes_.move_down(16, ", "codes_.move_down(32, "),
    "rows of a lower tile without a gate": (GATE_UP, "if (tile_rows_ == 16) {", "if (true) {"),
    "scales of a lower tile": (GATE_UP, "    }\n    move_scales(tile);\n", "    }\n"),
    "scales left go along": (WEIGHTS, "    tiles_left_ -= kUnits * kUnitTiles;\n", ""),
    "rows past the last": (GATE_UP, "return wanted < last_row ? wanted : last_row;", "return wanted;"),
    # the rows of hidden
    "numbers past K": (ROWS, "task.block < last ? task.block : last", "task.block"),
    "first unit of the slice": (ROWS, "local = first_unit - rows.base_unit;", "local = first_unit;"),
    "rows of three units": (ROWS, "(1 << 16) / range.count + 1", "(1 << 16) / range.count"),
    "columns without a token": (ROWS, "lane / 4 < rows.count ? lane / 4 : rows.count - 1", "lane / 4"),
    "input scale of an expert": (GATE_UP, "(params.input_scale_per_expert ? expert : 0)", "0"),
    "lanes meet after quantizing": (GATE_UP, "      ptx::sync_warp();\n      for (int tile", "      for (int tile"),
    # the rings
    "gate/up: wait for a stage": (GATE_UP, "ptx::cp_async_wait<kStages - 1>();", ""),
    "gate/up: lanes meet after the wait": (GATE_UP, "ptx::sync_warp();  // the other", "// the other"),
    "gate/up: lanes meet before a refill": (GATE_UP, "ptx::sync_warp();  // nobody", "// nobody"),
    "gate/up: commit": (GATE_UP, "    ptx::cp_async_commit();  // also", "    // also"),
    "gate/up: later tokens start again": (GATE_UP, "  stream.start(expert", "  if (first == 0) stream.start(expert"),
    "gate/up: sums have been read": (
        GATE_UP,
        "        if (summed) ptx::sync_block();",
        "        //",
    ),
    "gate/up: later tokens of an expert": (GATE_UP, "first += rows.count)", "first += tokens)"),
    "down: wait for a stage": (DOWN, "ptx::cp_async_wait<kStages - 1>();", ""),
    "down: lanes meet after the wait": (DOWN, "ptx::sync_warp();  // the other", "// the other"),
    "down: lanes meet before a refill": (DOWN, "ptx::sync_warp();  // nobody", "// nobody"),
    "down: commit": (DOWN, "    ptx::cp_async_commit();  // also", "    // also"),
    "down: carry of a unit": (DOWN, "if (++unit < units) return false;", "if (++unit <= units) return false;"),
    "down: rows past the last": (DOWN, "row < params_.hidden_size ? row : params_.hidden_size - 1;", "row;"),
    # the sums
    "warps meet before the sum": (SUMS, "  ptx::sync_block();\n  if (thread", "  if (thread"),
    "peers have started": (SUMS, "  inbox.wait_for_peers();\n", ""),
    "sums of the peers have arrived": (SUMS, "  inbox.wait_for_sums();\n", ""),
    # activation and quantization
    "negative numbers": (ACTIVATION, "x < 0.0f ? 0.0f : x * x", "x * x"),
    "inner scale of an expert": (ACTIVATION, "(params.inner_scale_per_expert ? expert : 0)", "0"),
    "blocks past the last": (ACTIVATION, "|| block >= params_.intermediate / kBlock ", ""),
    "tokens past the last": (ACTIVATION, "if (!live || block", "if (block"),
    # down
    "down: bits start as zero": (BLOCK, "ptx::store_shared_u32(tokens.active + 4 * thread, 0);", "{\n  }"),
    "down: bits are cleared before they are set": (BLOCK, "  ptx::sync_block();\n  if (expert", "  if (expert"),
    "down: bits are set before they are read": (BLOCK, "  ptx::sync_block();\n  int before", "  int before"),
    "experts of the words in front": (BLOCK, "if (word + i < thread) before", "if (word + i == -1) before"),
    "list of a block is complete": (BLOCK, "  ptx::sync_block();\n  return tokens;", "  return tokens;"),
    "no pair without a token's choice": (BLOCK, "tokens.pairs + 4 * entry, kNoPair", "tokens.pairs + 4 * entry, 0"),
    "first of two slots": (BLOCK, "    if (pair < thread) is_first = false;\n", ""),
    "weights of two slots": (BLOCK, "weight += ptx::load_shared_f32", "weight = ptx::load_shared_f32"),
    "weights of two slots are kept": (BLOCK, "  ptx::store_shared_f32(tokens.weights + 4 * thread, weight);\n", ""),
    "experts in front of an expert": (BLOCK, "index += ptx::count_bits", "index = ptx::count_bits"),
    "experts in front in its word": (BLOCK, " & ((1u << expert % 32) - 1)", ""),
    "table of pairs is complete": (DOWN, "  ptx::sync_block();  // the table", "  // the table"),
    "activations of the next expert": (DOWN, "    other_expert_ = item_", "    other_expert_ = false;\n    item_"),
    "activations of the next unit": (DOWN, "    codes_ += skinny::kUnitRowBytes;\n", ""),
    "scales of the next unit": (DOWN, "    scales_ += kUnitBlocks;\n", ""),
    "end of a row goes along": (DOWN, "    blocks_ -= kUnitBlocks;\n", ""),
    "weights of the next expert": (DOWN, "if (other_expert) {\n          find", "if (false) {\n          find"),
    "alpha of the next expert": (DOWN, "if (other_expert) {\n        const", "if (alpha == 0.0f) {\n        const"),
    "sums of an expert start at zero": (DOWN, "        sums = {};\n", ""),
    "tokens without the expert": (
        DOWN,
        "    if (pair == kNoPair) continue;\n    const float factor = alpha",
        "    const float factor = pair == kNoPair ? 0.0f : alpha",
    ),
    "scales without the expert": (DOWN, "      if (!current.live) current.tokens.scales[0] = 0;\n", ""),
    "column of a sum": (DOWN, "pair_entry(tokens, index, 2 * (lane % 4) + i)", "pair_entry(tokens, index, lane % 4)"),
    "end of a row of codes": (DOWN, "16 * i < last_byte ? 16 * i : last_byte", "16 * i"),
    "end of a row of scales": (DOWN, "(past ? 4 : 0)", "0"),
    "columns past the last": (DOWN, "if (!live || output >= columns_) return;", "if (!live) return;"),
}
