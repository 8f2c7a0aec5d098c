// What choosing a token takes from rows of logits: the passes over the vocabulary. Included inside a namespace, like rows.h.
// Sums and bounds here may differ between instruction sets in their last bits; draws.h decides nothing that those could turn.

constexpr int kDoubles = LANES / 2;

#if LANES == 16

using ints = __m512i;  // 8 of 64 bits
using doubles = __m512d;
TARGET inline ints splat(uint64_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); }
TARGET inline ints add(ints a, ints b) { return _mm512_add_epi64(a, b); }
TARGET inline ints times(ints a, ints b) { return _mm512_mullo_epi64(a, b); }
template <int kCount>
TARGET inline ints folded(ints a) {
  return _mm512_xor_si512(a, _mm512_srli_epi64(a, kCount));
}
// Offsets of two vectors of ints whose upper halves, brought together by `upper`, are in the order of the tokens.
TARGET inline ints evens() { return _mm512_set_epi64(13, 12, 9, 8, 5, 4, 1, 0); }
TARGET inline ints odds() { return _mm512_set_epi64(15, 14, 11, 10, 7, 6, 3, 2); }
TARGET inline ints upper(ints a, ints b) {
  return _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0xDD));
}
// 31 bits of what the upper 32 bits lack to their largest value, as a number between 0 and 2^31.
TARGET inline vec rest(ints a) {
  return _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_xor_si512(a, _mm512_set1_epi32(-1)), 1));
}
TARGET inline void split(vec x, vec& exponent, vec& mantissa) {
  const ints bits = _mm512_castps_si512(x);
  exponent = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(127)));
  const ints low = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff));
  mantissa = _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_set1_epi32(0x3f800000)));
}
TARGET inline float largest_of(vec v) { return _mm512_reduce_max_ps(v); }
TARGET inline uint32_t above(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
TARGET inline uint32_t at_least(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
TARGET inline uint32_t not_below(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
TARGET inline doubles widen_low(vec v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
TARGET inline doubles widen_high(vec v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
TARGET inline doubles set(double x) { return _mm512_set1_pd(x); }
TARGET inline doubles add(doubles a, doubles b) { return _mm512_add_pd(a, b); }
TARGET inline doubles sub(doubles a, doubles b) { return _mm512_sub_pd(a, b); }
TARGET inline doubles mul(doubles a, doubles b) { return _mm512_mul_pd(a, b); }
TARGET inline doubles fma(doubles a, doubles b, doubles c) { return _mm512_fmadd_pd(a, b, c); }
TARGET inline doubles max(doubles a, doubles b) { return _mm512_max_pd(a, b); }
TARGET inline doubles round_to_int(doubles a) {
  return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TARGET inline doubles times_power_of_two(doubles v, doubles n) { return _mm512_scalef_pd(v, n); }
TARGET inline double sum(doubles v) { return _mm512_reduce_add_pd(v); }

#elif LANES == 8

using ints = __m256i;  // 4 of 64 bits
using doubles = __m256d;
TARGET inline ints splat(uint64_t x) { return _mm256_set1_epi64x(static_cast<int64_t>(x)); }
TARGET inline ints add(ints a, ints b) { return _mm256_add_epi64(a, b); }
TARGET inline ints times(ints a, ints b) {
  const ints crossed = _mm256_mullo_epi32(a, _mm256_shuffle_epi32(b, 0xB1));
  const ints both = _mm256_add_epi32(crossed, _mm256_srli_epi64(crossed, 32));
  return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(both, 32));
}
template <int kCount>
TARGET inline ints folded(ints a) {
  return _mm256_xor_si256(a, _mm256_srli_epi64(a, kCount));
}
TARGET inline ints evens() { return _mm256_set_epi64x(5, 4, 1, 0); }
TARGET inline ints odds() { return _mm256_set_epi64x(7, 6, 3, 2); }
TARGET inline ints upper(ints a, ints b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0xDD));
}
TARGET inline vec rest(ints a) {
  return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_xor_si256(a, _mm256_set1_epi32(-1)), 1));
}
TARGET inline void split(vec x, vec& exponent, vec& mantissa) {
  const ints bits = _mm256_castps_si256(x);
  exponent = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
  const ints low = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff));
  mantissa = _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_set1_epi32(0x3f800000)));
}
TARGET inline float largest_of(vec v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
TARGET inline uint32_t above(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
TARGET inline uint32_t at_least(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
TARGET inline uint32_t not_below(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ)); }
TARGET inline doubles widen_low(vec v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
TARGET inline doubles widen_high(vec v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
TARGET inline doubles set(double x) { return _mm256_set1_pd(x); }
TARGET inline doubles add(doubles a, doubles b) { return _mm256_add_pd(a, b); }
TARGET inline doubles sub(doubles a, doubles b) { return _mm256_sub_pd(a, b); }
TARGET inline doubles mul(doubles a, doubles b) { return _mm256_mul_pd(a, b); }
TARGET inline doubles fma(doubles a, doubles b, doubles c) { return _mm256_fmadd_pd(a, b, c); }
TARGET inline doubles max(doubles a, doubles b) { return _mm256_max_pd(a, b); }
TARGET inline doubles round_to_int(doubles a) {
  return _mm256_round_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// n between -1022 and 1023.
TARGET inline doubles times_power_of_two(doubles v, doubles n) {
  const ints exponent = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n)), _mm256_set1_epi64x(1023));
  return _mm256_mul_pd(v, _mm256_castsi256_pd(_mm256_slli_epi64(exponent, 52)));
}
TARGET inline double sum(doubles v) {
  const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}

#endif

// The last logits of a row that fill no vector, with -inf behind them.
TARGET inline vec tail(const float* logits, int64_t count) {
  float part[LANES];
  for (int64_t i = 0; i < LANES; ++i) part[i] = i < count ? logits[i] : -INFINITY;
  return load(part);
}

TARGET inline vec logits_at(const float* logits, int64_t i, int64_t count) {
  return i + LANES <= count ? load(logits + i) : tail(logits + i, count - i);
}

// The largest of some logits; +inf where one is +inf or no number.
TARGET float largest_logit(const float* logits, int64_t count) {
  vec most[4] = {set(-INFINITY), set(-INFINITY), set(-INFINITY), set(-INFINITY)};
  uint32_t wrong = 0;
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (int part = 0; part < 4; ++part) {
      const vec v = load(logits + i + part * LANES);
      wrong |= not_below(v, set(INFINITY));
      most[part] = max(v, most[part]);
    }
  for (; i < count; i += LANES) {
    const vec v = logits_at(logits, i, count);
    wrong |= not_below(v, set(INFINITY));
    most[0] = max(v, most[0]);
  }
  return wrong ? INFINITY : largest_of(max(max(most[0], most[1]), max(most[2], most[3])));
}

// The first of the logits that is at least `value`, or count.
TARGET int64_t first_at_least(const float* logits, int64_t count, float value) {
  for (int64_t i = 0; i < count; i += LANES) {
    const uint32_t found = at_least(logits_at(logits, i, count), set(value));
    if (found) return i + __builtin_ctz(found);
  }
  return count;
}

TARGET int64_t count_above(const float* logits, int64_t count, float value) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += LANES)
    found += __builtin_popcount(above(logits_at(logits, i, count), set(value)));
  return found;
}

