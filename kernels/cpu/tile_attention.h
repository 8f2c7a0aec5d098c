// Paged attention on AMX tiles, over keys and values in bfloat16. Included in amx.h's namespace after attention_parts.h, with
// TARGET defined.
//
// Queries that share a key/value head, those of all its heads and of several rows of one sequence, are the lanes of tiles,
// sixteen each. Positions go by in blocks with a running maximum and sum (Milakov, Gimelshein, arXiv 1805.02867; Dao et al.,
// arXiv 2205.14135), so buffers do not grow with the context. Queries and weights are split into two bfloat16 each.
//
// Row invariance: a lane's sums, maximum and scale never meet those of another lane, blocks are counted from position 0, and
// what a row does not see adds exact zeros to what it has. So neither the lane that a row gets nor the rows beside it show,
// and one row takes the same way as many.

constexpr int64_t kBlockPositions = 64;
constexpr int64_t kMostLaneTiles = 6;  // rows that meet a block together: more would leave the second-level cache

struct TileAttention {
  const float* query;             // [n, heads, head_dim]
  const uint16_t *keys, *values;  // [slots, kv_heads, head_dim]
  const int64_t *slots, *rows;    // [total] and [n, 4], see Attention
  int64_t heads, kv_heads, head_dim;
  float scale;
  float* out;  // [n, heads * head_dim]

  int64_t group() const { return heads / kv_heads; }
};

// Rows of one sequence and a key/value head.
struct TileItem {
  int64_t first_row, num_rows, kv_head;
};

// The work in parts: enough for all threads, else as many rows in each as share a block's keys and values with profit. rows [n,
// 4], see TileAttention.
inline std::vector<TileItem> tile_items(
    const int64_t* rows, int64_t n, int64_t kv_heads, int64_t group, int64_t num_threads) {
  const int64_t fewest = std::max<int64_t>(1, kLanes / group);
  const int64_t most = std::max(fewest, kMostLaneTiles * kLanes / group);
  const int64_t size = std::min(most, std::max(fewest, n * kv_heads / (2 * num_threads) / fewest * fewest));
  std::vector<TileItem> items;
  for (int64_t first = 0, end; first < n; first = end) {
    end = first + 1;
    while (end < n && end - first < size && rows[4 * end] == rows[4 * first]) ++end;
    for (int64_t head = 0; head < kv_heads; ++head) items.push_back({first, end - first, head});
  }
  return items;
}

// Buffers of one thread, each on a line of the cache.
class TileScratch {
 public:
  void fit(int64_t num_tiles, int64_t dim) {
    const int64_t lanes = num_tiles * kLanes;
    if (lanes <= lanes_ && dim == dim_) return;
    lanes_ = lanes, dim_ = dim;
    bytes_ = 0;
    place_all();
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, bytes_)));
    if (!memory_) throw std::bad_alloc();
    bytes_ = 0;
    place_all();
    std::memset(nothing, 0, dim * sizeof(uint16_t));
  }

  int64_t dim() const { return dim_; }

  uint16_t* queries;  // [tiles of lanes][dim / 32][high, low]: 16 pairs of elements by 16 lanes
  uint16_t* keys;     // [positions of a block][dim]
  uint16_t* values;   // [positions of a block / 32][dim / 16]: 16 pairs of positions by 16 elements
  uint16_t* weights;  // [positions of a block / 32][high, low][lanes of a tile][32]
  uint16_t* seen;     // [tiles of lanes][positions of a block]: a bit for each lane
  uint16_t* nothing;  // [dim] zeros
  float* scores;      // [positions of a block][lanes of a tile]
  float* scaled;      // [dim]
  float* out;         // [lanes][dim]
  float* spare;       // [2][lanes of a tile][dim]
  float *largest, *totals;    // [lanes]
  int32_t *lengths, *starts;  // [lanes], 0 where there is no query
  uint64_t* visible;          // [lanes]
  const uint16_t* key_rows[kBlockPositions];
  const uint16_t* value_rows[kBlockPositions];

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  template <typename T>
  void place(T*& pointer, int64_t count) {
    pointer = reinterpret_cast<T*>(memory_.get() + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }

  void place_all() {
    place(queries, 2 * lanes_ * dim_), place(keys, kBlockPositions * dim_), place(values, kBlockPositions * dim_);
    place(weights, 2 * kLanes * kBlockPositions), place(seen, lanes_ / kLanes * kBlockPositions), place(nothing, dim_);
    place(scores, kLanes * kBlockPositions), place(scaled, dim_), place(out, lanes_ * dim_);
    place(spare, 2 * kLanes * dim_), place(largest, lanes_), place(totals, lanes_), place(lengths, lanes_);
    place(starts, lanes_), place(visible, lanes_);
  }

  std::unique_ptr<char, Free> memory_;
  int64_t bytes_ = 0, lanes_ = 0, dim_ = 0;
};

