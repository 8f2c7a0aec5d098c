// Rows of logits over a whole vocabulary, what top-k and top-p leave of them, and the noise of their tokens: the part of
// draws.h that looks at numbers.

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMultiplierA = 0xBF58476D1CE4E5B9u, kMultiplierB = 0x94D049BB133111EBu;
constexpr float kPad = 3e-4f;  // by how much bounds are too high
constexpr double kMargin = 1e-4;  // and by how much a bound that loses must lie below the best score
constexpr double kTie = 1e-11;  // scores this near to each other, relative to their size, are left undecided
constexpr double kResidualTie = 1e-5;  // the same for logarithms of differences
constexpr double kMassTie = 1e-9;  // and masses and probabilities, relative to theirs
constexpr double kSameProbability = 1e-12;  // scores so near may have one probability
constexpr int64_t kUndecided = -1;
constexpr int64_t kBoundsBlock = 256;  // tokens whose bounds are kept as one
constexpr int64_t kChunk = 1 << 15;  // tokens that are gone through at once; sums are over those, whatever the threads
// What a thread takes at least: some milliseconds. A thread may have to wait for a processor that another process uses, and all
// wait for it then: a few rows are done sooner by one.
constexpr int64_t kChunksOfThread = 80, kRowsOfThread = 32;

// A token that a filter looks at; `weight` is exp((value - largest) / temperature).
struct Entry {
  float value;
  int64_t column;
  double weight;
  // The ranking of reference.transforms: by value, then by token.
  bool operator<(const Entry& other) const {
    return value > other.value || (value == other.value && column < other.column);
  }
};

struct NoiseKey {
  uint64_t first, second;
};

struct DrawRow {
  const float* logits;
  int64_t count, first_token;
  NoiseKey key;
  float largest;
  double temperature;
};

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,popcnt")))
#define LANES 16
#include "sampling.h"
#undef LANES
#undef TARGET
}  // namespace avx512

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma,popcnt")))
#define LANES 8
#include "sampling.h"
#undef LANES
#undef TARGET
}  // namespace avx2

// The passes over the vocabulary, of one instruction set.
struct Passes {
  decltype(&avx2::largest_logit) largest_logit;
  decltype(&avx2::first_at_least) first_at_least;
  decltype(&avx2::count_above) count_above;
  decltype(&avx2::collect_between) collect_between;
  decltype(&avx2::collect_some) collect_some;
  decltype(&avx2::mass) mass;
  decltype(&avx2::bounds_of) bounds_of;
};

#define PASSES(set)                                                                                                     \
  {set::largest_logit, set::first_at_least, set::count_above, set::collect_between, set::collect_some, set::mass,         \
   set::bounds_of}
Passes passes_of(const std::string& isa) {
  if (parse(isa) == Isa::kAvx2) return PASSES(avx2);
  return PASSES(avx512);
}
#undef PASSES

// ---- noise, as kernels.reference.noise has it --------------------------------------------------------------------------

uint64_t mixed(uint64_t bits) {
  bits = (bits ^ bits >> 30) * kMultiplierA;
  bits = (bits ^ bits >> 27) * kMultiplierB;
  return bits ^ bits >> 31;
}

uint64_t random_bits(const NoiseKey& key, int64_t token) {
  return mixed(mixed(static_cast<uint64_t>(token) * kGolden + key.first) + key.second) >> 12;
}

double uniform_of(uint64_t bits) { return (static_cast<double>(bits) + 0.5) * 0x1p-52; }

double gumbel_of(uint64_t bits) { return -std::log(-std::log(uniform_of(bits))); }

// ---- rows ------------------------------------------------------------------------------------------------------------

// Rows of logits, and how each is sampled. Lists are as long as the rows.
struct Rows {
  std::vector<const float*> data;
  std::vector<double> temperatures, top_p;
  std::vector<int64_t> top_k;
  int64_t count = 0, size = 0, chunks = 0;
  Passes passes;
  std::vector<float> largest;  // +inf where a row has a NaN or +inf

  Rows(const std::vector<torch::Tensor>& rows, const std::string& isa) : size(rows.size()), passes(passes_of(isa)) {
    for (const torch::Tensor& row : rows) {
      TORCH_CHECK(row.dim() == 1 && row.scalar_type() == torch::kFloat32, "rows must be vectors of float32");
      TORCH_CHECK(row.size(0) > 0 && (row.size(0) == 1 || row.stride(0) == 1), "the logits of a row must lie side by side");
      TORCH_CHECK(data.empty() || row.size(0) == count, "rows must be equally long");
      count = row.size(0);
      data.push_back(row.data_ptr<float>());
    }
    chunks = (count + kChunk - 1) / kChunk;
    find_largest();
  }

