// The C interface of the host kernels, called by kernel.py through ctypes. Pointers are to contiguous host memory that
// doesn't overlap, counts are elements; kernel.py has checked both.
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "adamw.h"
#include "adamw_int8_moments.h"
#include "gradient_sum.h"
#include "instruction_sets.h"
#include "split_master.h"
#include "thread_pool.h"

namespace megatrain {
namespace {

// Raised whenever a signature or AdamConstants changes, so that a stale library is noticed and not called.
constexpr int kInterfaceVersion = 6;

// Elements a chunk: small enough to balance the threads, large enough to forget the counter. A multiple of 64, so that
// no two chunks share a cache line of an aligned array.
constexpr int64_t kGrain = 128 * 1024;

// Bytes a chunk of zero() and copy(): two huge pages.
constexpr int64_t kBytesGrain = 4 * 1024 * 1024;

struct Kernels {
  Kernels(int threads, InstructionSet set) : pool(threads), instruction_set(set) {}

  template <class Job>
  void run(const Job& job, int64_t count, int64_t grain = kGrain) {
    pool.run(range_function<Job>(instruction_set), &job, count, grain);
  }

  ThreadPool pool;
  InstructionSet instruction_set;
};

struct AccumulateBf16Job {
  uint16_t* destination;
  const uint16_t* source;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    uint16_t* __restrict__ to = destination;
    const uint16_t* __restrict__ from = source;
    for (int64_t i = begin; i < end; ++i) {
      to[i] = float_to_bf16(bf16_to_float(to[i]) + bf16_to_float(from[i]));
    }
  }
};

struct AccumulateFloatJob {
  float* destination;
  const float* source;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    float* __restrict__ to = destination;
    const float* __restrict__ from = source;
    for (int64_t i = begin; i < end; ++i) {
      to[i] = to[i] + from[i];
    }
  }
};

// What square_sum() reads, widened exactly.
struct Bf16Values {
  const uint16_t* bits;
  MEGATRAIN_INLINE double operator[](int64_t i) const { return bf16_to_float(bits[i]); }
};

struct FloatValues {
  const float* values;
  MEGATRAIN_INLINE double operator[](int64_t i) const { return values[i]; }
};

struct SplitValues {
  const uint16_t* hi;
  const int16_t* lo;
  MEGATRAIN_INLINE double operator[](int64_t i) const { return join_sum(hi[i], lo[i]); }
};

// Sums of squares, one for each grain, so that their total doesn't depend on who computed which.
template <class Values>
struct SquareSumJob {
  Values values;
  double* partial_sums;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    constexpr int kLanes = 16;
    const Values from = values;
    for (int64_t start = begin; start < end; start += kGrain) {
      const int64_t stop = end - start < kGrain ? end : start + kGrain;
      double lanes[kLanes] = {};
      int64_t i = start;
      for (; i + kLanes <= stop; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          const double value = from[i + lane];
          lanes[lane] = lanes[lane] + value * value;
        }
      }
      for (int lane = 0; i < stop; ++i, ++lane) {
        const double value = from[i];
        lanes[lane] = lanes[lane] + value * value;
      }
      double sum = 0.0;
      for (double lane : lanes) {
        sum = sum + lane;
      }
      partial_sums[start / kGrain] = sum;
    }
  }
};

template <class Values>
double square_sum(Kernels* kernels, Values values, int64_t count) {
  std::vector<double> partial_sums(static_cast<size_t>((count + kGrain - 1) / kGrain));
  kernels->run(SquareSumJob<Values>{values, partial_sums.data()}, count);
  double sum = 0.0;
  for (double partial : partial_sums) {
    sum = sum + partial;
  }
  return sum;
}

// `grad_lo` is null where the gradient isn't a sum.
template <class Moment>
void adamw_split(Kernels* kernels, uint16_t* hi, int16_t* lo, Moment* m, Moment* v, const uint16_t* grad,
                 const int16_t* grad_lo, int64_t count, AdamConstants constants, Rounding rounding = {}) {
  if (grad_lo != nullptr && constants.l2 != 0.0f) {
    kernels->run(AdamSplitJob<Moment, true, true>{hi, lo, m, v, grad, grad_lo, constants, rounding}, count);
  } else if (grad_lo != nullptr) {
    kernels->run(AdamSplitJob<Moment, false, true>{hi, lo, m, v, grad, grad_lo, constants, rounding}, count);
  } else if (constants.l2 != 0.0f) {
    kernels->run(AdamSplitJob<Moment, true, false>{hi, lo, m, v, grad, nullptr, constants, rounding}, count);
  } else {
    kernels->run(AdamSplitJob<Moment, false, false>{hi, lo, m, v, grad, nullptr, constants, rounding}, count);
  }
}

