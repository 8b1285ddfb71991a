// A persistent pool of threads for loops over long arrays.
//
// One call of run() is one loop over [0, count), cut into chunks. The threads, with the calling one, take them from an atomic
// counter, so that a thread that the system delays costs a chunk and not a fixed share. Which thread works on which chunk
// never enters the arithmetic: each element, or block of elements, is computed alone.
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

// Works on the elements [begin, end) of the job.
using RangeFunction = void (*)(const void* job, int64_t begin, int64_t end);

class ThreadPool {
 public:
  // `threads` counts the calling thread, so threads - 1 are started.
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
      // No chunk is left: threads still asleep needn't wake for this job, and the caller waits for the busy ones only.
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

  // Guarded by mutex_. function_, job_, count_ and grain_ change only while no worker is busy.
  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable workers_left_;
  RangeFunction function_ = nullptr;
  const void* job_ = nullptr;
  int64_t count_ = 0;
  int64_t grain_ = 1;
  std::fenv_t caller_environment_{};
  int busy_ = 0;
  bool open_ = false;
  bool stopping_ = false;

  std::atomic<int64_t> next_{0};
};

}  // namespace megatrain
