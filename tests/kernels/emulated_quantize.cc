// Runs the quantizer in the emulated thread block on a problem read from a file; used by the tests.
//
//   emulated_quantize INPUT OUTPUT
//
// INPUT: int64 m k x_stride input_type layout rule rows seed, the float32 global scale, then x: int64 length
// and bytes; rows is how many a thread takes, 0 for the launcher's choice. OUTPUT: codes, then scales; both
// start as 0xEE.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "emulation/machine.h"
#include "quantize/select.cuh"

using namespace sm120::quantize;

namespace {

int64_t read_int(FILE* file) {
  int64_t value = 0;
  if (std::fread(&value, sizeof(value), 1, file) != 1) std::exit(2);
  return value;
}

unsigned char* allocate(size_t bytes) {
  return static_cast<unsigned char*>(std::malloc(bytes));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  FILE* input = std::fopen(argv[1], "rb");
  if (input == nullptr) return 2;
  Params params = {};
  params.m = static_cast<int>(read_int(input));
  params.k = static_cast<int>(read_int(input));
  params.x_stride = read_int(input);
  const auto type = static_cast<InputType>(read_int(input));
  params.layout = static_cast<Layout>(read_int(input));
  const auto rule = static_cast<Rule>(read_int(input));
  const auto wanted_rows = static_cast<int>(read_int(input));
  const auto seed = static_cast<uint64_t>(read_int(input));
  float global_scale = 0;
  if (std::fread(&global_scale, sizeof(global_scale), 1, input) != 1) return 2;
  const auto x_bytes = static_cast<size_t>(read_int(input));
  unsigned char* x = allocate(x_bytes);
  if (std::fread(x, 1, x_bytes, input) != x_bytes) return 2;
  std::fclose(input);

  const size_t code_bytes = static_cast<size_t>(params.m) * params.k / 2;
  const size_t scale_bytes = params.layout == Layout::kLinear
                                 ? static_cast<size_t>(params.m) * params.k / 16
                                 : static_cast<size_t>((params.m + 127) / 128) * ((params.k + 63) / 64) * 512;
  unsigned char* codes = allocate(code_bytes);
  unsigned char* scales = allocate(scale_bytes);
  for (size_t i = 0; i < code_bytes; ++i) codes[i] = 0xEE;
  for (size_t i = 0; i < scale_bytes; ++i) scales[i] = 0xEE;
  params.x = x;
  params.global_scale = &global_scale;
  params.codes = codes;
  params.scales = scales;
  emu::declare_region("x", emu::RegionKind::kInput, x, x_bytes);
  emu::declare_region("global scale", emu::RegionKind::kInput, &global_scale, sizeof(global_scale));
  emu::declare_region("codes", emu::RegionKind::kOutput, codes, code_bytes);
  emu::declare_region("scales", emu::RegionKind::kOutput, scales, scale_bytes);

  const int rows = wanted_rows == 0 ? rows_per_thread(params.m, params.k) : wanted_rows;
  const Grid grid = grid_for(params.m, params.k, rows);
  const Kernel kernel = select_kernel(type, rule, rows);
  emu::launch({grid.columns, grid.groups, 1, kThreads, 0, seed}, [&] { kernel(params); });

  FILE* output = std::fopen(argv[2], "wb");
  if (output == nullptr) return 2;
  std::fwrite(codes, 1, code_bytes, output);
  std::fwrite(scales, 1, scale_bytes, output);
  std::fclose(output);
  std::free(x);
  std::free(codes);
  std::free(scales);
  return 0;
}
