"""The list of test_quantize_mutations.py: what is taken away or bent in the quantizer, one thing at a time."""

KERNEL = "csrc/quantize/kernel.cuh"
ROUNDING = "csrc/quantize/rounding.cuh"
CONFIG = "csrc/quantize/config.h"
DECODED = "csrc/ptx/e2m1_decoded.cuh"

# name: (file, text that occurs exactly once, replacement)
MUTATIONS = {
    # programmatic dependent launch
    "dependency wait": (KERNEL, "  ptx::wait_for_dependencies();\n", ""),
    "dependents are let go": (KERNEL, "  ptx::launch_dependents();\n", ""),
    "reads only after the wait": (
        KERNEL,
        "  ptx::wait_for_dependencies();\n",
        "  ptx::load_global_f32(params.global_scale);\n  ptx::wait_for_dependencies();\n",
    ),
    # what is read
    "rows past m": (KERNEL, "place.row(i) < params.m ? place.row(i) : params.m - 1", "place.row(i)"),
    "blocks past k": (KERNEL, "place.block < blocks ? place.block : blocks - 1", "place.block"),
    "row stride": (KERNEL, "row * params.x_stride", "row * static_cast<int64_t>(params.k)"),
    "second half of a block": (KERNEL, "source + 16 * half", "source"),
    "word of a load": (KERNEL, "words[4 * half + 2] = loaded.z", "words[4 * half + 2] = loaded.y"),
    # what is stored where
    "codes past m": (
        KERNEL,
        "if (place.row(i) < params.m && place.block < blocks) {\n        s",
        "if (true) {\n        s",
    ),
    "codes past k": (
        KERNEL,
        "if (place.row(i) < params.m && place.block < blocks) {\n        s",
        "if (place.row(i) < params.m) {\n        s",
    ),
    "order of the code words": (KERNEL, "out.codes[0], out.codes[1]", "out.codes[1], out.codes[0]"),
    "row of a quarter": (KERNEL, "(quarter + i) * kScaleQuarterRows", "quarter * kScaleQuarterRows + i"),
    "quarter of a scale": (KERNEL, "out.scale << (8 * (place.quarter + i))", "out.scale << (8 * i)"),
    "quarter of a linear scale": (KERNEL, "bytes >> (8 * (place.quarter + i))", "bytes >> (8 * i)"),
    "linear scales past m": (
        KERNEL,
        "if (place.row(i) < params.m && place.block < blocks) {\n      ptx",
        "if (place.block < blocks) {\n      ptx",
    ),
    # the exchange and the swizzle
    "first partner": (KERNEL, "shuffle_xor(bytes, 1)", "shuffle_xor(bytes, 2)"),
    "second partner": (KERNEL, "shuffle_xor(bytes, 2)", "shuffle_xor(bytes, 4)"),
    "bytes of even lanes": (KERNEL, "0x6240u", "0x2640u"),
    "bytes of odd lanes": (KERNEL, "0x3715u", "0x3751u"),
    "bytes of the lower pair": (KERNEL, "0x5410u", "0x5401u"),
    "bytes of the upper pair": (KERNEL, "0x3276u", "0x2376u"),
    "tile of rows": (KERNEL, "scale_tile_offset(place.tile,", "scale_tile_offset(0,"),
    "word of a quarter": (KERNEL, "quarter * kScaleQuarterRows + place.slot)", "place.slot)"),
    # padding of the scales
    "words past the last tile": (KERNEL, "bool mine = place.block / 4 < k_tiles;", "bool mine = true;"),
    "quarters without rows": (KERNEL, " || (last && quarter > place.quarter)", ""),
    "last quarter with rows": (KERNEL, "* kScaleQuarterRows >= params.m", "* kScaleQuarterRows > params.m"),
    "slots without rows": (CONFIG, "(m + 31) / 32 * 32", "(m + 3) / 4 * 4"),
    "columns of the last CTA": (CONFIG, "(k + 32 * kBlock - 1) /", "k /"),
    # the maximum
    "last pair of the maximum": (ROUNDING, "i < kPairs; ++i)", "i < kPairs - 1; ++i)"),
    "both halves of the maximum": (ROUNDING, "fmaxf(fabsf(low), fabsf(high))", "fabsf(low)"),
    # the exact rule
    "scale is nearest": (ROUNDING, "rint(value", "std::floor(value"),
    "scale saturates": (ROUNDING, "if (value >= 448.0) return 0x7E;", "if (value >= 448.0) return 0x7F;"),
    "scale of nothing but NaN": (
        ROUNDING,
        "if (!(value == value)) return 0x7F;",
        "if (!(value == value)) return 0x7E;",
    ),
    "subnormal scales": (ROUNDING, "double top = 0x1p-5;", "double top = 0x1p-4;"),
    "tie at 0.25": (ROUNDING, "magnitude > 0.25", "magnitude >= 0.25"),
    "tie at 0.75": (ROUNDING, "magnitude >= 0.75", "magnitude > 0.75"),
    "tie at 5": (ROUNDING, "magnitude > 5.0", "magnitude >= 5.0"),
    "code of NaN": (ROUNDING, "if (!(numerator == numerator)) return 7;", "if (!(numerator == numerator)) return 0;"),
    "sign": (ROUNDING, "std::signbit(numerator) ? 8u : 0u", "numerator < 0 ? 8u : 0u"),
    "codes of a zero scale": (ROUNDING, "  if (out.scale == 0u) return out;\n", ""),
    "nibbles of a pair": (ROUNDING, "exact_e2m1(static_cast<double>(high) * global, scale) << 4", "0u"),
    "place of a pair": (ROUNDING, "codes << (8 * (i % 4))", "codes << (8 * (3 - i % 4))"),
    # the reciprocal rule
    "order of the scale's steps": (
        ROUNDING,
        "global.value * (largest * ptx::reciprocal_approximate(6.0f))",
        "global.value * largest * ptx::reciprocal_approximate(6.0f)",
    ),
    "order of the factor's steps": (
        ROUNDING,
        "ptx::reciprocal_approximate(ptx::ue4m3_to_float(byte) * global.reciprocal)",
        "(global.value / ptx::ue4m3_to_float(byte))",
    ),
    "codes of a zero scale, reciprocal": (
        ROUNDING,
        "convert_e2m1x8(x) & scale.mask",
        "convert_e2m1x8(x) | (scale.mask & 0u)",
    ),
    "order of the numbers": (ROUNDING, "x[2 * i], x[2 * i + 1])", "x[2 * i + 1], x[2 * i])"),
}

# The same for the e2m1 conversion of cards that have none; e2m1_check.cc notices.
CONVERSION_MUTATIONS = {
    "steps below 4": (DECODED, "0x1p23f - 2.0f", "0x1p23f - 1.0f"),
    "steps above 4": (DECODED, "magnitude * 0.5f + 0x1p23f", "magnitude * 0.5f + (0x1p23f + 1.0f)"),
    "the smaller one": (DECODED, "fminf(magnitude +", "fmaxf(magnitude +"),
    "saturation": (DECODED, "fabsf(x), 6.0f", "fabsf(x), 8.0f"),
    "magnitude": (DECODED, "fminf(fabsf(x)", "fminf(x"),
    "constant of the sum": (DECODED, "0x11111111u", "0x01111111u"),
    "place of a code": (DECODED, "for (int i = 7; i >= 0; --i)", "for (int i = 0; i < 8; ++i)"),
    "sign bits": (DECODED, "signs & 0x88888888u", "signs & 0x88888880u"),
}
