// bfloat16 weights in units for AMX (see units.h): how a matrix keeps them, and products of rows with it.

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
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
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
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
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

// Products with a panel for all rows. Sums run over the inputs in order, 32 at a time, whatever the number of rows.
class UnitProduct {
 public:
  UnitProduct(const torch::Tensor& x, const torch::Tensor& packed)
      : n_(x.size(0)), in_(x.size(1)), steps_(in_ / amx::kTileInputs), weights_(packed), rows_(2 * n_ * in_) {
    const float* from = x.data_ptr<float>();
    at::parallel_for(0, n_, std::max<int64_t>(1, 65536 / in_), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t block = r / amx::kTileRows, height = rows_of(block), line = r % amx::kTileRows;
        uint16_t* to = rows_.data() + 2 * block * amx::kTileRows * in_ + line * amx::kTileInputs;
        amx::split(from + r * in_, in_, to, height * amx::kTileInputs, 2 * height * amx::kTileInputs);
      }
    });
  }

  // Buffers of one thread.
  struct Scratch {
    alignas(64) uint16_t opened[2 * amx::kUnit];
    std::vector<float> sums;
    int64_t rows = 0, more = 0;
  };

  Scratch scratch() const {
    Scratch s;
    s.sums.resize(kPanels * n_ * kPanel);
    return s;
  }

  // write(p, sums [n][kPanel]) for each of the panels. Many rows meet some inputs of a few panels before they go on to the
  // next inputs, so that both stay in the second-level cache.
  template <typename Write>
  void each(int64_t begin, int64_t end, Scratch& s, const Write& write) const {
    const int64_t part = n_ <= 2 * amx::kTileRows ? steps_ : std::max<int64_t>(1, kInputBytes / (4 * n_ * amx::kTileInputs));
    for (int64_t from = begin; from < end; from += kPanels) {
      const int64_t count = std::min(kPanels, end - from);
      std::fill_n(s.sums.begin(), count * n_ * kPanel, 0.f);
      std::vector<int64_t> place(count);
      for (int64_t i = 0; i < count; ++i) place[i] = weights_.starts[from + i];
      for (int64_t first = 0; first < steps_; first += part) {
        const int64_t steps = std::min(part, steps_ - first);
        for (int64_t i = 0; i < count; ++i) {
          const uint8_t* heads = weights_.heads + (from + i) * steps_ + first;
          add_steps(weights_.units + place[i], heads, first, steps, s.sums.data() + i * n_ * kPanel, s);
          for (int64_t step = 0; step < steps; ++step) place[i] += amx::unit_bytes(heads[step]);
        }
      }
      for (int64_t i = 0; i < count; ++i) write(from + i, s.sums.data() + i * n_ * kPanel);
    }
  }

  void finish(const Scratch&) const { amx::release(); }

 private:
  static constexpr int64_t kPanels = 8, kInputBytes = 1 << 19;

  int64_t rows_of(int64_t block) const { return std::min(amx::kTileRows, n_ - block * amx::kTileRows); }

  const uint16_t* inputs(int64_t block, int64_t step) const {
    return rows_.data() + 2 * (block * amx::kTileRows * in_ + step * rows_of(block) * amx::kTileInputs);
  }

  // Adds the products of a panel's units with all rows to their sums [n][kPanel], two blocks of rows at a time.
  void add_steps(
      const uint8_t* unit, const uint8_t* heads, int64_t first, int64_t steps, float* sums, Scratch& s) const {
    const int64_t blocks = (n_ + amx::kTileRows - 1) / amx::kTileRows;
    for (int64_t block = 0; block < blocks; block += 2) {
      float* of_block = sums + block * amx::kTileRows * kPanel;
      if (block + 1 < blocks) {
        add_blocks<true>(unit, heads, block, first, steps, of_block, s);
      } else {
        add_blocks<false>(unit, heads, block, first, steps, of_block, s);
      }
    }
  }

  // Each unit is opened while the one before is multiplied.
  template <bool kTwo>
  void add_blocks(
      const uint8_t* unit, const uint8_t* heads, int64_t block, int64_t first, int64_t steps, float* sums,
      Scratch& s) const {
    const int64_t rows = rows_of(block), more = kTwo ? rows_of(block + 1) : rows;
    float* second = sums + amx::kTileRows * kPanel;
    if (rows != s.rows || more != s.more) amx::configure(s.rows = rows, s.more = more);
    amx::load_sums<kTwo>(sums, second);
    const uint16_t* opened = amx::open_unit(unit, heads[0], s.opened);
    for (int64_t step = 0; step < steps; ++step) {
      const uint16_t* next = nullptr;
      unit += amx::unit_bytes(heads[step]);
      if (step + 1 < steps) next = amx::open_unit(unit, heads[step + 1], s.opened + (step + 1) % 2 * amx::kUnit);
      const uint16_t* others = kTwo ? inputs(block + 1, first + step) : nullptr;
      amx::add_unit<kTwo>(opened, inputs(block, first + step), rows, others, more);
      opened = next;
    }
    amx::store_sums<kTwo>(sums, second);
  }

  int64_t n_, in_, steps_;
  Units weights_;
  std::vector<uint16_t> rows_;  // [blocks of 16 rows][in / 32][high, low][rows][32]
};