// Queries times scale / ln 2, so that weights are powers of two, and what each lane sees.
TARGET inline void prepare(const TileAttention& a, const TileItem& item, int64_t num_tiles, TileScratch& s) {
  const int64_t dim = a.head_dim, group = a.group(), lanes = item.num_rows * group, stride = 2 * kTileRows * 32;
  const __m512 scale = _mm512_set1_ps(a.scale * 1.44269504088896341f);
  std::memset(s.queries, 0, 2 * num_tiles * kLanes * dim * sizeof(uint16_t));
  std::memset(s.out, 0, num_tiles * kLanes * dim * sizeof(float));
  for (int64_t lane = 0; lane < num_tiles * kLanes; ++lane) {
    s.largest[lane] = std::numeric_limits<float>::lowest();
    s.totals[lane] = 0.f;
    s.lengths[lane] = s.starts[lane] = 0;
    s.visible[lane] = 0;
    if (lane >= lanes) continue;
    const int64_t r = item.first_row + lane / group;
    s.lengths[lane] = static_cast<int32_t>(a.rows[4 * r + 1]);
    s.starts[lane] = static_cast<int32_t>(a.rows[4 * r + 2]);
    s.visible[lane] = static_cast<uint64_t>(a.rows[4 * r + 3]);
    const float* from = a.query + (r * a.heads + item.kv_head * group + lane % group) * dim;
    for (int64_t i = 0; i < dim; i += 16) _mm512_store_ps(s.scaled + i, _mm512_mul_ps(_mm512_loadu_ps(from + i), scale));
    uint16_t* to = s.queries + 2 * (lane / kLanes) * kLanes * dim + lane % kLanes * 32;
    split(s.scaled, dim, to, stride / 2, stride);
  }
  // Element pairs, which lie beside each other, go below each other.
  for (int64_t i = 0; i < 2 * num_tiles * kLanes * dim; i += stride / 2) {
    __m512i lines[16];
    for (int line = 0; line < 16; ++line) lines[line] = _mm512_load_si512(s.queries + i + line * 32);
    transpose(lines, s.queries + i, 32);
  }
}

// Which lanes see each of a block's positions.
TARGET inline void see(int64_t first, int64_t count, int64_t num_tiles, TileScratch& s) {
  const __m512i one = _mm512_set1_epi64(1);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t lane = tile * kLanes;
    const __m512i lengths = _mm512_load_si512(s.lengths + lane), starts = _mm512_load_si512(s.starts + lane);
    const __m512i low = _mm512_load_si512(s.visible + lane), high = _mm512_load_si512(s.visible + lane + 8);
    for (int64_t i = 0; i < count; ++i) {
      const __m512i position = _mm512_set1_epi32(static_cast<int32_t>(first + i));
      const __m512i past = _mm512_sub_epi32(position, starts);  // a shift by 64 or more gives 0, and so does a negative one
      const __m512i low_past = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(past));
      const __m512i high_past = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(past, 1));
      const uint32_t bits = _mm512_test_epi64_mask(_mm512_srlv_epi64(low, low_past), one) |
                            _mm512_test_epi64_mask(_mm512_srlv_epi64(high, high_past), one) << 8;
      const uint32_t before = _mm512_cmplt_epi32_mask(position, starts);
      const uint32_t reached = _mm512_cmplt_epi32_mask(position, lengths);
      s.seen[tile * kBlockPositions + i] = static_cast<uint16_t>(reached & (before | bits));
    }
  }
}

// Leaves out the values that no lane of a block sees. Whether others are no finite numbers and are seen by some lanes only: a
// weight of 0 does not silence those.
TARGET inline bool hide_values(int64_t count, int64_t lanes, TileScratch& s) {
  bool torn = false;
  for (int64_t i = 0; i < count; ++i) {
    bool any = false, all = true;
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
      const uint16_t seen = s.seen[lane / kLanes * kBlockPositions + i];
      const uint16_t there = static_cast<uint16_t>(lanes - lane >= kLanes ? 0xffff : (1 << (lanes - lane)) - 1);
      any |= (seen & there) != 0;
      all &= (seen & there) == there;
    }
    if (!any) s.value_rows[i] = s.nothing;
    if (any && !all) torn |= !finite(s.value_rows[i], s.dim());
  }
  return torn;
}

