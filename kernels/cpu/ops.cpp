// Row-invariant kernels for CPUs: linear layers with bfloat16 or int8 weights, norms, rotary embedding, SwiGLU, and paged
// attention. Inputs, sums and outputs are float32. Each runs on AVX2 and on AVX-512, products on AMX too; which one is an
// argument, so that a machine can test all that it has. Compiled for the plainest x86-64 and chosen at run time, so a build
// can be taken to another machine.
#include <ATen/Parallel.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/extension.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace {

// Outputs that are packed together. bfloat16: [in / 2][kPanel][2], so that a 32-bit lane holds two inputs of one output,
// which a shift and a mask widen. int8: [in][kPanel]. For AMX both are tiles, see amx.h.
constexpr int64_t kPanel = 32;
constexpr int64_t kBlock = 256;  // inputs whose part of a panel stays in the first-level cache while rows go by

// One row of attention over one key/value head.
struct AttentionRow {
  const float* query;    // [heads, head_dim]
  const int64_t* slots;  // [length], of each position
  int64_t length;        // positions up to the row's own
  int64_t step_start;    // from this position on, `visible` says which positions count
  uint64_t visible;
  int64_t heads, head_dim, slot_stride;
  float scale;
};

enum class Isa { kAvx2, kAvx512, kAmx };

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define LANES 16
#include "simd.h"
#include "rows.h"
#undef LANES
#undef TARGET
}  // namespace avx512

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#include "simd.h"
#include "rows.h"
#undef LANES
#undef TARGET
}  // namespace avx2

namespace amx {
#define TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")))
#include "amx.h"
#include "units.h"
#undef TARGET
}  // namespace amx

Isa parse(const std::string& name) {
  if (name == "avx2") return Isa::kAvx2;
  if (name == "avx512") return Isa::kAvx512;
  TORCH_CHECK(name == "amx", "no such instruction set: ", name);
  TORCH_CHECK(amx::granted(), "the kernel does not let this process use AMX");
  return Isa::kAmx;
}

#include "pages.h"
#include "unit_product.h"
#include "product.h"

// The instruction sets that this machine has, best last.
std::vector<std::string> instruction_sets() {
  __builtin_cpu_init();
  std::vector<std::string> found;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return found;
  found.push_back("avx2");
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return found;
  found.push_back("avx512");
  unsigned int eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool has_tiles = (edx >> 22 & 1) && (edx >> 24 & 1) && (edx >> 25 & 1);  // AMX-BF16, AMX-TILE, AMX-INT8
  eax = 7, ecx = 1;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool has_bf16 = eax >> 5 & 1;  // AVX512-BF16
  if (has_tiles && has_bf16 && amx::granted()) found.push_back("amx");
  return found;
}

const float* data_or_null(const std::optional<torch::Tensor>& tensor) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->is_contiguous(), "scales, biases and weights of norms must be contiguous");
  return tensor->data_ptr<float>();
}

void check_rows(const torch::Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == torch::kFloat32, "rows must be contiguous float32");
}

// x [n, in], packed as `pack` gave it, scales [groups, out] for int8, bias [out] -> [n, out].
torch::Tensor linear(
    const torch::Tensor& x, const torch::Tensor& packed, int64_t out, const std::optional<torch::Tensor>& scales,
    int64_t group, const std::optional<torch::Tensor>& bias, const std::string& isa) {
  check_rows(x);
  const int64_t n = x.size(0), panels = (out + kPanel - 1) / kPanel;
  TORCH_CHECK(x.dim() == 2, "x is no matrix");
  const bool in_units = packed.scalar_type() == torch::kByte;
  const bool fits = in_units ? Units(packed).fits(x.size(1), panels) : packed.numel() == panels * kPanel * x.size(1);
  TORCH_CHECK(fits, "x does not fit the weights");
  TORCH_CHECK((packed.scalar_type() == torch::kInt8) == scales.has_value(), "int8 weights have scales, others none");
  const float *scale = data_or_null(scales), *add = data_or_null(bias);
  const Isa set = parse(isa);
  if (n == 0) return torch::empty({n, out}, x.options());
  if (in_units) {
    TORCH_CHECK(set == Isa::kAmx, "units of weights are for amx");
    return product_of(UnitProduct(x, packed), x, out, add);
  }
  if (scale && tiles_take(set, true, x.size(1), group))
    return product_of(DigitProduct(x, packed, out, scale, group), x, out, add);
  return product_of(Product(x, packed, out, scale, group, set), x, out, add);
}