template <class Moment>
void adamw_fp32(Kernels* kernels, float* weight, Moment* m, Moment* v, const float* grad, int64_t count,
                AdamConstants constants, Rounding rounding = {}) {
  if (constants.l2 != 0.0f) {
    kernels->run(AdamFloatJob<Moment, true>{weight, m, v, grad, constants, rounding}, count);
  } else {
    kernels->run(AdamFloatJob<Moment, false>{weight, m, v, grad, constants, rounding}, count);
  }
}

template <class Weights>
void adamw_int8(Kernels* kernels, Weights weights, Int8Moments moments, int64_t count, AdamConstants constants,
                Rounding rounding) {
  static_assert(kGrain % kMomentBlock == 0, "a block has one thread");
  if (constants.l2 != 0.0f) {
    kernels->run(AdamInt8Job<Weights, true>{weights, moments, constants, rounding}, count);
  } else {
    kernels->run(AdamInt8Job<Weights, false>{weights, moments, constants, rounding}, count);
  }
}

struct CopyJob {
  char* destination;
  const char* source;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    std::memcpy(destination + begin, source + begin, static_cast<size_t>(end - begin));
  }
};

struct ZeroJob {
  char* bytes;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    std::memset(bytes + begin, 0, static_cast<size_t>(end - begin));
  }
};

}  // namespace
}  // namespace megatrain

using megatrain::AdamConstants;
using megatrain::InstructionSet;
using megatrain::Kernels;

#define MEGATRAIN_EXPORT extern "C" __attribute__((visibility("default")))

MEGATRAIN_EXPORT int megatrain_interface_version() { return megatrain::kInterfaceVersion; }

// The largest instruction set that this machine has: 0 baseline, 1 AVX2 and FMA, 2 AVX-512.
MEGATRAIN_EXPORT int megatrain_best_instruction_set() { return megatrain::best_instruction_set(); }

// Null when the threads can't be started. `instruction_set` must not exceed megatrain_best_instruction_set().
MEGATRAIN_EXPORT Kernels* megatrain_create(int threads, int instruction_set) {
  try {
    return new Kernels(threads, static_cast<InstructionSet>(instruction_set));
  } catch (const std::exception&) {
    return nullptr;
  }
}

MEGATRAIN_EXPORT void megatrain_destroy(Kernels* kernels) {
  // In a forked child there are no threads to join, and joining would wait for ever: the object is left behind.
  if (kernels->pool.owned_by_this_process()) {
    delete kernels;
  }
}

MEGATRAIN_EXPORT void megatrain_adamw_split(Kernels* kernels, uint16_t* hi, int16_t* lo, float* m, float* v,
                                            const uint16_t* grad, int64_t count, AdamConstants constants) {
  megatrain::adamw_split(kernels, hi, lo, m, v, grad, nullptr, count, constants);
}

MEGATRAIN_EXPORT void megatrain_adamw_split_sum(Kernels* kernels, uint16_t* hi, int16_t* lo, float* m, float* v,
                                                const uint16_t* grad, const int16_t* grad_lo, int64_t count,
                                                AdamConstants constants) {
  megatrain::adamw_split(kernels, hi, lo, m, v, grad, grad_lo, count, constants);
}

MEGATRAIN_EXPORT void megatrain_adamw_fp32(Kernels* kernels, float* weight, float* m, float* v, const float* grad,
                                           int64_t count, AdamConstants constants) {
  megatrain::adamw_fp32(kernels, weight, m, v, grad, count, constants);
}

// `grad_lo` is null where the gradient isn't a sum.
MEGATRAIN_EXPORT void megatrain_adamw_split_bf16(Kernels* kernels, uint16_t* hi, int16_t* lo, uint16_t* m, uint16_t* v,
                                                 const uint16_t* grad, const int16_t* grad_lo, int64_t count,
                                                 AdamConstants constants, uint32_t first_element, uint32_t seed) {
  megatrain::adamw_split(kernels, hi, lo, m, v, grad, grad_lo, count, constants, {first_element, seed});
}

MEGATRAIN_EXPORT void megatrain_adamw_fp32_bf16(Kernels* kernels, float* weight, uint16_t* m, uint16_t* v,
                                                const float* grad, int64_t count, AdamConstants constants,
                                                uint32_t first_element, uint32_t seed) {
  megatrain::adamw_fp32(kernels, weight, m, v, grad, count, constants, {first_element, seed});
}