  // Calls function(row, begin, end, index) for each chunk of each row, on as many threads as that is worth.
  template <typename Function>
  void for_chunks(const Function& function) const {
    at::parallel_for(0, size * chunks, kChunksOfThread, [&](int64_t first, int64_t last) {
      for (int64_t index = first; index < last; ++index) {
        const int64_t begin = index % chunks * kChunk;
        function(index / chunks, begin, std::min(begin + kChunk, count), index);
      }
    });
  }

  // Calls function(row) for each row, on as many threads as that is worth.
  template <typename Function>
  void for_rows(const Function& function) const {
    at::parallel_for(0, size, kRowsOfThread, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) function(r);
    });
  }

  void find_largest() {
    largest.resize(size);
    at::parallel_for(0, size, kRowsOfThread, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) largest[r] = passes.largest_logit(data[r], count);
    });
  }

  void sample_with(
      const std::vector<double>& temperature, const std::vector<int64_t>& k, const std::vector<double>& p) {
    const size_t n = size;
    TORCH_CHECK(temperature.size() == n && k.size() == n && p.size() == n, "settings do not fit the rows");
    temperatures = temperature, top_k = k, top_p = p;
    for (int64_t& own : top_k)
      if (own >= count) own = 0;
  }

  // Whether the arithmetic of this file holds for a row.
  bool is_usual(int64_t r) const {
    return std::isfinite(largest[r]) && temperatures[r] >= 1e-4 && temperatures[r] <= 1e6;
  }

  double score(int64_t r, int64_t column) const {
    return (static_cast<double>(data[r][column]) - largest[r]) / temperatures[r];
  }

  // The mass of each row for which `wanted` says so: the sum of exp(score).
  template <typename Wanted>
  std::vector<double> masses(const Wanted& wanted) const {
    std::vector<double> parts(size * chunks), found(size);
    bool is_any = false;
    for (int64_t r = 0; r < size; ++r) is_any |= wanted(r);
    if (!is_any) return found;
    for_chunks([&](int64_t r, int64_t begin, int64_t end, int64_t index) {
      if (is_usual(r) && wanted(r)) parts[index] = passes.mass(data[r] + begin, end - begin, largest[r], temperatures[r]);
    });
    for (size_t index = 0; index < parts.size(); ++index) found[index / chunks] += parts[index];
    return found;
  }
};

// ---- filters -----------------------------------------------------------------------------------------------------------

// What filters leave of a row: all of it, or `entries`, in any order, the last of the ranking among them `last`.
struct Kept {
  bool is_decided = false, is_full = false;
  double mass = 0;  // 0 where it is the whole row's and nobody asked
  std::vector<Entry> entries;
  Entry last{};

  bool holds(const float* logits, int64_t column) const {
    return is_full || !(last < Entry{logits[column], column, 0});
  }
};

// The first k of a row's ranking, in any order; no logit is a NaN.
std::vector<Entry> top_of_row(const float* logits, int64_t count, int64_t k, const Passes& passes) {
  const int64_t room = std::max<int64_t>(3 * k, 1024);
  std::vector<Entry> found;
  found.reserve(k + room);
  int64_t at = std::min(count, k + room);
  for (int64_t i = 0; i < at; ++i) found.push_back({logits[i], i, 0});
  while (true) {
    if (static_cast<int64_t>(found.size()) > k) {
      std::nth_element(found.begin(), found.begin() + (k - 1), found.end());
      found.resize(k);
    }
    if (at >= count) return found;
    // What comes later and is as large as the last of them ranks behind it.
    const float least = std::max_element(found.begin(), found.end())->value;
    at = passes.collect_some(logits, at, count, least, room, found);
  }
}

// Gives the entries from `begin` on their weights; returns the sum.
double weigh(std::vector<Entry>& entries, int64_t begin, float largest, double temperature) {
  double sum = 0;
  for (size_t i = begin; i < entries.size(); ++i)
    sum += entries[i].weight = std::exp((static_cast<double>(entries[i].value) - largest) / temperature);
  return sum;
}

