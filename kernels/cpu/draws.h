// Choosing tokens from rows of logits over a whole vocabulary: Gumbel draws, the decision about a proposal, top-k and top-p.
//
// The vocabulary is gone through with cheap bounds and sums (sampling.h), and the few tokens that are left are compared in
// float64. Whatever comes so near to a tie that the last bits of a sum or a logarithm could turn it is left *undecided*, and
// the caller's own arithmetic decides. So results are those of `kernels.batched` in torch, on every instruction set.

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMultiplierA = 0xBF58476D1CE4E5B9u, kMultiplierB = 0x94D049BB133111EBu;
constexpr float kPad = 3e-4f;  // by how much bounds are too high
constexpr double kMargin = 1e-4;  // and by how much a bound that loses must lie below the best score
constexpr double kTie = 1e-11;  // scores this near to each other, relative to their size, are left undecided
constexpr double kResidualTie = 1e-5;  // the same for logarithms of differences
constexpr double kMassTie = 1e-9;  // and masses and probabilities, relative to theirs
constexpr double kSameProbability = 1e-12;  // scores so near may have one probability
constexpr int64_t kUndecided = -1;
constexpr int64_t kBoundsBlock = 256;  // tokens whose bounds are kept as one
constexpr int64_t kChunk = 1 << 15;  // tokens that a thread takes at once; sums are over those, whatever the threads

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

  // Calls function(row, begin, end, index) for each chunk of each row, on all threads.
  template <typename Function>
  void for_chunks(const Function& function) const {
    at::parallel_for(0, size * chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t index = first; index < last; ++index) {
        const int64_t begin = index % chunks * kChunk;
        function(index / chunks, begin, std::min(begin + kChunk, count), index);
      }
    });
  }

  // Calls function(row) for each row, on all threads.
  template <typename Function>
  void for_rows(const Function& function) const {
    at::parallel_for(0, size, 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) function(r);
    });
  }

  void find_largest() {
    std::vector<float> parts(size * chunks);
    largest.assign(size, -INFINITY);
    for_chunks([&](int64_t r, int64_t begin, int64_t end, int64_t index) {
      parts[index] = passes.largest_logit(data[r] + begin, end - begin);
    });
    for (size_t index = 0; index < parts.size(); ++index)
      largest[index / chunks] = std::max(largest[index / chunks], parts[index]);
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

// ---- drawing ---------------------------------------------------------------------------------------------------------

// What q takes from a row's weights.
struct Taken {
  int64_t column;
  double weight;
};

// The best of the tokens that were looked at.
struct Race {
  const DrawRow& row;
  const std::vector<Taken>& taken;
  double best = -INFINITY, second = -INFINITY;
  int64_t column = kUndecided;
  bool is_unclear = false;

  // Returns whether the token is the best so far.
  bool enter(int64_t other, uint64_t bits) {
    double score = (static_cast<double>(row.logits[other]) - row.largest) / row.temperature;
    for (const Taken& part : taken)
      if (part.column == other) {
        const double weight = std::exp(score), left = weight - part.weight;
        is_unclear |= std::abs(left) <= 1e-6 * weight;
        score = left > 0 ? std::log(left) : -INFINITY;
      }
    score += gumbel_of(bits);
    if (score <= best) {
      second = std::max(second, score);
      return false;
    }
    second = best, best = score, column = other;
    return true;
  }

  // Scores here are taken from the largest; the caller's may be larger, and so their rounding.
  int64_t winner() const {
    const double tie = taken.empty() ? kTie * (50 + std::abs(row.largest) / row.temperature) : kResidualTie;
    return is_unclear || tie > kMargin / 2 || !(best - second > tie) ? kUndecided : column;
  }
};

// The column that a whole row draws. tops: the largest bound of each of its blocks; used up.
int64_t draw_whole(const DrawRow& row, float* tops, const std::vector<Taken>& taken, const Passes& passes) {
  const int64_t blocks = (row.count + kBoundsBlock - 1) / kBoundsBlock;
  float bounds[kBoundsBlock + 16];
  Race race{row, taken};
  while (true) {
    const int64_t block = std::max_element(tops, tops + blocks) - tops;
    if (tops[block] == -INFINITY || tops[block] < static_cast<float>(race.best - kMargin)) return race.winner();
    tops[block] = -INFINITY;
    const int64_t begin = block * kBoundsBlock, end = std::min(begin + kBoundsBlock, row.count);
    passes.bounds_of(row, begin, end, bounds);
    for (int64_t i = begin; i < end; ++i)
      if (bounds[i - begin] > -INFINITY && bounds[i - begin] >= static_cast<float>(race.best - kMargin))
        race.enter(i, random_bits(row.key, row.first_token + i));
  }
}

// The column that a row draws from the entries.
int64_t draw_kept(const DrawRow& row, const std::vector<Entry>& entries, const std::vector<Taken>& taken) {
  Race race{row, taken};
  double bar = 0;
  for (const Entry& entry : entries) {
    if (entry.weight == 0) continue;
    const uint64_t bits = random_bits(row.key, row.first_token + entry.column);
    // Noise is at most -log(1 - u), since -log(u) >= 1 - u.
    if (entry.weight < bar * (1.0 - uniform_of(bits))) continue;
    if (race.enter(entry.column, bits)) bar = std::exp(race.best - kMargin);
  }
  return race.winner();
}

using Keys = std::vector<uint64_t>;  // two for each row

// What the wanted rows draw; where `taken` is given, less what it takes from each. Others stay undecided.
std::vector<int64_t> draw_rows(
    const Rows& rows, const std::vector<Kept>& kept, const Keys& keys, int64_t first_token,
    const std::vector<char>& wanted, const std::vector<std::vector<Taken>>& taken) {
  TORCH_CHECK(static_cast<int64_t>(keys.size()) == 2 * rows.size, "keys do not fit the rows");
  std::vector<int64_t> columns(rows.size, kUndecided);
  const int64_t blocks = (rows.count + kBoundsBlock - 1) / kBoundsBlock;
  std::vector<float> tops(rows.size * blocks);
  const auto row_of = [&](int64_t r) {
    const NoiseKey key{keys[2 * r], keys[2 * r + 1]};
    return DrawRow{rows.data[r], rows.count, first_token, key, rows.largest[r], rows.temperatures[r]};
  };
  rows.for_chunks([&](int64_t r, int64_t begin, int64_t end, int64_t) {
    if (!wanted[r] || !kept[r].is_full) return;
    const DrawRow row = row_of(r);
    for (int64_t from = begin; from < end; from += kBoundsBlock)
      tops[r * blocks + from / kBoundsBlock] =
          rows.passes.bounds_of(row, from, std::min(from + kBoundsBlock, end), nullptr);
  });
  for (int64_t r = 0; r < rows.size; ++r)
    if (wanted[r])
      columns[r] = kept[r].is_full ? draw_whole(row_of(r), tops.data() + r * blocks, taken[r], rows.passes)
                                   : draw_kept(row_of(r), kept[r].entries, taken[r]);
  return columns;
}

std::vector<int64_t> draw(
    const std::vector<torch::Tensor>& logits, const std::vector<double>& temperatures, const std::vector<int64_t>& top_k,
    const std::vector<double>& top_p, const Keys& keys, int64_t first_token, const std::string& isa) {
  Rows rows(logits, isa);
  rows.sample_with(temperatures, top_k, top_p);
  const std::vector<Kept> kept = filtered(rows, false);
  std::vector<char> wanted;
  for (const Kept& one : kept) wanted.push_back(one.is_decided);
  return draw_rows(rows, kept, keys, first_token, wanted, std::vector<std::vector<Taken>>(rows.size));
}

std::vector<int64_t> argmax(const std::vector<torch::Tensor>& logits, const std::string& isa) {
  const Rows rows(logits, isa);
  std::vector<int64_t> columns(rows.size, kUndecided);
  for (int64_t r = 0; r < rows.size; ++r)
    if (std::isfinite(rows.largest[r])) columns[r] = rows.passes.first_at_least(rows.data[r], rows.count, rows.largest[r]);
  return columns;
}

// ---- columns and masses ------------------------------------------------------------------------------------------------

// The first m of what is kept of each row, ascending, as far as there are so many: [n, m], and how many those are.
std::pair<torch::Tensor, std::vector<int64_t>> top_columns(
    const std::vector<torch::Tensor>& logits, const std::vector<double>& temperatures, const std::vector<int64_t>& top_k,
    const std::vector<double>& top_p, int64_t m, const std::string& isa) {
  Rows rows(logits, isa);
  rows.sample_with(temperatures, top_k, top_p);
  TORCH_CHECK(m > 0, "no columns are wanted");
  m = std::min(m, rows.count);
  std::vector<int64_t> sizes(rows.size, kUndecided);
  std::vector<Kept> kept = filtered(rows, false);
  auto out = torch::zeros({rows.size, m}, torch::kInt64);
  int64_t* columns = out.data_ptr<int64_t>();
  rows.for_rows([&](int64_t r) {
    if (!kept[r].is_decided) return;
    std::vector<Entry>& entries = kept[r].entries;
    if (kept[r].is_full) entries = top_of_row(rows.data[r], rows.count, m, rows.passes);
    if (static_cast<int64_t>(entries.size()) > m) {
      std::nth_element(entries.begin(), entries.begin() + (m - 1), entries.end());
      entries.resize(m);
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.column < b.column; });
    sizes[r] = entries.size();
    for (size_t i = 0; i < entries.size(); ++i) columns[r * m + i] = entries[i].column;
  });
  return {out, sizes};
}

