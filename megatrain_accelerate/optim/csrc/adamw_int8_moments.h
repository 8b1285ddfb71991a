// AdamW of adamw.h with the two moments kept as 8-bit codes: one scale, fp32, for each block of 128 elements and moment.
//
// Block-wise 8-bit states are an idea of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
// The map here is a formula, without a table, so that a loop over a block is vectors:
//
//   first moment    m = sign * (code / 127)**2 * scale         int8; the scale is the largest |m| of the block
//   second moment   sqrt(v) = (code / 255)**2 * scale          uint8; the scale is the largest sqrt(v) of the block
//
// The square gives small values small steps: down to 6e-5 of the largest m, and 1.5e-5 of the largest sqrt(v), which is what
// the weight is divided by and has the units of m.
//
// Codes are rounded stochastically, for the reason in adamw_bf16_moments.h and with its random bits, between the two whose
// values enclose the moment, so that m and v (not its root) are right in the mean. A v above zero never gets the code of zero:
// next to an m that did not vanish it would make the step as long as lr * m / eps.
//
// A block's largest element has the largest code and is held exactly; with that, and codes that are rounded to nearest, a moment
// that is decoded and coded again has the same bits (int8_moments.py does it for checkpoints).
#pragma once

#include <cstdint>

#include "adamw.h"

namespace megatrain {

constexpr int64_t kMomentBlock = 128;

// Scales are at least this: the least sqrt(v) above zero is then 1e-19, and v a normal number.
constexpr float kSmallestScale = 0x1p-46f;

constexpr float kLastFirst = 127.0f;
constexpr float kLastSecond = 255.0f;

struct Int8Moments {
  int8_t* m;
  uint8_t* v;
  float* m_scale;
  float* v_scale;
};

// Of non-negative numbers, whose order is that of their bits; above all others NaN, so that a block with one becomes NaN.
MEGATRAIN_INLINE int32_t magnitude_bits(float value) { return static_cast<int32_t>(bits_of(value) & 0x7fffffffu); }

MEGATRAIN_INLINE float scale_of(int32_t largest_bits) {
  const float largest = float_of(static_cast<uint32_t>(largest_bits));
  return largest < kSmallestScale ? kSmallestScale : largest;
}

MEGATRAIN_INLINE float share_of_code(float code, float last) { return (code * code) * (1.0f / (last * last)); }

// What a magnitude is multiplied with to be the square of its code. Enlarged by more than the three roundings on the way can
// take off, so that the largest element reaches the last code.
MEGATRAIN_INLINE float code_factor(float scale, float last) { return (last * last / scale) * 0x1.000008p0f; }

// `squared` is the square of the code wanted. `random`, in (0, 1), is held against the moment's place between the values of
// two codes, which for the first moment are as the codes' squares, with kFourth as their fourth powers.
template <bool kFourth>
MEGATRAIN_INLINE int32_t code_of(float squared, float random, float last) {
  const float bounded = squared < last * last ? squared : last * last;
  const int32_t code = static_cast<int32_t>(__builtin_sqrtf(bounded));
  const float lower = static_cast<float>(code);
  float above = bounded - lower * lower;
  float gap = 2.0f * lower + 1.0f;
  if (kFourth) {
    above = above * (bounded + lower * lower);
    gap = gap * ((2.0f * lower) * (lower + 1.0f) + 1.0f);
  }
  return code + (above > random * gap ? 1 : 0);
}

// How a weight and its gradient are kept: split masters, the gradient with its residual or without, or fp32.
template <bool kGradSplit>
struct SplitWeights {
  uint16_t* hi;
  int16_t* lo;
  const uint16_t* grad;
  const int16_t* grad_lo;

  MEGATRAIN_INLINE float weight(int64_t i) const { return join_master(hi[i], lo[i]); }

  MEGATRAIN_INLINE float gradient(int64_t i) const {
    if constexpr (kGradSplit) {
      return join_sum(grad[i], grad_lo[i]);
    } else {
      return bf16_to_float(grad[i]);
    }
  }

