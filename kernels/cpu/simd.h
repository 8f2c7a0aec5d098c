// Vectors of float32, written once and compiled for each instruction set. Included inside a namespace, with TARGET (the
// function attribute that selects the instruction set) and LANES defined.

#if LANES == 16

constexpr int kRegisters = 32;
using vec = __m512;
TARGET inline vec zero() { return _mm512_setzero_ps(); }
TARGET inline vec load(const float* p) { return _mm512_loadu_ps(p); }
TARGET inline void store(float* p, vec v) { _mm512_storeu_ps(p, v); }
TARGET inline vec broadcast(const float* p) { return _mm512_set1_ps(*p); }
TARGET inline vec set(float x) { return _mm512_set1_ps(x); }
TARGET inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
TARGET inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
TARGET inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
TARGET inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
TARGET inline vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
TARGET inline vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
TARGET inline vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
TARGET inline float sum(vec v) { return _mm512_reduce_add_ps(v); }
TARGET inline vec widen_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
TARGET inline vec widen_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// 16 pairs of bfloat16: the first and the second of each.
TARGET inline void widen_pairs(const uint16_t* p, vec& even, vec& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
TARGET inline vec round_to_int(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TARGET inline vec times_power_of_two(vec v, vec n) { return _mm512_scalef_ps(v, n); }

#elif LANES == 8

constexpr int kRegisters = 16;
using vec = __m256;
TARGET inline vec zero() { return _mm256_setzero_ps(); }
TARGET inline vec load(const float* p) { return _mm256_loadu_ps(p); }
TARGET inline void store(float* p, vec v) { _mm256_storeu_ps(p, v); }
TARGET inline vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
TARGET inline vec set(float x) { return _mm256_set1_ps(x); }
TARGET inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
TARGET inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
TARGET inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
TARGET inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
TARGET inline vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
TARGET inline vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
TARGET inline vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
TARGET inline float sum(vec v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
TARGET inline vec widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
TARGET inline vec widen_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
TARGET inline void widen_pairs(const uint16_t* p, vec& even, vec& odd) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
TARGET inline vec round_to_int(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// n between -126 and 127.
TARGET inline vec times_power_of_two(vec v, vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(v, _mm256_castsi256_ps(exponent));
}

#endif

// exp(x) within 2 units in the last place, for x from -87.3 to 88; beyond, its value there. A NaN stays one.
TARGET inline vec exp(vec x) {
  const vec clamped = min(set(88.0f), max(set(-87.3f), x));  // the second operand wins where one is no number
  const vec n = round_to_int(mul(clamped, set(1.44269504088896341f)));
  vec r = fma(n, set(-0.693359375f), clamped);
  r = fma(n, set(2.12194440e-4f), r);
  vec p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  const vec y = add(fma(p, mul(r, r), r), set(1.0f));
  return times_power_of_two(y, n);
}
