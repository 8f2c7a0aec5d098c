// Products on AMX tiles. Included in a namespace of its own, with TARGET defined.

// The memory layout that the instruction LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileInputs = 32;      // bfloat16
constexpr int64_t kTileInputsInt8 = 64;  // int8
// Bytes of a panel between those that are multiplied and those that are asked for. Measured: nearer, or into the first-level
// cache, a core reads 10 to 20 % less in the same time.
constexpr int64_t kAhead = 32768;

// Where a panel of int8 weights has that of input k and output o: tile by tile, as they are read, each of sixteen outputs. A
// line of a tile has four inputs of each output.
inline int64_t place_int8(int64_t k, int64_t o) {
  const int64_t tile = k / kTileInputsInt8 * (kPanel / 16) + o / 16;
  return tile * 1024 + k % kTileInputsInt8 / 4 * 64 + o % 16 * 4 + k % 4;
}

// Asks the kernel once for the right to use the tiles; threads inherit it.
inline bool granted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool answer = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return answer;
}

// Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights. Tiles 2, 3 and 5 have `more` rows, those of a second block.
TARGET inline void configure(int64_t rows, int64_t more) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_second = tile == 2 || tile == 3 || tile == 5;
    config.bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile >= 6 ? kTileRows : is_second ? more : rows);
  }
  asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic claims to read eight bytes only
  _tile_loadconfig(&config);
}

TARGET inline void release() { _tile_release(); }

// Asks for bytes that are multiplied later.
TARGET inline void ask_ahead(const void* weights, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64)
    _mm_prefetch(static_cast<const char*>(weights) + kAhead + byte, _MM_HINT_T1);
}

// int8 weights meet rows of three digits, which lie in tiles as three rows: so five rows take one tile, and a few cost no
// more than one. Rounded rows have two digits.

// x [count], a multiple of 16, as whole multiples of the result: digits of 256, the highest first, `apart` from one another.
// Half of the smallest multiple of three digits is 2^-24 of the largest magnitude, so what is lost is what float32 loses at such
// a number; of two digits, 2^-16. Where x holds something that is no finite number, the result is a NaN.
template <int64_t kDigits>
TARGET inline float split_int8(const float* x, int64_t count, int8_t* digits, int64_t apart) {
  constexpr float kLargest = 127.f * (kDigits == 3 ? 65536.f : 256.f), kNearlyZero = 1e-30f;
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;
  __m512i largest_bits = _mm512_setzero_si512();  // of a magnitude: in the order of the numbers
  for (int64_t i = 0; i < count; i += 16)
    largest_bits =
        _mm512_max_epi32(largest_bits, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(kMagnitude)));
  const int32_t bits = _mm512_reduce_max_epi32(largest_bits);
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  const bool is_zero = largest < kNearlyZero, is_finite = bits < kInfinite;
  const __m512 inverse = _mm512_set1_ps(is_zero || !is_finite ? 0.f : kLargest / largest);
  for (int64_t i = 0; i < count; i += 16) {
    // The digits are signed: each takes what brings the rest below into its range.
    __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
    for (int64_t digit = kDigits - 1; digit >= 0; --digit) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + digit * apart + i), _mm512_cvtepi32_epi8(value));
      value = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
    }
  }
  if (!is_finite) return std::numeric_limits<float>::quiet_NaN();
  return is_zero ? 0.f : largest / kLargest;
}

// Sums of one panel of int8 weights over `count` inputs, a multiple of kTileInputsInt8 and few enough for 32 bits: exact.
// digits [16 * num_tiles rows at `stride`], sums [16 * num_tiles][kPanel]. All tiles have all rows.
TARGET inline void digit_sums(
    const int8_t* weights, const int8_t* digits, int64_t stride, int64_t count, int64_t num_tiles, int32_t* sums) {
  for (int64_t t = 0; t < num_tiles; t += 2) {
    const bool both = t + 1 < num_tiles;
    const int8_t *first = digits + t * kTileRows * stride, *second = first + kTileRows * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < count; k += kTileInputsInt8) {
      if (t == 0) ask_ahead(weights + k * kPanel, kTileInputsInt8 * kPanel);
      _tile_loadd(6, weights + k * kPanel, 64);
      _tile_loadd(7, weights + k * kPanel + 1024, 64);
      _tile_loadd(4, first + k, stride);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if (!both) continue;
      _tile_loadd(5, second + k, stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    int32_t* to = sums + t * kTileRows * kPanel;
    _tile_stored(0, to, 4 * kPanel);
    _tile_stored(1, to + 16, 4 * kPanel);
    if (both) _tile_stored(2, to + kTileRows * kPanel, 4 * kPanel);
    if (both) _tile_stored(3, to + kTileRows * kPanel + 16, 4 * kPanel);
  }
  asm volatile("" : : "r"(sums) : "memory");
}

// acc [n][kPanel] += the numbers whose digits' sums are given, [kDigits * n][kPanel], times row_scales [n at `stride`] and
// scales [kPanel].
template <int64_t kDigits>
TARGET inline void add_scaled(
    const int32_t* sums, const float* row_scales, int64_t stride, const float* scales, int64_t n, float* acc) {
  for (int64_t r = 0; r < n; ++r) {
    const __m512 row_scale = _mm512_set1_ps(row_scales[r * stride]);
    for (int64_t o = 0; o < kPanel; o += 16) {
      const int32_t* digit = sums + (kDigits * (r + 1) - 1) * kPanel + o;
      __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(digit));
      float worth = 256.f;
      for (int64_t i = 1; i < kDigits; ++i, worth *= 256.f)
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(digit - i * kPanel)), _mm512_set1_ps(worth), sum);
      float* to = acc + r * kPanel + o;
      const __m512 scale = _mm512_mul_ps(row_scale, _mm512_loadu_ps(scales + o));
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, scale, _mm512_loadu_ps(to)));
    }
  }
}
