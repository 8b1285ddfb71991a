// Run-time choice of the instruction set for loops that the compiler vectorises.
//
// A job is a struct with `void range(int64_t begin, int64_t end) const`, marked MEGATRAIN_INLINE, whose loop is compiled once
// per instruction set. The bits don't depend on the choice: the library is built with -ffp-contract=off, every fused
// multiply-add is written out as __builtin_fmaf, and add, multiply, divide and square root are correctly rounded by IEEE 754
// at every vector width. The baseline of x86-64 has no FMA instruction and calls libm's fmaf(), which is exact but slow. It
// serves machines older than 2013 and the tests.
//
// (GCC's target_clones isn't used: it dispatches "arch=haswell" by the exact CPU model, needs GCC 12 for
// "arch=x86-64-v3", needs ifunc from the C library, and can't be told to run a smaller set for a test.)
#pragma once

#include <cstdint>

#include "thread_pool.h"

#define MEGATRAIN_INLINE inline __attribute__((always_inline))

// MEGATRAIN_AVX512: Clang ignores a whole target that names a vector width, and uses the widest vectors by itself.
// MEGATRAIN_NO_OVERLAP marks a loop with independent iterations: arrays don't overlap, or are read where they are written.
// Otherwise compilers compare the addresses at run time, and don't vectorise where that takes more than ten comparisons.
#if defined(__clang__)
#define MEGATRAIN_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define MEGATRAIN_NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define MEGATRAIN_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#define MEGATRAIN_NO_OVERLAP _Pragma("GCC ivdep")
#endif

namespace megatrain {

#define MEGATRAIN_RUN_RANGE(name, target)                         \
  template <class Job>                                            \
  target void name(const void* job, int64_t begin, int64_t end) { \
    static_cast<const Job*>(job)->range(begin, end);              \
  }
MEGATRAIN_RUN_RANGE(run_range_baseline, )
#if defined(__x86_64__)
MEGATRAIN_RUN_RANGE(run_range_avx2, __attribute__((target("avx2,fma"))))
MEGATRAIN_RUN_RANGE(run_range_avx512, MEGATRAIN_AVX512)
#endif

// The loop of `Job` compiled for an instruction set, by its index in INSTRUCTION_SETS of host.py. Other processors than x86-64
// have only the baseline (NEON and its FMA are part of that of aarch64).
template <class Job>
RangeFunction range_function([[maybe_unused]] int instruction_set) {
#if defined(__x86_64__)
  constexpr RangeFunction of_sets[] = {run_range_baseline<Job>, run_range_avx2<Job>, run_range_avx512<Job>};
  return of_sets[instruction_set];
#else
  return run_range_baseline<Job>;
#endif
}

}  // namespace megatrain