// Of entries whose first `begin` rank before the others and have the mass `left`: how many, best first, it takes for `target`,
// a mass; those come to the front. -1 where that is undecided. same: scores that are no further apart may have one
// probability, and the caller ranks those by token alone.
int64_t cut_at(std::vector<Entry>& entries, int64_t begin, double left, double target, double tie, double same) {
  const auto first = entries.begin();
  int64_t end = entries.size();
  while (end - begin > 32) {  // what comes before begin does not suffice, and what comes before end does
    const int64_t middle = (begin + end) / 2;
    std::nth_element(first + begin, first + middle, first + end);
    double more = 0;
    for (int64_t i = begin; i < middle; ++i) more += entries[i].weight;
    if (std::abs(left + more - target) <= tie) return kUndecided;
    if (left + more < target) {
      left += more, begin = middle;
    } else {
      end = middle;
    }
  }
  std::sort(first + begin, first + end);
  int64_t cut = begin;
  for (; cut < end && left < target; ++cut) {
    if (std::abs(left - target) <= tie) return kUndecided;
    left += entries[cut].weight;
  }
  if (!(left - target > tie)) return kUndecided;
  if (cut < static_cast<int64_t>(entries.size())) {
    const float value = entries[cut - 1].value, next = std::min_element(first + cut, entries.end())->value;
    if (value != next && static_cast<double>(value) - next <= same) return kUndecided;
  }
  return cut;
}

// The entries that hold what top-p keeps of a whole row, whose mass is given; none where it is undecided.
std::vector<Entry> nucleus_of_row(const Rows& rows, int64_t r, double mass) {
  const double temperature = rows.temperatures[r], top_p = rows.top_p[r];
  const double target = top_p * mass, tie = kMassTie * mass, same = kSameProbability * temperature;
  const double least = (1.0 - top_p) / (2.0 * rows.count);  // see transforms.nucleus
  std::vector<Entry> found;
  double before = 0;
  float high = INFINITY;
  for (double share = 1e-3;; share /= 8) {  // of the mass; tokens of a larger one are found
    share = std::max(share, least);
    const float low = static_cast<float>(rows.largest[r] + temperature * std::log(share * mass));
    const int64_t begin = found.size();
    rows.passes.collect_between(rows.data[r], rows.count, low, high, found);
    const double more = weigh(found, begin, rows.largest[r], temperature);
    if (before + more > target + tie) {
      if (begin > 0 && target - before <= tie) return {};
      const int64_t cut = cut_at(found, begin, before, target, tie, same);
      if (cut < 0) return {};
      const bool is_all = cut == static_cast<int64_t>(found.size());
      found.resize(cut);
      const float last = std::max_element(found.begin(), found.end())->value;
      if (is_all && static_cast<double>(last) - low <= same) return {};  // of the next one nothing is known
      return found;
    }
    if (share <= least) return {};
    before += more, high = low;
  }
}

// What is kept of a row. mass: of the whole row, where top-p needs it, or 0.
Kept filtered_row(const Rows& rows, int64_t r, double mass) {
  Kept kept;
  const int64_t k = rows.top_k[r];
  if (!rows.is_usual(r)) return kept;
  if (k <= 0 && rows.top_p[r] >= 1.0) {
    kept.is_decided = kept.is_full = true;
    kept.mass = mass;
    return kept;
  }
  if (k > 0) {
    kept.entries = top_of_row(rows.data[r], rows.count, k, rows.passes);
    const double total = weigh(kept.entries, 0, rows.largest[r], rows.temperatures[r]);
    if (rows.top_p[r] < 1.0) {
      const double same = kSameProbability * rows.temperatures[r];
      kept.entries.resize(
          std::max<int64_t>(0, cut_at(kept.entries, 0, 0, rows.top_p[r] * total, kMassTie * total, same)));
    }
  } else {
    kept.entries = nucleus_of_row(rows, r, mass);
  }
  if (kept.entries.empty()) return kept;
  kept.is_decided = true;
  kept.last = *std::max_element(kept.entries.begin(), kept.entries.end());
  for (const Entry& entry : kept.entries) kept.mass += entry.weight;
  return kept;
}

// What is kept of each row; with the masses of whole rows also where filters do not ask for them.
std::vector<Kept> filtered(const Rows& rows, bool with_masses) {
  const std::vector<double> masses =
      rows.masses([&](int64_t r) { return rows.top_k[r] <= 0 && (with_masses || rows.top_p[r] < 1.0); });
  std::vector<Kept> kept(rows.size);
  rows.for_rows([&](int64_t r) { kept[r] = filtered_row(rows, r, masses[r]); });
  return kept;
}
