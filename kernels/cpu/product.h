// Products of rows with packed weights on any instruction set.

// Products of one panel for all rows, group by group of inputs: out [n][kPanel].
class Product {
 public:
  // x [n, in]
  Product(const float* x, int64_t n, const Matrix& matrix, Workspace&)
      : n_(n),
        in_(matrix.in()),
        out_(matrix.out()),
        x_(x),
        scales_(matrix.scales()),
        group_(scales_ ? matrix.group() : in_),
        is_int8_(matrix.packed().scalar_type() == torch::kInt8),
        weights_(static_cast<const char*>(matrix.packed().data_ptr())),
        is_wide_(matrix.kind() != Matrix::Kind::kAvx2) {}

  void take(int64_t, int64_t) {}

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

// Products with int8 weights on tiles: rows as digits, exact sums over up to kPart inputs that share two scales.
template <int64_t kDigits>
class DigitProduct {
 public:
  // x [n, in]
  DigitProduct(const float* x, int64_t n, const Matrix& matrix, Workspace& space)
      : n_(n),
        in_(matrix.in()),
        out_(matrix.out()),
        num_tiles_((kDigits * n_ + amx::kTileRows - 1) / amx::kTileRows),
        x_(x),
        scales_(matrix.scales()),
        weights_(matrix.packed().data_ptr<int8_t>()),
        digits_(space.take<int8_t>(num_tiles_ * amx::kTileRows * in_)) {
    const int64_t group = matrix.group();
    for (int64_t start = 0; start < in_; start += group)
      for (int64_t k = start; k < std::min(in_, start + group); k += kPart)
        parts_.push_back({start / group, k, std::min({kPart, start + group - k, in_ - k})});
    row_scales_.resize(n_ * parts_.size());
    // Rows of the last tile that nobody fills give sums that nobody reads.
    std::fill(digits_ + kDigits * n_ * in_, digits_ + num_tiles_ * amx::kTileRows * in_, 0);
  }

  // Splits rows begin to end.
  void take(int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (size_t i = 0; i < parts_.size(); ++i) {
        const auto [group, first, count] = parts_[i];
        row_scales_[r * parts_.size() + i] =
            amx::split_int8<kDigits>(x_ + r * in_ + first, count, digits_ + kDigits * r * in_ + first, in_);
      }
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
          weights_ + (p * in_ + part.first) * kPanel, digits_ + part.first, in_, part.count, num_tiles_,
          s.sums.data());
      amx::add_scaled<kDigits>(s.sums.data(), row_scales_.data() + i, parts_.size(), scales, n_, s.total.data());
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
  const float *x_, *scales_;
  const int8_t* weights_;
  int8_t* digits_;  // [16 * num_tiles][in]
  std::vector<Part> parts_;
  std::vector<float> row_scales_;  // [n][parts]
};

// Where a product goes.
struct Output {
  float* rows;         // [n, out]
  const float* added;  // [n, out], added at last; or null
};

// One product as phases of a team: `take` of all rows, by whoever wrote them, then `run` of all members.
class Multiplication {
 public:
  virtual ~Multiplication() = default;
  // Rows begin to end are there.
  virtual void take(int64_t begin, int64_t end) = 0;
  // This member's panels of the product.
  virtual void run(const Output& to) = 0;
};

template <typename P>
class MultiplicationOf final : public Multiplication {
 public:
  MultiplicationOf(const float* x, int64_t n, const Matrix& matrix, int64_t num_threads, Workspace& space)
      : product_(x, n, matrix, space),
        n_(n),
        out_(matrix.out()),
        bias_(matrix.bias()),
        left_((out_ + kPanel - 1) / kPanel, num_threads) {}

  void take(int64_t begin, int64_t end) override { product_.take(begin, end); }

  void run(const Output& to) override {
    int64_t begin, end;
    if (!left_.take(begin, end)) return;
    auto scratch = product_.scratch();
    const auto write = [&](int64_t p, const float* sums) {
      const int64_t first = p * kPanel, columns = std::min(kPanel, out_ - first);
      float bias[kPanel] = {};
      if (bias_) std::copy_n(bias_ + first, columns, bias);
      const auto row = [&](int64_t r, int64_t count) {
        const float *sum = sums + r * kPanel, *more = to.added ? to.added + r * out_ + first : nullptr;
        float* y = to.rows + r * out_ + first;
        if (more) {
          for (int64_t o = 0; o < count; ++o) y[o] = sum[o] + bias[o] + more[o];
        } else {
          for (int64_t o = 0; o < count; ++o) y[o] = sum[o] + bias[o];
        }
      };
      for (int64_t r = 0; r < n_; ++r) columns == kPanel ? row(r, kPanel) : row(r, columns);
    };
    do {
      product_.each(begin, end, scratch, write);
    } while (left_.take(begin, end));
    product_.finish(scratch);
  }

 private:
  P product_;
  int64_t n_, out_;
  const float* bias_;
  Parts left_;
};

template <typename P>
std::unique_ptr<Multiplication> multiplication_of(
    const float* x, int64_t n, const Matrix& matrix, int64_t num_threads, Workspace& space) {
  return std::make_unique<MultiplicationOf<P>>(x, n, matrix, num_threads, space);
}

// x [n, in] is to be read from `take` on only. num_threads: of the team.
inline std::unique_ptr<Multiplication> multiplication(
    const float* x, int64_t n, const Matrix& matrix, int64_t num_threads, Workspace& space) {
  const bool rounds = matrix.rounds_rows();
  const auto make = matrix.kind() == Matrix::Kind::kUnits
                        ? (rounds ? multiplication_of<UnitProduct<1>> : multiplication_of<UnitProduct<2>>)
                    : matrix.kind() == Matrix::Kind::kDigits
                        ? (rounds ? multiplication_of<DigitProduct<2>> : multiplication_of<DigitProduct<3>>)
                        : multiplication_of<Product>;
  return make(x, n, matrix, num_threads, space);
}
