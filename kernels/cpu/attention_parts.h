// What attention on AMX tiles is made of, see tile_attention.h. Included in amx.h's namespace after units.h, with TARGET
// defined.

constexpr int64_t kLanes = 16;  // queries of a tile

// Rows and columns of 16 x 16 numbers of 32 bits change places; line i goes to `to` + i * stride.
TARGET inline void transpose(__m512i* m, uint16_t* to, int64_t stride) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    m[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    m[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    m[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    m[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(m[i], m[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(m[i], m[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(m[8 + i], m[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(m[8 + i], m[12 + i], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    _mm512_store_si512(to + i * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
    _mm512_store_si512(to + (8 + i) * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
  }
}

// 2^x within 3e-7 of it, for x up to 0; at 0 it is 1, below -126 its value there: processors are slow at smaller numbers.
// A NaN stays one.
TARGET inline __m512 power_of_two(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.f), x);  // the second operand wins where one is no number
  const __m512 n = avx512::round_to_int(x), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.32647273e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.67151299e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55073358e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40222424e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147004e-1f));
  return avx512::times_power_of_two(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f)), n);
}

TARGET inline bool finite(const uint16_t* values, int64_t count) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  for (int64_t i = 0; i < count; i += 32)
    if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(values + i), exponent), exponent)) return false;
  return true;
}

// Values in pairs of positions, as tiles take them.
TARGET inline void pair_values(const uint16_t* const* rows, int64_t count, int64_t dim, uint16_t* to) {
  const __m512i low = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < count; i += 2) {
    uint16_t* line = to + i / 32 * 32 * dim + i % 32 * 16;
    for (int64_t d = 0; d < dim; d += 32, line += 1024) {
      const __m512i even = _mm512_loadu_si512(rows[i] + d), odd = _mm512_loadu_si512(rows[i + 1] + d);
      _mm512_store_si512(line, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_store_si512(line + 512, _mm512_permutex2var_epi16(even, high, odd));
    }
  }
}

// A tile of 16 positions' keys, and how far apart they lie, in elements.
struct KeyTile {
  const uint16_t* start;
  int64_t stride;
};

// The tile as it lies in the cache, where its keys lie `stride` apart. Else, and where several tiles of lanes meet it, a copy in
// `to`: lines that lie so far apart drive each other out of the first-level cache.
TARGET inline KeyTile key_tile(const uint16_t* const* rows, int64_t stride, bool is_met_often, int64_t dim, uint16_t* to) {
  int64_t even = 1;
  while (even < kTileRows && rows[even] == rows[0] + even * stride) ++even;
  if (even == kTileRows && !is_met_often) return {rows[0], stride};
  for (int64_t i = 0; i < kTileRows; ++i)
    for (int64_t d = 0; d < dim; d += 32) _mm512_store_si512(to + i * dim + d, _mm512_loadu_si512(rows[i] + d));
  return {to, dim};
}

// Scores of two or four tiles of positions with a tile of lanes: [positions][lanes]. Two tiles of keys take turns, so that one
// is loaded while the other is multiplied.
template <bool kFour>
TARGET inline void multiply_keys(const KeyTile* keys, const uint16_t* queries, int64_t dim, float* scores) {
  asm volatile("" : : : "memory");  // GCC's intrinsics claim to read no memory: what was stored is to be there
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32, queries += 1024) {
    _tile_loadd(4, queries, 64);
    _tile_loadd(5, queries + 512, 64);
    _tile_loadd(6, keys[0].start + d, 2 * keys[0].stride);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(7, keys[1].start + d, 2 * keys[1].stride);
    _tile_dpbf16ps(1, 7, 4);
    _tile_dpbf16ps(0, 6, 5);
    _tile_dpbf16ps(1, 7, 5);
    if constexpr (!kFour) continue;
    _tile_loadd(6, keys[2].start + d, 2 * keys[2].stride);
    _tile_dpbf16ps(2, 6, 4);
    _tile_loadd(7, keys[3].start + d, 2 * keys[3].stride);
    _tile_dpbf16ps(3, 7, 4);
    _tile_dpbf16ps(2, 6, 5);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + 256, 64);
  if constexpr (kFour) {
    _tile_stored(2, scores + 512, 64);
    _tile_stored(3, scores + 768, 64);
  }
}