// Rows that a thread should have at least: below some thousand elements, waking it costs more than it saves.
int64_t grain(int64_t size) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(size, 1)); }

// x [..., size] -> the same shape; with a residual of that shape, x is added to it in place first.
torch::Tensor rms_norm(
    const torch::Tensor& x, const std::optional<torch::Tensor>& residual, const torch::Tensor& weight, double eps,
    const std::string& isa) {
  check_rows(x);
  const int64_t size = x.size(-1), n = x.numel() / std::max<int64_t>(size, 1);
  TORCH_CHECK(weight.numel() == size, "x does not fit the norm's weight");
  auto out = torch::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = out.data_ptr<float>();
  float* rest = nullptr;
  if (residual.has_value()) {
    check_rows(*residual);
    TORCH_CHECK(residual->numel() == x.numel(), "x does not fit the residual");
    rest = residual->data_ptr<float>();
  }
  const float* scale = weight.data_ptr<float>();
  const auto function = parse(isa) == Isa::kAvx2 ? avx2::rms_norm_row : avx512::rms_norm_row;
  at::parallel_for(0, n, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      function(
          from + r * size, rest ? rest + r * size : nullptr, scale, static_cast<float>(eps), size, to + r * size);
  });
  return out;
}

// gate_up [n, 2 * size], gates first -> silu(gate) * up [n, size].
torch::Tensor silu_mul(const torch::Tensor& gate_up, const std::string& isa) {
  check_rows(gate_up);
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be a matrix with an even number of columns");
  const int64_t n = gate_up.size(0), size = gate_up.size(1) / 2;
  auto out = torch::empty({n, size}, gate_up.options());
  const auto function = parse(isa) == Isa::kAvx2 ? avx2::silu_mul_row : avx512::silu_mul_row;
  const float* from = gate_up.data_ptr<float>();
  float* to = out.data_ptr<float>();
  at::parallel_for(0, n, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) function(from + 2 * r * size, from + (2 * r + 1) * size, size, to + r * size);
  });
  return out;
}

template <typename T>
void copy_as(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// qkv [n, (heads + 2 kv_heads) * dim]; cos, sin [n, rotary]; keys, values [slots, kv_heads, dim], float32 or bfloat16,
// written at slot_mapping [n] int64; q_norm, k_norm [dim] -> queries [n, heads, dim].
torch::Tensor rope_and_store(
    const torch::Tensor& qkv, int64_t heads, const torch::Tensor& cos, const torch::Tensor& sin,
    const std::optional<torch::Tensor>& q_norm, const std::optional<torch::Tensor>& k_norm, double eps,
    torch::Tensor keys, torch::Tensor values, const torch::Tensor& slot_mapping, const std::string& isa) {
  for (const auto& rows : {qkv, cos, sin}) check_rows(rows);
  const int64_t kv_heads = keys.size(1), dim = keys.size(2), n = slot_mapping.numel(), rotary = cos.size(-1);
  const int64_t width = (heads + 2 * kv_heads) * dim;
  TORCH_CHECK(qkv.numel() == n * width, "qkv does not fit the cache");
  TORCH_CHECK(cos.numel() == n * rotary && sin.numel() == n * rotary && rotary <= dim, "cos and sin do not fit qkv");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && slot_mapping.is_contiguous(), "the cache is torn");
  auto query = torch::empty({n, heads, dim}, qkv.options());
  const float *from = qkv.data_ptr<float>(), *c = cos.data_ptr<float>(), *s = sin.data_ptr<float>();
  const float *q_weight = data_or_null(q_norm), *k_weight = data_or_null(k_norm);
  const int64_t* slots = slot_mapping.data_ptr<int64_t>();
  const auto turn = parse(isa) == Isa::kAvx2 ? avx2::turn_head : avx512::turn_head;
  float* to = query.data_ptr<float>();
  const bool narrow = keys.scalar_type() == torch::kBFloat16;
  at::parallel_for(0, n, grain(width), [&](int64_t begin, int64_t end) {
    std::vector<float> turned(dim);
    for (int64_t r = begin; r < end; ++r) {
      const float *row = from + r * width, *row_cos = c + r * rotary, *row_sin = s + r * rotary;
      for (int64_t h = 0; h < heads; ++h)
        turn(
            row + h * dim, q_weight, static_cast<float>(eps), row_cos, row_sin, dim, rotary, to + (r * heads + h) * dim);
      for (int64_t h = 0; h < kv_heads; ++h) {
        const int64_t place = (slots[r] * kv_heads + h) * dim;
        const float *key = row + (heads + h) * dim, *value = row + (heads + kv_heads + h) * dim;
        turn(key, k_weight, static_cast<float>(eps), row_cos, row_sin, dim, rotary, turned.data());
        if (narrow) {
          copy_as(turned.data(), dim, keys.data_ptr<at::BFloat16>() + place);
          copy_as(value, dim, values.data_ptr<at::BFloat16>() + place);
        } else {
          copy_as(turned.data(), dim, keys.data_ptr<float>() + place);
          copy_as(value, dim, values.data_ptr<float>() + place);
        }
      }
    }
  });
  return query;
}

