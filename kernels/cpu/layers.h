// Layers whose phases one team goes through, so that its threads start once in a layer.

// Threads for a layer: one where it is so small that another would come too late.
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

  // rows [n, hidden] -> [n, out of down]; with `added`, the rows themselves are added at last.
  torch::Tensor forward(const torch::Tensor& rows, bool added) const {
    const float* x = data_of(rows);
    const int64_t hidden = gate_up_.in(), n = rows.numel() / hidden, size = down_.in();
    TORCH_CHECK(!added || down_.out() == hidden, "rows do not fit what they are added to");
    auto out = torch::empty({n, down_.out()}, rows.options());
    Buffer<float> normed(n * hidden), wide(n * 2 * size), inner(n * size);
    const auto first = multiplication(normed.data(), n, gate_up_), second = multiplication(inner.data(), n, down_);
    const Output result{out.data_ptr<float>(), added ? x : nullptr};
    with_team(threads_for(n, {&gate_up_, &down_}), [&](const Member& member) {
      member.share(n, [&](int64_t begin, int64_t end) {
        norm_.rows(x, nullptr, begin, end, normed.data());
        first->take(begin, end);
      });
      member.meet();
      first->run({wide.data(), nullptr});
      member.meet();
      member.share(n, [&](int64_t begin, int64_t end) {
        silu_mul_rows(wide.data(), size, norm_.is_narrow, begin, end, inner.data());
        second->take(begin, end);
      });
      member.meet();
      second->run(result);
    });
    return out;
  }

 private:
  Norm norm_;
  Matrix gate_up_, down_;
};

// output(attention(qkv(x))), x normalised first.
class AttentionLayer {
 public:
  AttentionLayer(Norm norm, Matrix qkv, Heads heads, Matrix output)
      : norm_(std::move(norm)), qkv_(std::move(qkv)), heads_(std::move(heads)), output_(std::move(output)) {
    TORCH_CHECK(norm_.weight.numel() == qkv_.in(), "the norm does not fit the matrices");
  }

  // rows [n, hidden]; cos, sin [n, rotary]; slot_mapping [n]; slots and table see Attention -> [n, out of output]; with `added`,
  // the rows themselves are added at last.
  torch::Tensor forward(
      const torch::Tensor& rows, const torch::Tensor& cos, const torch::Tensor& sin, torch::Tensor keys, torch::Tensor values,
      const torch::Tensor& slot_mapping, const torch::Tensor& slots, const torch::Tensor& table, bool added) const {
    const float* x = data_of(rows);
    const int64_t hidden = qkv_.in(), n = rows.numel() / hidden;
    const Cache cache(std::move(keys), std::move(values));
    const Rotation rotation(heads_, cache, cos, sin, slot_mapping);
    Attention attention(heads_, cache, slots, table);
    TORCH_CHECK(slot_mapping.numel() == n && table.size(0) == n, "there must be a slot and an entry of the table for each row");
    TORCH_CHECK(qkv_.out() == rotation.width() && output_.in() == heads_.heads * cache.dim(), "the matrices do not fit the heads");
    TORCH_CHECK(!added || output_.out() == hidden, "rows do not fit what they are added to");
    auto out = torch::empty({n, output_.out()}, rows.options());
    Buffer<float> normed(n * hidden), wide(n * qkv_.out()), query(n * output_.in()), mixed(n * output_.in());
    const auto first = multiplication(normed.data(), n, qkv_), second = multiplication(mixed.data(), n, output_);
    const Output result{out.data_ptr<float>(), added ? x : nullptr};
    with_team(threads_for(n, {&qkv_, &output_}), [&](const Member& member) {
      member.share(n, [&](int64_t begin, int64_t end) {
        norm_.rows(x, nullptr, begin, end, normed.data());
        first->take(begin, end);
      });
      member.meet();
      first->run({wide.data(), nullptr});
      member.meet();
      member.share(n, [&](int64_t begin, int64_t end) { rotation.rows(wide.data(), begin, end, query.data()); });
      member.meet();
      attention.run(query.data(), mixed.data());
      member.meet();
      member.share(n, [&](int64_t begin, int64_t end) { second->take(begin, end); });
      member.meet();
      second->run(result);
    });
    return out;
  }

 private:
  Norm norm_;
  Matrix qkv_;
  Heads heads_;
  Matrix output_;
};