// Adds the values of `count` positions times their weights to 32 or 64 elements of a tile of lanes' sums: [lanes][dim].
template <bool kFour>
TARGET inline void add_values(const uint16_t* values, const uint16_t* weights, int64_t count, int64_t dim, float* sums) {
  asm volatile("" : : : "memory");  // as above
  _tile_loadd(0, sums, 4 * dim);
  _tile_loadd(1, sums + 16, 4 * dim);
  if constexpr (kFour) {
    _tile_loadd(2, sums + 32, 4 * dim);
    _tile_loadd(3, sums + 48, 4 * dim);
  }
  for (int64_t i = 0; i < count; i += 32, values += 32 * dim, weights += 1024) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + 512, 64);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    if constexpr (!kFour) continue;
    _tile_loadd(6, values + 1024, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, values + 1536, 64);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 4 * dim);
  _tile_stored(1, sums + 16, 4 * dim);
  if constexpr (kFour) {
    _tile_stored(2, sums + 32, 4 * dim);
    _tile_stored(3, sums + 48, 4 * dim);
  }
}

TARGET inline void weigh_values(
    const uint16_t* values, const uint16_t* weights, int64_t count, int64_t dim, float* sums) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) add_values<true>(values + 32 * d, weights, count, dim, sums + d);
  if (d < dim) add_values<false>(values + 32 * d, weights, count, dim, sums + d);
}

// Weights of a block's positions from their scores, in two bfloat16; what was summed before is brought to the new maximum.
// seen: [count], or null where all lanes see all positions. largest, totals: [lanes]; sums [lanes][dim].
template <bool kMasked>
TARGET inline void weigh_scores(
    const float* scores, const uint16_t* seen, int64_t count, int64_t dim, float* largest, float* totals, float* sums,
    uint16_t* weights) {
  const __m512 before = _mm512_load_ps(largest);
  __m512 most[4] = {before, before, before, before};
  for (int64_t i = 0; i < count; i += 4)
    for (int k = 0; k < 4; ++k) {
      const __m512 score = _mm512_load_ps(scores + (i + k) * kLanes);  // passed over where it is no number
      most[k] = kMasked ? _mm512_mask_max_ps(most[k], seen[i + k], score, most[k]) : _mm512_max_ps(score, most[k]);
    }
  const __m512 now = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
  __m512 total = _mm512_load_ps(totals);
  if (const uint32_t risen = _mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ)) {
    alignas(64) float factors[kLanes];
    const __m512 factor = power_of_two(_mm512_sub_ps(before, now));
    _mm512_store_ps(factors, factor);
    total = _mm512_mul_ps(total, factor);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (!(risen >> lane & 1)) continue;
      float* to = sums + lane * dim;
      for (int64_t d = 0; d < dim; d += 16)
        _mm512_store_ps(to + d, _mm512_mul_ps(_mm512_load_ps(to + d), _mm512_set1_ps(factors[lane])));
    }
    _mm512_store_ps(largest, now);
  }
  // Halves of numbers are rounded as integers are: that is to the nearest, as weights are no more than 1.
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  __m512 part[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t i = 0; i < count; i += 32, weights += 1024) {
    __m512i high[16], low[16];
    for (int pair = 0; pair < 16; ++pair) {
      __m512i first[2], rest[2];
      for (int k = 0; k < 2; ++k) {
        const int64_t at = i + 2 * pair + k;
        __m512 weight = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + at * kLanes), now));
        if constexpr (kMasked) weight = _mm512_maskz_mov_ps(seen[at], weight);
        __m512& sum = part[2 * (pair % 2) + k];
        sum = _mm512_add_ps(sum, weight);
        first[k] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(weight), half), upper);
        rest[k] = _mm512_castps_si512(_mm512_sub_ps(weight, _mm512_castsi512_ps(first[k])));
        rest[k] = _mm512_add_epi32(rest[k], half);
      }
      high[pair] = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first[0], 16), first[1]);
      low[pair] = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(rest[0], 16), rest[1]);
    }
    transpose(high, weights, 32);
    transpose(low, weights + 512, 32);
  }
  const __m512 sum = _mm512_add_ps(_mm512_add_ps(part[0], part[1]), _mm512_add_ps(part[2], part[3]));
  _mm512_store_ps(totals, _mm512_add_ps(total, sum));
}
