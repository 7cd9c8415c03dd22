// Runs the skinny GEMM kernel in the emulated thread block on a problem read from a file; used by the tests.
//
//   emulated_gemm INPUT OUTPUT
//
// The file's own numbers: cluster stages token_tiles seed.
#include "gemm_file.h"
#include "gemm_skinny/kernel.cuh"

using namespace sm120::skinny;

namespace {

using Kernel = void (*)(Params);

template <int kStages>
Kernel pick(int64_t token_tiles) {
  switch (token_tiles) {
    case 1:
      return gemm_kernel<1, kStages>;
    case 2:
      return gemm_kernel<2, kStages>;
    case 4:
      return gemm_kernel<4, kStages>;
    default:
      return gemm_kernel<8, kStages>;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const GemmFile file(argv[1]);
  const int cluster = static_cast<int>(file.own[0]);
  const int stages = static_cast<int>(file.own[1]);
  const int token_tiles = static_cast<int>(file.own[2]);
  Params params = {file.params, 0};
  while (1 << params.cluster_shift < cluster) ++params.cluster_shift;

  const Kernel kernel = stages == 4 ? pick<4>(token_tiles) : pick<2>(token_tiles);
  const emu::LaunchShape shape = {row_tiles(params.n) * cluster,
                                  token_blocks(params.m),
                                  cluster,
                                  kThreads,
                                  static_cast<uint32_t>(shared_bytes(stages, token_tiles)),
                                  static_cast<uint64_t>(file.own[3])};
  emu::launch(shape, [&] { kernel(params); });
  file.write_output(argv[2]);
  return 0;
}
