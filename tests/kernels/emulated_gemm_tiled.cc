// Runs the tiled GEMM kernel in the emulated thread block on a problem read from a file; used by the tests.
//
//   emulated_gemm_tiled INPUT OUTPUT
//
// The file's own numbers: shape (128 or 64), whether activation rows are copied in whole 16-byte chunks, 0,
// seed.
#include "gemm_file.h"
#include "gemm_tiled/kernel.cuh"

using namespace sm120::tiled;

namespace {

template <Shape kShape>
void run(const Params& params, bool whole_chunks, uint64_t seed) {
  const Grid tiles = grid(kShape, params.m, params.n);
  const emu::LaunchShape launch = {
      tiles.width, tiles.rows, 1, kThreads, static_cast<uint32_t>(shared_bytes(kShape)), seed, tiles.planes};
  if (whole_chunks) {
    emu::launch(launch, [&] { tiled_gemm_kernel<kShape, true>(params); });
  } else {
    emu::launch(launch, [&] { tiled_gemm_kernel<kShape, false>(params); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const GemmFile file(argv[1]);
  const auto shape = static_cast<Shape>(file.own[0]);
  const auto seed = static_cast<uint64_t>(file.own[3]);
  if (shape == Shape::kWide) {
    run<Shape::kWide>(file.params, file.own[1] != 0, seed);
  } else {
    run<Shape::kSplitK>(file.params, file.own[1] != 0, seed);
  }
  file.write_output(argv[2]);
  return 0;
}
