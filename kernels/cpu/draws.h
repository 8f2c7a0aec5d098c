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
constexpr int64_t kUndecided = -1;
constexpr int64_t kBoundsBlock = 256;  // tokens whose bounds are kept as one
constexpr int64_t kChunk = 1 << 15;  // tokens that a thread takes at once; sums are over those, whatever the threads

struct Entry {
  float value;
  int64_t column;
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
  decltype(&avx2::collect_above) collect_above;
  decltype(&avx2::collect_some) collect_some;
  decltype(&avx2::mass) mass;
  decltype(&avx2::bounds_of) bounds_of;
};

#define PASSES(set)                                                                                                     \
  {set::largest_logit, set::first_at_least, set::count_above, set::collect_above, set::collect_some, set::mass,         \
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

double uniform(const NoiseKey& key, int64_t token) {
  const uint64_t bits = mixed(mixed(static_cast<uint64_t>(token) * kGolden + key.first) + key.second);
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

double gumbel(const NoiseKey& key, int64_t token) { return -std::log(-std::log(uniform(key, token))); }

// ---- rows ------------------------------------------------------------------------------------------------------------

// [n, V] float32, tokens of a row side by side.
struct Logits {
  const float* data;
  int64_t rows, count, stride;
  explicit Logits(const torch::Tensor& logits)
      : data(logits.data_ptr<float>()), rows(logits.size(0)), count(logits.size(1)), stride(logits.stride(0)) {
    TORCH_CHECK(logits.dim() == 2 && count > 0, "logits must be rows of tokens");
    TORCH_CHECK(count == 1 || logits.stride(1) == 1, "the logits of a row must lie side by side");
  }
  const float* row(int64_t r) const { return data + r * stride; }
  int64_t chunks() const { return (count + kChunk - 1) / kChunk; }
};

template <typename T>
const T* column_of(const torch::Tensor& values, int64_t size) {
  TORCH_CHECK(values.is_contiguous() && values.numel() == size, "a setting does not fit the rows");
  return values.data_ptr<T>();
}

NoiseKey key_of(const int64_t* keys, int64_t r) {
  return {static_cast<uint64_t>(keys[2 * r]), static_cast<uint64_t>(keys[2 * r + 1])};
}

// Calls function(row, begin, end, index) for each chunk of each row, on all threads.
template <typename Function>
void for_chunks(const Logits& logits, const Function& function) {
  const int64_t chunks = logits.chunks();
  at::parallel_for(0, logits.rows * chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
      const int64_t begin = index % chunks * kChunk;
      function(index / chunks, begin, std::min(begin + kChunk, logits.count), index);
    }
  });
}

// The largest logit of each row; not finite where the row holds no distribution.
std::vector<float> largest_of_rows(const Logits& logits, const Passes& passes) {
  std::vector<float> parts(logits.rows * logits.chunks()), largest(logits.rows, -INFINITY);
  for_chunks(logits, [&](int64_t r, int64_t begin, int64_t end, int64_t index) {
    parts[index] = passes.largest_logit(logits.row(r) + begin, end - begin);
  });
  for (size_t index = 0; index < parts.size(); ++index) {
    float& most = largest[index / logits.chunks()];
    most = std::max(most, parts[index]);
  }
  return largest;
}

// Where the arithmetic of this file holds.
bool is_usual(float largest, double temperature) {
  return std::isfinite(largest) && temperature >= 1e-4 && temperature <= 1e6;
}

std::vector<double> masses_of_rows(
    const Logits& logits, const std::vector<float>& largest, const double* temperatures, const Passes& passes) {
  std::vector<double> parts(logits.rows * logits.chunks()), masses(logits.rows);
  for_chunks(logits, [&](int64_t r, int64_t begin, int64_t end, int64_t index) {
    if (is_usual(largest[r], temperatures[r]))
      parts[index] = passes.mass(logits.row(r) + begin, end - begin, largest[r], temperatures[r]);
  });
  for (size_t index = 0; index < parts.size(); ++index) masses[index / logits.chunks()] += parts[index];
  return masses;
}

// ---- drawing ---------------------------------------------------------------------------------------------------------

