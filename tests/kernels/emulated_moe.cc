// Runs the two mixture-of-experts kernels in the emulated thread block, one after the other, on a problem
// read from a file; used by the tests.
//
//   emulated_moe INPUT OUTPUT
//
// INPUT: little-endian int64: m top_k hidden_size intermediate experts first_expert relu2 gate_first fp16
// input_scale_per_expert inner_scale_per_expert hidden_stride out_stride seed gate_up_shift gate_up_clusters
// gate_up_rows down_shift (each -1 for the launcher's choice on a device of 132 SMs), then twelve buffers,
// each an int64 length and its bytes: hidden topk_ids topk_weights w13 w13_scales w13_alpha input_scale w2
// w2_scales w2_alpha inner_scale out. The workspace starts as 0xEE. OUTPUT: out, then the workspace.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "emulation/machine.h"
#include "moe/select.cuh"

using namespace sm120::moe;

namespace {

struct Buffer {
  size_t bytes = 0;
  std::unique_ptr<unsigned char, void (*)(void*)> data{nullptr, std::free};

  // Exactly as long as it is said to be, so that the address sanitizer sees the first byte too many.
  void allocate(size_t count) {
    bytes = count;
    data.reset(static_cast<unsigned char*>(std::malloc(count)));
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data.get());
  }
};

int64_t read_int(FILE* file) {
  int64_t value = 0;
  if (std::fread(&value, sizeof(value), 1, file) != 1) std::exit(2);
  return value;
}

enum : int {
  kHidden,
  kIds,
  kWeights,
  kW13,
  kW13Scales,
  kW13Alpha,
  kInputScale,
  kW2,
  kW2Scales,
  kW2Alpha,
  kInnerScale,
  kOut,
  kBuffers
};
const char* const kNames[kBuffers] = {"hidden",     "topk_ids",  "topk_weights", "w13",
                                      "w13_scales", "w13_alpha", "input_scale",  "w2",
                                      "w2_scales",  "w2_alpha",  "inner_scale",  "out"};

void declare(const Buffer (&buffers)[kBuffers], int index, emu::RegionKind kind) {
  if (buffers[index].bytes > 0) {
    emu::declare_region(kNames[index], kind, buffers[index].data.get(), buffers[index].bytes);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  FILE* file = std::fopen(argv[1], "rb");
  if (file == nullptr) return 2;
  KernelParams params = {};
  params.m = static_cast<int>(read_int(file));
  params.top_k = static_cast<int>(read_int(file));
  params.hidden_size = static_cast<int>(read_int(file));
  params.intermediate = static_cast<int>(read_int(file));
  params.experts = static_cast<int>(read_int(file));
  params.first_expert = static_cast<int>(read_int(file));
  params.activation = static_cast<Activation>(read_int(file));
  params.gate_first = read_int(file) != 0;
  params.type = static_cast<OutputType>(read_int(file));
  params.input_scale_per_expert = read_int(file) != 0;
  params.inner_scale_per_expert = read_int(file) != 0;
  params.hidden_stride = read_int(file);
  params.out_stride = read_int(file);
  const auto seed = static_cast<uint64_t>(read_int(file));
  params.config = choose_config(params, 132, 8);
  for (int* choice : {&params.config.gate_up_shift, &params.config.gate_up_clusters,
                      &params.config.gate_up_rows, &params.config.down_shift}) {
    const auto wanted = static_cast<int>(read_int(file));
    if (wanted >= 0) *choice = wanted;
  }
  Buffer buffers[kBuffers];
  for (Buffer& buffer : buffers) {
    buffer.allocate(static_cast<size_t>(read_int(file)));
    if (std::fread(buffer.data.get(), 1, buffer.bytes, file) != buffer.bytes) return 2;
  }
  std::fclose(file);
  Buffer workspace;
  workspace.allocate(static_cast<size_t>(workspace_bytes(params.m, params.top_k, params.intermediate)));
  std::memset(workspace.data.get(), 0xEE, workspace.bytes);

  params.hidden = buffers[kHidden].data.get();
  params.topk_ids = buffers[kIds].as<int32_t>();
  params.topk_weights = buffers[kWeights].as<float>();
  params.w13 = buffers[kW13].data.get();
  params.w13_scales = buffers[kW13Scales].data.get();
  params.w13_alpha = buffers[kW13Alpha].as<float>();
  params.input_scale = buffers[kInputScale].as<float>();
  params.w2 = buffers[kW2].data.get();
  params.w2_scales = buffers[kW2Scales].data.get();
  params.w2_alpha = buffers[kW2Alpha].as<float>();
  params.inner_scale = buffers[kInnerScale].as<float>();
  params.out = buffers[kOut].data.get();
  params.workspace = workspace.data.get();

  const auto blocks = [](int x, int shift) { return x << shift; };
  const auto shared = static_cast<uint32_t>(gate_up_shared_bytes(params, params.config));
  if (active_experts(params) > 0) {
    for (int index : {kHidden, kIds, kInputScale, kInnerScale, kW13Alpha}) {
      declare(buffers, index, emu::RegionKind::kInput);
    }
    for (int index : {kW13, kW13Scales}) declare(buffers, index, emu::RegionKind::kWeights);
    emu::declare_region("workspace", emu::RegionKind::kOutput, workspace.data.get(), workspace.bytes);
    const int shift = params.config.gate_up_shift;
    const Kernel kernel = select_gate_up(params);
    emu::launch({blocks(params.config.gate_up_clusters, shift), 1, 1 << shift, kThreads, shared, seed},
                [&] { kernel(params); });
    emu::forget_regions();
  }

  // Written in front of the first launch: the second may read it before its wait, as it may its weights.
  for (int index : {kIds, kWeights, kW2, kW2Scales}) declare(buffers, index, emu::RegionKind::kWeights);
  declare(buffers, kW2Alpha, emu::RegionKind::kInput);
  emu::declare_region("workspace", emu::RegionKind::kInput, workspace.data.get(), workspace.bytes);
  declare(buffers, kOut, emu::RegionKind::kOutput);
  const int shift = params.config.down_shift;
  const Kernel kernel = select_down(params);
  emu::launch({blocks(token_blocks(params.m), shift), sm120::skinny::row_tiles(params.hidden_size),
               1 << shift, kThreads, static_cast<uint32_t>(kDownSharedBytes), seed},
              [&] { kernel(params); });

  file = std::fopen(argv[2], "wb");
  if (file == nullptr) return 2;
  std::fwrite(buffers[kOut].data.get(), 1, buffers[kOut].bytes, file);
  std::fwrite(workspace.data.get(), 1, workspace.bytes, file);
  std::fclose(file);
  return 0;
}
