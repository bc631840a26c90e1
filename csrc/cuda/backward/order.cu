// Sorts the pairs of queries and entries by the row that the entry names: CUB's radix sort, which is stable.
#include <cub/device/device_radix_sort.cuh>

#include "cuda/common/launch.h"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kThreads = 256;

// Entries that name no row sort behind all that do.
__global__ void __launch_bounds__(kThreads)
    name_rows(const __grid_constant__ OrderProblem p, uint32_t* rows, int32_t* pairs) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pair >= int64_t{p.queries} * p.lists.topk) return;
  const auto query = static_cast<int32_t>(pair / p.lists.topk), entry = static_cast<int32_t>(pair % p.lists.topk);
  const int32_t row = entry < p.lists.entries(query) ? p.lists.indices[query * p.lists.stride + entry] : -1;
  rows[pair] = p.lists.names(row) ? row : p.lists.rows;
  pairs[pair] = static_cast<int32_t>(pair);
}

// begin[row] is how many of the sorted rows are smaller.
__global__ void __launch_bounds__(kThreads)
    find_rows(const uint32_t* sorted, int64_t pairs, int32_t rows, int32_t* begin) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row > rows) return;
  int64_t low = 0, high = pairs;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted[middle] < row)
      low = middle + 1;
    else
      high = middle;
  }
  begin[row] = static_cast<int32_t>(low);
}

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

// Bits of the largest key, which is `rows`.
int key_bits(int32_t rows) {
  int bits = 1;
  while (int64_t{rows} >> bits) ++bits;
  return bits;
}

// Scratch memory: two arrays of rows and one of pairs (the result is the other one), and CUB's own.
struct Scratch {
  int64_t array_bytes;
  size_t cub_bytes = 0;

  Scratch(int64_t pairs, int32_t rows) : array_bytes((4 * pairs + 255) / 256 * 256) {
    cub::DoubleBuffer<uint32_t> keys;
    cub::DoubleBuffer<int32_t> values;
    check(cub::DeviceRadixSort::SortPairs(nullptr, cub_bytes, keys, values, pairs, 0, key_bits(rows)),
          "backward_order");
  }
  int64_t bytes() const { return 3 * array_bytes + static_cast<int64_t>(cub_bytes); }
};

}  // namespace

int64_t order_scratch_bytes(int64_t pairs, int32_t rows) { return Scratch(pairs, rows).bytes(); }

void backward_order(const OrderProblem& p, void* stream) {
  const int64_t pairs = int64_t{p.queries} * p.lists.topk;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const uint32_t* sorted = nullptr;
  if (pairs > 0) {
    Scratch scratch(pairs, p.lists.rows);
    uint8_t* const memory = static_cast<uint8_t*>(p.scratch);
    const auto array = [&](int i) { return memory + i * scratch.array_bytes; };
    cub::DoubleBuffer<uint32_t> keys(reinterpret_cast<uint32_t*>(array(0)), reinterpret_cast<uint32_t*>(array(1)));
    cub::DoubleBuffer<int32_t> values(reinterpret_cast<int32_t*>(array(2)), p.pairs);
    name_rows<<<blocks_of(pairs), kThreads, 0, cuda_stream>>>(p, keys.Current(), values.Current());
    check(cudaGetLastError(), "backward_order");
    check(cub::DeviceRadixSort::SortPairs(array(3), scratch.cub_bytes, keys, values, pairs, 0, key_bits(p.lists.rows),
                                          cuda_stream),
          "backward_order");
    if (values.Current() != p.pairs)
      check(cudaMemcpyAsync(p.pairs, values.Current(), 4 * pairs, cudaMemcpyDeviceToDevice, cuda_stream),
            "backward_order");
    sorted = keys.Current();
  }
  find_rows<<<blocks_of(int64_t{p.lists.rows} + 1), kThreads, 0, cuda_stream>>>(sorted, pairs, p.lists.rows, p.begin);
  check(cudaGetLastError(), "backward_order");
}

MLA_KERNELS {
  static const KernelEntry entries[] = {
      {"backward_order, before the sort", reinterpret_cast<const void*>(name_rows), kThreads, 0},
      {"backward_order, after the sort", reinterpret_cast<const void*>(find_rows), kThreads, 0}};
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
