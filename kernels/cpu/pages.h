// Memory for packed weights.

// [size] zeros on huge pages, where the system gives some: a pass reads all weights once, and with pages of 4 KiB a core looks
// for addresses a fifth of the time.
inline torch::Tensor zeros_on_huge_pages(int64_t size, const torch::TensorOptions& options) {
  constexpr size_t kHugePage = size_t{1} << 21;
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  if (bytes < kHugePage) return torch::zeros({size}, options);
  // Memory of its own: what the heap had before is in small pages already. Fresh pages are zero.
  const size_t room = bytes + 2 * kHugePage;
  void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return torch::zeros({size}, options);
  madvise(mapped, room, MADV_HUGEPAGE);  // a refusal costs time only
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) / kHugePage * kHugePage;
  const auto release = [mapped, room](void*) { munmap(mapped, room); };
  return torch::from_blob(reinterpret_cast<void*>(aligned), {size}, release, options);
}