// As weigh_values, row by row: each with the values that it sees, zeros in place of the others.
TARGET inline void weigh_values_apart(int64_t tile, int64_t count, int64_t group, int64_t lanes, TileScratch& s) {
  const int64_t dim = s.dim(), size = kLanes * dim;
  float *sums = s.out + tile * size, *before = s.spare, *own = s.spare + size;
  std::memcpy(before, sums, size * sizeof(float));
  const int64_t last = std::min(lanes, (tile + 1) * kLanes);
  for (int64_t lane = tile * kLanes, end; lane < last; lane = end) {
    end = std::min(last, (lane / group + 1) * group);
    const uint16_t* rows[kBlockPositions];
    for (int64_t i = 0; i < count; ++i)
      rows[i] = s.seen[tile * kBlockPositions + i] >> lane % kLanes & 1 ? s.value_rows[i] : s.nothing;
    pair_values(rows, count, dim, s.values);
    std::memcpy(own, before, size * sizeof(float));
    weigh_values(s.values, s.weights, count, dim, own);
    std::memcpy(sums + lane % kLanes * dim, own + lane % kLanes * dim, (end - lane) * dim * sizeof(float));
  }
}

// A block of positions for all lanes of an item. masked: some lane does not see some of them.
TARGET inline void attend_block(
    bool masked, int64_t first, int64_t count, int64_t group, int64_t lanes, int64_t slot_stride, TileScratch& s) {
  const int64_t dim = s.dim(), num_tiles = (lanes + kLanes - 1) / kLanes;
  if (masked) see(first, count, num_tiles, s);
  const bool torn = masked && hide_values(count, lanes, s);
  KeyTile keys[kBlockPositions / kTileRows];
  for (int64_t i = 0; i < count; i += kTileRows)
    keys[i / kTileRows] = key_tile(s.key_rows + i, slot_stride, num_tiles > 1, dim, s.keys + i * dim);
  if (!torn) pair_values(s.value_rows, count, dim, s.values);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const uint16_t *queries = s.queries + 2 * tile * kLanes * dim, *seen = s.seen + tile * kBlockPositions;
    float *largest = s.largest + tile * kLanes, *totals = s.totals + tile * kLanes, *sums = s.out + tile * kLanes * dim;
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) multiply_keys<true>(keys + i / kTileRows, queries, dim, s.scores + i * kLanes);
    if (i < count) multiply_keys<false>(keys + i / kTileRows, queries, dim, s.scores + i * kLanes);
    if (masked) {
      weigh_scores<true>(s.scores, seen, count, dim, largest, totals, sums, s.weights);
    } else {
      weigh_scores<false>(s.scores, nullptr, count, dim, largest, totals, sums, s.weights);
    }
    if (torn) {
      weigh_values_apart(tile, count, group, lanes, s);
    } else {
      weigh_values(s.values, s.weights, count, dim, sums);
    }
  }
}

TARGET inline void attend_item(const TileAttention& a, const TileItem& item, TileScratch& s) {
  const int64_t dim = a.head_dim, group = a.group(), lanes = item.num_rows * group, slot_stride = a.kv_heads * dim;
  const int64_t num_tiles = (lanes + kLanes - 1) / kLanes;
  s.fit(num_tiles, dim);
  prepare(a, item, num_tiles, s);
  int64_t longest = 0, clear = std::numeric_limits<int64_t>::max();  // all rows see what is before `clear`
  for (int64_t r = item.first_row; r < item.first_row + item.num_rows; ++r) {
    longest = std::max(longest, a.rows[4 * r + 1]);
    clear = std::min({clear, a.rows[4 * r + 1], a.rows[4 * r + 2]});
  }
  const int64_t* slots = a.slots + a.rows[4 * item.first_row];
  const uint16_t *keys = a.keys + item.kv_head * dim, *values = a.values + item.kv_head * dim;
  for (int64_t first = 0; first < longest; first += kBlockPositions) {
    const int64_t count = std::min(kBlockPositions, (longest - first + 31) / 32 * 32);
    for (int64_t i = 0; i < count; ++i) {
      const bool there = first + i < longest;
      const int64_t offset = there ? slots[first + i] * slot_stride : 0;
      s.key_rows[i] = there ? keys + offset : s.nothing;
      s.value_rows[i] = there ? values + offset : s.nothing;
    }
    attend_block(first + count > clear, first, count, group, lanes, slot_stride, s);
  }
  for (int64_t lane = 0; lane < lanes; ++lane) {
    float* to = a.out + ((item.first_row + lane / group) * a.heads + item.kv_head * group + lane % group) * dim;
    const __m512 inverse = _mm512_set1_ps(1.f / s.totals[lane]);
    for (int64_t d = 0; d < dim; d += 16)  // adding 0 makes one of both zeros: which it is may depend on who is beside
      _mm512_storeu_ps(
          to + d, _mm512_fmadd_ps(_mm512_load_ps(s.out + lane * dim + d), inverse, _mm512_setzero_ps()));
  }
}

// Some items, by one thread with its buffers; the tiles are configured and released here.
TARGET inline void tile_attend(const TileAttention& a, const TileItem* items, int64_t count, TileScratch& s) {
  configure(kTileRows, kTileRows);
  for (int64_t i = 0; i < count; ++i) attend_item(a, items[i], s);
  release();
}