// What q takes from a row: weights in terms of exp((logit - largest) / temperature).
struct Taken {
  int64_t column;
  double weight;
};

// The best of the tokens that were looked at.
struct Race {
  double best = -INFINITY, second = -INFINITY;
  int64_t column = kUndecided;
  bool is_unclear = false;
  void enter(int64_t other, double score) {
    if (score > best) {
      second = best, best = score, column = other;
    } else if (score > second) {
      second = score;
    }
  }
  int64_t winner(double tie) const {
    return is_unclear || tie > kMargin / 2 || !(best - second > tie) ? kUndecided : column;
  }
};

// The column that a row draws, less what `taken` takes from it. tops: the largest bound of each block; used up.
// size_of_scores: how large the caller's scores are, whose rounding counts; here they are taken from the largest.
int64_t finish_draw(
    const DrawRow& row, float* tops, const std::vector<Taken>& taken, double size_of_scores, const Passes& passes) {
  const int64_t blocks = (row.count + kBoundsBlock - 1) / kBoundsBlock;
  float bounds[kBoundsBlock + 16];
  Race race;
  while (true) {
    const int64_t block = std::max_element(tops, tops + blocks) - tops;
    if (tops[block] == -INFINITY || tops[block] < static_cast<float>(race.best - kMargin)) break;
    tops[block] = -INFINITY;
    const int64_t begin = block * kBoundsBlock, end = std::min(begin + kBoundsBlock, row.count);
    passes.bounds_of(row, begin, end, bounds);
    for (int64_t i = begin; i < end; ++i) {
      if (bounds[i - begin] == -INFINITY || bounds[i - begin] < static_cast<float>(race.best - kMargin)) continue;
      double score = (static_cast<double>(row.logits[i]) - row.largest) / row.temperature;
      for (const Taken& part : taken)
        if (part.column == i) {
          const double weight = std::exp(score), left = weight - part.weight;
          race.is_unclear |= std::abs(left) <= 1e-6 * weight;
          score = left > 0 ? std::log(left) : -INFINITY;
        }
      race.enter(i, score + gumbel(row.key, row.first_token + i));
    }
  }
  return race.winner(taken.empty() ? kTie * (50 + size_of_scores) : kResidualTie);
}

// Draws from rows; where `taken` is given, less what it takes from each. Rows that are not wanted stay undecided.
torch::Tensor draw_rows(
    const Logits& logits, const std::vector<float>& largest, const double* temperatures, const int64_t* keys,
    int64_t first_token, const std::vector<bool>& wanted, const std::vector<std::vector<Taken>>& taken,
    const Passes& passes) {
  auto out = torch::full({logits.rows}, kUndecided, torch::kInt64);
  int64_t* columns = out.data_ptr<int64_t>();
  const int64_t blocks = (logits.count + kBoundsBlock - 1) / kBoundsBlock;
  std::vector<float> tops(logits.rows * blocks);
  const auto row_of = [&](int64_t r) {
    return DrawRow{logits.row(r), logits.count, first_token, key_of(keys, r), largest[r], temperatures[r]};
  };
  for_chunks(logits, [&](int64_t r, int64_t begin, int64_t end, int64_t) {
    if (!wanted[r]) return;
    const DrawRow row = row_of(r);
    for (int64_t from = begin; from < end; from += kBoundsBlock)
      tops[r * blocks + from / kBoundsBlock] =
          passes.bounds_of(row, from, std::min(from + kBoundsBlock, end), nullptr);
  });
  at::parallel_for(0, logits.rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      if (wanted[r])
        columns[r] = finish_draw(
            row_of(r), tops.data() + r * blocks, taken[r], std::abs(largest[r]) / temperatures[r], passes);
  });
  return out;
}

