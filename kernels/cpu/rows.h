// Kernels over rows, for one instruction set. Included once for each, after simd.h, in the same namespace.
//
// Row invariance: what a row gives is computed by the same operations in the same order whatever rows are beside it.
// Every (row, output) of a product is one chain of multiply-adds over the inputs, ascending; how many chains run side by
// side changes speed alone.

// ---- products -------------------------------------------------------------------------------------------------------

// R rows by V vectors of outputs, over `count` inputs of one panel; acc [R][kPanel] is read and written.
template <int R, int V, bool kInt8>
TARGET inline void product_block(
    const char* weights, const float* x, int64_t x_stride, int64_t count, float* acc, int64_t first) {
  vec sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load(acc + r * kPanel + first + v * LANES);
  if constexpr (kInt8) {
    const int8_t* w = reinterpret_cast<const int8_t*>(weights) + first;
    for (int64_t k = 0; k < count; ++k, w += kPanel) {
      vec wide[V];
      for (int v = 0; v < V; ++v) wide[v] = widen_int8(w + v * LANES);
      for (int r = 0; r < R; ++r) {
        const vec input = broadcast(x + r * x_stride + k);
        for (int v = 0; v < V; ++v) sums[r][v] = fma(wide[v], input, sums[r][v]);
      }
    }
  } else {
    const uint16_t* w = reinterpret_cast<const uint16_t*>(weights) + 2 * first;
    for (int64_t k = 0; k < count; k += 2, w += 2 * kPanel) {
      for (int v = 0; v < V; ++v) {
        vec even, odd;
        widen_pairs(w + 2 * v * LANES, even, odd);
        for (int r = 0; r < R; ++r) {
          sums[r][v] = fma(even, broadcast(x + r * x_stride + k), sums[r][v]);
          sums[r][v] = fma(odd, broadcast(x + r * x_stride + k + 1), sums[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(acc + r * kPanel + first + v * LANES, sums[r][v]);
}

// A whole panel for R rows, as many vectors at once as the registers hold.
template <int R, bool kInt8>
TARGET inline void product_rows(const char* weights, const float* x, int64_t x_stride, int64_t count, float* acc) {
  constexpr int kVectors = kPanel / LANES;
  constexpr int kFit = (kRegisters - 4) / R;
  constexpr int V = kFit >= kVectors ? kVectors : kFit >= 2 && kVectors >= 2 ? 2 : 1;
  for (int v = 0; v < kVectors; v += V) product_block<R, V, kInt8>(weights, x, x_stride, count, acc, v * LANES);
}

template <bool kInt8>
TARGET void product_panel(
    const char* weights, const float* x, int64_t x_stride, int64_t num_rows, int64_t count, float* acc) {
  while (num_rows > 0) {
    // Two even parts rather than six rows and one: a part of one row costs as much as one of three.
    int64_t done = num_rows > 6 && num_rows < 12 ? (num_rows + 1) / 2 : num_rows < 6 ? num_rows : 6;
    switch (done) {
      case 1: product_rows<1, kInt8>(weights, x, x_stride, count, acc); break;
      case 2: product_rows<2, kInt8>(weights, x, x_stride, count, acc); break;
      case 3: product_rows<3, kInt8>(weights, x, x_stride, count, acc); break;
      case 4: product_rows<4, kInt8>(weights, x, x_stride, count, acc); break;
      case 5: product_rows<5, kInt8>(weights, x, x_stride, count, acc); break;
      default: product_rows<6, kInt8>(weights, x, x_stride, count, acc); break;
    }
    x += done * x_stride;
    acc += done * kPanel;
    num_rows -= done;
  }
}

// ---- elementwise ----------------------------------------------------------------------------------------------------

// out = x / rms(x) * weight for one row (Zhang, Sennrich, arXiv 1910.07467); with `residual`, x is first added to it and the
// sum stays there.
TARGET void rms_norm_row(const float* x, float* residual, const float* weight, float eps, int64_t size, float* out) {
  vec squares = zero();
  float rest = 0.f;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    vec value = load(x + i);
    if (residual) store(residual + i, value = add(value, load(residual + i)));
    squares = fma(value, value, squares);
  }
  for (; i < size; ++i) {
    const float value = residual ? residual[i] += x[i] : x[i];
    rest += value * value;
  }
  const float scale = 1.f / std::sqrt((sum(squares) + rest) / static_cast<float>(size) + eps);
  const float* from = residual ? residual : x;
  for (i = 0; i + LANES <= size; i += LANES) store(out + i, mul(mul(load(from + i), set(scale)), load(weight + i)));
  for (; i < size; ++i) out[i] = from[i] * scale * weight[i];
}

// out[i] = silu(gate[i]) * up[i]. The tail runs through the same vector code.
TARGET void silu_mul_row(const float* gate, const float* up, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vec g = load(gate + i);
    store(out + i, mul(div(g, add(set(1.f), exp(sub(zero(), g)))), load(up + i)));
  }
  if (i < size) {
    float g_tail[LANES] = {}, u_tail[LANES] = {}, o_tail[LANES];
    std::memcpy(g_tail, gate + i, (size - i) * sizeof(float));
    std::memcpy(u_tail, up + i, (size - i) * sizeof(float));
    const vec g = load(g_tail);
    store(o_tail, mul(div(g, add(set(1.f), exp(sub(zero(), g)))), load(u_tail)));
    std::memcpy(out + i, o_tail, (size - i) * sizeof(float));
  }
}

// ---- attention ------------------------------------------------------------------------------------------------------

// One head: normalised over its elements where there is a weight, then turned by the angles of the row's position (Su et
// al., arXiv 2104.09864, in the form of halves that transformers uses). cos, sin: [rotary], both halves.
TARGET void turn_head(
    const float* x, const float* weight, float eps, const float* cos, const float* sin, int64_t dim, int64_t rotary,
    float* out) {
  if (weight)
    rms_norm_row(x, nullptr, weight, eps, dim, out);
  else
    std::memcpy(out, x, dim * sizeof(float));
  const int64_t half = rotary / 2;
  float* other = out + half;
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vec a = load(out + i), b = load(other + i);
    store(out + i, sub(mul(a, load(cos + i)), mul(b, load(sin + i))));
    store(other + i, add(mul(b, load(cos + half + i)), mul(a, load(sin + half + i))));
  }
  for (; i < half; ++i) {
    const float a = out[i], b = other[i];
    out[i] = a * cos[i] - b * sin[i];
    other[i] = b * cos[half + i] + a * sin[half + i];
  }
}

TARGET inline vec widen(const float* p) { return load(p); }
TARGET inline vec widen(const uint16_t* p) { return widen_bf16(p); }

template <typename T>
TARGET inline float dot(const float* a, const T* b, int64_t size) {
  vec s = zero();
  for (int64_t i = 0; i < size; i += LANES) s = fma(load(a + i), widen(b + i), s);
  return sum(s);
}

// out [H][dim], elements first to first + V * LANES: the values at `offsets` weighted by weights [H][weight_stride].
template <int H, int V, typename T>
TARGET inline void weigh_part(
    const float* weights, int64_t weight_stride, const int64_t* offsets, int64_t count, const T* values, int64_t first,
    int64_t dim, float* out) {
  vec sums[H][V];
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v) sums[h][v] = zero();
  for (int64_t i = 0; i < count; ++i) {
    vec value[V];
    for (int v = 0; v < V; ++v) value[v] = widen(values + offsets[i] + first + v * LANES);
    for (int h = 0; h < H; ++h) {
      const vec weight = broadcast(weights + h * weight_stride + i);
      for (int v = 0; v < V; ++v) sums[h][v] = fma(weight, value[v], sums[h][v]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int v = 0; v < V; ++v) store(out + h * dim + first + v * LANES, sums[h][v]);
}

template <int H, typename T>
TARGET void weigh(
    const float* weights, int64_t weight_stride, const int64_t* offsets, int64_t count, const T* values, int64_t dim,
    float* out) {
  int64_t i = 0;
  for (; i + 2 * LANES <= dim; i += 2 * LANES)
    weigh_part<H, 2, T>(weights, weight_stride, offsets, count, values, i, dim, out);
  for (; i < dim; i += LANES) weigh_part<H, 1, T>(weights, weight_stride, offsets, count, values, i, dim, out);
}

// In place: exp(s - largest) / sum. Lanes beyond the last score are kept out of the sum.
TARGET void softmax(float* s, int64_t count) {
  float largest = s[0];
  for (int64_t i = 1; i < count; ++i) largest = s[i] > largest ? s[i] : largest;
  vec totals = zero();
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const vec e = exp(sub(load(s + i), set(largest)));
    store(s + i, e);
    totals = add(totals, e);
  }
  if (i < count) {
    float part[LANES] = {};
    std::memcpy(part, s + i, (count - i) * sizeof(float));
    store(part, exp(sub(load(part), set(largest))));
    std::memset(part + (count - i), 0, (LANES - (count - i)) * sizeof(float));
    totals = add(totals, load(part));
    std::memcpy(s + i, part, (count - i) * sizeof(float));
  }
  const float inverse = 1.f / sum(totals);
  for (i = 0; i + LANES <= count; i += LANES) store(s + i, mul(load(s + i), set(inverse)));
  for (; i < count; ++i) s[i] *= inverse;
}

// One row and one key/value head: `heads` queries that share it. Positions are taken in ascending order; among those of
// the step, the ones whose bit in `visible` is not set are left out (a tree's other branches). Nothing else is read, so
// whatever lies in other slots, numbers or not, leaves no trace. scores [heads][length], offsets [length]: scratch.
template <typename T>
TARGET void attend(
    const AttentionRow& row, const T* keys, const T* values, float* scores, int64_t* offsets, float* out) {
  const int64_t length = row.length, dim = row.head_dim;
  int64_t count = 0;
  for (int64_t t = 0; t < length; ++t) {
    if (t >= row.step_start && !(row.visible >> (t - row.step_start) & 1)) continue;
    offsets[count] = row.slots[t] * row.slot_stride;
    const T* key = keys + offsets[count];
    for (int64_t h = 0; h < row.heads; ++h) scores[h * length + count] = row.scale * dot(row.query + h * dim, key, dim);
    ++count;
  }
  for (int64_t h = 0; h < row.heads; ++h) softmax(scores + h * length, count);
  for (int64_t h = 0; h < row.heads;) {
    const float* weights = scores + h * length;
    float* to = out + h * dim;
    const int64_t some = row.heads - h < 6 ? row.heads - h : 6;
    switch (some) {
      case 1: weigh<1, T>(weights, length, offsets, count, values, dim, to); break;
      case 2: weigh<2, T>(weights, length, offsets, count, values, dim, to); break;
      case 3: weigh<3, T>(weights, length, offsets, count, values, dim, to); break;
      case 4: weigh<4, T>(weights, length, offsets, count, values, dim, to); break;
      case 5: weigh<5, T>(weights, length, offsets, count, values, dim, to); break;
      default: weigh<6, T>(weights, length, offsets, count, values, dim, to); break;
    }
    h += some;
  }
}
