// Runs the skinny GEMM kernel in the emulated thread block on a problem read from a file; used by the tests.
//
//   emulated_gemm INPUT OUTPUT
//
// INPUT is a sequence of little-endian int64: m n k activation_stride weight_stride out_stride
// alpha_per_column output_type cluster stages token_tiles seed, then seven buffers, each an int64 length and
// its bytes: activations, activation scales, weights, weight scales, alpha, bias (may be empty), out (its
// initial, poisoned content).
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "emulation/machine.h"
#include "gemm_skinny/kernel.cuh"

using namespace sm120::skinny;

namespace {

struct Buffer {
  size_t bytes = 0;
  std::unique_ptr<unsigned char, void (*)(void*)> data{nullptr, std::free};
};

int64_t read_int(FILE* file) {
  int64_t value = 0;
  if (std::fread(&value, sizeof(value), 1, file) != 1) std::exit(2);
  return value;
}

// Exactly as long as it is said to be, so that the address sanitizer sees the first byte too many.
Buffer read_buffer(FILE* file) {
  Buffer buffer;
  buffer.bytes = static_cast<size_t>(read_int(file));
  if (buffer.bytes == 0) return buffer;
  buffer.data.reset(static_cast<unsigned char*>(std::malloc(buffer.bytes)));
  if (std::fread(buffer.data.get(), 1, buffer.bytes, file) != buffer.bytes) std::exit(2);
  return buffer;
}

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
  FILE* input = std::fopen(argv[1], "rb");
  if (input == nullptr) return 2;
  Params params = {};
  params.m = static_cast<int>(read_int(input));
  params.n = static_cast<int>(read_int(input));
  params.k = static_cast<int>(read_int(input));
  params.activation_stride = static_cast<int>(read_int(input));
  params.weight_stride = static_cast<int>(read_int(input));
  params.out_stride = read_int(input);
  params.alpha_per_column = read_int(input) != 0;
  params.output_type = static_cast<OutputType>(read_int(input));
  const int cluster = static_cast<int>(read_int(input));
  while (1 << params.cluster_shift < cluster) ++params.cluster_shift;
  const int stages = static_cast<int>(read_int(input));
  const int token_tiles = static_cast<int>(read_int(input));
  const auto seed = static_cast<uint64_t>(read_int(input));
  Buffer buffers[7];
  for (Buffer& buffer : buffers) buffer = read_buffer(input);
  std::fclose(input);

  const char* names[7] = {"activations", "activation scales", "weights", "weight scales", "alpha", "bias",
                          "out"};
  for (int i = 0; i < 7; ++i) {
    const auto kind = i == 6             ? emu::RegionKind::kOutput
                      : i == 2 || i == 3 ? emu::RegionKind::kWeights
                                         : emu::RegionKind::kInput;
    if (buffers[i].bytes > 0) emu::declare_region(names[i], kind, buffers[i].data.get(), buffers[i].bytes);
  }
  params.activations = buffers[0].data.get();
  params.activation_scales = buffers[1].data.get();
  params.weights = buffers[2].data.get();
  params.weight_scales = buffers[3].data.get();
  params.alpha = reinterpret_cast<const float*>(buffers[4].data.get());
  params.bias = buffers[5].data.get();
  params.out = buffers[6].data.get();

  const Kernel kernel = stages == 4 ? pick<4>(token_tiles) : pick<2>(token_tiles);
  const emu::LaunchShape shape = {row_tiles(params.n) * cluster,
                                  token_blocks(params.m),
                                  cluster,
                                  kThreads,
                                  static_cast<uint32_t>(shared_bytes(stages, token_tiles)),
                                  seed};
  emu::launch(shape, [&] { kernel(params); });

  FILE* output = std::fopen(argv[2], "wb");
  if (output == nullptr) return 2;
  std::fwrite(buffers[6].data.get(), 1, buffers[6].bytes, output);
  std::fclose(output);
  return 0;
}