// Appends to `found` what is above `low`, but not above `high`.
TARGET void collect_between(const float* logits, int64_t count, float low, float high, std::vector<Entry>& found) {
  for (int64_t i = 0; i < count; i += LANES) {
    const vec v = logits_at(logits, i, count);
    for (uint32_t bits = above(v, set(low)) & ~above(v, set(high)); bits; bits &= bits - 1) {
      const int64_t column = i + __builtin_ctz(bits);
      found.push_back({logits[column], column, 0});
    }
  }
}

// From `begin` on, appends to `found` what is above `value`, until it holds `room` more or the row ends. Returns where it
// stopped.
TARGET int64_t collect_some(
    const float* logits, int64_t begin, int64_t end, float value, size_t room, std::vector<Entry>& found) {
  int64_t i = begin;
  const size_t full = found.size() + room;
  for (; i < end && found.size() + LANES <= full; i += LANES) {
    uint32_t bits = above(logits_at(logits, i, end), set(value));
    for (; bits; bits &= bits - 1) {
      const int64_t column = i + __builtin_ctz(bits);
      found.push_back({logits[column], column, 0});
    }
  }
  return i < end ? i : end;
}

// exp(x) within 1e-12 of it, x between -700 and 0.
TARGET inline doubles exp(doubles x) {
  const doubles n = round_to_int(mul(x, set(1.4426950408889634)));
  doubles r = fma(n, set(-0.6931471805599453), x);
  doubles p = set(1.0 / 3628800);
  p = fma(p, r, set(1.0 / 362880));
  p = fma(p, r, set(1.0 / 40320));
  p = fma(p, r, set(1.0 / 5040));
  p = fma(p, r, set(1.0 / 720));
  p = fma(p, r, set(1.0 / 120));
  p = fma(p, r, set(1.0 / 24));
  p = fma(p, r, set(1.0 / 6));
  p = fma(p, r, set(0.5));
  p = fma(p, r, set(1.0));
  p = fma(p, r, set(1.0));
  return times_power_of_two(p, n);
}

