// Work on the caller's thread pool. The bindings supply the pool (torch's), so that we never compete with it
// for cores; nothing here knows torch.
#pragma once

#include <cstdint>

namespace mla::cpu {

int thread_count();

// Runs body(item) for every item in [0, items), each exactly once, on up to thread_count() threads that take
// the next item as they finish one. Returns when all are done.
void parallel_items(int64_t items, void (*body)(int64_t item, void* context), void* context);

template <typename Body>
void for_each(int64_t items, Body&& body) {
  parallel_items(items, [](int64_t item, void* context) { (*static_cast<Body*>(context))(item); }, &body);
}

// The same over ranges of at least `grain` items, for bodies too small to be handed out one by one.
template <typename Body>
void for_each_in_ranges(int64_t items, int64_t grain, Body&& body) {
  const int64_t threads = thread_count();
  int64_t range = (items + 4 * threads - 1) / (4 * threads);
  if (range < grain) range = grain;
  const int64_t ranges = (items + range - 1) / range;
  for_each(ranges, [&](int64_t s) {
    const int64_t end = (s + 1) * range < items ? (s + 1) * range : items;
    for (int64_t i = s * range; i < end; ++i) body(i);
  });
}

}  // namespace mla::cpu
