// AdamW and Adam in one pass over the states of a run of parameters.
//
// Sources: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (arXiv 1412.6980), algorithm 1; Loshchilov and
// Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2. The order of operations and each
// rounding follow _single_tensor_adam of torch/optim/adam.py as ATen's CPU kernels carry it out with AVX2 or AVX-512:
//
//   grad = fma(l2, weight, grad)                    grad.add(param, alpha=weight_decay); Adam only
//   weight = weight * decay                         param.mul_(1 - lr * weight_decay); AdamW only
//   m = fma(w, grad - m, m)                         exp_avg.lerp_(grad, w), w = 1 - beta1, below 0.5
//     = fma(w - 1, grad - m, grad)                  the same from 0.5
//   v = fma((1 - beta2) * grad, grad, v * beta2)    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
//   denominator = sqrt(v) / correction2_sqrt + eps
//   weight = weight + (-step_size * m) / denominator    param.addcdiv_(exp_avg, denominator, value=-step_size)
//
// Each constant is computed in double by Python and rounded to float once, as torch does. The square root is the correctly
// rounded one of IEEE 754. The docstring of host.py tells how MKL's differs.
//
// Moments are kept in fp32, in bf16, or as 8-bit codes (adamw_int8_moments.h). The arithmetic is fp32.
//
// bf16 moments are rounded stochastically when they are stored. Rounded to nearest, the second one could neither grow slowly
// nor decay: with beta2 = 0.999 a step changes it by at most a thousandth, and bf16 has steps of 1/256. Rounded up with the
// probability of what is cut off, it is right in the mean (Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192).
// The random bits are a hash of the element's and the step's number, the finaliser of MurmurHash3 (Appleby): its low half for
// the first moment, its high half for the second. So threads, chunks, the device of a unit and a resumed run change nothing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "split_master.h"

namespace megatrain {

// The constants of one step, passed by value. host.py has the same fields in the same order.
struct AdamConstants {
  float gradient_factor;   // clip factor, negative when maximizing
  float decay;             // 1 - lr * weight_decay, or 1
  float l2;                // weight_decay of Adam, or 0
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float correction2_sqrt;  // sqrt(1 - beta2 ** step)
  float eps;
  float negative_step_size;  // -lr / (1 - beta1 ** step)
};

// Updates m and v in place and returns the new weight.
template <bool kL2>
MEGATRAIN_INLINE float adam_element(const AdamConstants& c, float weight, float grad, float& m, float& v) {
  grad = grad * c.gradient_factor;
  if (kL2) {
    grad = __builtin_fmaf(c.l2, weight, grad);
  } else {
    weight = weight * c.decay;
  }
  const bool small_step = c.one_minus_beta1 < 0.5f;
  const float difference = grad - m;
  m = __builtin_fmaf(small_step ? c.one_minus_beta1 : c.one_minus_beta1 - 1.0f, difference, small_step ? m : grad);
  v = __builtin_fmaf(c.one_minus_beta2 * grad, grad, v * c.beta2);
  const float denominator = __builtin_sqrtf(v) / c.correction2_sqrt + c.eps;
  return weight + (c.negative_step_size * m) / denominator;
}

// What the stochastic rounding of moments depends on.
struct Rounding {
  uint32_t first_element;  // index of the first element in its unit, modulo 2**32
  uint32_t seed;
};

MEGATRAIN_INLINE uint32_t rounding_bits(uint32_t element, uint32_t seed) {
  uint32_t x = element * 0x9e3779b1u + seed;
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  x ^= x >> 16;
  return x;
}

// Floating-point moments are prefetched explicitly, since processors prefetch within a page only. With 14 threads of an Intel
// Xeon (with AVX-512) the step became 5 to 12% faster.
constexpr int64_t kPrefetchedElements = 256;
constexpr int64_t kPrefetchDistance = 2048;

// Moments in fp32 (float), or in bf16 (uint16_t).
template <class Element>
struct FloatMoments {
  Element* m;
  Element* v;

  template <bool kL2, class Job>
  MEGATRAIN_INLINE void step(const Job& job, int64_t begin, int64_t end) const {
    const AdamConstants c = job.constants;  // a copy: the stores below could alias its floats
    for (int64_t first = begin; first < end; first += kPrefetchedElements) {
      const int64_t last = std::min(first + kPrefetchedElements, end);
      if (last + kPrefetchDistance <= end) {
        constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
        for (int64_t i = 0; i < kPrefetchedElements; i += kLine) {
          __builtin_prefetch(m + first + kPrefetchDistance + i, 1);
          __builtin_prefetch(v + first + kPrefetchDistance + i, 1);
        }
      }
      MEGATRAIN_NO_OVERLAP
      for (int64_t i = first; i < last; ++i) {
        float new_m = to_float(m[i]);
        float new_v = to_float(v[i]);
        const float weight = adam_element<kL2>(c, job.weights.load(i), job.gradients.load(i), new_m, new_v);
        store(i, new_m, new_v, job.rounding);
        job.weights.store(i, weight);
      }
    }
  }

  // Numbers that bf16 can represent, zero and infinity among them, are stored unchanged.
  MEGATRAIN_INLINE void store(int64_t i, float new_m, float new_v, Rounding rounding) const {
    if constexpr (sizeof(Element) == sizeof(float)) {
      m[i] = new_m;
      v[i] = new_v;
    } else {
      const uint32_t random = rounding_bits(rounding.first_element + static_cast<uint32_t>(i), rounding.seed);
      m[i] = static_cast<Element>((bits_of(new_m) + (random & 0xffffu)) >> 16);
      v[i] = static_cast<Element>((bits_of(new_v) + (random >> 16)) >> 16);
    }
  }
};

// Bytes of memory traffic a parameter: 26 with split masters, fp32 moments and bf16 gradients (gradients are read once, all
// else is read and written once), 28 with fp32 weights or with gradients that are fp32 sums, 8 less with bf16 moments, and
// 14.1 with split masters and 8-bit moments.
template <class Weights, class Gradients, class Moments, bool kL2>
struct AdamJob {
  Weights weights;
  Gradients gradients;
  Moments moments;
  AdamConstants constants;
  Rounding rounding;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const { moments.template step<kL2>(*this, begin, end); }
};

}  // namespace megatrain
