// A pool of threads that run one function together and meet at barriers inside it.
//
// A parallel region per matrix costs more than a small matrix takes, so the whole decoder step is one
// region. At a barrier a thread spins for a moment and then gives its core away, so that more threads
// than free cores are slow and not stuck.
//
// Where torch runs on GNU OpenMP, its threads are the pool: two pools would wait for each other's cores,
// since OpenMP's threads spin for a while after their work. Elsewhere the workers are our own and sleep
// between regions.
#pragma once

#include <atomic>
#include <climits>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

class Threads {
 public:
  // Never destroyed: a worker may sleep in it while the process ends.
  static Threads& shared() {
    static Threads* threads = new Threads;
    return *threads;
  }

  // The most threads that run a region.
  int most() const { return count_; }

  // Inside a region: the threads that run it.
  int count() const { return team_.load(std::memory_order_relaxed); }

  // How many threads run a region, the calling one included.
  void resize(int count) {
    std::lock_guard<std::mutex> turn(turn_);
    count_ = count < 1 ? 1 : count;
  }

  // GNU OpenMP's entry points: run a function on so many threads, and how many they are inside.
  typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
  typedef int (*TeamSize)();
  void use(Parallel parallel, TeamSize team_size) {
    std::lock_guard<std::mutex> turn(turn_);
    parallel_ = parallel, team_size_ = team_size;
  }

  // Run `region(thread)` on every thread, `most` of them if there are more; return when all have ended.
  void run(const std::function<void(int)>& region, int most = INT_MAX) {
    std::lock_guard<std::mutex> turn(turn_);
    const int count = count_ < most ? count_.load() : most;
    team_.store(count, std::memory_order_relaxed);
    if (count == 1) return region(0);
    if (parallel_ != nullptr) {
      region_ = &region;
      ticket_.store(0, std::memory_order_relaxed);
      return parallel_(&Threads::enter, this, static_cast<unsigned>(count), 0);
    }
    while (workers_ < count - 1) std::thread(&Threads::work, this, ++workers_).detach();
    running_.store(count - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      region_ = &region;
      active_ = count;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    region(0);
    spin([&] { return running_.load(std::memory_order_acquire) == 0; });
  }

  // Inside a region: wait until all its threads are here.
  void barrier() {
    const int team = count();
    if (team == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      spin([&] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

 private:
  template <class Done>
  static void spin(Done done) {
    for (int tries = 0; !done(); ++tries) {
      if (tries < 4000) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

  // On a thread of OpenMP's, which may be fewer than were asked for.
  static void enter(void* threads) {
    Threads& self = *static_cast<Threads*>(threads);
    self.team_.store(self.team_size_(), std::memory_order_relaxed);
    (*self.region_)(self.ticket_.fetch_add(1, std::memory_order_acq_rel));
  }

  void work(int number) {
    unsigned seen = 0;
    for (;;) {
      const std::function<void(int)>* region = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        seen = generation_.load(std::memory_order_acquire);
        if (number < active_) region = region_;
      }
      if (region == nullptr) continue;
      (*region)(number);
      running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::atomic<int> count_{1};
  int workers_ = 0;
  Parallel parallel_ = nullptr;
  TeamSize team_size_ = nullptr;
  std::atomic<int> team_{1};
  std::atomic<int> ticket_{0};
  int active_ = 1;
  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* region_ = nullptr;
  std::atomic<unsigned> generation_{0};
  std::atomic<int> running_{0};
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> phase_{0};
};

// The share of `items` that is this thread's: a contiguous range.
struct Range {
  long begin, end;
};

static inline Range share(long items, int thread, int threads) {
  return {items * thread / threads, items * (thread + 1) / threads};
}
