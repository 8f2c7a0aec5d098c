// bfloat16 weights in three quarters of their bytes, without loss, and their products on AMX tiles. Included in amx.h's
// namespace, with TARGET defined.
//
// A pass over a few rows takes the time that reading the weights takes. The exponents of a trained matrix are alike: of 512
// neighbours all but one in some ten thousand lie within 15 powers of two of the largest, so four bits say which one it is.
// (Lossless coding of exponents: Zhang et al., arXiv 2504.11651, with variable lengths; a fixed one is opened by two table
// look-ups for 64 weights, faster than memory delivers them.)
//
// A unit is 32 inputs of 32 outputs: two tiles. Its head is the largest exponent; each weight has a byte of sign and mantissa
// and four bits that count down from it, 15 for the exponent zero. A unit that spans more, or holds what is no finite number,
// is left as it is (kPlain).

constexpr int64_t kUnit = kTileInputs * kPanel;  // weights
constexpr int64_t kNarrowBytes = kUnit * 3 / 2, kPlainBytes = kUnit * 2;
constexpr uint8_t kPlain = 255;
constexpr int kCodes = 15;

inline int64_t unit_bytes(uint8_t head) { return head == kPlain ? kPlainBytes : kNarrowBytes; }

// Where a unit has the weight of input k and output o: a line of a tile has two inputs of each output.
inline int64_t place_bfloat16(int64_t k, int64_t o) { return o / 16 * 512 + k / 2 * 32 + o % 16 * 2 + k % 2; }

// The head of a unit of weights.
inline uint8_t head_of(const uint16_t* unit) {
  int largest = 0, smallest = 255;
  for (int64_t i = 0; i < kUnit; ++i) {
    const int exponent = unit[i] >> 7 & 0xff;
    largest = std::max(largest, exponent);
    if (exponent) smallest = std::min(smallest, exponent);
  }
  if (largest == 255 || (largest && largest - smallest >= kCodes)) return kPlain;
  return static_cast<uint8_t>(largest);
}

// Of 64 weights, the place of the byte of each: unpacking interleaves within 16 bytes. i is the place in the unit.
inline int64_t byte_place(int64_t i) {
  const int64_t lane = i % 32 / 8;
  return i / 64 * 64 + lane * 16 + i / 32 % 2 * 8 + i % 8;
}

// Stores a unit. 128 weights lie together: 64 bytes with two codes each, then their bytes of sign and mantissa.
inline void close_unit(const uint16_t* unit, uint8_t head, uint8_t* to) {
  if (head == kPlain) {
    std::memcpy(to, unit, kPlainBytes);
    return;
  }
  std::memset(to, 0, kNarrowBytes);
  for (int64_t i = 0; i < kUnit; ++i) {
    const int exponent = unit[i] >> 7 & 0xff, code = exponent ? head - exponent : kCodes;
    const int64_t byte = byte_place(i);
    uint8_t* pair = to + byte / 128 * 192;
    pair[byte % 64] = static_cast<uint8_t>(pair[byte % 64] | code << (byte / 64 % 2 * 4));
    pair[64 + byte % 128] = static_cast<uint8_t>((unit[i] >> 8 & 0x80) | (unit[i] & 0x7f));
  }
}

// 64 weights from their bytes and codes.
TARGET inline void open_64(__m512i bytes, __m512i codes, __m512i upper, __m512i lower, uint16_t* to) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  // A weight's upper byte is the sign and seven bits of the exponent, its lower byte the last of these and the mantissa.
  const __m512i high = _mm512_ternarylogic_epi64(bytes, sign, _mm512_shuffle_epi8(upper, codes), 0xEA);
  const __m512i low = _mm512_ternarylogic_epi64(bytes, sign, _mm512_shuffle_epi8(lower, codes), 0xBA);
  _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
  _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}