// logits [n, V], temperatures [n] float64, keys [n, 2] -> [n] int64 columns; column i stands for token first_token + i.
torch::Tensor draw_full(
    const torch::Tensor& all_logits, const torch::Tensor& temperatures, const torch::Tensor& keys, int64_t first_token,
    const std::string& isa) {
  const Logits logits(all_logits);
  const Passes passes = passes_of(isa);
  const double* temperature = column_of<double>(temperatures, logits.rows);
  const std::vector<float> largest = largest_of_rows(logits, passes);
  std::vector<bool> wanted(logits.rows);
  for (int64_t r = 0; r < logits.rows; ++r) wanted[r] = is_usual(largest[r], temperature[r]);
  const std::vector<std::vector<Taken>> nothing(logits.rows);
  return draw_rows(
      logits, largest, temperature, column_of<int64_t>(keys, 2 * logits.rows), first_token, wanted, nothing, passes);
}

// token_ids [n, s], scores [n, s] float64, keys [n, 2] -> [n] int64: the tokens that supports draw. For narrow ones.
torch::Tensor draw_narrow(const torch::Tensor& token_ids, const torch::Tensor& scores, const torch::Tensor& keys) {
  const int64_t n = scores.size(0), size = scores.size(1);
  const int64_t* ids = column_of<int64_t>(token_ids, n * size);
  const double* values = column_of<double>(scores, n * size);
  const int64_t* key = column_of<int64_t>(keys, 2 * n);
  auto out = torch::empty({n}, torch::kInt64);
  int64_t* to = out.data_ptr<int64_t>();
  for (int64_t r = 0; r < n; ++r) {
    Race race;
    for (int64_t i = 0; i < size; ++i) {
      const double score = values[r * size + i];
      if (score + 36.75 < race.best) continue;  // no noise is larger
      if (!std::isfinite(score)) race.is_unclear |= score != -INFINITY;
      race.enter(ids[r * size + i], score + gumbel(key_of(key, r), ids[r * size + i]));
    }
    to[r] = race.winner(kTie * (50 + std::abs(race.best)));
  }
  return out;
}

// [n, V] -> [n] int64: the first of the largest logits of each row, undecided where it holds no distribution.
torch::Tensor argmax(const torch::Tensor& all_logits, const std::string& isa) {
  const Logits logits(all_logits);
  const Passes passes = passes_of(isa);
  const std::vector<float> largest = largest_of_rows(logits, passes);
  auto out = torch::empty({logits.rows}, torch::kInt64);
  int64_t* columns = out.data_ptr<int64_t>();
  at::parallel_for(0, logits.rows, 2, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      columns[r] = std::isfinite(largest[r]) ? passes.first_at_least(logits.row(r), logits.count, largest[r]) : kUndecided;
  });
  return out;
}

// ---- filters -----------------------------------------------------------------------------------------------------------

// The first k of a row's ranking, in any order; no logit is a NaN.
std::vector<Entry> top_of_row(const float* logits, int64_t count, int64_t k, const Passes& passes) {
  const int64_t room = std::max<int64_t>(3 * k, 1024);
  std::vector<Entry> found;
  found.reserve(k + room);
  int64_t at = std::min(count, k + room);
  for (int64_t i = 0; i < at; ++i) found.push_back({logits[i], i});
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

void put_columns(std::vector<Entry>& found, int64_t* to) {
  std::sort(found.begin(), found.end(), [](const Entry& a, const Entry& b) { return a.column < b.column; });
  for (const Entry& entry : found) *to++ = entry.column;
}

// [n, V] without NaNs -> [n, k] int64: columns of the first k of each row's ranking, ascending. k below V.
torch::Tensor top_columns(const torch::Tensor& all_logits, int64_t k, const std::string& isa) {
  const Logits logits(all_logits);
  const Passes passes = passes_of(isa);
  TORCH_CHECK(0 < k && k < logits.count, "k must be below the number of columns");
  auto out = torch::empty({logits.rows, k}, torch::kInt64);
  int64_t* columns = out.data_ptr<int64_t>();
  at::parallel_for(0, logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::vector<Entry> found = top_of_row(logits.row(r), logits.count, k, passes);
      put_columns(found, columns + r * k);
    }
  });
  return out;
}

