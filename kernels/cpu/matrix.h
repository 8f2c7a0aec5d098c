// Weights as the kernels keep them.

// One byte tensor: int64 panels, int64 inputs, int64 starts [panels + 1] of the panels' units in bytes from the first unit,
// uint8 heads [panels][inputs / 32], then the units from a line of the cache on.
struct Units {
  explicit Units(const torch::Tensor& packed) {
    const auto* words = reinterpret_cast<const int64_t*>(packed.data_ptr<uint8_t>());
    panels = words[0], inputs = words[1], starts = words + 2;
    heads = reinterpret_cast<const uint8_t*>(starts + panels + 1);
    units = packed.data_ptr<uint8_t>() + prelude_bytes(panels, inputs);
  }

  static int64_t prelude_bytes(int64_t panels, int64_t inputs) {
    const int64_t bytes = 8 * (panels + 3) + panels * (inputs / amx::kTileInputs);
    return (bytes + 63) / 64 * 64;
  }

  bool fits(int64_t in, int64_t num_panels) const { return inputs == in && panels == num_panels; }

  int64_t panels, inputs;
  const int64_t* starts;
  const uint8_t *heads, *units;
};

// weight [out, in] bfloat16, in a multiple of 32 -> see Units.
inline torch::Tensor pack_units(const torch::Tensor& weight) {
  const int64_t out = weight.size(0), in = weight.size(1), panels = (out + kPanel - 1) / kPanel;
  const int64_t steps = in / amx::kTileInputs;
  const auto* from = reinterpret_cast<const uint16_t*>(weight.data_ptr<at::BFloat16>());
  const auto gather = [&](int64_t p, int64_t step, uint16_t* unit) {
    const int64_t width = std::min(kPanel, out - p * kPanel);
    std::memset(unit, 0, amx::kPlainBytes);
    for (int64_t o = 0; o < width; ++o)
      for (int64_t k = 0; k < amx::kTileInputs; ++k)
        unit[amx::place_bfloat16(k, o)] = from[(p * kPanel + o) * in + step * amx::kTileInputs + k];
  };
  std::vector<uint8_t> heads(panels * steps);
  std::vector<int64_t> starts(panels + 1);
  share(panels, kPanel * in, [&](int64_t begin, int64_t end) {
    uint16_t unit[amx::kUnit];
    for (int64_t p = begin; p < end; ++p)
      for (int64_t step = 0; step < steps; ++step) {
        gather(p, step, unit);
        heads[p * steps + step] = amx::head_of(unit);
      }
  });
  for (int64_t p = 0; p < panels; ++p) {
    starts[p + 1] = starts[p];
    for (int64_t step = 0; step < steps; ++step) starts[p + 1] += amx::unit_bytes(heads[p * steps + step]);
  }
  const int64_t prelude = Units::prelude_bytes(panels, in);
  auto packed = zeros_on_huge_pages(prelude + starts[panels], weight.options().dtype(torch::kByte));
  auto* bytes = packed.data_ptr<uint8_t>();
  const int64_t sizes[] = {panels, in};
  std::memcpy(bytes, sizes, sizeof(sizes));
  std::memcpy(bytes + 16, starts.data(), 8 * (panels + 1));
  std::memcpy(bytes + 16 + 8 * (panels + 1), heads.data(), panels * steps);
  share(panels, kPanel * in, [&](int64_t begin, int64_t end) {
    uint16_t unit[amx::kUnit];
    for (int64_t p = begin; p < end; ++p) {
      uint8_t* to = bytes + prelude + starts[p];
      for (int64_t step = 0; step < steps; ++step) {
        const uint8_t head = heads[p * steps + step];
        gather(p, step, unit);
        amx::close_unit(unit, head, to);
        to += amx::unit_bytes(head);
      }
    }
  });
  return packed;
}

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
  share(panels, kPanel * in, [&](int64_t begin, int64_t end) {
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

// A matrix as `pack` gave it, with what belongs to it.
class Matrix {
 public:
  // scales [groups, out] for int8, else none; bias [out]; rounds_rows: whether rows that meet it on tiles are rounded there to
  // bfloat16, or to 16 bits where they meet int8. Checks that the parts fit.
  Matrix(
      torch::Tensor packed, int64_t out, int64_t in, std::optional<torch::Tensor> scales, int64_t group,
      std::optional<torch::Tensor> bias, bool rounds_rows, const std::string& isa)
      : packed_(std::move(packed)),
        scales_(std::move(scales)),
        bias_(std::move(bias)),
        out_(out),
        in_(in),
        group_(group),
        rounds_rows_(rounds_rows) {
    const Isa set = parse(isa);
    const bool is_int8 = packed_.scalar_type() == torch::kInt8, in_units = packed_.scalar_type() == torch::kByte;
    const int64_t panels = (out + kPanel - 1) / kPanel;
    TORCH_CHECK(
        in_units ? Units(packed_).fits(in, panels) : packed_.numel() == panels * kPanel * in, "the weights do not fit");
    TORCH_CHECK(is_int8 == scales_.has_value(), "int8 weights have scales, others none");
    TORCH_CHECK(!is_int8 || scales_->numel() == (in + group - 1) / group * out, "the scales do not fit the weights");
    TORCH_CHECK(!in_units || set == Isa::kAmx, "units of weights are for amx");
    TORCH_CHECK(!bias_ || bias_->numel() == out, "the bias does not fit the weights");
    data_or_null(scales_), data_or_null(bias_);
    kind_ = in_units ? Kind::kUnits
            : is_int8 && tiles_take(set, true, in, group) ? Kind::kDigits
            : set == Isa::kAvx2 ? Kind::kAvx2 : Kind::kAvx512;
  }

  enum class Kind { kUnits, kDigits, kAvx512, kAvx2 };

  const torch::Tensor& packed() const { return packed_; }
  const float* scales() const { return data_or_null(scales_); }
  const float* bias() const { return data_or_null(bias_); }
  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  int64_t group() const { return group_; }
  bool rounds_rows() const { return rounds_rows_; }
  Kind kind() const { return kind_; }

 private:
  torch::Tensor packed_;
  std::optional<torch::Tensor> scales_, bias_;
  int64_t out_, in_, group_;
  bool rounds_rows_;
  Kind kind_;
};
