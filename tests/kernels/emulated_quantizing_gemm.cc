// Runs the skinny GEMM kernel that quantizes its activations itself in the emulated thread block on a problem
// read from a file; used by the tests.
//
//   emulated_quantizing_gemm INPUT OUTPUT
//
// Activations are 16-bit numbers, the activation scales are the float32 encode scale. The file's own numbers:
// cluster token_tiles float16 seed.
#include "gemm_file.h"
#include "gemm_skinny/kernel.cuh"

using namespace sm120::skinny;
using sm120::quantize::InputType;

namespace {

using Kernel = void (*)(QuantizingParams);

template <InputType kType>
Kernel pick(int token_tiles) {
  return token_tiles == 1 ? quantizing_gemm_kernel<kType, 1, kRingStages>
                          : quantizing_gemm_kernel<kType, 2, kRingStages>;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const GemmFile file(argv[1]);
  const int cluster = static_cast<int>(file.own[0]);
  const int token_tiles = static_cast<int>(file.own[1]);
  QuantizingParams params = {{file.params, 0}, reinterpret_cast<const float*>(file.params.activation_scales)};
  while (1 << params.cluster_shift < cluster) ++params.cluster_shift;

  const Kernel kernel =
      file.own[2] != 0 ? pick<InputType::kFloat16>(token_tiles) : pick<InputType::kBfloat16>(token_tiles);
  const emu::LaunchShape shape = {row_tiles(params.n) * cluster,
                                  token_blocks(params.m),
                                  cluster,
                                  kThreads,
                                  static_cast<uint32_t>(shared_bytes(kRingStages, token_tiles)),
                                  static_cast<uint64_t>(file.own[3])};
  emu::launch(shape, [&] { kernel(params); });
  file.write_output(argv[2]);
  return 0;
}
