// The fp32 sum of bf16 gradients, split as the master is (split_master.h): the bf16 half is what `parameter.grad` shows.
//
// Whoever reads the gradient may also write to it behind autograd's back (`parameter.grad.data.zero_()`), which leaves the
// residual of another number. It is at most half a unit of that number then, but beside a zero a negative one would make a
// NaN, which no sum does: there it counts as zero.
//
// A NaN is stored as the quiet NaN 0x7fc00000: others, among them the one that GPUs make (0x7fffffff), would be split
// into a bf16 half that isn't a NaN.
#pragma once

#include <cstdint>

#include "split_master.h"

namespace megatrain {

MEGATRAIN_INLINE float join_sum(uint16_t hi, int16_t lo) {
  const bool is_stale = (hi & 0x7fffu) == 0 && lo < 0;
  return join_master(hi, is_stale ? static_cast<int16_t>(0) : lo);
}

// 10 bytes of memory traffic a parameter, 8 where the sum so far has no residual yet.
template <bool kHasResidual>
struct AccumulateSplitJob {
  uint16_t* hi;
  int16_t* lo;
  const uint16_t* source;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    uint16_t* __restrict__ hi_ = hi;
    int16_t* __restrict__ lo_ = lo;
    const uint16_t* __restrict__ from = source;
    for (int64_t i = begin; i < end; ++i) {
      float earlier;
      if constexpr (kHasResidual) {
        earlier = join_sum(hi_[i], lo_[i]);
      } else {
        earlier = bf16_to_float(hi_[i]);
      }
      const float sum = earlier + bf16_to_float(from[i]);
      const uint32_t bits = sum != sum ? 0x7fc00000u : bits_of(sum);
      hi_[i] = master_hi(bits);
      lo_[i] = master_lo(bits);
    }
  }
};

}  // namespace megatrain
