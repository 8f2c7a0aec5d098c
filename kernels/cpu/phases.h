// What layers do between their products, row by row.

inline const float* data_of(const torch::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == torch::kFloat32, "rows must be contiguous float32");
  return tensor.data_ptr<float>();
}

struct Norm {
  torch::Tensor weight;  // [size]
  float eps;
  bool is_narrow;  // AVX2

  Norm(torch::Tensor weight, double eps, const std::string& isa)
      : weight(std::move(weight)), eps(static_cast<float>(eps)), is_narrow(parse(isa) == Isa::kAvx2) {
    data_of(this->weight);
  }

  // to = x / rms(x) * weight for rows [begin, end) of [n, size]; with `residual`, x is first added to it and the sum stays there.
  void rows(const float* x, float* residual, int64_t begin, int64_t end, float* to) const {
    const int64_t size = weight.numel();
    const float* scale = weight.data_ptr<float>();
    const auto function = is_narrow ? avx2::rms_norm_row : avx512::rms_norm_row;
    for (int64_t r = begin; r < end; ++r)
      function(x + r * size, residual ? residual + r * size : nullptr, scale, eps, size, to + r * size);
  }
};

// silu(gate) * up for rows [begin, end) of gate_up [n, 2 * size], gates first.
inline void silu_mul_rows(const float* gate_up, int64_t size, bool is_narrow, int64_t begin, int64_t end, float* to) {
  const auto function = is_narrow ? avx2::silu_mul_row : avx512::silu_mul_row;
  for (int64_t r = begin; r < end; ++r) function(gate_up + 2 * r * size, gate_up + (2 * r + 1) * size, size, to + r * size);
}

