// Layers, and stacks of them, whose phases one team goes through: its threads start once.

// Threads for products of so many rows: one where they are so small that another would come too late.
inline int64_t threads_for(int64_t rows, std::initializer_list<const Matrix*> matrices) {
  int64_t elements = 0;
  for (const Matrix* matrix : matrices) elements += matrix->in() * matrix->out();
  return threads_for(elements * rows);
}

// down(silu(gate(x)) * up(x)), x normalised first.
class SwiGluLayer {
 public:
  SwiGluLayer(Norm norm, Matrix gate_up, Matrix down) : norm_(std::move(norm)), gate_up_(std::move(gate_up)), down_(std::move(down)) {
    TORCH_CHECK(norm_.weight.numel() == gate_up_.in() && gate_up_.out() == 2 * down_.in(), "the matrices do not fit");
  }

  int64_t in() const { return gate_up_.in(); }
  int64_t out() const { return down_.out(); }
  int64_t threads(int64_t rows) const { return threads_for(rows, {&gate_up_, &down_}); }

  // Phases over rows x [n, in], read once the team has met; `to` is written by all when they have met again.
  class Run {
   public:
    Run(const SwiGluLayer& layer, const float* x, int64_t n, const Output& to, int64_t num_threads, Workspace& space)
        : norm_(layer.norm_),
          n_(n),
          size_(layer.down_.in()),
          x_(x),
          to_(to),
          normed_(space.take<float>(n * layer.in())),
          wide_(space.take<float>(n * layer.gate_up_.out())),
          inner_(space.take<float>(n * size_)),
          first_(multiplication(normed_, n, layer.gate_up_, num_threads, space)),
          second_(multiplication(inner_, n, layer.down_, num_threads, space)) {}

    void phases(const Member& member) {
      member.share(n_, [&](int64_t begin, int64_t end) {
        norm_.rows(x_, nullptr, begin, end, normed_);
        first_->take(begin, end);
      });
      first_->run({wide_, nullptr});
      member.share(n_, [&](int64_t begin, int64_t end) {
        silu_mul_rows(wide_, size_, norm_.is_narrow, begin, end, inner_);
        second_->take(begin, end);
      });
      second_->run(to_);
    }

   private:
    const Norm& norm_;
    int64_t n_, size_;
    const float* x_;
    Output to_;
    float *normed_, *wide_, *inner_;
    std::unique_ptr<Multiplication> first_, second_;
  };

  // rows [n, in] -> [n, out]; with `added`, the rows themselves are added at last.
  torch::Tensor forward(const torch::Tensor& rows, bool added) const {
    const float* x = data_of(rows);
    TORCH_CHECK(rows.dim() == 2 && rows.size(1) == in(), "rows do not fit the matrices");
    TORCH_CHECK(!added || out() == in(), "rows do not fit what they are added to");
    auto result = torch::empty({rows.size(0), out()}, rows.options());
    const int64_t num_threads = threads(rows.size(0));
    Workspace space;
    Run run(*this, x, rows.size(0), {result.data_ptr<float>(), added ? x : nullptr}, num_threads, space);
    with_team(num_threads, [&](const Member& member) { run.phases(member); });
    return result;
  }

 private:
  Norm norm_;
  Matrix gate_up_, down_;
};

// What the attention layers of a step share.
struct StepTensors {
  const torch::Tensor &cos, &sin;          // [n, rotary]
  const torch::Tensor& slot_mapping;       // [n]
  const torch::Tensor &slots, &row_table;  // see Attention
};

// output(attention(qkv(x))), x normalised first.
class AttentionLayer {
 public:
  AttentionLayer(Norm norm, Matrix qkv, Heads heads, Matrix output)
      : norm_(std::move(norm)), qkv_(std::move(qkv)), heads_(std::move(heads)), output_(std::move(output)) {
    TORCH_CHECK(norm_.weight.numel() == qkv_.in(), "the norm does not fit the matrices");
  }

  int64_t in() const { return qkv_.in(); }
  int64_t out() const { return output_.out(); }
  int64_t threads(const Cache& cache, const torch::Tensor& row_table) const {
    return std::max(
        threads_for(row_table.size(0), {&qkv_, &output_}), threads_for_attention(heads_, cache, row_table));
  }

  void check(const Cache& cache, const StepTensors& step, int64_t n) const {
    const Rotation rotation(heads_, cache, step.cos, step.sin, step.slot_mapping);
    Attention::check(heads_, cache, step.slots, step.row_table);
    TORCH_CHECK(
        step.slot_mapping.numel() == n && step.row_table.size(0) == n, "there must be a slot and a line of the table for each row");
    TORCH_CHECK(qkv_.out() == rotation.width() && output_.in() == heads_.heads * cache.dim(), "the matrices do not fit the heads");
  }

  // As SwiGluLayer::Run. What it is made from has been checked.
  class Run {
   public:
    Run(
        const AttentionLayer& layer, const Cache& cache, const StepTensors& step, const float* x, int64_t n, const Output& to,
        int64_t num_threads, Workspace& space)
        : norm_(layer.norm_),
          n_(n),
          x_(x),
          to_(to),
          rotation_(layer.heads_, cache, step.cos, step.sin, step.slot_mapping),
          attention_(layer.heads_, cache, step.slots, step.row_table, num_threads),
          normed_(space.take<float>(n * layer.in())),
          wide_(space.take<float>(n * layer.qkv_.out())),
          query_(space.take<float>(n * layer.output_.in())),
          mixed_(space.take<float>(n * layer.output_.in())),
          first_(multiplication(normed_, n, layer.qkv_, num_threads, space)),
          second_(multiplication(mixed_, n, layer.output_, num_threads, space)) {}