// `grad_lo` is null where the gradient isn't a sum. The scales are those of the blocks that begin with the first element.
MEGATRAIN_EXPORT void megatrain_adamw_split_int8(Kernels* kernels, uint16_t* hi, int16_t* lo, int8_t* m, uint8_t* v,
                                                 float* m_scale, float* v_scale, const uint16_t* grad,
                                                 const int16_t* grad_lo, int64_t count, AdamConstants constants,
                                                 uint32_t first_element, uint32_t seed) {
  const megatrain::Int8Moments moments{m, v, m_scale, v_scale};
  const megatrain::Rounding rounding{first_element, seed};
  if (grad_lo != nullptr) {
    const megatrain::SplitWeights<true> weights{hi, lo, grad, grad_lo};
    megatrain::adamw_int8(kernels, weights, moments, count, constants, rounding);
  } else {
    const megatrain::SplitWeights<false> weights{hi, lo, grad, nullptr};
    megatrain::adamw_int8(kernels, weights, moments, count, constants, rounding);
  }
}

MEGATRAIN_EXPORT void megatrain_adamw_fp32_int8(Kernels* kernels, float* weight, int8_t* m, uint8_t* v, float* m_scale,
                                                float* v_scale, const float* grad, int64_t count,
                                                AdamConstants constants, uint32_t first_element, uint32_t seed) {
  megatrain::adamw_int8(kernels, megatrain::FloatWeights{weight, grad}, {m, v, m_scale, v_scale}, count, constants,
                        {first_element, seed});
}

MEGATRAIN_EXPORT void megatrain_stream_probe(Kernels* kernels, uint16_t* hi, int16_t* lo, float* m, float* v,
                                             const uint16_t* grad, int64_t count) {
  kernels->run(megatrain::StreamProbeJob{hi, lo, m, v, grad}, count);
}

MEGATRAIN_EXPORT void megatrain_accumulate_bf16(Kernels* kernels, uint16_t* destination, const uint16_t* source,
                                                int64_t count) {
  kernels->run(megatrain::AccumulateBf16Job{destination, source}, count);
}

MEGATRAIN_EXPORT void megatrain_accumulate_fp32(Kernels* kernels, float* destination, const float* source,
                                                int64_t count) {
  kernels->run(megatrain::AccumulateFloatJob{destination, source}, count);
}

// Without `has_residual` the sum so far is `hi` alone and `lo` is only written.
MEGATRAIN_EXPORT void megatrain_accumulate_split(Kernels* kernels, uint16_t* hi, int16_t* lo, const uint16_t* source,
                                                 int has_residual, int64_t count) {
  if (has_residual != 0) {
    kernels->run(megatrain::AccumulateSplitJob<true>{hi, lo, source}, count);
  } else {
    kernels->run(megatrain::AccumulateSplitJob<false>{hi, lo, source}, count);
  }
}

MEGATRAIN_EXPORT double megatrain_square_sum_bf16(Kernels* kernels, const uint16_t* values, int64_t count) {
  return megatrain::square_sum(kernels, megatrain::Bf16Values{values}, count);
}

MEGATRAIN_EXPORT double megatrain_square_sum_fp32(Kernels* kernels, const float* values, int64_t count) {
  return megatrain::square_sum(kernels, megatrain::FloatValues{values}, count);
}

MEGATRAIN_EXPORT double megatrain_square_sum_split(Kernels* kernels, const uint16_t* hi, const int16_t* lo,
                                                   int64_t count) {
  return megatrain::square_sum(kernels, megatrain::SplitValues{hi, lo}, count);
}

MEGATRAIN_EXPORT void megatrain_split(Kernels* kernels, const float* master, uint16_t* hi, int16_t* lo,
                                      int64_t count) {
  kernels->run(megatrain::SplitJob{master, hi, lo}, count);
}

MEGATRAIN_EXPORT void megatrain_join(Kernels* kernels, const uint16_t* hi, const int16_t* lo, float* master,
                                     int64_t count) {
  kernels->run(megatrain::JoinJob{hi, lo, master}, count);
}

MEGATRAIN_EXPORT void megatrain_copy(Kernels* kernels, char* destination, const char* source, int64_t byte_count) {
  kernels->run(megatrain::CopyJob{destination, source}, byte_count, megatrain::kBytesGrain);
}

MEGATRAIN_EXPORT void megatrain_zero(Kernels* kernels, char* bytes, int64_t byte_count) {
  kernels->run(megatrain::ZeroJob{bytes}, byte_count, megatrain::kBytesGrain);
}
