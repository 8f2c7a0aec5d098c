// Packed weights, and the product of rows with a panel of them on any instruction set.

// The inputs of a weight matrix as int8 weights are packed: each group that shares a scale is filled up to fours, and is
// summed up in parts that fit into 32 bits.
struct Layout {
  int64_t in, group;

  Layout(int64_t inputs, int64_t group_size) : in(inputs), group(std::min(group_size, inputs)) {}

  static int64_t fours(int64_t count) { return (count + 3) / 4 * 4; }
  // Inputs with those that fill up.
  int64_t padded() const { return in / group * fours(group) + fours(in % group); }

  struct Part {
    int64_t group, first, count;      // among a matrix's inputs
    int64_t packed_first, packed_count;
  };

  std::vector<Part> parts() const {
    std::vector<Part> found;
    for (int64_t start = 0, place = 0, index = 0; start < in; start += group, ++index) {
      const int64_t end = std::min(in, start + group);
      for (int64_t k = start; k < end; k += kPart) {
        const int64_t count = std::min(kPart, end - k);
        found.push_back({index, k, count, place, fours(count)});
        place += fours(count);
      }
    }
    return found;
  }
};

// weight [out, in] bfloat16 (in even), or int8 whose scales belong to `group` inputs -> a panel after the other.
inline torch::Tensor pack(const torch::Tensor& weight, int64_t group) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be a contiguous matrix");
  const int64_t out = weight.size(0), in = weight.size(1), panels = (out + kPanel - 1) / kPanel;
  const bool is_int8 = weight.scalar_type() == torch::kInt8;
  TORCH_CHECK(is_int8 || weight.scalar_type() == torch::kBFloat16, "weight must be bfloat16 or int8");
  TORCH_CHECK(is_int8 || in % 2 == 0, "weight has an odd number of inputs");
  TORCH_CHECK(!is_int8 || group > 0, "int8 weights come in groups of at least one input");
  const Layout layout(in, is_int8 ? group : in);
  const auto parts = layout.parts();
  const int64_t padded = is_int8 ? layout.padded() : in;
  auto packed = torch::zeros({panels * kPanel * padded}, weight.options());
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t width = std::min(kPanel, out - p * kPanel);
      if (is_int8) {
        const int8_t* from = weight.data_ptr<int8_t>() + p * kPanel * in;
        int8_t* to = packed.data_ptr<int8_t>() + p * kPanel * padded;
        for (const auto& part : parts)
          for (int64_t o = 0; o < width; ++o)
            for (int64_t i = 0; i < part.count; ++i) {
              const int64_t k = part.packed_first + i;
              to[k / 4 * 4 * kPanel + 4 * o + k % 4] = from[o * in + part.first + i];
            }
      } else {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(weight.data_ptr<at::BFloat16>()) + p * kPanel * in;
        uint16_t* to = reinterpret_cast<uint16_t*>(packed.data_ptr<at::BFloat16>()) + p * kPanel * in;
        for (int64_t o = 0; o < width; ++o)
          for (int64_t k = 0; k < in; ++k) to[k / 2 * 2 * kPanel + 2 * o + k % 2] = from[o * in + k];
      }
    }
  });
  return packed;
}

// Buffers of one thread.
struct Scratch {
  std::vector<float> sums;         // [n][kPanel]
  std::vector<int32_t> part_sums;  // as sums
  int64_t configured = 0;

  // Lets the tiles have that many rows.
  void configure(int64_t rows) {
    if (rows != configured) amx::configure(configured = rows);
  }
};

// Products with bfloat16 weights.
class Bfloat16Product {
 public:
  Bfloat16Product(const torch::Tensor& x, const torch::Tensor& packed, int64_t out, Isa isa)
      : n_(x.size(0)), in_(x.size(1)), x_(x.data_ptr<float>()), isa_(isa) {
    TORCH_CHECK(packed.numel() == (out + kPanel - 1) / kPanel * kPanel * in_, "x does not fit the weights");
    weights_ = reinterpret_cast<const uint16_t*>(packed.data_ptr<at::BFloat16>());
    if (isa_ != Isa::kAmx) return;
    if (in_ % amx::kTileInputs) {  // does not depend on the number of rows, or the rows' bits would
      isa_ = Isa::kAvx512;
      return;
    }
    high_.resize(n_ * in_);
    low_.resize(n_ * in_);
    at::parallel_for(0, n_, std::max<int64_t>(1, 65536 / in_), [&](int64_t begin, int64_t end) {
      amx::split(x_ + begin * in_, (end - begin) * in_, high_.data() + begin * in_, low_.data() + begin * in_);
    });
  }

  // The panel's outputs, [n][kPanel].
  const float* panel(int64_t p, Scratch& s) const {
    const uint16_t* weights = weights_ + p * kPanel * in_;
    s.sums.assign(n_ * kPanel, 0.f);
    if (isa_ == Isa::kAmx) {
      for (int64_t r = 0; r < n_; r += amx::kTileRows) {
        const int64_t rows = std::min(amx::kTileRows, n_ - r);
        s.configure(rows);
        amx::product_panel(
            weights, high_.data() + r * in_, low_.data() + r * in_, in_, in_, rows, s.sums.data() + r * kPanel);
      }
      return s.sums.data();
    }
    const auto product = isa_ == Isa::kAvx512 ? avx512::product_bfloat16 : avx2::product_bfloat16;
    for (int64_t k = 0; k < in_; k += kBlock)
      product(weights + k * kPanel, x_ + k, in_, n_, std::min(kBlock, in_ - k), s.sums.data());
    return s.sums.data();
  }

