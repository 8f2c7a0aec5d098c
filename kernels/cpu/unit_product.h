// Products of rows with bfloat16 weights in units on AMX (see units.h and matrix.h).

// Products with a panel for all rows. Sums run over the inputs in order, 32 at a time, whatever the number of rows.
// kParts: of which a row is the sum; one of them rounds it.
template <int64_t kParts>
class UnitProduct {
  static constexpr int64_t kPanels = 8, kInputBytes = 1 << 20;

 public:
  // x [n, in]
  UnitProduct(const float* x, int64_t n, const Matrix& matrix, Workspace& space)
      : n_(n),
        in_(matrix.in()),
        steps_(in_ / amx::kTileInputs),
        has_few_(n <= 2 * amx::kTileRows),
        part_(has_few_ ? steps_ : std::clamp<int64_t>(kInputBytes / (2 * kParts * n * amx::kTileInputs), 1, steps_)),
        x_(x),
        weights_(matrix.packed()),
        rows_(space.take<uint16_t>(kParts * n_ * in_)) {}

  // Rounds or splits rows begin to end.
  void take(int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t block = r / amx::kTileRows, height = rows_of(block), line = r % amx::kTileRows;
      const int64_t part = height * amx::kTileInputs;
      uint16_t* to = rows_ + kParts * block * amx::kTileRows * in_ + line * amx::kTileInputs;
      if constexpr (kParts == 1) amx::round(x_ + r * in_, in_, to, part);
      if constexpr (kParts == 2) amx::split(x_ + r * in_, in_, to, part, 2 * part);
    }
  }

  // Buffers of one thread.
  struct Scratch {
    Workspace space;
    float* sums;       // [kPanels][n][kPanel]
    uint16_t* opened;  // [2, or part_ where there are many rows][kUnit]
    std::vector<const uint16_t*> units;
    int64_t rows = 0, more = 0;
  };

  Scratch scratch() const {
    Scratch s;
    s.sums = s.space.template take<float>(kPanels * n_ * kPanel);
    s.units.resize(has_few_ ? 2 : part_);
    s.opened = s.space.template take<uint16_t>(s.units.size() * amx::kUnit);
    return s;
  }

  // write(p, sums [n][kPanel]) for each of the panels. Many rows meet some inputs of a few panels before they go on to the
  // next inputs, so that both stay in the second-level cache.
  template <typename Write>
  void each(int64_t begin, int64_t end, Scratch& s, const Write& write) const {
    for (int64_t from = begin; from < end; from += kPanels) {
      const int64_t count = std::min(kPanels, end - from);
      std::fill_n(s.sums, count * n_ * kPanel, 0.f);
      std::vector<int64_t> place(count);
      for (int64_t i = 0; i < count; ++i) place[i] = weights_.starts[from + i];
      for (int64_t first = 0; first < steps_; first += part_) {
        const int64_t steps = std::min(part_, steps_ - first);
        for (int64_t i = 0; i < count; ++i) {
          const uint8_t* heads = weights_.heads + (from + i) * steps_ + first;
          add_steps(weights_.units + place[i], heads, first, steps, s.sums + i * n_ * kPanel, s);
          for (int64_t step = 0; step < steps; ++step) place[i] += amx::unit_bytes(heads[step]);
        }
      }
      for (int64_t i = 0; i < count; ++i) write(from + i, s.sums + i * n_ * kPanel);
    }
  }

  void finish(const Scratch&) const { amx::release(); }

 private:
  int64_t rows_of(int64_t block) const { return std::min(amx::kTileRows, n_ - block * amx::kTileRows); }

  const uint16_t* inputs(int64_t block, int64_t step) const {
    return rows_ + kParts * (block * amx::kTileRows * in_ + step * rows_of(block) * amx::kTileInputs);
  }

  // Adds the products of a panel's units with all rows to their sums [n][kPanel], two blocks of rows at a time. The first
  // open the units for all.
  void add_steps(
      const uint8_t* unit, const uint8_t* heads, int64_t first, int64_t steps, float* sums, Scratch& s) const {
    const int64_t blocks = (n_ + amx::kTileRows - 1) / amx::kTileRows;
    for (int64_t block = 0; block < blocks; block += 2) {
      float* of_block = sums + block * amx::kTileRows * kPanel;
      const auto add = block + 1 < blocks ? (block ? &UnitProduct::add_blocks<true, false> : &UnitProduct::add_blocks<true, true>)
                                          : (block ? &UnitProduct::add_blocks<false, false> : &UnitProduct::add_blocks<false, true>);
      (this->*add)(unit, heads, block, first, steps, of_block, s);
    }
  }

  // With kOpens, each unit is opened while the one before is multiplied.
  template <bool kTwo, bool kOpens>
  void add_blocks(
      const uint8_t* unit, const uint8_t* heads, int64_t block, int64_t first, int64_t steps, float* sums,
      Scratch& s) const {
    const int64_t rows = rows_of(block), more = kTwo ? rows_of(block + 1) : rows;
    float* second = sums + amx::kTileRows * kPanel;
    if (rows != s.rows || more != s.more) amx::configure(s.rows = rows, s.more = more);
    amx::load_sums<kTwo>(sums, second);
    const int64_t place = has_few_ ? 1 : -1;  // bits of a step that say where its unit lies
    if constexpr (kOpens) s.units[0] = amx::open_unit(unit, heads[0], s.opened);
    for (int64_t step = 0; step < steps; ++step) {
      if constexpr (kOpens) {
        unit += amx::unit_bytes(heads[step]);
        const int64_t next = (step + 1) & place;
        if (step + 1 < steps) s.units[next] = amx::open_unit(unit, heads[step + 1], s.opened + next * amx::kUnit);
      }
      const uint16_t* others = kTwo ? inputs(block + 1, first + step) : nullptr;
      amx::add_unit<kTwo, kParts>(s.units[step & place], inputs(block, first + step), rows, others, more);
    }
    amx::store_sums<kTwo>(sums, second);
  }

  int64_t n_, in_, steps_;
  bool has_few_;  // all rows meet a unit while it is open
  int64_t part_;  // steps in which rows meet some panels before they go on
  const float* x_;
  Units weights_;
  uint16_t* rows_;  // [blocks of 16 rows][in / 32][kParts][rows][32]
};
