// Kernels over rows, for one instruction set. Included once for each, after simd.h, in the same namespace.
//
// Row invariance: what a row gives is computed by the same operations in the same order whatever rows are beside it.
// Every (row, output) of a product is one chain of multiply-adds over the inputs, ascending; how many chains run side by
// side changes speed alone. With int8 weights the sums over a part of the inputs are exact, so that their order is free.

// ---- products -------------------------------------------------------------------------------------------------------

// R rows by V vectors of outputs, over `count` inputs of one panel; acc [R][kPanel] is read and written.
template <int R, int V>
TARGET inline void product_block(
    const uint16_t* weights, const float* x, int64_t x_stride, int64_t count, float* acc, int64_t first) {
  vec sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load(acc + r * kPanel + first + v * LANES);
  const uint16_t* w = weights + 2 * first;
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
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(acc + r * kPanel + first + v * LANES, sums[r][v]);
}

// The same for int8 weights and 16-bit inputs, four of each output side by side; `count` is a multiple of 4 and small
// enough for a sum in 32 bits, so the sums are exact. acc [R][kPanel] is written. A vector holds LANES / 2 outputs.
template <int R, int V>
TARGET inline void product_block(
    const int8_t* weights, const int16_t* x, int64_t x_stride, int64_t count, int32_t* acc, int64_t first) {
  ivec sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = izero();
  const int8_t* w = weights + 4 * first;
  for (int64_t k = 0; k < count; k += 4, w += 4 * kPanel) {
    ivec wide[V];
    for (int v = 0; v < V; ++v) wide[v] = widen_to_int16(w + 2 * v * LANES);
    for (int r = 0; r < R; ++r) {
      const ivec four = broadcast_four(x + r * x_stride + k);
      for (int v = 0; v < V; ++v) sums[r][v] = add_products(sums[r][v], wide[v], four);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store_pair_sums(acc + r * kPanel + first + v * LANES / 2, sums[r][v]);
}

// A whole panel for R rows, as many vectors at once as the registers hold. OUTPUTS: those of one vector.
template <int R, int OUTPUTS, typename W, typename X, typename A>
TARGET inline void product_rows(const W* weights, const X* x, int64_t x_stride, int64_t count, A* acc) {
  constexpr int kVectors = kPanel / OUTPUTS;
  constexpr int kFit = (kRegisters - 4) / R;
  constexpr int V = kFit >= kVectors ? kVectors : kFit >= 4 && kVectors >= 4 ? 4 : kFit >= 2 && kVectors >= 2 ? 2 : 1;
  for (int v = 0; v < kVectors; v += V) product_block<R, V>(weights, x, x_stride, count, acc, v * OUTPUTS);
}

template <int OUTPUTS, typename W, typename X, typename A>
TARGET inline void product_panel(
    const W* weights, const X* x, int64_t x_stride, int64_t num_rows, int64_t count, A* acc) {
  while (num_rows > 0) {
    // Two even parts rather than six rows and one: a part of one row costs as much as one of three.
    int64_t done = num_rows > 6 && num_rows < 12 ? (num_rows + 1) / 2 : num_rows < 6 ? num_rows : 6;
    switch (done) {
      case 1: product_rows<1, OUTPUTS>(weights, x, x_stride, count, acc); break;
      case 2: product_rows<2, OUTPUTS>(weights, x, x_stride, count, acc); break;
      case 3: product_rows<3, OUTPUTS>(weights, x, x_stride, count, acc); break;
      case 4: product_rows<4, OUTPUTS>(weights, x, x_stride, count, acc); break;
      case 5: product_rows<5, OUTPUTS>(weights, x, x_stride, count, acc); break;
      default: product_rows<6, OUTPUTS>(weights, x, x_stride, count, acc); break;
    }
    x += done * x_stride;
    acc += done * kPanel;
    num_rows -= done;
  }
}

TARGET inline void product_bfloat16(
    const uint16_t* weights, const float* x, int64_t x_stride, int64_t num_rows, int64_t count, float* acc) {
  product_panel<LANES>(weights, x, x_stride, num_rows, count, acc);
}

TARGET inline void product_int8(
    const int8_t* weights, const int16_t* x, int64_t x_stride, int64_t num_rows, int64_t count, int32_t* acc) {
  product_panel<LANES / 2>(weights, x, x_stride, num_rows, count, acc);
}

// x [count] in whole multiples of the result, at most kLargest in magnitude: to [count]. A row with something that is no
// finite number gives a NaN, one of nothing but (nearly) zeros gives zero; `to` is not written then.
TARGET inline float round_to_int16(const float* x, int64_t count, int16_t* to) {
  constexpr int32_t kInfinite = 0x7f800000;
  int32_t largest_bits = 0;  // of a magnitude: in the order of the numbers
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    largest_bits = std::max(largest_bits, bits & 0x7fffffff);
  }
  if (largest_bits >= kInfinite) return std::numeric_limits<float>::quiet_NaN();
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof(largest));
  if (largest < kNearlyZero) return 0.f;
  const float inverse = kLargest / largest;
  for (int64_t i = 0; i < count; ++i) {
    const float shifted = x[i] * inverse + 12582912.f;  // 1.5 * 2^23: the last bits are the nearest integer, ties to even
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    to[i] = static_cast<int16_t>(bits);
  }
  return largest / kLargest;
}

// total [n][kPanel] += sums [n][kPanel] * (x_scales[r * stride] * scales[o]); scales [kPanel]
TARGET inline void add_scaled(
    const int32_t* sums, const float* x_scales, int64_t stride, const float* scales, int64_t n, float* total) {
  for (int64_t r = 0; r < n; ++r) {
    const vec scale = set(x_scales[r * stride]);
    for (int64_t o = r * kPanel; o < (r + 1) * kPanel; o += LANES)
      store(total + o, fma(from_int32(sums + o), mul(scale, load(scales + o - r * kPanel)), load(total + o)));
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
