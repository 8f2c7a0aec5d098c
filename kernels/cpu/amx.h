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
constexpr int64_t kAhead = 8192;         // bytes of a panel between those that are multiplied and those that are asked for

// Asks the kernel once for the right to use the tiles; threads inherit it.
inline bool granted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool answer = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return answer;
}

TARGET inline void configure(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
  }
  asm volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic claims to read eight bytes only
  _tile_loadconfig(&config);
}

TARGET inline void release() { _tile_release(); }

// Tile loads of strided lines do not start the hardware's prefetcher: asks for the 2 KiB that are multiplied later.
TARGET inline void ask_ahead(const void* weights) {
  for (int64_t byte = 0; byte < 2048; byte += 64)
    _mm_prefetch(static_cast<const char*>(weights) + kAhead + byte, _MM_HINT_T0);
}

// x [count], a multiple of 16, as the sum of two bfloat16. Together they keep 16 bits of the mantissa: the weights have 8,
// so what is lost is far below what they lost already. A high part that is no finite number has no rest.
TARGET inline void split(const float* x, int64_t count, uint16_t* high, uint16_t* low) {
  constexpr int kNanOrInfinite = 0x99;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512 value = _mm512_loadu_ps(x + i);
    const __m256i first = (__m256i)_mm512_cvtneps_pbh(value);
    const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16));
    const __mmask16 finite = static_cast<__mmask16>(~_mm512_fpclass_ps_mask(back, kNanOrInfinite));
    const __m256i rest = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_sub_ps(finite, value, back));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), rest);
  }
}

// One panel for up to kTileRows rows. The products of either part of the inputs have sums of their own, which are added at
// the end. Tiles 0, 1: sums of the high parts; 2, 3: of the low ones; 4, 5: inputs; 6, 7: weights. acc: [rows][kPanel].
TARGET inline void product_panel(
    const uint16_t* weights, const uint16_t* high, const uint16_t* low, int64_t stride, int64_t count, int64_t rows,
    float* acc) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < count; k += kTileInputs) {
    ask_ahead(weights + k * kPanel);
    _tile_loadd(6, weights + k * kPanel, 4 * kPanel);
    _tile_loadd(7, weights + k * kPanel + 32, 4 * kPanel);
    _tile_loadd(4, high + k, 2 * stride);
    _tile_loadd(5, low + k, 2 * stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float low_sums[kTileRows * kPanel];
  _tile_stored(0, acc, 4 * kPanel);
  _tile_stored(1, acc + 16, 4 * kPanel);
  _tile_stored(2, low_sums, 4 * kPanel);
  _tile_stored(3, low_sums + 16, 4 * kPanel);
  asm volatile("" : : "r"(acc), "r"(low_sums) : "memory");
  for (int64_t i = 0; i < rows * kPanel; i += 16)
    _mm512_storeu_ps(acc + i, _mm512_add_ps(_mm512_loadu_ps(acc + i), _mm512_load_ps(low_sums + i)));
}

// x [count], 16-bit numbers of at most 32512 in magnitude -> 256 * high + low.
inline void split_int16(const int16_t* x, int64_t count, int8_t* high, int8_t* low) {
  for (int64_t i = 0; i < count; ++i) {
    const int upper = (x[i] + 128) >> 8;
    high[i] = static_cast<int8_t>(upper);
    low[i] = static_cast<int8_t>(x[i] - 256 * upper);
  }
}

// One panel of int8 weights for up to kTileRows rows, tiles as above. acc [rows][kPanel]: exact.
TARGET inline void product_panel(
    const int8_t* weights, const int8_t* high, const int8_t* low, int64_t stride, int64_t count, int64_t rows,
    int32_t* acc) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < count; k += kTileInputsInt8) {
    ask_ahead(weights + k * kPanel);
    _tile_loadd(6, weights + k * kPanel, 4 * kPanel);
    _tile_loadd(7, weights + k * kPanel + 64, 4 * kPanel);
    _tile_loadd(4, high + k, stride);
    _tile_loadd(5, low + k, stride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  alignas(64) int32_t low_sums[kTileRows * kPanel];
  _tile_stored(0, acc, 4 * kPanel);
  _tile_stored(1, acc + 16, 4 * kPanel);
  _tile_stored(2, low_sums, 4 * kPanel);
  _tile_stored(3, low_sums + 16, 4 * kPanel);
  asm volatile("" : : "r"(acc), "r"(low_sums) : "memory");
  for (int64_t i = 0; i < rows * kPanel; i += 16)
    _mm512_storeu_si512(
        acc + i,
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_loadu_si512(acc + i), 8), _mm512_load_si512(low_sums + i)));
}
