// Choosing tokens from rows of logits over a whole vocabulary: Gumbel draws, the decision about a proposal, top-k and top-p.
//
// The vocabulary is gone through with cheap bounds and sums (sampling.h), and the few tokens that are left are compared in
// float64. Whatever comes so near to a tie that the last bits of a sum or a logarithm could turn it is left *undecided*, and
// the caller's own arithmetic decides. So results are those of `kernels.batched` in torch, on every instruction set.

#include "long_rows.h"

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
  bool is_any_full = false;
  for (int64_t r = 0; r < rows.size; ++r) is_any_full |= wanted[r] && kept[r].is_full;
  const auto row_of = [&](int64_t r) {
    const NoiseKey key{keys[2 * r], keys[2 * r + 1]};
    return DrawRow{rows.data[r], rows.count, first_token, key, rows.largest[r], rows.temperatures[r]};
  };
  const auto bound_blocks = [&](int64_t r, int64_t begin, int64_t end, int64_t) {
    if (!wanted[r] || !kept[r].is_full) return;
    const DrawRow row = row_of(r);
    for (int64_t from = begin; from < end; from += kBoundsBlock)
      tops[r * blocks + from / kBoundsBlock] =
          rows.passes.bounds_of(row, from, std::min(from + kBoundsBlock, end), nullptr);
  };
  if (is_any_full) rows.for_chunks(bound_blocks);
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
    TORCH_CHECK(0 <= tokens[r] && tokens[r] < rows.count, "a token is outside the row");
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