 private:
  int64_t n_, in_;
  const float* x_;
  const uint16_t* weights_;
  Isa isa_;
  std::vector<uint16_t> high_, low_;
};

// Products with int8 weights. Each row is rounded to 16 bits with a scale for each part of its inputs, which is far closer
// than the weights are; sums of a part are exact, so every instruction set gives the same bits.
class Int8Product {
 public:
  Int8Product(
      const torch::Tensor& x, const torch::Tensor& packed, int64_t out, const torch::Tensor& scales, int64_t group,
      Isa isa)
      : n_(x.size(0)),
        out_(out),
        layout_(x.size(1), group),
        parts_(layout_.parts()),
        padded_(layout_.padded()),
        scales_(scales.data_ptr<float>()),
        isa_(isa) {
    TORCH_CHECK(packed.numel() == (out + kPanel - 1) / kPanel * kPanel * padded_, "x does not fit the weights");
    TORCH_CHECK(scales.numel() == (parts_.back().group + 1) * out, "the scales do not fit the weights");
    weights_ = packed.data_ptr<int8_t>();
    // Tiles take whole parts. That does not depend on the number of rows.
    const auto ragged = [](const Layout::Part& part) { return part.count % amx::kTileInputsInt8 != 0; };
    if (isa_ == Isa::kAmx && std::any_of(parts_.begin(), parts_.end(), ragged)) isa_ = Isa::kAvx512;
    rounded_.resize(n_ * padded_);
    row_scales_.resize(n_ * parts_.size());
    if (isa_ == Isa::kAmx) {
      high_.resize(n_ * padded_);
      low_.resize(n_ * padded_);
    }
    const float* rows = x.data_ptr<float>();
    at::parallel_for(0, n_, std::max<int64_t>(1, 32768 / padded_), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) round_row(rows + r * layout_.in, r);
    });
  }

  const float* panel(int64_t p, Scratch& s) const {
    const bool is_small = isa_ == Isa::kAvx2;
    const int64_t columns = std::min(kPanel, out_ - p * kPanel), num_parts = parts_.size();
    s.sums.assign(n_ * kPanel, 0.f);
    s.part_sums.resize(n_ * kPanel);
    for (int64_t i = 0; i < num_parts; ++i) {
      const auto& part = parts_[i];
      const int8_t* weights = weights_ + (p * padded_ + part.packed_first) * kPanel;
      if (isa_ == Isa::kAmx)
        for (int64_t r = 0; r < n_; r += amx::kTileRows) {
          const int64_t rows = std::min(amx::kTileRows, n_ - r), from = r * padded_ + part.packed_first;
          s.configure(rows);
          amx::product_panel(
              weights, high_.data() + from, low_.data() + from, padded_, part.packed_count, rows,
              s.part_sums.data() + r * kPanel);
        }
      else
        (is_small ? avx2::product_int8 : avx512::product_int8)(
            weights, rounded_.data() + part.packed_first, padded_, n_, part.packed_count, s.part_sums.data());
      alignas(64) float scales[kPanel] = {};
      std::copy_n(scales_ + part.group * out_ + p * kPanel, columns, scales);
      (is_small ? avx2::add_scaled : avx512::add_scaled)(
          s.part_sums.data(), row_scales_.data() + i, num_parts, scales, n_, s.sums.data());
    }
    return s.sums.data();
  }

 private:
  void round_row(const float* x, int64_t r) {
    int16_t* to = rounded_.data() + r * padded_;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const auto& part = parts_[i];
      const auto round = isa_ == Isa::kAvx2 ? avx2::round_to_int16 : avx512::round_to_int16;
      row_scales_[r * parts_.size() + i] = round(x + part.first, part.count, to + part.packed_first);
    }
    if (isa_ == Isa::kAmx)
      amx::split_int16(to, padded_, high_.data() + r * padded_, low_.data() + r * padded_);
  }

  int64_t n_, out_;
  Layout layout_;
  std::vector<Layout::Part> parts_;
  int64_t padded_;
  const float* scales_;
  const int8_t* weights_;
  Isa isa_;
  std::vector<int16_t> rounded_;  // [n][padded]
  std::vector<int8_t> high_, low_;
  std::vector<float> row_scales_;  // [n][parts]
};

// x [n, in] -> [n, out]; add [out] or null
template <typename P>
torch::Tensor product_of(const P& product, const torch::Tensor& x, int64_t out, const float* add) {
  const int64_t n = x.size(0), panels = (out + kPanel - 1) / kPanel;
  auto result = torch::empty({n, out}, x.options());
  if (n == 0) return result;
  float* y = result.template data_ptr<float>();
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t p = begin; p < end; ++p) {
      const float* sums = product.panel(p, scratch);
      const int64_t first = p * kPanel, columns = std::min(kPanel, out - first);
      for (int64_t r = 0; r < n; ++r)
        for (int64_t o = 0; o < columns; ++o)
          y[r * out + first + o] = add ? sums[r * kPanel + o] + add[first + o] : sums[r * kPanel + o];
    }
    if (scratch.configured) amx::release();
  });
  return result;
}