// The weights of a unit, as tiles read them. to: [kUnit], on a line of the cache, written unless the unit is plain.
TARGET inline const uint16_t* open_unit(const uint8_t* from, uint8_t head, uint16_t* to) {
  ask_ahead(from, unit_bytes(head));
  if (head == kPlain) return reinterpret_cast<const uint16_t*>(from);
  const __m128i down = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0);
  const __m128i all = _mm_sub_epi8(_mm_set1_epi8(static_cast<char>(head)), down);
  const __m128i exponents = _mm_insert_epi8(all, 0, kCodes), seven = _mm_set1_epi8(0x7f);
  const __m512i upper = _mm512_broadcast_i32x4(_mm_and_si128(_mm_srli_epi16(exponents, 1), seven));
  const __m512i lower = _mm512_broadcast_i32x4(_mm_andnot_si128(seven, _mm_slli_epi16(exponents, 7)));
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  for (int64_t i = 0; i < kUnit; i += 128, from += 192) {
    const __m512i codes = _mm512_loadu_si512(from);
    open_64(_mm512_loadu_si512(from + 64), _mm512_and_si512(codes, nibble), upper, lower, to + i);
    const __m512i others = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
    open_64(_mm512_loadu_si512(from + 128), others, upper, lower, to + i + 64);
  }
  return to;
}

// A row's x [count], a multiple of 32, rounded to bfloat16: 32 go to `to`, and so on at `stride`.
TARGET inline void round(const float* x, int64_t count, uint16_t* to, int64_t stride) {
  for (int64_t k = 0; k < count; k += 32, to += stride)
    for (int64_t i = 0; i < 32; i += 16) {
      const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + k + i));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), rounded);
    }
}

// The same as the sum of two bfloat16: the high parts go to `to`, the low ones `apart` further. Together they keep 16 bits of
// the mantissa: the weights have 8, so what is lost is far below what they lost already. A high part that is no finite number
// has no rest.
TARGET inline void split(const float* x, int64_t count, uint16_t* to, int64_t apart, int64_t stride) {
  constexpr int kNanOrInfinite = 0x99;
  for (int64_t k = 0; k < count; k += 32, to += stride)
    for (int64_t i = 0; i < 32; i += 16) {
      const __m512 value = _mm512_loadu_ps(x + k + i);
      const __m256i first = (__m256i)_mm512_cvtneps_pbh(value);
      const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(first), 16));
      const __mmask16 finite = static_cast<__mmask16>(~_mm512_fpclass_ps_mask(back, kNanOrInfinite));
      const __m256i rest = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_sub_ps(finite, value, back));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), first);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + apart + i), rest);
    }
}

// Sums of one or two blocks of rows with a panel's 32 outputs, [rows][kPanel] each.
template <bool kTwo>
TARGET inline void load_sums(const float* first, const float* second) {
  asm volatile("" : : : "memory");  // GCC's intrinsics claim to read no memory: what was stored is to be there
  _tile_loadd(0, first, 4 * kPanel);
  _tile_loadd(1, first + 16, 4 * kPanel);
  if constexpr (!kTwo) return;
  _tile_loadd(2, second, 4 * kPanel);
  _tile_loadd(3, second + 16, 4 * kPanel);
}

template <bool kTwo>
TARGET inline void store_sums(float* first, float* second) {
  _tile_stored(0, first, 4 * kPanel);
  _tile_stored(1, first + 16, 4 * kPanel);
  if constexpr (kTwo) {
    _tile_stored(2, second, 4 * kPanel);
    _tile_stored(3, second + 16, 4 * kPanel);
  }
  asm volatile("" : : "r"(first), "r"(second) : "memory");
}

// Adds a unit's products with 32 inputs of one or two blocks of rows, part after part into the same sums.
// first, second: [kParts][rows][kTileInputs].
template <bool kTwo, int64_t kParts>
TARGET inline void add_unit(const uint16_t* unit, const uint16_t* first, int64_t rows, const uint16_t* second, int64_t more) {
  asm volatile("" : : : "memory");  // as above
  _tile_loadd(6, unit, 64);
  _tile_loadd(7, unit + 512, 64);
  for (int64_t part = 0; part < kParts; ++part) {
    _tile_loadd(4, first + part * rows * kTileInputs, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (!kTwo) continue;
    _tile_loadd(5, second + part * more * kTileInputs, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  asm volatile("" : : : "memory");  // the next unit is opened where this one was only once it has been read
}