// query [n, heads, dim]; keys, values [slots, kv_heads, dim], float32 or bfloat16; slots [total] int64: the slots of each
// sequence's positions, one sequence after the other. rows [n, 4] int64: where the row's sequence starts in slots, positions
// up to its own, the position from which `visible` counts, and those 64 bits -> [n, heads * dim].
torch::Tensor attention(
    const torch::Tensor& query, const torch::Tensor& keys, const torch::Tensor& values, const torch::Tensor& slots,
    const torch::Tensor& rows, double scale, const std::string& isa) {
  check_rows(query);
  const int64_t n = query.size(0), heads = query.size(1), dim = query.size(2), kv_heads = keys.size(1);
  TORCH_CHECK(rows.is_contiguous() && rows.size(0) == n && rows.size(1) == 4, "rows do not fit the queries");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && slots.is_contiguous(), "the cache is torn");
  TORCH_CHECK(dim % 16 == 0 && heads % kv_heads == 0 && keys.size(2) == dim, "head_dim must be a multiple of 16");
  auto out = torch::empty({n, heads * dim}, query.options());
  const int64_t group = heads / kv_heads;
  const bool narrow = keys.scalar_type() == torch::kBFloat16, small = parse(isa) == Isa::kAvx2;
  const int64_t *facts = rows.data_ptr<int64_t>(), *all_slots = slots.data_ptr<int64_t>();
  int64_t longest = 0;
  for (int64_t r = 0; r < n; ++r) longest = std::max(longest, facts[4 * r + 1]);
  at::parallel_for(0, n * kv_heads, grain(group * longest * dim / 32), [&](int64_t begin, int64_t end) {
    std::vector<float> scores;
    std::vector<int64_t> offsets;
    for (int64_t index = begin; index < end; ++index) {
      const int64_t r = index / kv_heads, h = index % kv_heads;
      const int64_t* fact = facts + 4 * r;
      const AttentionRow row{
          query.data_ptr<float>() + (r * heads + h * group) * dim,
          all_slots + fact[0],
          fact[1],
          fact[2],
          static_cast<uint64_t>(fact[3]),
          group,
          dim,
          kv_heads * dim,
          static_cast<float>(scale)};
      scores.resize(group * row.length);
      offsets.resize(row.length);
      float* to = out.data_ptr<float>() + (r * heads + h * group) * dim;
      if (narrow) {
        const uint16_t* k = reinterpret_cast<const uint16_t*>(keys.data_ptr<at::BFloat16>()) + h * dim;
        const uint16_t* v = reinterpret_cast<const uint16_t*>(values.data_ptr<at::BFloat16>()) + h * dim;
        (small ? avx2::attend<uint16_t> : avx512::attend<uint16_t>)(row, k, v, scores.data(), offsets.data(), to);
      } else {
        const float *k = keys.data_ptr<float>() + h * dim, *v = values.data_ptr<float>() + h * dim;
        (small ? avx2::attend<float> : avx512::attend<float>)(row, k, v, scores.data(), offsets.data(), to);
      }
    }
  });
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("instruction_sets", &instruction_sets);
  m.def("pack", &pack, release());
  m.def("linear", &linear, release());
  m.def("rms_norm", &rms_norm, release());
  m.def("silu_mul", &silu_mul, release());
  m.def("rope_and_store", &rope_and_store, release());
  m.def("attention", &attention, release());
}
