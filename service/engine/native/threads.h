// Threads: a pool that runs calls, and teams whose threads run each batch together.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "lanes.h"

namespace {

// Whether `is_due` becomes true within a moment that is too short to sleep.
template <class F> INLINE bool comes_soon(F&& is_due) {
  for (int spins = 0; spins < 1000; ++spins) {
    if (is_due()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Runs a function on several threads, including the caller's.
class Pool {
 public:
  explicit Pool(int size) : begins(size) {
    try {
      for (int i = 1; i < size; ++i) threads.emplace_back([this, i] { work(i); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }
  int size() const { return int(threads.size()) + 1; }

  // Call function(i) for i in [0, count), and wait for the ends of the calls. is_optional: threads that have not woken
  // up when the caller's function ends do not call it.
  template <class F> void run(int count, F&& function, bool is_optional = false) {
    if (count > 1) {
      {
        std::lock_guard<std::mutex> guard(mutex);
        call = [](void* f, int i) { (*(std::remove_reference_t<F>*)f)(i); };
        argument = (void*)&function;
        wanted = asleep = count - 1;
        pending = count - 1;
        ++generation;
      }
      for (int i = 1; i < count; ++i) begins[i].notify_one();
    }
    function(0);
    if (count > 1 && is_optional) {
      std::lock_guard<std::mutex> guard(mutex);
      pending -= std::exchange(asleep, 0);
      wanted = 0;
    }
    const auto is_done = [this] { return pending.load(std::memory_order_acquire) == 0; };
    if (count > 1 && !comes_soon(is_done)) {
      std::unique_lock<std::mutex> lock(mutex);
      end.wait(lock, is_done);
    }
  }

 private:
  void stop() {
    {
      std::lock_guard<std::mutex> guard(mutex);
      is_ending = true;
    }
    for (auto& begin : begins) begin.notify_one();
    for (auto& thread : threads) thread.join();
  }

  void work(int index) {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        begins[index].wait(lock, [&] { return is_ending || generation != seen; });
        if (is_ending) return;
        seen = generation;
        if (index > wanted) continue;
        --asleep;
      }
      call(argument, index);
      std::lock_guard<std::mutex> guard(mutex);
      if (--pending == 0) end.notify_one();
    }
  }

  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<std::condition_variable> begins;  // one per thread
  std::condition_variable end;
  void (*call)(void*, int) = nullptr;
  void* argument = nullptr;
  int wanted = 0, asleep = 0;  // threads of the call beside the caller's, and those of them that have not begun
  std::atomic<int> pending{0};
  uint64_t generation = 0;
  bool is_ending = false;
};

// What the threads of a team share.
class Barrier {
 public:
  // is_optional: the first thread also runs batches alone, see Team::meets.
  Barrier(int size, bool is_optional) : is_optional(is_optional), places(size) {}

  const bool is_optional;
  int size() const { return int(places.size()); }
  // Whether the threads of an optional team recently got a CPU each.
  bool is_quick() const { return Clock::now() >= slow_until; }

 private:
  friend class Team;
  struct alignas(64) Place {
    std::atomic<uint32_t> arrivals{0};
  };
  std::vector<Place> places;  // one per thread
  bool is_dismissed = false;  // the first thread writes it before it arrives
  Clock::time_point slow_until{};
};

// A thread's membership of a team, whose threads run each batch together. The first thread leads, the others follow.
class Team {
 public:
  Team() = default;  // of one thread
  Team(Barrier& barrier, int index) : index(index), size(barrier.size()), barrier(&barrier) {
    if (index) return;
    for (auto& place : barrier.places) place.arrivals.store(0, std::memory_order_relaxed);
    barrier.is_dismissed = false;
  }

  bool is_alone() const { return size == 1; }
  // The thread's share of `count` things, as (first, end).
  std::pair<int, int> share(int count) const { return {count * index / size, count * (index + 1) / size}; }

  // Wait for all others. Spins first, because each thread is meant to have a CPU. Then offers the CPU to other threads.
  void wait() {
    if (is_alone()) return;
    arrive();
    if (comes_soon([this] { return have_arrived(arrivals); })) return;
    const auto began = Clock::now();
    while (!have_arrived(arrivals)) std::this_thread::yield();
    waited += Seconds(Clock::now() - began).count();
  }

  // For the first thread, before a batch: wait for the others, and return whether they share it. In an optional team
  // they do not share it if one of them has not yet woken up, or has no CPU.
  bool meets() {
    if (is_held_up()) dismiss();
    if (!is_alone() && barrier->is_optional && !have_arrived(arrivals + 1)) return false;
    wait();
    return true;
  }

  // For the first thread: go on alone.
  void dismiss() {
    if (is_alone()) return;
    if (is_held_up())
      barrier->slow_until = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(TIMES_SLOW * waited));
    barrier->is_dismissed = true;
    arrive();
    size = 1;
  }

  // For the others: whether there is another batch.
  bool follows() {
    wait();
    return !barrier->is_dismissed;
  }

 private:
  // Threads that wait for each other lose more than they win if other programs use their CPUs. If the first thread of
  // an optional team has waited for HELD_UP seconds in a call, beyond its spins, it does the rest of the call alone,
  // and further calls for TIMES_SLOW times the time that it waited. So waiting costs at most 1 / TIMES_SLOW of the
  // time.
  static constexpr double HELD_UP = 0.0005, TIMES_SLOW = 20;

  bool is_held_up() const { return !is_alone() && barrier->is_optional && waited > HELD_UP; }

  void arrive() { barrier->places[index].arrivals.store(++arrivals, std::memory_order_release); }

  bool have_arrived(uint32_t count) const {
    for (int i = 0; i < size; ++i)
      if (i != index && int32_t(barrier->places[i].arrivals.load(std::memory_order_acquire) - count) < 0) return false;
    return true;
  }

  int index = 0, size = 1;
  Barrier* barrier = nullptr;
  uint32_t arrivals = 0;
  double waited = 0;  // seconds
};

}  // namespace