template <typename T>
void copy_as(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// What an attention layer is, apart from its products.
struct Heads {
  int64_t heads;
  float scale;
  std::optional<torch::Tensor> q_norm, k_norm;  // [dim], over each head's elements before its rotation
  float eps;
  bool is_narrow;  // AVX2
  bool has_tiles;  // AMX

  Heads(
      int64_t heads, double scale, std::optional<torch::Tensor> q_norm, std::optional<torch::Tensor> k_norm, double eps,
      const std::string& isa)
      : heads(heads),
        scale(static_cast<float>(scale)),
        q_norm(std::move(q_norm)),
        k_norm(std::move(k_norm)),
        eps(static_cast<float>(eps)),
        is_narrow(parse(isa) == Isa::kAvx2),
        has_tiles(parse(isa) == Isa::kAmx) {
    data_or_null(this->q_norm), data_or_null(this->k_norm);
  }
};

// One layer's keys and values, [slots, kv_heads, dim], float32 or bfloat16.
struct Cache {
  torch::Tensor keys, values;

  Cache(torch::Tensor keys, torch::Tensor values) : keys(std::move(keys)), values(std::move(values)) {
    TORCH_CHECK(this->keys.is_contiguous() && this->values.is_contiguous(), "the cache is torn");
    TORCH_CHECK(this->keys.sizes() == this->values.sizes() && this->keys.dim() == 3, "keys and values do not match");
    const auto type = this->keys.scalar_type();
    TORCH_CHECK(type == torch::kFloat32 || type == torch::kBFloat16, "keys and values must be float32 or bfloat16");
    TORCH_CHECK(this->values.scalar_type() == type, "keys and values must be of one type");
  }

  int64_t kv_heads() const { return keys.size(1); }
  int64_t dim() const { return keys.size(2); }
  bool is_bfloat16() const { return keys.scalar_type() == torch::kBFloat16; }
};

// Turns queries and keys to their rows' positions; keys and values go to their slots.
struct Rotation {
  const Heads& heads;
  const Cache& cache;
  const float *cos, *sin;  // [n, rotary]
  int64_t rotary;
  const int64_t* slots;  // [n]

  Rotation(
      const Heads& heads, const Cache& cache, const torch::Tensor& cos, const torch::Tensor& sin,
      const torch::Tensor& slot_mapping)
      : heads(heads),
        cache(cache),
        cos(data_of(cos)),
        sin(data_of(sin)),
        rotary(cos.size(-1)),
        slots(slot_mapping.data_ptr<int64_t>()) {
    const int64_t n = slot_mapping.numel();
    TORCH_CHECK(slot_mapping.is_contiguous(), "slot_mapping must be contiguous");
    for (const auto& norm : {heads.q_norm, heads.k_norm})
      TORCH_CHECK(!norm || norm->numel() == cache.dim(), "a norm does not fit the heads");
    TORCH_CHECK(
        cos.numel() == n * rotary && sin.numel() == n * rotary && rotary <= cache.dim(), "cos and sin do not fit the rows");
  }

  int64_t width() const { return (heads.heads + 2 * cache.kv_heads()) * cache.dim(); }

  // qkv [n, width] -> query [n, heads, dim], for rows [begin, end)
  void rows(const float* qkv, int64_t begin, int64_t end, float* query) const {
    if (cache.is_bfloat16()) {
      rows_of(qkv, begin, end, query, cache.keys.data_ptr<at::BFloat16>(), cache.values.data_ptr<at::BFloat16>());
    } else {
      rows_of(qkv, begin, end, query, cache.keys.data_ptr<float>(), cache.values.data_ptr<float>());
    }
  }

 private:
  template <typename T>
  void rows_of(const float* qkv, int64_t begin, int64_t end, float* query, T* keys, T* values) const {
    const auto turn = heads.is_narrow ? avx2::turn_head : avx512::turn_head;
    const float *q_weight = data_or_null(heads.q_norm), *k_weight = data_or_null(heads.k_norm);
    const int64_t dim = cache.dim(), kv_heads = cache.kv_heads(), count = heads.heads;
    std::vector<float> turned(dim);
    for (int64_t r = begin; r < end; ++r) {
      const float *row = qkv + r * width(), *row_cos = cos + r * rotary, *row_sin = sin + r * rotary;
      for (int64_t h = 0; h < count; ++h)
        turn(row + h * dim, q_weight, heads.eps, row_cos, row_sin, dim, rotary, query + (r * count + h) * dim);
      for (int64_t h = 0; h < kv_heads; ++h) {
        const int64_t place = (slots[r] * kv_heads + h) * dim;
        const float *key = row + (count + h) * dim, *value = row + (count + kv_heads + h) * dim;
        turn(key, k_weight, heads.eps, row_cos, row_sin, dim, rotary, turned.data());
        copy_as(turned.data(), dim, keys + place);
        copy_as(value, dim, values + place);
      }
    }
  }
};

// Threads for attention, by what all rows read, about. rows: see Attention.
inline int64_t threads_for_attention(const Heads& heads, const Cache& cache, const torch::Tensor& rows) {
  const int64_t* facts = rows.data_ptr<int64_t>();
  int64_t positions = 0;
  for (int64_t r = 0; r < rows.size(0); ++r) positions += facts[4 * r + 1];
  return threads_for(positions * heads.heads * cache.dim() / 32);
}

// Attention over the paged cache: one part for each row and key/value head, or for several rows where tiles take them.
class Attention {
 public:
  // slots [total] int64: the slots of each sequence's positions, one sequence after the other. rows [n, 4] int64: where the row's
  // sequence starts in slots, positions up to its own, the position from which `visible` counts, and those 64 bits.
  Attention(
      const Heads& heads, const Cache& cache, const torch::Tensor& slots, const torch::Tensor& rows, int64_t num_threads)
      : heads_(heads),
        cache_(cache),
        n_(rows.size(0)),
        group_(heads.heads / cache.kv_heads()),
        slots_(slots.data_ptr<int64_t>()),
        facts_(rows.data_ptr<int64_t>()),
        // Never by the number of rows, or their bits would depend on it.
        is_tiled_(heads.has_tiles && cache.is_bfloat16() && cache.dim() % amx::kTileInputs == 0) {
    check(heads, cache, slots, rows);
    if (is_tiled_) items_ = amx::tile_items(facts_, n_, cache.kv_heads(), group_, num_threads);
    left_.emplace(is_tiled_ ? static_cast<int64_t>(items_.size()) : n_ * cache.kv_heads(), num_threads);
  }

  static void check(const Heads& heads, const Cache& cache, const torch::Tensor& slots, const torch::Tensor& rows) {
    TORCH_CHECK(rows.is_contiguous() && rows.dim() == 2 && rows.size(1) == 4, "rows do not fit the queries");
    TORCH_CHECK(slots.is_contiguous(), "the cache is torn");
    TORCH_CHECK(cache.dim() % 16 == 0 && heads.heads % cache.kv_heads() == 0, "head_dim must be a multiple of 16");
  }

  // This member's parts. query [n, heads, dim] -> out [n, heads * dim]
  void run(const float* query, float* out) {
    if (cache_.is_bfloat16()) {
      const auto bits = [](const torch::Tensor& tensor) {
        return reinterpret_cast<const uint16_t*>(tensor.data_ptr<at::BFloat16>());
      };
      if (is_tiled_) return run_tiles(query, bits(cache_.keys), bits(cache_.values), out);
      run_of(query, bits(cache_.keys), bits(cache_.values), out);
    } else {
      run_of(query, cache_.keys.data_ptr<float>(), cache_.values.data_ptr<float>(), out);
    }
  }

 private:
  void run_tiles(const float* query, const uint16_t* keys, const uint16_t* values, float* out) {
    const amx::TileAttention tiles{
        query, keys, values, slots_, facts_, heads_.heads, cache_.kv_heads(), cache_.dim(), heads_.scale, out};
    amx::TileScratch scratch;
    for (int64_t begin, end; left_->take(begin, end);)
      amx::tile_attend(tiles, items_.data() + begin, end - begin, scratch);
  }

  template <typename T>
  void run_of(const float* query, const T* keys, const T* values, float* out) {
    const int64_t kv_heads = cache_.kv_heads(), dim = cache_.dim();
    const auto attend = heads_.is_narrow ? avx2::attend<T> : avx512::attend<T>;
    std::vector<float> scores;
    std::vector<int64_t> offsets;
    for (int64_t begin, end; left_->take(begin, end);)
      for (int64_t index = begin; index < end; ++index) {
        const int64_t r = index / kv_heads, h = index % kv_heads, first = (r * heads_.heads + h * group_) * dim;
        const int64_t* fact = facts_ + 4 * r;
        const AttentionRow row{
            query + first,
            slots_ + fact[0],
            fact[1],
            fact[2],
            static_cast<uint64_t>(fact[3]),
            group_,
            dim,
            kv_heads * dim,
            heads_.scale};
        scores.resize(group_ * row.length);
        offsets.resize(row.length);
        attend(row, keys + h * dim, values + h * dim, scores.data(), offsets.data(), out + first);
      }
  }

  const Heads& heads_;
  const Cache& cache_;
  int64_t n_, group_;
  const int64_t *slots_, *facts_;
  bool is_tiled_;
  std::vector<amx::TileItem> items_;
  std::optional<Parts> left_;
};
