// AdamW and Adam with moments that are stored in bf16: the arithmetic of adamw.h in fp32, and a stochastic rounding of the
// two moments when they are stored.
//
// To nearest the second moment would stand still: with beta2 = 0.999 a step changes it by at most a thousandth while bf16
// has steps of 1/256, so that it could neither grow slowly nor decay. Rounded up with the probability of what is cut off, it
// is right in the mean (Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192).
//
// The random bits are a hash of the element's number and of the step's, so that threads, chunks, the place of a unit and
// a resumed run change nothing: the finaliser of MurmurHash3 (Appleby), its low half for the first moment and its high half
// for the second.
#pragma once

#include <cstdint>

#include "adamw.h"

namespace megatrain {

MEGATRAIN_INLINE uint32_t rounding_bits(uint32_t element, uint32_t seed) {
  uint32_t x = element * 0x9e3779b1u + seed;
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  x ^= x >> 16;
  return x;
}

// `random` in [0, 65535]. A number that bf16 holds, zero and infinity among them, stays as it is.
MEGATRAIN_INLINE uint16_t round_stochastically(float value, uint32_t random) {
  return static_cast<uint16_t>((bits_of(value) + random) >> 16);
}

// Two moments in bf16, and what their rounding depends on.
struct Bf16Moments {
  uint16_t* m;
  uint16_t* v;
  uint32_t first_element;  // number of the first one, modulo 2**32
  uint32_t seed;
};

// 18 bytes of memory traffic a parameter, 20 with kGradSplit.
template <bool kL2, bool kGradSplit>
struct AdamSplitBf16Job {
  uint16_t* hi;
  int16_t* lo;
  Bf16Moments moments;
  const uint16_t* grad;
  const int16_t* grad_lo;
  AdamConstants constants;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    const AdamConstants c = constants;
    uint16_t* __restrict__ hi_ = hi;
    int16_t* __restrict__ lo_ = lo;
    uint16_t* __restrict__ m_ = moments.m;
    uint16_t* __restrict__ v_ = moments.v;
    const uint16_t* __restrict__ grad_ = grad;
    [[maybe_unused]] const int16_t* __restrict__ grad_lo_ = grad_lo;
    for (int64_t i = begin; i < end; ++i) {
      float new_m = bf16_to_float(m_[i]);
      float new_v = bf16_to_float(v_[i]);
      const float weight = join_master(hi_[i], lo_[i]);
      float gradient;
      if constexpr (kGradSplit) {
        gradient = join_sum(grad_[i], grad_lo_[i]);
      } else {
        gradient = bf16_to_float(grad_[i]);
      }
      const uint32_t bits = bits_of(adam_element<kL2>(c, weight, gradient, new_m, new_v));
      const uint32_t random = rounding_bits(moments.first_element + static_cast<uint32_t>(i), moments.seed);
      m_[i] = round_stochastically(new_m, random & 0xffffu);
      v_[i] = round_stochastically(new_v, random >> 16);
      hi_[i] = master_hi(bits);
      lo_[i] = master_lo(bits);
    }
  }
};

// 20 bytes of memory traffic a parameter.
template <bool kL2>
struct AdamFloatBf16Job {
  float* weight;
  Bf16Moments moments;
  const float* grad;
  AdamConstants constants;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    const AdamConstants c = constants;
    float* __restrict__ weight_ = weight;
    uint16_t* __restrict__ m_ = moments.m;
    uint16_t* __restrict__ v_ = moments.v;
    const float* __restrict__ grad_ = grad;
    for (int64_t i = begin; i < end; ++i) {
      float new_m = bf16_to_float(m_[i]);
      float new_v = bf16_to_float(v_[i]);
      weight_[i] = adam_element<kL2>(c, weight_[i], grad_[i], new_m, new_v);
      const uint32_t random = rounding_bits(moments.first_element + static_cast<uint32_t>(i), moments.seed);
      m_[i] = round_stochastically(new_m, random & 0xffffu);
      v_[i] = round_stochastically(new_v, random >> 16);
    }
  }
};

}  // namespace megatrain