// What top-p keeps of a row, best first; nothing where it is undecided.
std::vector<Entry> nucleus_of_row(
    const float* logits, int64_t count, float largest, double temperature, double mass, double top_p,
    const Passes& passes) {
  std::vector<Entry> found;
  const double least = (1.0 - top_p) / (2.0 * count);  // see transforms.nucleus
  for (double share = 1e-3;; share /= 16) {
    share = std::max(share, least);
    const double lowest = largest + temperature * std::log(share * mass);
    found.clear();
    passes.collect_above(logits, 0, count, static_cast<float>(lowest), found);
    std::sort(found.begin(), found.end());
    double before = 0;
    for (size_t kept = 0; kept < found.size(); ++kept) {
      if (std::abs(before - top_p) <= kMassTie) return {};
      if (before > top_p) {
        found.resize(kept);
        return found;
      }
      before += std::exp((static_cast<double>(found[kept].value) - largest) / temperature) / mass;
    }
    if (before > top_p + kMassTie) return found;
    if (share <= least) return {};
  }
}

// The width at which batched.rows handles a row that keeps so many of `count` columns.
int64_t width_of(int64_t kept, int64_t count) {
  int64_t width = 16;
  while (width < kept) width *= 2;
  return std::min(width, count);
}

// logits [n, V], temperatures and top_p [n] float64 -> kept [n], and columns [n, w] int64: what top-p keeps of each row, and
// as transforms.packed_columns does, the first of the others up to the row's width; ascending; flags [n, w] bool say which.
// kept is -1 where the row is undecided, or so many are left that nothing is won.
std::vector<torch::Tensor> nucleus(
    const torch::Tensor& all_logits, const torch::Tensor& temperatures, const torch::Tensor& top_p,
    const std::string& isa) {
  const Logits logits(all_logits);
  const Passes passes = passes_of(isa);
  const double* temperature = column_of<double>(temperatures, logits.rows);
  const double* share = column_of<double>(top_p, logits.rows);
  const std::vector<float> largest = largest_of_rows(logits, passes);
  const std::vector<double> masses = masses_of_rows(logits, largest, temperature, passes);
  std::vector<std::vector<Entry>> rows(logits.rows);
  at::parallel_for(0, logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (!is_usual(largest[r], temperature[r])) continue;
      rows[r] = nucleus_of_row(logits.row(r), logits.count, largest[r], temperature[r], masses[r], share[r], passes);
      std::sort(rows[r].begin(), rows[r].end(), [](const Entry& a, const Entry& b) { return a.column < b.column; });
    }
  });
  int64_t widest = 16;
  for (auto& row : rows) {
    if (width_of(row.size(), logits.count) >= logits.count) row.clear();
    widest = std::max(widest, width_of(row.size(), logits.count));
  }
  widest = std::min(widest, logits.count);
  auto kept = torch::empty({logits.rows}, torch::kInt64);
  auto columns = torch::zeros({logits.rows, widest}, torch::kInt64);
  auto flags = torch::zeros({logits.rows, widest}, torch::kBool);
  for (int64_t r = 0; r < logits.rows; ++r) {
    const int64_t size = rows[r].size(), width = width_of(size, logits.count);
    kept.data_ptr<int64_t>()[r] = size ? size : kUndecided;
    int64_t* to = columns.data_ptr<int64_t>() + r * widest;
    bool* flag = flags.data_ptr<bool>() + r * widest;
    int64_t next = 0, room = width - size, used = 0;
    for (int64_t i = 0; size && i < width; ++i) {
      const bool is_kept = used < size && (room == 0 || rows[r][used].column == next);
      to[i] = is_kept ? rows[r][used].column : next;
      flag[i] = is_kept;
      used += is_kept;
      room -= !is_kept;
      next = to[i] + 1;
    }
  }
  return {kept, columns, flags};
}

// ---- masses and proposals ----------------------------------------------------------------------------------------------

