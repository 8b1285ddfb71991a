// AdamW of adamw.h with both moments kept as 8-bit codes. Each block of 128 elements has an fp32 scale for each moment.
//
// Block-wise 8-bit states are an idea of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
// A code stands for a share of the scale, a number in [0, 1] with three bits of mantissa. It is the upper 12 bits of that fp32
// number minus a constant, the offset: shifts and additions decode and encode it, without a table or a root.
//
//   first moment    m = sign * share(code) * scale, the scale the largest |m| of the block; codes -127 to 127 (int8)
//                   shares from 1.25 * 2**-16 to 1, and 0
//   second moment   v = share(code) * scale, the scale the largest v of the block; codes 0 to 255 (uint8)
//                   shares from 1.25 * 2**-32 to 1, and 0
//
// Why floating point: what counts is m / sqrt(v) of each element, the small ones too, and the ranges of m and of sqrt(v) are
// the same. A v above zero never gets the code of zero: next to an m that did not vanish it would make a step of lr * m / eps.
//
// Codes are rounded stochastically, as bf16 moments are and with the same random bits (adamw.h). A block's largest element has
// the last code and is held exactly, unless it is below the least scale. So moments that are decoded and encoded again, to
// nearest (moments.py, for checkpoints), keep their bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adamw.h"

namespace megatrain {

constexpr int64_t kMomentBlock = 128;

// The last codes, 127 and 255, are the upper 12 bits of 1.0f.
constexpr int32_t kFirstOffset = 0x3f8 - 127;
constexpr int32_t kSecondOffset = 0x3f8 - 255;

// Scales are at least these, so that the least v above zero, 1.25 * 2**-124, is a normal number, and scales have reciprocals.
// The first is the second's square root.
constexpr float kLeastFirstScale = 0x1p-46f;
constexpr float kLeastSecondScale = 0x1p-92f;

// The bits of |value|. They are ordered as the magnitudes are, with NaN above all, so that a block with a NaN becomes NaN.
MEGATRAIN_INLINE int32_t magnitude_bits(float value) { return static_cast<int32_t>(bits_of(value) & 0x7fffffffu); }

MEGATRAIN_INLINE float scale_of(int32_t largest_bits, float least) {
  return std::max(float_of(static_cast<uint32_t>(largest_bits)), least);
}

MEGATRAIN_INLINE float share_of_code(int32_t code, int32_t offset) {
  const float share = float_of(static_cast<uint32_t>(code + offset) << 20);
  return code == 0 ? 0.0f : share;
}

// The factor that turns a magnitude into its share of the scale. It is enlarged by 2**-21, more than the three roundings on
// the way (of the reciprocal, this product and the share) can take off, so that the largest element reaches 1.
MEGATRAIN_INLINE float share_factor(float scale) { return (1.0f / scale) * 0x1.000008p0f; }

// Rounds a share up or down to a code. `random`, in [0, 65535], is added to the upper 16 of the 20 bits that are then cut off,
// so that a share is rounded up with the probability of what is cut off. A share below code 1's is rounded to 0 or 1 alike.
MEGATRAIN_INLINE int32_t code_of_share(float share, uint32_t random, int32_t offset) {
  const int32_t least_bits = (1 + offset) << 20;  // of the share of code 1
  const float threshold =
      (static_cast<float>(static_cast<int32_t>(random)) + 0.5f) * (float_of(static_cast<uint32_t>(least_bits)) * 0x1p-16f);
  const int32_t bits = static_cast<int32_t>(bits_of(share < 1.0f ? share : 1.0f));
  const int32_t code = ((bits + static_cast<int32_t>(random * 16 + 8)) >> 20) - offset;
  const int32_t zero_or_one = bits > static_cast<int32_t>(bits_of(threshold)) ? 1 : 0;
  return bits < least_bits ? zero_or_one : code;
}

struct Int8Moments {
  int8_t* m_codes;
  uint8_t* v_codes;
  float* m_scales;
  float* v_scales;

  // Steps a range of an AdamJob. `begin` is a multiple of the block. The last block may be short. kL2: Adam's weight decay.
  template <bool kL2, class Job>
  MEGATRAIN_INLINE void step(const Job& job, int64_t begin, int64_t end) const {
    int64_t start = begin;
    for (; end - start >= kMomentBlock; start += kMomentBlock) {
      block<kL2>(job, start, kMomentBlock);
    }
    if (start < end) {
      block<kL2>(job, start, end - start);
    }
  }

  template <bool kL2, class Job>
  MEGATRAIN_INLINE void block(const Job& job, int64_t start, int64_t count) const {
    const AdamConstants c = job.constants;
    const auto w = job.weights;
    const auto g = job.gradients;
    int8_t* m_ = m_codes + start;
    uint8_t* v_ = v_codes + start;
    float& m_scale = m_scales[start / kMomentBlock];
    float& v_scale = v_scales[start / kMomentBlock];
    alignas(64) float new_m[kMomentBlock];
    alignas(64) float new_v[kMomentBlock];
    const float old_m_scale = m_scale;
    const float old_v_scale = v_scale;
    int32_t m_largest = 0;
    int32_t v_largest = 0;
    MEGATRAIN_NO_OVERLAP
    for (int64_t i = 0; i < count; ++i) {
      const int32_t m_code = m_[i];
      const float magnitude = share_of_code(m_code < 0 ? -m_code : m_code, kFirstOffset) * old_m_scale;
      new_m[i] = m_code < 0 ? -magnitude : magnitude;
      new_v[i] = share_of_code(v_[i], kSecondOffset) * old_v_scale;
      // adam_element() updates new_m[i] and new_v[i].
      w.store(start + i, adam_element<kL2>(c, w.load(start + i), g.load(start + i), new_m[i], new_v[i]));
      m_largest = std::max(m_largest, magnitude_bits(new_m[i]));
      v_largest = std::max(v_largest, magnitude_bits(new_v[i]));
    }
    m_scale = scale_of(m_largest, kLeastFirstScale);
    v_scale = scale_of(v_largest, kLeastSecondScale);
    const float m_factor = share_factor(m_scale);
    const float v_factor = share_factor(v_scale);
    const uint32_t first = job.rounding.first_element + static_cast<uint32_t>(start);
    const uint32_t seed = job.rounding.seed;
    MEGATRAIN_NO_OVERLAP
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t random = rounding_bits(first + static_cast<uint32_t>(i), seed);
      const float m = new_m[i];
      const float v = new_v[i];
      const int32_t m_code = code_of_share((m < 0.0f ? -m : m) * m_factor, random & 0xffffu, kFirstOffset);
      const int32_t v_code = code_of_share(v * v_factor, random >> 16, kSecondOffset);
      m_[i] = static_cast<int8_t>(m < 0.0f ? -m_code : m_code);
      v_[i] = static_cast<uint8_t>(std::max(v_code, v > 0.0f ? 1 : 0));
    }
  }
};

}  // namespace megatrain
