// torch's thread pool, for the CPU ops.
#include "cpu/common/parallel.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>

namespace mla::cpu {

int thread_count() { return static_cast<int>(torch::stable::get_num_threads()); }

void parallel_items(int64_t items, void (*body)(int64_t item, void* context), void* context) {
  const int64_t threads = items < thread_count() ? items : thread_count();
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) body(item, context);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(item, context);
  });
}

}  // namespace mla::cpu
