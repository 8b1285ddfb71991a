// The C interface of the host kernels, called by host.py through ctypes. Pointers are to contiguous host memory and counts are
// elements: host.py has checked both. Arrays don't overlap: that is up to its callers.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <numeric>
#include <type_traits>
#include <vector>

#include "adamw_int8_moments.h"

namespace megatrain {
namespace {

// Raised whenever a signature or AdamConstants changes, so that a stale library is noticed before it is called.
constexpr int kInterfaceVersion = 9;

// Elements of a chunk: few enough to balance the threads, and so many that the counter costs nothing. A multiple of 64, so
// that no two chunks share a cache line of an aligned array.
constexpr int64_t kGrain = 128 * 1024;

// Bytes of a chunk of megatrain_fill(): two huge pages.
constexpr int64_t kBytesGrain = 4 * 1024 * 1024;

struct Kernels {
  template <class Job>
  void run(const Job& job, int64_t count, int64_t grain = kGrain) {
    pool.run(range_function<Job>(instruction_set), &job, count, grain);
  }

  ThreadPool pool;
  int instruction_set;
};

// Sums of squares, one for each kGrain elements, so that their total doesn't depend on which thread computed which.
template <class Values>
struct SquareSumJob {
  Values values;
  double* partial_sums;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    constexpr int kLanes = 16;
    for (int64_t start = begin; start < end; start += kGrain) {
      const int64_t stop = end - start < kGrain ? end : start + kGrain;
      double lanes[kLanes] = {};
      int64_t i = start;
      for (; i + kLanes <= stop; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) {
          const double value = values.load(i + lane);
          lanes[lane] = lanes[lane] + value * value;
        }
      }
      for (int lane = 0; i < stop; ++i, ++lane) {
        const double value = values.load(i);
        lanes[lane] = lanes[lane] + value * value;
      }
      partial_sums[start / kGrain] = std::accumulate(lanes, lanes + kLanes, 0.0);
    }
  }
};

template <class Values>
double square_sum(Kernels* kernels, Values values, int64_t count) {
  std::vector<double> partial_sums(static_cast<size_t>((count + kGrain - 1) / kGrain));
  kernels->run(SquareSumJob<Values>{values, partial_sums.data()}, count);
  return std::accumulate(partial_sums.begin(), partial_sums.end(), 0.0);
}

// Copies bytes, or sets them to zero if the source is null.
struct FillJob {
  char* destination;
  const char* source;

  MEGATRAIN_INLINE void range(int64_t begin, int64_t end) const {
    const size_t bytes = static_cast<size_t>(end - begin);
    if (source == nullptr) {
      std::memset(destination + begin, 0, bytes);
    } else {
      std::memcpy(destination + begin, source + begin, bytes);
    }
  }
};

}  // namespace
}  // namespace megatrain

using namespace megatrain;

#define MEGATRAIN_EXPORT extern "C" __attribute__((visibility("default")))

MEGATRAIN_EXPORT int megatrain_interface_version() { return kInterfaceVersion; }

// Who sees a write of this thread after the fence also sees those before it. Reads keep their order, too.
MEGATRAIN_EXPORT void megatrain_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Returns null if the threads can't be started. `instruction_set` must be one that this machine has.
MEGATRAIN_EXPORT Kernels* megatrain_create(int threads, int instruction_set) {
  try {
    return new Kernels{ThreadPool(threads), instruction_set};
  } catch (const std::exception&) {
    return nullptr;
  }
}

MEGATRAIN_EXPORT void megatrain_destroy(Kernels* kernels) {
  // A forked child has no threads to join, and joining would wait for ever: the object is leaked.
  if (kernels->pool.owned_by_this_process()) {
    delete kernels;
  }
}