  MEGATRAIN_INLINE void store(int64_t i, float weight) const {
    const uint32_t bits = bits_of(weight);
    hi[i] = master_hi(bits);
    lo[i] = master_lo(bits);
  }
};

struct FloatWeights {
  float* values;
  const float* grad;

  MEGATRAIN_INLINE float weight(int64_t i) const { return values[i]; }
  MEGATRAIN_INLINE float gradient(int64_t i) const { return grad[i]; }
  MEGATRAIN_INLINE void store(int64_t i, float weight) const { values[i] = weight; }
};

// 14.1 bytes of memory traffic a parameter on split masters. `begin` is a multiple of the block; the last block may be short.
template <class Weights, bool kL2>
struct AdamInt8Job {
  Weights weights;
  Int8Moments moments;
  AdamConstants constants;
  Rounding rounding;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    for (int64_t start = begin; start < end; start += kMomentBlock) {
      block(start, end - start < kMomentBlock ? end - start : kMomentBlock);
    }
  }

  MEGATRAIN_INLINE void block(int64_t start, int64_t count) const {
    const AdamConstants c = constants;
    const Weights w = weights;
    int8_t* __restrict__ m_ = moments.m + start;
    uint8_t* __restrict__ v_ = moments.v + start;
    float& m_scale = moments.m_scale[start / kMomentBlock];
    float& v_scale = moments.v_scale[start / kMomentBlock];
    alignas(64) float new_m[kMomentBlock];
    alignas(64) float new_root[kMomentBlock];
    const float old_m_scale = m_scale;
    const float old_v_scale = v_scale;
    int32_t m_largest = 0;
    int32_t root_largest = 0;
    MEGATRAIN_NO_OVERLAP
    for (int64_t i = 0; i < count; ++i) {
      const float m_code = static_cast<float>(m_[i]);
      float m = share_of_code(m_code, kLastFirst) * old_m_scale;
      m = m_code < 0.0f ? -m : m;
      const float root = share_of_code(static_cast<float>(v_[i]), kLastSecond) * old_v_scale;
      float v = root * root;
      w.store(start + i, adam_element<kL2>(c, w.weight(start + i), w.gradient(start + i), m, v));
      const float new_v_root = __builtin_sqrtf(v);
      const int32_t m_bits = magnitude_bits(m);
      const int32_t root_bits = magnitude_bits(new_v_root);
      m_largest = m_bits > m_largest ? m_bits : m_largest;
      root_largest = root_bits > root_largest ? root_bits : root_largest;
      new_m[i] = m;
      new_root[i] = new_v_root;
    }
    m_scale = scale_of(m_largest);
    v_scale = scale_of(root_largest);
    const float m_factor = code_factor(m_scale, kLastFirst);
    const float v_factor = code_factor(v_scale, kLastSecond);
    const uint32_t first = rounding.first_element + static_cast<uint32_t>(start);
    const uint32_t seed = rounding.seed;
    MEGATRAIN_NO_OVERLAP
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t random = rounding_bits(first + static_cast<uint32_t>(i), seed);
      const float m_random = (static_cast<float>(static_cast<int32_t>(random & 0xffffu)) + 0.5f) * 0x1p-16f;
      const float v_random = (static_cast<float>(static_cast<int32_t>(random >> 16)) + 0.5f) * 0x1p-16f;
      const float m = new_m[i];
      const float root = new_root[i];
      const int32_t m_code = code_of<false>((m < 0.0f ? -m : m) * m_factor, m_random, kLastFirst);
      const int32_t v_code = code_of<true>(root * v_factor, v_random, kLastSecond);
      m_[i] = static_cast<int8_t>(m < 0.0f ? -m_code : m_code);
      v_[i] = static_cast<uint8_t>(v_code == 0 && root > 0.0f ? 1 : v_code);
    }
  }
};

}  // namespace megatrain
