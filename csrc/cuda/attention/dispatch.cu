// Asks the GPU and the problem what mla/choice.h wants to know, and launches the kernel that it chooses.
#include <atomic>
#include <map>
#include <mutex>

#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"

namespace mla::cuda {
namespace {

enum class Selection { automatic, portable, unclustered };

std::atomic<Selection> selection{Selection::automatic};

int current_device() {
  int index;
  check(cudaGetDevice(&index), "device");
  return index;
}

int attribute(cudaDeviceAttr which, int device) {
  int value;
  check(cudaDeviceGetAttribute(&value, which, device), "device");
  return value;
}

Device ask_device(int index) {
  Device device{};
  device.processors = attribute(cudaDevAttrMultiProcessorCount, index);
#ifdef MLA_CUDA_SM90A
  device.hopper_kernels = attribute(cudaDevAttrComputeCapabilityMajor, index) == 9;
  if (device.hopper_kernels) {
    const int before = current_device();
    check(cudaSetDevice(index), "device");
    try {
      for (int blocks = 2; blocks <= kMaxCluster; ++blocks) device.clusters[blocks] = few_heads_clusters(blocks);
    } catch (...) {
      cudaSetDevice(before);
      throw;
    }
    check(cudaSetDevice(before), "device");
  }
#endif
  return device;
}

// The Hopper kernels read and write in 16-byte pieces, count them in 32 bits, and have one kind of tile.
bool suits_hopper_kernels(const AttentionProblem& p) {
  for (int i = 0; i < p.list_count; ++i) {
    const CacheView& cache = p.lists[i].cache;
    if (cache.format.tile() != p.tile || !rows_aligned16(cache) || cache.block_size > INT32_MAX) return false;
    if (cache.block_stride < 0 || cache.row_stride < 0 ||
        (cache.blocks * cache.block_stride + cache.block_size * cache.row_stride) / 16 >= UINT32_MAX)
      return false;
  }
  const auto aligned = [](const uint16_t* base, const RowStrides& strides) {
    return aligned16(base, 2 * strides.token) && aligned16(base, 2 * strides.query) &&
           aligned16(base, 2 * strides.head);
  };
  return aligned(p.q_nope, p.q_nope_strides) && aligned(p.q_rope, p.q_rope_strides) && aligned(p.out, p.out_strides);
}

AttentionShape shape_of(const AttentionProblem& p) {
  int64_t tiles = 0;
  for (int i = 0; i < p.list_count; ++i) tiles += tiles_of(p.lists[i].topk, kGpuTileSlots);
  const CacheFormat& format = p.lists[0].cache.format;
  return {p.tokens, p.heads, format, p.whole_tokens, suits_hopper_kernels(p), p.workers, tiles};
}

}  // namespace

Device describe_device(int index) {
  static std::mutex mutex;
  static std::map<int, Device> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(index);
  if (found == known.end()) found = known.emplace(index, ask_device(index)).first;
  Device device = found->second;
  if (selection == Selection::portable) device.hopper_kernels = false;
  return device;
}

Device describe_current_device() { return describe_device(current_device()); }

void attention(const AttentionProblem& p, void* stream) {
  Choice choice = choose(shape_of(p), describe_current_device());
  if (selection == Selection::unclustered) choice.cluster = 1;
  switch (choice.kernel) {
#ifdef MLA_CUDA_SM90A
    case Choice::few_heads:
      return few_heads_attention(p, choice, stream);
    case Choice::few_heads_wide:
      few_heads_wide_attention(p, choice, stream);
      break;
    case Choice::many_heads:
      return many_heads_attention(p, choice, stream);
#endif
    default:
      portable_attention(p, choice, stream);
  }
  merge_cut_tokens(p, false, stream);
}

bool select_kernel(const std::string& name) {
  static const std::map<std::string, Selection> names{
      {"auto", Selection::automatic}, {"portable", Selection::portable}, {"unclustered", Selection::unclustered}};
  const auto found = names.find(name);
  if (found != names.end()) selection = found->second;
  return found != names.end();
}

}  // namespace mla::cuda
