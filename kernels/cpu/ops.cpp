// Row-invariant kernels for CPUs: linear layers with bfloat16 or int8 weights, norms, rotary embedding, SwiGLU, and paged
// attention. Inputs, sums and outputs are float32. Each runs on AVX2 and on AVX-512, products and attention over
// bfloat16 on AMX too; which one is an argument, so that a machine can test all that it has. Compiled for the plainest x86-64
// and chosen at run time, so a build can be taken to another machine.
#include <ATen/Parallel.h>
#include <immintrin.h>
#include <omp.h>
#include <sched.h>
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
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
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
#include "attention_parts.h"
#include "tile_attention.h"
#undef TARGET
}  // namespace amx

Isa parse(const std::string& name) {
  if (name == "avx2") return Isa::kAvx2;
  if (name == "avx512") return Isa::kAvx512;
  TORCH_CHECK(name == "amx", "no such instruction set: ", name);
  TORCH_CHECK(amx::granted(), "the kernel does not let this process use AMX");
  return Isa::kAmx;
}

inline const float* data_or_null(const std::optional<torch::Tensor>& tensor) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->is_contiguous(), "scales, biases and weights of norms must be contiguous");
  return tensor->data_ptr<float>();
}

#include "team.h"
#include "pages.h"
#include "matrix.h"
#include "unit_product.h"
#include "product.h"
#include "phases.h"
#include "layers.h"
#include "draws.h"

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

// x [n, in] -> [n, out]
torch::Tensor linear(const torch::Tensor& x, const Matrix& matrix) {
  const float* from = data_of(x);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == matrix.in(), "x does not fit the weights");
  const int64_t n = x.size(0);
  auto out = torch::empty({n, matrix.out()}, x.options());
  if (n == 0) return out;
  const int64_t num_threads = threads_for(n, {&matrix});
  Workspace space;
  const auto product = multiplication(from, n, matrix, num_threads, space);
  with_team(num_threads, [&](const Member& member) {
    member.share(n, [&](int64_t begin, int64_t end) { product->take(begin, end); });
    product->run({out.data_ptr<float>(), nullptr});
  });
  return out;
}

// x [..., size] -> the same shape; with a residual of that shape, x is added to it in place first.
torch::Tensor rms_norm(
    const torch::Tensor& x, const std::optional<torch::Tensor>& residual, const torch::Tensor& weight, double eps,
    const std::string& isa) {
  const float* from = data_of(x);
  const int64_t size = x.size(-1), n = x.numel() / std::max<int64_t>(size, 1);
  TORCH_CHECK(weight.numel() == size, "x does not fit the norm's weight");
  TORCH_CHECK(!residual || residual->numel() == x.numel(), "x does not fit the residual");
  const Norm norm(weight, eps, isa);
  auto out = torch::empty_like(x);
  float *to = out.data_ptr<float>(), *rest = residual ? (data_of(*residual), residual->data_ptr<float>()) : nullptr;
  share(n, size, [&](int64_t begin, int64_t end) { norm.rows(from, rest, begin, end, to); });
  return out;
}

// gate_up [n, 2 * size], gates first -> silu(gate) * up [n, size].
torch::Tensor silu_mul(const torch::Tensor& gate_up, const std::string& isa) {
  const float* from = data_of(gate_up);
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be a matrix with an even number of columns");
  const int64_t n = gate_up.size(0), size = gate_up.size(1) / 2;
  const bool is_narrow = parse(isa) == Isa::kAvx2;
  auto out = torch::empty({n, size}, gate_up.options());
  float* to = out.data_ptr<float>();
  share(n, 2 * size, [&](int64_t begin, int64_t end) { silu_mul_rows(from, size, is_narrow, begin, end, to); });
  return out;
}

// qkv [n, (heads + 2 kv_heads) * dim], cos, sin [n, rotary], slot_mapping [n] int64 -> queries [n, heads, dim].
torch::Tensor rope_and_store(
    const torch::Tensor& qkv, const Heads& heads, const torch::Tensor& cos, const torch::Tensor& sin, torch::Tensor keys,
    torch::Tensor values, const torch::Tensor& slot_mapping) {
  const float* from = data_of(qkv);
  const Cache cache(std::move(keys), std::move(values));
  const Rotation rotation(heads, cache, cos, sin, slot_mapping);
  const int64_t n = slot_mapping.numel();
  TORCH_CHECK(qkv.numel() == n * rotation.width(), "qkv does not fit the cache");
  auto query = torch::empty({n, heads.heads, cache.dim()}, qkv.options());
  float* to = query.data_ptr<float>();
  share(n, rotation.width(), [&](int64_t begin, int64_t end) { rotation.rows(from, begin, end, to); });
  return query;
}

// query [n, heads, dim]; slots and rows see Attention -> [n, heads * dim].
torch::Tensor attention(
    const torch::Tensor& query, const Heads& heads, torch::Tensor keys, torch::Tensor values, const torch::Tensor& slots,
    const torch::Tensor& rows) {
  const float* from = data_of(query);
  const Cache cache(std::move(keys), std::move(values));
  const int64_t num_threads = threads_for_attention(heads, cache, rows);
  Attention attention(heads, cache, slots, rows, num_threads);
  const int64_t n = rows.size(0);
  TORCH_CHECK(query.numel() == n * heads.heads * cache.dim(), "rows do not fit the queries");
  auto out = torch::empty({n, heads.heads * cache.dim()}, query.options());
  with_team(num_threads, [&](const Member&) { attention.run(from, out.data_ptr<float>()); });
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using release = py::call_guard<py::gil_scoped_release>;
  using Tensor = torch::Tensor;
  using MaybeTensor = std::optional<Tensor>;
  m.def("instruction_sets", &instruction_sets);
  m.def("pack", &pack, release());
  py::class_<Matrix>(m, "Matrix")
      .def(py::init<Tensor, int64_t, int64_t, MaybeTensor, int64_t, MaybeTensor, bool, const std::string&>());
  py::class_<Norm>(m, "Norm").def(py::init<Tensor, double, const std::string&>());
  py::class_<Heads>(m, "Heads").def(py::init<int64_t, double, MaybeTensor, MaybeTensor, double, const std::string&>());
  py::class_<SwiGluLayer>(m, "SwiGluLayer")
      .def(py::init<Norm, Matrix, Matrix>())
      .def("forward", &SwiGluLayer::forward, release(), py::arg("rows"), py::arg("added"));
  py::class_<AttentionLayer>(m, "AttentionLayer")
      .def(py::init<Norm, Matrix, Heads, Matrix>())
      .def(
          "forward", &AttentionLayer::forward, release(), py::arg("rows"), py::arg("cos"), py::arg("sin"), py::arg("keys"),
          py::arg("values"), py::arg("slot_mapping"), py::arg("slots"), py::arg("row_table"), py::arg("added"));
  py::class_<Stack>(m, "Stack")
      .def(py::init<std::vector<AttentionLayer>, std::vector<SwiGluLayer>, Norm>())
      .def("forward", &Stack::forward, release());
  m.def("linear", &linear, release());
  m.def("rms_norm", &rms_norm, release());
  m.def("silu_mul", &silu_mul, release());
  m.def("rope_and_store", &rope_and_store, release());
  m.def("attention", &attention, release());
  define_draws(m);
}
