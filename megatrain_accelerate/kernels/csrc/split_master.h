// The split fp32 master: the bf16 weight that is streamed, and a signed 16-bit residual.
//
//   bits of the fp32 master = (hi << 16) + sign_extend(lo)        in 32-bit integer arithmetic, modulo 2**32
//   hi = (bits + 0x8000) >> 16,  lo = bits - (hi << 16)
//
// `hi` is the master rounded to bf16, to nearest with ties away from zero (the bits are sign and magnitude, so adding half a
// unit rounds the magnitude up). Ties to even, torch's rule for float -> bfloat16, can't be stored: around an even hi both
// ties round inward, so 65,537 masters would share that hi, and 16 bits tell 65,536 apart. With ties away from zero each hi
// has exactly 65,536 masters, lo covers [-32768, 32767], and the pair is invertible for every one of the 2**32 patterns:
// normal, denormal, infinite or NaN. The rules differ only for a master halfway between two bf16 numbers, one pattern in
// 65,536.
//
// As under torch's rule, a finite master that is rounded beyond bf16's largest finite number (3.39e38) has hi = infinity.
//
// An fp32 sum of bf16 gradients is split in the same way, into `parameter.grad` and a residual. A write to the gradient that
// autograd doesn't see (`parameter.grad.data.zero_()`) leaves a stale residual. Joined with the new number it changes that by
// at most half a unit. But beside a zero a negative one would make a NaN, which no sum does: there it counts as zero. A NaN is
// stored as the quiet NaN 0x7fc00000. Others, such as that of GPUs (0x7fffffff), would have a bf16 half that isn't a NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "instruction_sets.h"

namespace megatrain {

MEGATRAIN_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

MEGATRAIN_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

MEGATRAIN_INLINE float join_master(uint16_t hi, int16_t lo) {
  return float_of((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo)));
}

MEGATRAIN_INLINE float to_float(float value) { return value; }
MEGATRAIN_INLINE float to_float(uint16_t bf16) { return float_of(static_cast<uint32_t>(bf16) << 16); }

// Rounds to nearest, ties to even, as torch rounds float -> bfloat16. A NaN becomes the quiet NaN 0x7fc0.
MEGATRAIN_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

// Each array type loads and stores number `i` as a float, whatever its format in memory: here fp32 (float) or bf16 (uint16_t).
template <class Element>
struct Array {
  Element* values;

  MEGATRAIN_INLINE float load(int64_t i) const { return to_float(values[i]); }
  MEGATRAIN_INLINE void store(int64_t i, float value) const {
    if constexpr (sizeof(Element) == sizeof(float)) {
      values[i] = value;
    } else {
      values[i] = float_to_bf16(value);
    }
  }
};

using FloatArray = Array<float>;
using Bf16Array = Array<uint16_t>;

struct MasterArray {
  uint16_t* hi;
  int16_t* lo;

  MEGATRAIN_INLINE float load(int64_t i) const { return join_master(hi[i], lo[i]); }
  MEGATRAIN_INLINE void store(int64_t i, float value) const {
    const uint32_t bits = bits_of(value);
    hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    // bits - (hi << 16) modulo 2**32 is in [-32768, 32767], so its low 16 bits, which are those of `bits`, are enough.
    lo[i] = static_cast<int16_t>(bits & 0xffffu);
  }
};

struct SumArray : MasterArray {
  MEGATRAIN_INLINE float load(int64_t i) const {
    const bool is_stale = (hi[i] & 0x7fffu) == 0 && lo[i] < 0;
    return join_master(hi[i], is_stale ? static_cast<int16_t>(0) : lo[i]);
  }
  MEGATRAIN_INLINE void store(int64_t i, float value) const {
    MasterArray::store(i, value != value ? float_of(0x7fc00000u) : value);
  }
};

// The fp32 sums of two arrays, which can only be loaded.
template <class Earlier, class Addend>
struct Added {
  Earlier earlier;
  Addend addend;

  MEGATRAIN_INLINE float load(int64_t i) const { return earlier.load(i) + addend.load(i); }
};

// `to` may be the memory of a part of `from`.
template <class From, class To>
struct ConvertJob {
  From from;
  To to;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    MEGATRAIN_NO_OVERLAP
    for (int64_t i = begin; i < end; ++i) {
      to.store(i, from.load(i));
    }
  }
};

}  // namespace megatrain
