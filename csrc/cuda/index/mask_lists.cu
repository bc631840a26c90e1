// A block's mask as lists of slots: a thread block a token. Each thread finds the positions seen in one word of the
// mask; then a warp writes those of its words one after the other, so that writes are coalesced.
#include <algorithm>

#include "cuda/common/divide.h"
#include "cuda/common/launch.h"
#include "cuda/common/scan.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

constexpr int kMaxThreads = 256;

struct Problem : MaskListsProblem {
  uint32_t block_words;  // from one block's first word to the next one's
  PositionDivisor block_of_word, page_of;

  explicit Problem(const MaskListsProblem& p)
      : MaskListsProblem(p),
        block_words((std::min(p.kv_block, p.positions) + 31) / 32),
        block_of_word(block_words),
        page_of(p.pages.block_size) {}
};

// MaskRow::slot() without its division.
__device__ __forceinline__ int32_t slot_of(const Problem& p, const MaskRow& row, int32_t position) {
  if (!p.pages.blocks) return static_cast<int32_t>(row.batch * p.positions + position);
  const uint32_t page = p.page_of(position);
  if (page >= static_cast<uint32_t>(p.pages.max_blocks)) return -1;
  const int64_t block = p.pages.blocks[row.batch * p.pages.stride + page];
  const int64_t slot = block * p.pages.block_size + (position - static_cast<int32_t>(page * p.pages.block_size));
  return block < 0 || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
}

__global__ void __launch_bounds__(kMaxThreads) lists_kernel(const __grid_constant__ Problem p) {
  __shared__ uint32_t warps[2][kMaxWarps];  // of even and odd rounds: a barrier each is then enough
  const int64_t token = blockIdx.x;
  const MaskRow row(p, p.first + token);
  int32_t* slots = p.slots + token * p.slot_stride;
  const int lane = threadIdx.x % 32;
  const uint32_t words = p.block_words * p.kv_blocks;
  uint32_t length = 0;  // of the rounds so far
  int parity = 0;
  for (uint32_t round = 0; round < words; round += blockDim.x, parity ^= 1) {
    const uint32_t number = round + threadIdx.x;
    uint32_t seen = 0, position = 0;
    if (number < words) {
      const uint32_t block = p.block_of_word(number), word = number - block * p.block_words;
      position = block * p.kv_block + 32 * word;
      seen = row.seen(p, block, word, position);
    }
    uint32_t total;
    const uint32_t rank = length + exclusive_sum<uint32_t>(__popc(seen), total, warps[parity]);
    length += total;
    if (p.topk == 0) continue;
    for (uint32_t left = __ballot_sync(~0u, seen != 0); left; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const uint32_t word_seen = __shfl_sync(~0u, seen, from), word_position = __shfl_sync(~0u, position, from);
      const uint32_t own = __shfl_sync(~0u, rank, from) + __popc(word_seen & lanes_below());
      if (word_seen >> lane & 1 && own < static_cast<uint32_t>(p.topk))
        slots[own] = slot_of(p, row, word_position + lane);
    }
  }
  if (threadIdx.x == 0) p.lengths[token] = length;
}

}  // namespace

void mask_lists(const MaskListsProblem& p, void* stream) {
  const Problem problem(p);
  const int64_t words = int64_t{problem.block_words} * p.kv_blocks;
  const int threads = static_cast<int>(std::clamp<int64_t>((words + 31) / 32 * 32, 32, kMaxThreads));
  launch(lists_kernel, static_cast<unsigned>(p.tokens), threads, 0, stream, "mask_lists", problem);
}

MLA_KERNELS {
  static const KernelEntry entries[] = {{"mask_lists", reinterpret_cast<const void*>(lists_kernel), kMaxThreads, 0}};
  return {entries, 1};
}

}  // namespace mla::cuda
