// A persistent pool of threads for loops over long arrays.
//
// One call of run() is one loop over [0, count), cut into chunks. The threads, with the calling one, take them from an atomic
// counter, so that a thread that the system delays costs a chunk and not a fixed share. For results that don't depend on which
// thread took which chunk, a job must compute each element alone, or each block, of which `grain` must then be a multiple.
#pragma once

#include <cfenv>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <unistd.h>

namespace megatrain {

// Works on the elements [begin, end) of the job. It mustn't throw, nor call run() of the same pool.
using RangeFunction = void (*)(const void* job, int64_t begin, int64_t end);

class ThreadPool {
 public:
  // `threads` counts the thread that calls run(), so threads - 1 are started.
  explicit ThreadPool(int threads) : owner_pid_(getpid()) {
    // Workers start with all signals blocked: handlers (Python's, the launcher's) belong to the main thread.
    sigset_t all_signals;
    sigset_t previous;
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous);
    try {
      for (int index = 1; index < threads; ++index) {
        workers_.emplace_back([this] { work(); });
      }
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &previous, nullptr);
      stop();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }

  // Not for a forked child, which would wait for ever for threads that it doesn't have: see megatrain_destroy().
  ~ThreadPool() { stop(); }

  // False in a forked child: the threads stayed with the parent, and a mutex may have been copied while held.
  bool owned_by_this_process() const { return getpid() == owner_pid_; }

  // Runs `function` over [0, count) in chunks of `grain` and returns when all of it is done. Calls from several
  // threads are served one after the other.
  void run(RangeFunction function, const void* job, int64_t count, int64_t grain) {
    if (count <= 0) {
      return;
    }
    if (workers_.empty() || count <= grain || !owned_by_this_process()) {
      function(job, 0, count);
      return;
    }
    std::lock_guard<std::mutex> one_call_at_a_time(call_mutex_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      function_ = function;
      job_ = job;
      count_ = count;
      grain_ = grain;
      // The workers take over the caller's rounding and denormal mode, so that the mode can't differ by chunk.
      std::fegetenv(&caller_environment_);
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
    }
    work_ready_.notify_all();
    take_chunks();
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;
    workers_left_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take_chunks() {
    for (;;) {
      // Relaxed, since mutex_ orders everything else: jobs before their chunks, and results before the end of run().
      const int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
      if (begin >= count_) {
        return;
      }
      function_(job_, begin, count_ - begin < grain_ ? count_ : begin + grain_);
    }
  }

  void work() {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "megatrain-host");
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_ready_.wait(lock, [this] { return stopping_ || open_; });
      if (stopping_) {
        return;
      }
      ++busy_;
      std::fesetenv(&caller_environment_);
      lock.unlock();
      take_chunks();
      lock.lock();
      // No chunk is left: threads still asleep needn't wake for this job, and the caller waits for the busy ones only. This
      // can't close a later job: run() opens none before this thread is counted out below.
      open_ = false;
      if (--busy_ == 0) {
        workers_left_.notify_one();
      }
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_ready_.notify_all();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }

  const pid_t owner_pid_;
  std::vector<std::thread> workers_;

  std::mutex call_mutex_;  // held by the caller for the whole of run()

  // Guarded by mutex_. But take_chunks() reads without it what changes only while no worker is busy: function_ to grain_.
  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable workers_left_;  // the last busy worker has left the job
  RangeFunction function_ = nullptr;
  const void* job_ = nullptr;
  int64_t count_ = 0;
  int64_t grain_ = 1;
  std::fenv_t caller_environment_{};
  int busy_ = 0;
  bool open_ = false;  // idle workers may join the job
  bool stopping_ = false;

  std::atomic<int64_t> next_{0};
};

}  // namespace megatrain
