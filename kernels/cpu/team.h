// Threads that go through the phases of a kernel together.

// Memory for a call's intermediate rows, which layers use one after the other: taken from the system anew for each, rows of a
// long prompt would cost a page fault for every 4 KiB of them in every layer.
class Workspace {
 public:
  // Uninitialised elements on a line of the cache, until `reuse`.
  template <typename T>
  T* take(int64_t size) {
    const size_t bytes = (std::max<size_t>(size, 1) * sizeof(T) + 63) / 64 * 64;
    if (next_ == slots_.size()) slots_.emplace_back();
    Slot& slot = slots_[next_++];
    if (slot.bytes < bytes) {
      slot.data.reset();  // what it held is not needed
      slot.data.reset(std::aligned_alloc(64, bytes));
      if (!slot.data) throw std::bad_alloc();
      slot.bytes = bytes;
    }
    return static_cast<T*>(slot.data.get());
  }

  // What was taken is free again.
  void reuse() { next_ = 0; }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  struct Slot {
    std::unique_ptr<void, Free> data;
    size_t bytes = 0;
  };
  std::vector<Slot> slots_;
  size_t next_ = 0;
};

// Where the threads of a team wait for one another. They do not go to sleep: a pass has hundreds of phases, and waking a thread
// takes as long as a small one. One that waits for long offers its turn: what it waits for may want the same processor.
class MeetingPoint {
 public:
  // Returns when all `size` have come here and the last of them has done `between`.
  template <typename Work>
  void meet(int64_t size, const Work& between) {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      between();
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int turn = 0; phase_.load(std::memory_order_acquire) == phase; ++turn) {
      if (turn < kPauses) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kPauses = 1000;  // some 50 us
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// One thread of a team.
class Member {
 public:
  Member(MeetingPoint& point, int64_t index, int64_t size) : point_(point), index_(index), size_(size) {}

  // Once all have come here, one does the work; then all go on.
  template <typename Work>
  void once(const Work& work) const {
    point_.meet(size_, work);
  }

  // Once all have come here, the team does work(begin, end) for all parts of [0, count); then all go on.
  template <typename Work>
  void share(int64_t count, const Work& work) const {
    if (count <= 1) return once([&] { count > 0 ? work(0, count) : void(); });
    const int64_t begin = index_ * count / size_, end = (index_ + 1) * count / size_;
    once([] {});
    if (begin < end) work(begin, end);
    once([] {});
  }

 private:
  MeetingPoint& point_;
  int64_t index_, size_;
};

// body(member) in up to `wanted` threads, each of which goes through the same phases. What the body throws ends the process.
template <typename Body>
inline void with_team(int64_t wanted, const Body& body) {
  MeetingPoint point;
  wanted = std::min<int64_t>(wanted, at::get_num_threads());
  if (wanted <= 1 || at::in_parallel_region()) {
    body(Member(point, 0, 1));
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(wanted))
  body(Member(point, omp_get_thread_num(), omp_get_num_threads()));
}

// Threads for work of so many elements: below some thousand, waking one costs more than it saves.
inline int64_t threads_for(int64_t elements) {
  return std::clamp<int64_t>(elements / 16384, 1, at::get_num_threads());
}

// work(begin, end) for parts of [0, count), each of some `size` elements, side by side.
template <typename Work>
inline void share(int64_t count, int64_t size, const Work& work) {
  with_team(std::min(count, threads_for(count * size)), [&](const Member& member) { member.share(count, work); });
}

// Parts for threads that ask: each takes half of an even share of what is left. With fixed shares all would wait for one that
// other work on this machine keeps from running.
class Parts {
 public:
  Parts(int64_t count, int64_t num_threads) : count_(count), num_threads_(num_threads) {}

  bool take(int64_t& begin, int64_t& end) {
    begin = next_.load(std::memory_order_relaxed);
    do {
      if (begin >= count_) return false;
      end = begin + std::max<int64_t>(1, (count_ - begin) / (2 * num_threads_));
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

 private:
  int64_t count_, num_threads_;
  std::atomic<int64_t> next_{0};
};