// With `lo`, the masters' residuals, weights and gradients are bf16, else fp32. `grad_lo` is null unless the gradient is an
// fp32 sum. Moments of 32 and 16 bits are floating-point numbers. With those of 8, codes, the first element begins a block.
MEGATRAIN_EXPORT void megatrain_adamw(Kernels* kernels, void* weight, int16_t* lo, void* m, void* v, void* grad,
                                      int16_t* grad_lo, int64_t count, float* m_scale, float* v_scale, int moment_bits,
                                      AdamConstants constants, uint32_t first_element, uint32_t seed) {
  static_assert(kGrain % kMomentBlock == 0, "a block has one thread");
  const auto step = [&](auto weights, auto gradients) {
    const auto step_with = [&](auto moments) {
      const auto run = [&](auto has_l2) {
        using Job = AdamJob<decltype(weights), decltype(gradients), decltype(moments), has_l2.value>;
        kernels->run(Job{weights, gradients, moments, constants, {first_element, seed}}, count);
      };
      constants.l2 != 0.0f ? run(std::true_type()) : run(std::false_type());
    };
    if (moment_bits == 8) {
      step_with(Int8Moments{static_cast<int8_t*>(m), static_cast<uint8_t*>(v), m_scale, v_scale});
    } else if (moment_bits == 16) {
      step_with(FloatMoments<uint16_t>{static_cast<uint16_t*>(m), static_cast<uint16_t*>(v)});
    } else {
      step_with(FloatMoments<float>{static_cast<float*>(m), static_cast<float*>(v)});
    }
  };
  const MasterArray masters{static_cast<uint16_t*>(weight), lo};
  if (lo == nullptr) {
    step(FloatArray{static_cast<float*>(weight)}, FloatArray{static_cast<float*>(grad)});
  } else if (grad_lo == nullptr) {
    step(masters, Bf16Array{static_cast<uint16_t*>(grad)});
  } else {
    step(masters, SumArray{static_cast<uint16_t*>(grad), grad_lo});
  }
}

// `sum` and `source` are fp32 if `element_bytes` is 4, else bf16. With `lo`, `sum` is the bf16 half of an fp32 sum. Without
// `has_residual` that is `sum` alone so far, and `lo` is only written.
MEGATRAIN_EXPORT void megatrain_accumulate(Kernels* kernels, void* sum, int16_t* lo, void* source, int64_t count,
                                           int element_bytes, int has_residual) {
  const FloatArray floats{static_cast<float*>(sum)};
  const Bf16Array halves{static_cast<uint16_t*>(sum)};
  const Bf16Array addend{static_cast<uint16_t*>(source)};
  const SumArray split{halves.values, lo};
  if (element_bytes == 4) {
    const FloatArray others{static_cast<float*>(source)};
    kernels->run(ConvertJob<Added<FloatArray, FloatArray>, FloatArray>{{floats, others}, floats}, count);
  } else if (lo == nullptr) {
    kernels->run(ConvertJob<Added<Bf16Array, Bf16Array>, Bf16Array>{{halves, addend}, halves}, count);
  } else if (has_residual != 0) {
    kernels->run(ConvertJob<Added<SumArray, Bf16Array>, SumArray>{{split, addend}, split}, count);
  } else {
    kernels->run(ConvertJob<Added<Bf16Array, Bf16Array>, SumArray>{{halves, addend}, split}, count);
  }
}

// `values`, `lo` and `element_bytes` are as those of `sum` in megatrain_accumulate.
MEGATRAIN_EXPORT double megatrain_square_sum(Kernels* kernels, void* values, int16_t* lo, int64_t count,
                                             int element_bytes) {
  const Bf16Array halves{static_cast<uint16_t*>(values)};
  if (element_bytes == 4) {
    return square_sum(kernels, FloatArray{static_cast<float*>(values)}, count);
  }
  return lo == nullptr ? square_sum(kernels, halves, count) : square_sum(kernels, SumArray{halves.values, lo}, count);
}

MEGATRAIN_EXPORT void megatrain_split(Kernels* kernels, float* master, uint16_t* hi, int16_t* lo, int64_t count) {
  kernels->run(ConvertJob<FloatArray, MasterArray>{{master}, {hi, lo}}, count);
}

MEGATRAIN_EXPORT void megatrain_join(Kernels* kernels, uint16_t* hi, int16_t* lo, float* master, int64_t count) {
  kernels->run(ConvertJob<MasterArray, FloatArray>{{hi, lo}, {master}}, count);
}

MEGATRAIN_EXPORT void megatrain_fill(Kernels* kernels, char* destination, const char* source, int64_t count,
                                     int64_t element_bytes) {
  kernels->run(FillJob{destination, source}, count * element_bytes, kBytesGrain);
}
