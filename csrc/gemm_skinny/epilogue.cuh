// Writes the sums: two neighbouring columns a thread. A thread's columns are the same for all its tokens
// (pair % 16 == thread % 16 everywhere in reduce.cuh), so alpha and bias are fetched once, early.
#pragma once

#include "../gemm/output.cuh"
#include "row_tile.cuh"

namespace sm120::skinny {

class Epilogue {
 public:
  DEVICE_FN Epilogue(const Params& params, int first_token, int tile, int thread)
      : out_(static_cast<uint8_t*>(params.out) + 2 * first_token * params.out_stride),
        out_stride_(params.out_stride),
        column_(global_row(tile, 2 * (thread % (kTileRows / 2)))),
        inside_(column_ < params.n),
        type_(params.output_type),
        columns_(gemm::load_columns(params, inside_ ? column_ : 0)) {}

  DEVICE_FN void store(int token, const ptx::Float2& sum) const {
    if (!inside_) return;
    ptx::store_global_u32(out_ + 2 * (token * out_stride_ + column_),
                          gemm::finish(columns_, sum.x, sum.y, type_));
  }

 private:
  uint8_t* out_;
  int64_t out_stride_;
  int column_;
  bool inside_;
  OutputType type_;
  gemm::ColumnPair columns_;
};

}  // namespace sm120::skinny