// Of each row: the logarithm of the sum of exp(logit / temperature) over what is kept, how many logits are above the token's,
// and how many are kept; -1 where that is undecided.
std::tuple<std::vector<double>, std::vector<int64_t>, std::vector<int64_t>> normalisers(
    const std::vector<torch::Tensor>& logits, const std::vector<double>& temperatures, const std::vector<int64_t>& top_k,
    const std::vector<double>& top_p, const std::vector<int64_t>& tokens, const std::string& isa) {
  Rows rows(logits, isa);
  rows.sample_with(temperatures, top_k, top_p);
  TORCH_CHECK(static_cast<int64_t>(tokens.size()) == rows.size, "tokens do not fit the rows");
  const std::vector<Kept> kept = filtered(rows, true);
  std::vector<double> found(rows.size);
  std::vector<int64_t> above(rows.size), sizes(rows.size, kUndecided);
  for (int64_t r = 0; r < rows.size; ++r) {
    if (!kept[r].is_decided) continue;
    TORCH_CHECK(0 <= tokens[r] && tokens[r] < rows.count, "a token is outside the row");
    found[r] = rows.largest[r] / rows.temperatures[r] + std::log(kept[r].mass);
    above[r] = rows.passes.count_above(rows.data[r], rows.count, rows.data[r][tokens[r]]);
    sizes[r] = kept[r].is_full ? rows.count : kept[r].entries.size();
  }
  return {found, above, sizes};
}

