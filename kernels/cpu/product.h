// Packed weights, and the product of rows with a panel of them on any instruction set.

// Whether products of that kind run on tiles: they take whole tiles of inputs, and of those that share a scale. What does not
// fit is left to AVX-512. The number of rows has no say, or the rows' bits would depend on it.
inline bool tiles_take(Isa isa, bool is_int8, int64_t in, int64_t group) {
  if (isa != Isa::kAmx) return false;
  if (!is_int8) return in % amx::kTileInputs == 0;
  return in % amx::kTileInputsInt8 == 0 && (group >= in || group % amx::kTileInputsInt8 == 0);
}

// weight [out, in] bfloat16 (in even), or int8 with scales for `group` inputs -> [panels * kPanel * in] of the same type, or
// units (see units.h) where tiles take bfloat16.
inline torch::Tensor pack(const torch::Tensor& weight, int64_t group, const std::string& isa) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be a contiguous matrix");
  const int64_t out = weight.size(0), in = weight.size(1), panels = (out + kPanel - 1) / kPanel;
  const bool is_int8 = weight.scalar_type() == torch::kInt8;
  TORCH_CHECK(is_int8 || weight.scalar_type() == torch::kBFloat16, "weight must be bfloat16 or int8");
  TORCH_CHECK(is_int8 || in % 2 == 0, "weight has an odd number of inputs");
  const bool tiled = tiles_take(parse(isa), is_int8, in, group);
  if (tiled && !is_int8) return pack_units(weight);
  auto packed = zeros_on_huge_pages(panels * kPanel * in, weight.options());
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t width = std::min(kPanel, out - p * kPanel), first = p * kPanel * in;
      if (is_int8) {
        const int8_t* from = weight.data_ptr<int8_t>() + first;
        int8_t* to = packed.data_ptr<int8_t>() + first;
        for (int64_t o = 0; o < width; ++o)
          for (int64_t k = 0; k < in; ++k) to[tiled ? amx::place_int8(k, o) : k * kPanel + o] = from[o * in + k];
      } else {
        const uint16_t* from = reinterpret_cast<const uint16_t*>(weight.data_ptr<at::BFloat16>()) + first;
        uint16_t* to = reinterpret_cast<uint16_t*>(packed.data_ptr<at::BFloat16>()) + first;
        for (int64_t o = 0; o < width; ++o)
          for (int64_t k = 0; k < in; ++k) to[k / 2 * 2 * kPanel + 2 * o + k % 2] = from[o * in + k];
      }
    }
  });
  return packed;
}

// Products of one panel for all rows, group by group of inputs: out [n][kPanel].
class Product {
 public:
  Product(const torch::Tensor& x, const torch::Tensor& packed, int64_t out, const float* scales, int64_t group, Isa isa)
      : n_(x.size(0)),
        in_(x.size(1)),
        out_(out),
        x_(x.data_ptr<float>()),
        scales_(scales),
        group_(scales ? group : in_),
        is_int8_(packed.scalar_type() == torch::kInt8),
        weights_(static_cast<const char*>(packed.data_ptr())),
        is_wide_(isa != Isa::kAvx2) {}

  // Buffers of one thread.
  struct Scratch {
    std::vector<float> sums, total;
  };

  Scratch scratch() const {
    Scratch s;
    s.sums.resize(n_ * kPanel);
    s.total.resize(scales_ ? n_ * kPanel : 0);
    return s;
  }

  const float* panel(int64_t p, Scratch& s) const {
    if (!scales_) {
      part(p, 0, in_, s);
      return s.sums.data();
    }
    std::fill(s.total.begin(), s.total.end(), 0.f);
    const int64_t columns = std::min(kPanel, out_ - p * kPanel);
    for (int64_t k = 0; k < in_; k += group_) {
      part(p, k, std::min(group_, in_ - k), s);
      const float* scale = scales_ + k / group_ * out_ + p * kPanel;
      for (int64_t r = 0; r < n_; ++r)
        for (int64_t o = 0; o < columns; ++o) s.total[r * kPanel + o] += scale[o] * s.sums[r * kPanel + o];
    }
    return s.total.data();
  }

  // write(p, sums [n][kPanel]) for each of the panels.
  template <typename Write>
  void each(int64_t begin, int64_t end, Scratch& s, const Write& write) const {
    for (int64_t p = begin; p < end; ++p) write(p, panel(p, s));
  }

  void finish(const Scratch&) const {}

 private:
  // Sums over `count` inputs from `first` on, into s.sums.
  void part(int64_t p, int64_t first, int64_t count, Scratch& s) const {
    const int64_t width = is_int8_ ? 1 : 2;
    const char* weights = weights_ + (p * kPanel * in_ + first * kPanel) * width;
    std::fill(s.sums.begin(), s.sums.end(), 0.f);
    const auto product = is_int8_ ? (is_wide_ ? avx512::product_panel<true> : avx2::product_panel<true>)
                                  : (is_wide_ ? avx512::product_panel<false> : avx2::product_panel<false>);
    for (int64_t k = 0; k < count; k += kBlock)
      product(weights + k * kPanel * width, x_ + first + k, in_, n_, std::min(kBlock, count - k), s.sums.data());
  }

