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
// Each constant is computed in double by Python and rounded to float once, as torch does. The square root here is the
// correctly rounded one of IEEE 754; see the docstring of kernel.py on MKL's.
#pragma once

#include <cstdint>

#include "adamw_bf16_moments.h"
#include "gradient_sum.h"
#include "split_master.h"

namespace megatrain {

// The constants of one step, handed over by value. kernel.py has the same fields in the same order.
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

// 26 bytes of memory traffic a parameter: hi, lo, m and v read and written once, the bf16 gradient read once. With
// kGradSplit the gradient is an fp32 sum, split as the master is, and the traffic 28 bytes; `grad_lo` isn't read without.
// 8 bytes less with moments in bf16 (uint16_t); `rounding` isn't read with float ones.
template <class Moment, bool kL2, bool kGradSplit>
struct AdamSplitJob {
  uint16_t* hi;
  int16_t* lo;
  Moment* m;
  Moment* v;
  const uint16_t* grad;
  const int16_t* grad_lo;
  AdamConstants constants;
  Rounding rounding;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    const AdamConstants c = constants;
    uint16_t* __restrict__ hi_ = hi;
    int16_t* __restrict__ lo_ = lo;
    Moment* __restrict__ m_ = m;
    Moment* __restrict__ v_ = v;
    const uint16_t* __restrict__ grad_ = grad;
    [[maybe_unused]] const int16_t* __restrict__ grad_lo_ = grad_lo;
    MEGATRAIN_NO_OVERLAP
    for (int64_t i = begin; i < end; ++i) {
      float new_m = load_moment(m_[i]);
      float new_v = load_moment(v_[i]);
      const float weight = join_master(hi_[i], lo_[i]);
      float gradient;
      if constexpr (kGradSplit) {
        gradient = join_sum(grad_[i], grad_lo_[i]);
      } else {
        gradient = bf16_to_float(grad_[i]);
      }
      const uint32_t bits = bits_of(adam_element<kL2>(c, weight, gradient, new_m, new_v));
      store_moments(m_[i], v_[i], new_m, new_v, rounding, i);
      hi_[i] = master_hi(bits);
      lo_[i] = master_lo(bits);
    }
  }
};

// 28 bytes of memory traffic a parameter, 16 of storage; 8 and 4 less with moments in bf16.
template <class Moment, bool kL2>
struct AdamFloatJob {
  float* weight;
  Moment* m;
  Moment* v;
  const float* grad;
  AdamConstants constants;
  Rounding rounding;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    const AdamConstants c = constants;
    float* __restrict__ weight_ = weight;
    Moment* __restrict__ m_ = m;
    Moment* __restrict__ v_ = v;
    const float* __restrict__ grad_ = grad;
    for (int64_t i = begin; i < end; ++i) {
      float new_m = load_moment(m_[i]);
      float new_v = load_moment(v_[i]);
      weight_[i] = adam_element<kL2>(c, weight_[i], grad_[i], new_m, new_v);
      store_moments(m_[i], v_[i], new_m, new_v, rounding, i);
    }
  }
};

// The traffic of AdamSplitJob with next to no arithmetic: the bound that the benchmark holds the kernel against.
struct StreamProbeJob {
  uint16_t* hi;
  int16_t* lo;
  float* m;
  float* v;
  const uint16_t* grad;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    uint16_t* __restrict__ hi_ = hi;
    int16_t* __restrict__ lo_ = lo;
    float* __restrict__ m_ = m;
    float* __restrict__ v_ = v;
    const uint16_t* __restrict__ grad_ = grad;
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t g = grad_[i];
      hi_[i] = static_cast<uint16_t>(hi_[i] ^ g);
      lo_[i] = static_cast<int16_t>(lo_[i] ^ g);
      m_[i] = m_[i] + 1.0f;
      v_[i] = v_[i] + 1.0f;
    }
  }
};

}  // namespace megatrain