// The decision about one proposal in each row, as reference.rejection.decide takes it. draft_ids [n, m], draft_probs [n, m]
// float64, normalised -> accepted: 1, 0, or -1 where it is undecided, and own: the token where it was not accepted, or -1.
std::pair<std::vector<int64_t>, std::vector<int64_t>> decide(
    const std::vector<torch::Tensor>& logits, const std::vector<double>& temperatures, const std::vector<int64_t>& top_k,
    const std::vector<double>& top_p, const std::vector<int64_t>& tokens, const torch::Tensor& draft_ids,
    const torch::Tensor& draft_probs, const Keys& accept_keys, const Keys& residual_keys, const std::string& isa) {
  Rows rows(logits, isa);
  rows.sample_with(temperatures, top_k, top_p);
  const int64_t n = rows.size, width = draft_ids.size(1);
  TORCH_CHECK(draft_ids.is_contiguous() && draft_probs.is_contiguous(), "q rows are torn");
  TORCH_CHECK(draft_ids.size(0) == n && draft_probs.sizes() == draft_ids.sizes(), "q rows do not fit");
  TORCH_CHECK(static_cast<int64_t>(tokens.size()) == n && accept_keys.size() == tokens.size() * 2, "tokens do not fit");
  const int64_t* ids = draft_ids.data_ptr<int64_t>();
  const double* probs = draft_probs.data_ptr<double>();
  const std::vector<Kept> kept = filtered(rows, true);
  std::vector<int64_t> accepted(n, kUndecided);
  std::vector<std::vector<Taken>> taken(n);
  std::vector<char> lost(n);
  for (int64_t r = 0; r < n; ++r) {
    if (!kept[r].is_decided) continue;
    const double mass = kept[r].mass;
    const auto weight = [&](int64_t column) {
      return kept[r].holds(rows.data[r], column) ? std::exp(rows.score(r, column)) : 0.0;
    };
    double q_token = 0, excess = mass;
    for (int64_t j = r * width; j < (r + 1) * width; ++j) {
      if (probs[j] == 0) continue;
      TORCH_CHECK(0 <= ids[j] && ids[j] < rows.count, "a token of q is outside the row");
      if (ids[j] == tokens[r]) q_token += probs[j];
      if (const double own = weight(ids[j]); own > 0) {
        taken[r].push_back({ids[j], probs[j] * mass});
        excess += std::max(own - probs[j] * mass, 0.0) - own;
      }
    }
    const double p_token = weight(tokens[r]) / mass;
    const double asked = uniform_of(random_bits({accept_keys[2 * r], accept_keys[2 * r + 1]}, tokens[r])) * q_token;
    if (std::abs(asked - p_token) <= kMassTie * p_token) continue;
    const bool is_accepted = asked < p_token;
    // A residual as light as that may be below reference.rejection.RESIDUAL_MASS_FLOOR.
    if (!is_accepted && !(excess > 1e-6 * mass)) continue;
    accepted[r] = is_accepted;
    lost[r] = !is_accepted;
  }
  std::vector<int64_t> own = draw_rows(rows, kept, residual_keys, 0, lost, taken);
  for (int64_t r = 0; r < n; ++r)
    if (lost[r] && own[r] < 0) accepted[r] = kUndecided;
  return {accepted, own};
}

void define_draws(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("draw", &draw, release());
  m.def("argmax", &argmax, release());
  m.def("top_columns", &top_columns, release());
  m.def("normalisers", &normalisers, release());
  m.def("decide", &decide, release());
}