  int64_t n_, in_, out_;
  const float* x_;
  const float* scales_;
  int64_t group_;
  bool is_int8_;
  const char* weights_;
  bool is_wide_;
};

// Products with int8 weights on tiles: rows as three digits, exact sums over up to kPart inputs that share two scales.
class DigitProduct {
 public:
  DigitProduct(const torch::Tensor& x, const torch::Tensor& packed, int64_t out, const float* scales, int64_t group)
      : n_(x.size(0)),
        in_(x.size(1)),
        out_(out),
        num_tiles_((3 * n_ + amx::kTileRows - 1) / amx::kTileRows),
        scales_(scales),
        weights_(packed.data_ptr<int8_t>()),
        digits_(num_tiles_ * amx::kTileRows * in_) {
    for (int64_t start = 0; start < in_; start += group)
      for (int64_t k = start; k < std::min(in_, start + group); k += kPart)
        parts_.push_back({start / group, k, std::min({kPart, start + group - k, in_ - k})});
    row_scales_.resize(n_ * parts_.size());
    const float* rows = x.data_ptr<float>();
    at::parallel_for(0, n_, std::max<int64_t>(1, 32768 / in_), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        for (size_t i = 0; i < parts_.size(); ++i) {
          int8_t* to = digits_.data() + 3 * r * in_ + parts_[i].first;
          row_scales_[r * parts_.size() + i] =
              amx::split_int8(rows + r * in_ + parts_[i].first, parts_[i].count, to, to + in_, to + 2 * in_);
        }
    });
  }

  struct Scratch {
    std::vector<float> total;
    std::vector<int32_t> sums;
  };

  Scratch scratch() const {
    amx::configure(amx::kTileRows, amx::kTileRows);
    return {std::vector<float>(n_ * kPanel), std::vector<int32_t>(num_tiles_ * amx::kTileRows * kPanel)};
  }

  const float* panel(int64_t p, Scratch& s) const {
    std::fill(s.total.begin(), s.total.end(), 0.f);
    const int64_t columns = std::min(kPanel, out_ - p * kPanel);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      float scales[kPanel] = {};
      std::copy_n(scales_ + part.group * out_ + p * kPanel, columns, scales);
      amx::digit_sums(
          weights_ + (p * in_ + part.first) * kPanel, digits_.data() + part.first, in_, part.count, num_tiles_,
          s.sums.data());
      amx::add_scaled(s.sums.data(), row_scales_.data() + i, parts_.size(), scales, n_, s.total.data());
    }
    return s.total.data();
  }

  // write(p, sums [n][kPanel]) for each of the panels.
  template <typename Write>
  void each(int64_t begin, int64_t end, Scratch& s, const Write& write) const {
    for (int64_t p = begin; p < end; ++p) write(p, panel(p, s));
  }

  void finish(const Scratch&) const { amx::release(); }

 private:
  static constexpr int64_t kPart = 512;

  struct Part {
    int64_t group, first, count;
  };

  int64_t n_, in_, out_, num_tiles_;
  const float* scales_;
  const int8_t* weights_;
  std::vector<int8_t> digits_;  // [16 * num_tiles][in]
  std::vector<Part> parts_;
  std::vector<float> row_scales_;  // [n][parts]
};

// Panels for threads that ask: each takes half of an even share of what is left. With fixed shares all would wait for one that
// other work on this machine keeps from running.
class Panels {
 public:
  Panels(int64_t count, int64_t num_threads) : count_(count), num_threads_(num_threads) {}

  bool take(int64_t& begin, int64_t& end) {
    begin = next_.load(std::memory_order_relaxed);
    do {
      if (begin >= count_) return false;
      end = begin + std::max<int64_t>(1, (count_ - begin) / (2 * num_threads_));
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

 private:
  int64_t count_, num_threads_;
  std::atomic<int64_t> next_{0};
};

// x [n, in] -> [n, out]; add [out] or null
template <typename P>
torch::Tensor product_of(const P& product, const torch::Tensor& x, int64_t out, const float* add) {
  const int64_t n = x.size(0), panels = (out + kPanel - 1) / kPanel;
  auto result = torch::empty({n, out}, x.options());
  float* y = result.template data_ptr<float>();
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), panels);
  Panels left(panels, num_threads);
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    auto scratch = product.scratch();
    const auto write = [&](int64_t p, const float* sums) {
      const int64_t first = p * kPanel, columns = std::min(kPanel, out - first);
      for (int64_t r = 0; r < n; ++r)
        for (int64_t o = 0; o < columns; ++o)
          y[r * out + first + o] = add ? sums[r * kPanel + o] + add[first + o] : sums[r * kPanel + o];
    };
    for (int64_t begin, end; left.take(begin, end);) product.each(begin, end, scratch, write);
    product.finish(scratch);
  });
  return result;
}