    void phases(const Member& member) {
      member.share(n_, [&](int64_t begin, int64_t end) {
        norm_.rows(x_, nullptr, begin, end, normed_);
        first_->take(begin, end);
      });
      first_->run({wide_, nullptr});
      member.share(n_, [&](int64_t begin, int64_t end) { rotation_.rows(wide_, begin, end, query_); });
      attention_.run(query_, mixed_);
      member.share(n_, [&](int64_t begin, int64_t end) { second_->take(begin, end); });
      second_->run(to_);
    }

   private:
    const Norm& norm_;
    int64_t n_;
    const float* x_;
    Output to_;
    Rotation rotation_;
    Attention attention_;
    float *normed_, *wide_, *query_, *mixed_;
    std::unique_ptr<Multiplication> first_, second_;
  };

  // rows [n, in] -> [n, out]; keys, values: see Cache; `added` as in SwiGluLayer.
  torch::Tensor forward(
      const torch::Tensor& rows, const torch::Tensor& cos, const torch::Tensor& sin, torch::Tensor keys, torch::Tensor values,
      const torch::Tensor& slot_mapping, const torch::Tensor& slots, const torch::Tensor& row_table, bool added) const {
    const float* x = data_of(rows);
    TORCH_CHECK(rows.dim() == 2 && rows.size(1) == in(), "rows do not fit the matrices");
    TORCH_CHECK(!added || out() == in(), "rows do not fit what they are added to");
    const Cache cache(std::move(keys), std::move(values));
    const StepTensors step{cos, sin, slot_mapping, slots, row_table};
    check(cache, step, rows.size(0));
    auto result = torch::empty({rows.size(0), out()}, rows.options());
    const int64_t num_threads = threads(cache, row_table);
    Workspace space;
    Run run(*this, cache, step, x, rows.size(0), {result.data_ptr<float>(), added ? x : nullptr}, num_threads, space);
    with_team(num_threads, [&](const Member& member) { run.phases(member); });
    return result;
  }

 private:
  Norm norm_;
  Matrix qkv_;
  Heads heads_;
  Matrix output_;
};

// Blocks one after the other: x + attention(x), then x + mlp(x); and a norm of what comes out.
class Stack {
 public:
  Stack(std::vector<AttentionLayer> attention, std::vector<SwiGluLayer> mlps, Norm norm)
      : attention_(std::move(attention)), mlps_(std::move(mlps)), norm_(std::move(norm)) {
    TORCH_CHECK(attention_.size() == mlps_.size() && !mlps_.empty(), "each block has an attention layer and an MLP");
    for (size_t i = 0; i < mlps_.size(); ++i)
      for (const int64_t size : {attention_[i].in(), attention_[i].out(), mlps_[i].in(), mlps_[i].out()})
        TORCH_CHECK(size == norm_.weight.numel(), "the layers do not fit one another");
  }

  // rows [n, hidden]; keys, values of each layer; else as AttentionLayer -> [n, hidden]
  torch::Tensor forward(
      const torch::Tensor& rows, const torch::Tensor& cos, const torch::Tensor& sin, const std::vector<torch::Tensor>& keys,
      const std::vector<torch::Tensor>& values, const torch::Tensor& slot_mapping, const torch::Tensor& slots,
      const torch::Tensor& row_table) const {
    const float* x = data_of(rows);
    const int64_t hidden = norm_.weight.numel(), n = rows.size(0);
    TORCH_CHECK(rows.dim() == 2 && rows.size(1) == hidden, "rows do not fit the layers");
    TORCH_CHECK(keys.size() == mlps_.size() && values.size() == mlps_.size(), "there must be keys and values for each layer");
    const StepTensors step{cos, sin, slot_mapping, slots, row_table};
    std::vector<Cache> caches;
    for (size_t i = 0; i < keys.size(); ++i) {
      caches.emplace_back(keys[i], values[i]);
      attention_[i].check(caches[i], step, n);
    }
    auto result = torch::empty({n, hidden}, rows.options());
    Workspace kept, space;
    float *between = kept.take<float>(n * hidden), *after = kept.take<float>(n * hidden);
    std::optional<AttentionLayer::Run> attend;
    std::optional<SwiGluLayer::Run> mlp;
    const int64_t num_threads = std::max(attention_[0].threads(caches[0], row_table), mlps_[0].threads(n));
    with_team(num_threads, [&](const Member& member) {
      for (size_t i = 0; i < mlps_.size(); ++i) {
        member.once([&] {
          const float* from = i ? after : x;
          space.reuse();
          attend.emplace(attention_[i], caches[i], step, from, n, Output{between, from}, num_threads, space);
        });
        attend->phases(member);
        member.once([&] {
          space.reuse();
          mlp.emplace(mlps_[i], between, n, Output{after, between}, num_threads, space);
        });
        mlp->phases(member);
      }
      member.share(n, [&](int64_t begin, int64_t end) {
        norm_.rows(after, nullptr, begin, end, result.data_ptr<float>());
      });
    });
    return result;
  }

 private:
  std::vector<AttentionLayer> attention_;
  std::vector<SwiGluLayer> mlps_;
  Norm norm_;
};
