// How the two moments of adamw.h, which computes in fp32, are loaded and stored: as they are, or in bf16 with a stochastic
// rounding when they are stored.
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

#include "split_master.h"

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

// What the rounding depends on.
struct Rounding {
  uint32_t first_element;  // number of the first one, modulo 2**32
  uint32_t seed;
};

MEGATRAIN_INLINE float load_moment(float moment) { return moment; }

MEGATRAIN_INLINE float load_moment(uint16_t moment) { return bf16_to_float(moment); }

MEGATRAIN_INLINE void store_moments(float& m, float& v, float new_m, float new_v, Rounding, int64_t) {
  m = new_m;
  v = new_v;
}

MEGATRAIN_INLINE void store_moments(uint16_t& m, uint16_t& v, float new_m, float new_v, Rounding rounding, int64_t i) {
  const uint32_t random = rounding_bits(rounding.first_element + static_cast<uint32_t>(i), rounding.seed);
  m = round_stochastically(new_m, random & 0xffffu);
  v = round_stochastically(new_v, random >> 16);
}

}  // namespace megatrain
