// A GEMM problem in a file, for the programs that run the kernels in the emulated thread block. Little-endian
// int64: m n k activation_stride weight_stride out_stride alpha_per_column output_type, four numbers of the
// program's own, then seven buffers, each an int64 length and its bytes: activations, activation scales,
// weights, weight scales, alpha, bias (may be empty), out (its initial, poisoned content).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "emulation/machine.h"
#include "gemm/params.h"

class GemmFile {
 public:
  /// Reads the problem and declares its buffers to the machine.
  explicit GemmFile(const char* path) {
    FILE* file = std::fopen(path, "rb");
    if (file == nullptr) std::exit(2);
    params.m = static_cast<int>(read_int(file));
    params.n = static_cast<int>(read_int(file));
    params.k = static_cast<int>(read_int(file));
    params.activation_stride = static_cast<int>(read_int(file));
    params.weight_stride = static_cast<int>(read_int(file));
    params.out_stride = read_int(file);
    params.alpha_per_column = read_int(file) != 0;
    params.output_type = static_cast<sm120::gemm::OutputType>(read_int(file));
    for (int64_t& number : own) number = read_int(file);
    for (Buffer& buffer : buffers_) buffer = read_buffer(file);
    std::fclose(file);

    const char* names[kBuffers] = {
        "activations", "activation scales", "weights", "weight scales", "alpha", "bias", "out"};
    for (int i = 0; i < kBuffers; ++i) {
      const auto kind = i == 6             ? emu::RegionKind::kOutput
                        : i == 2 || i == 3 ? emu::RegionKind::kWeights
                                           : emu::RegionKind::kInput;
      if (buffers_[i].bytes > 0) {
        emu::declare_region(names[i], kind, buffers_[i].data.get(), buffers_[i].bytes);
      }
    }
    params.activations = buffers_[0].data.get();
    params.activation_scales = buffers_[1].data.get();
    params.weights = buffers_[2].data.get();
    params.weight_scales = buffers_[3].data.get();
    params.alpha = reinterpret_cast<const float*>(buffers_[4].data.get());
    params.bias = buffers_[5].data.get();
    params.out = buffers_[6].data.get();
  }

  void write_output(const char* path) const {
    FILE* file = std::fopen(path, "wb");
    if (file == nullptr) std::exit(2);
    std::fwrite(buffers_[6].data.get(), 1, buffers_[6].bytes, file);
    std::fclose(file);
  }

  sm120::gemm::Params params = {};
  int64_t own[4] = {};

 private:
  static constexpr int kBuffers = 7;
  struct Buffer {
    size_t bytes = 0;
    std::unique_ptr<unsigned char, void (*)(void*)> data{nullptr, std::free};
  };

  static int64_t read_int(FILE* file) {
    int64_t value = 0;
    if (std::fread(&value, sizeof(value), 1, file) != 1) std::exit(2);
    return value;
  }

  // Exactly as long as it is said to be, so that the address sanitizer sees the first byte too many.
  static Buffer read_buffer(FILE* file) {
    Buffer buffer;
    buffer.bytes = static_cast<size_t>(read_int(file));
    if (buffer.bytes == 0) return buffer;
    buffer.data.reset(static_cast<unsigned char*>(std::malloc(buffer.bytes)));
    if (std::fread(buffer.data.get(), 1, buffer.bytes, file) != buffer.bytes) std::exit(2);
    return buffer;
  }

  Buffer buffers_[kBuffers];
};