// The sum of exp((logit - largest) / temperature), within 1e-11 of it and 1e-25 a token.
TARGET double mass(const float* logits, int64_t count, float largest, double temperature) {
  const doubles top = set(static_cast<double>(largest)), scale = set(1.0 / temperature);
  const vec light = set(largest - static_cast<float>(60.0 * temperature));
  doubles low = set(0.0), high = set(0.0);
  for (int64_t i = 0; i < count; i += LANES) {
    const vec v = logits_at(logits, i, count);
    if (!at_least(v, light)) continue;
    low = add(low, exp(max(mul(sub(widen_low(v), top), scale), set(-700.0))));
    high = add(high, exp(max(mul(sub(widen_high(v), top), scale), set(-700.0))));
  }
  return sum(add(low, high));
}

TARGET inline ints mixed(ints bits) {
  bits = times(folded<30>(bits), splat(kMultiplierA));
  return times(folded<27>(bits), splat(kMultiplierB));  // less the last folding
}

// For each token, a bound of (logit - largest) / temperature + its Gumbel noise, from above and seldom loose.
//
// With w = 1 - u, -log(u) >= w + w^2 / 2 + w^3 / 3, so the noise is at most -log of that. w is taken from 31 of its bits,
// rounded down; the logarithm is within 1.1e-4 in base 2; kPad covers that and the rounding of float32.
TARGET inline vec bound_at(vec logits, ints first, ints second, const NoiseKey& key, vec largest, vec scale) {
  const ints add_b = splat(key.second);
  first = mixed(add(folded<31>(mixed(add(first, splat(key.first)))), add_b));
  second = mixed(add(folded<31>(mixed(add(second, splat(key.first)))), add_b));
  const vec w = mul(rest(upper(first, second)), set(0x1p-31f));
  const vec negative_log = mul(w, fma(w, fma(w, set(1.f / 3.f), set(0.5f)), set(1.f)));
  vec exponent, x;
  split(negative_log, exponent, x);
  x = sub(x, set(1.f));
  vec p = set(-0.08001087605953217f);
  p = fma(p, x, set(0.31546759605407715f));
  p = fma(p, x, set(-0.6729341745376587f));
  p = fma(p, x, set(1.4373021125793457f));
  p = fma(p, x, set(0.00010018903412856162f));
  const vec noise = fma(add(exponent, p), set(-0.69314718f), set(kPad));
  return fma(sub(logits, largest), scale, noise);
}

// The bounds of a row's columns begin to end - 1: their largest, and where `bounds` is given, each of them.
TARGET float bounds_of(const DrawRow& row, int64_t begin, int64_t end, float* bounds) {
  const ints golden = splat(kGolden);
  ints first = times(add(evens(), splat(row.first_token + begin)), golden);
  ints second = times(add(odds(), splat(row.first_token + begin)), golden);
  const ints step = splat(LANES * kGolden);
  // A little towards 0: rounding must not lower a bound.
  const vec largest = set(row.largest), scale = set(static_cast<float>(1.0 / row.temperature) * (1.f - 1e-6f));
  vec most = set(-INFINITY);
  for (int64_t i = begin; i < end; i += LANES) {
    const vec bound = bound_at(logits_at(row.logits, i, end), first, second, row.key, largest, scale);
    most = max(bound, most);
    if (bounds) store(bounds + (i - begin), bound);
    first = add(first, step);
    second = add(second, step);
  }
  return largest_of(most);
}