// logits [n, V], temperatures [n] float64, tokens [n] -> log-probabilities of the tokens [n] float64, and how many logits are
// above theirs [n] int64. Each row holds a distribution.
std::vector<torch::Tensor> token_scores(
    const torch::Tensor& all_logits, const torch::Tensor& temperatures, const torch::Tensor& tokens,
    const std::string& isa) {
  const Logits logits(all_logits);
  const Passes passes = passes_of(isa);
  const double* temperature = column_of<double>(temperatures, logits.rows);
  const int64_t* token = column_of<int64_t>(tokens, logits.rows);
  const std::vector<float> largest = largest_of_rows(logits, passes);
  const std::vector<double> masses = masses_of_rows(logits, largest, temperature, passes);
  auto normalisers = torch::empty({logits.rows}, torch::kFloat64);
  auto above = torch::empty({logits.rows}, torch::kInt64);
  at::parallel_for(0, logits.rows, 2, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      normalisers.data_ptr<double>()[r] = largest[r] / temperature[r] + std::log(masses[r]);
      above.data_ptr<int64_t>()[r] = passes.count_above(logits.row(r), logits.count, logits.row(r)[token[r]]);
    }
  });
  return {normalisers, above};
}

// The decision about one proposal in each of n rows, as reference.rejection.decide takes it. logits [n, V]; temperatures [n]
// float64; tokens [n]; draft_ids [n, m], draft_probs [n, m] float64, normalised; keys [n, 2] -> accepted [n]: 1, 0, or -1
// where it is undecided, and own [n]: the token where it was not accepted, or -1.
std::vector<torch::Tensor> decide(
    const torch::Tensor& all_logits, const torch::Tensor& temperatures, const torch::Tensor& tokens,
    const torch::Tensor& draft_ids, const torch::Tensor& draft_probs, const torch::Tensor& accept_keys,
    const torch::Tensor& residual_keys, const std::string& isa) {
  const Logits logits(all_logits);
  const Passes passes = passes_of(isa);
  const int64_t n = logits.rows, width = draft_ids.size(1);
  const double* temperature = column_of<double>(temperatures, n);
  const int64_t *token = column_of<int64_t>(tokens, n), *ids = column_of<int64_t>(draft_ids, n * width);
  const double* probs = column_of<double>(draft_probs, n * width);
  const int64_t *accept = column_of<int64_t>(accept_keys, 2 * n), *residual = column_of<int64_t>(residual_keys, 2 * n);
  const std::vector<float> largest = largest_of_rows(logits, passes);
  const std::vector<double> masses = masses_of_rows(logits, largest, temperature, passes);
  auto accepted = torch::full({n}, kUndecided, torch::kInt64);
  std::vector<std::vector<Taken>> taken(n);
  std::vector<bool> lost(n);
  for (int64_t r = 0; r < n; ++r) {
    if (!is_usual(largest[r], temperature[r])) continue;
    const auto weight = [&](int64_t i) {
      return std::exp((static_cast<double>(logits.row(r)[i]) - largest[r]) / temperature[r]);
    };
    double q_token = 0, excess = masses[r];
    for (int64_t j = r * width; j < (r + 1) * width; ++j) {
      if (probs[j] == 0) continue;
      if (ids[j] == token[r]) q_token += probs[j];
      taken[r].push_back({ids[j], probs[j] * masses[r]});
      const double own = weight(ids[j]);
      excess += std::max(own - taken[r].back().weight, 0.0) - own;
    }
    const double p_token = weight(token[r]) / masses[r];
    const double asked = uniform(key_of(accept, r), token[r]) * q_token;
    if (std::abs(asked - p_token) <= kMassTie * p_token) continue;
    const bool is_accepted = asked < p_token;
    // A residual as light as that may be below reference.rejection.RESIDUAL_MASS_FLOOR.
    if (!is_accepted && !(excess > 1e-6 * masses[r])) continue;
    accepted.data_ptr<int64_t>()[r] = is_accepted;
    lost[r] = !is_accepted;
  }
  auto own = draw_rows(logits, largest, temperature, residual, 0, lost, taken, passes);
  for (int64_t r = 0; r < n; ++r)
    if (lost[r] && own.data_ptr<int64_t>()[r] < 0) accepted.data_ptr<int64_t>()[r] = kUndecided;
  return {accepted, own};
}

void define_draws(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("draw_full", &draw_full, release());
  m.def("draw_narrow", &draw_narrow, release());
  m.def("argmax", &argmax, release());
  m.def("top_columns", &top_columns, release());
  m.def("nucleus", &nucleus, release());
  m.def("token_scores", &token_scores, release());
  m.def("decide", &decide, release());
}
