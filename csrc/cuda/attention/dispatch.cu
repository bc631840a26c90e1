// Asks a GPU once what choose_launch() wants to know of it, and runs the kernel that a launch names.
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>

#include "cuda/common/launch.h"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"
#include "mla/limits.h"
#include "mla/schedule/cost.h"

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

Gpu ask_gpu(int index) {
  Gpu gpu{};
  gpu.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
  gpu.clock_ghz = attribute(cudaDevAttrClockRate, index) * 1e-6;
  // two transfers a clock
  gpu.memory_tbs =
      2e-9 / 8 * attribute(cudaDevAttrMemoryClockRate, index) * attribute(cudaDevAttrGlobalMemoryBusWidth, index);
#ifdef MLA_CUDA_SM90A
  gpu.hopper = attribute(cudaDevAttrComputeCapabilityMajor, index) == 9;
  if (gpu.hopper) {
    const int before = current_device();
    check(cudaSetDevice(index), "device");
    try {
      for (int ctas = 2; ctas <= kMaxCluster; ++ctas) gpu.clusters[ctas] = swap_ab_clusters(ctas);
    } catch (...) {
      cudaSetDevice(before);
      throw;
    }
    check(cudaSetDevice(before), "device");
  }
#endif
  return gpu;
}

// What Hopper kernels count rows' offsets in: whole rows, unless blocks are apart by parts of them.
uint32_t row_unit(const AttentionProblem& p) {
  int64_t unit = 0;
  for (int i = 0; i < p.list_count; ++i)
    unit = std::gcd(std::gcd(unit, p.lists[i].cache.row_stride), p.lists[i].cache.block_stride);
  return unit > 0 && unit <= UINT32_MAX ? static_cast<uint32_t>(unit) : 16;
}

// The Hopper kernels read and write in 16-byte pieces, count rows in 32 bits, and have one kind of tile.
bool suits_hopper_kernels(const AttentionProblem& p) {
  const uint32_t unit = row_unit(p);
  for (int i = 0; i < p.list_count; ++i) {
    const CacheView& cache = p.lists[i].cache;
    if (cache.format.tile() != p.tile || !rows_aligned16(cache) || cache.block_size > INT32_MAX) return false;
    if (cache.block_stride < 0 || cache.row_stride < 0 ||
        (cache.blocks * cache.block_stride + cache.block_size * cache.row_stride) / unit >= UINT32_MAX)
      return false;
  }
  const auto aligned = [](const uint16_t* base, const RowStrides& strides) {
    return aligned16(base, 2 * strides.token) && aligned16(base, 2 * strides.query) &&
           aligned16(base, 2 * strides.head);
  };
  return aligned(p.q_nope, p.q_nope_strides) && aligned(p.q_rope, p.q_rope_strides) && aligned(p.out, p.out_strides);
}

AttentionProblem in_units(AttentionProblem p) {
  p.row_unit = row_unit(p);
  p.odd_unit = p.row_unit / 16 & 1;
  for (SlotList& list : p.lists)
    list.row_units = static_cast<uint32_t>(list.cache.row_stride / p.row_unit),
    list.block_units = static_cast<uint32_t>(list.cache.block_stride / p.row_unit);
  return p;
}

// The launch, if its kernel can run the problem. Whoever made the plan may have supposed other rows, and saw no
// tensors: a plan for other rows runs on the nearest kernel that has these, and what Hopper kernels can't read on the
// portable one.
Launch fitted(const AttentionProblem& p, Launch launch) {
  const Gpu gpu = describe_current_gpu();
  const Launch portable{Kernel::portable, kPortableHeads, launch.splits, 1, launch.rounds, launch.ctas};
  if (!gpu.hopper || !suits_hopper_kernels(p)) return portable;
  if (p.tile == TileType::staged_576) launch.kernel = Kernel::m64, launch.heads_per_cta = 64;
  if (launch.kernel == Kernel::swap_ab && launch.heads_per_cta == 32 && !has_swap_ab_32(p.lists[0].cache.format))
    launch.heads_per_cta = 16;
  const int heads = launch.heads_per_cta;
  const bool swap_ab = launch.kernel == Kernel::swap_ab && (heads == 8 || heads == 16 || heads == 32);
  const bool m64 = (launch.kernel == Kernel::m64 || launch.kernel == Kernel::m64_fp8) && heads == 64;
  if (!swap_ab && !m64) return portable;
  if (m64) {
    const int64_t slots = int64_t{p.lists[0].topk} + (p.list_count > 1 ? p.lists[1].topk : 0);
    // a page table's width is not its requests' length: whether it is narrow must not change their bits
    launch.kernel = p.lists[0].paged ? Kernel::m64 : m64_kernel(p.products, p.lists[0].cache.format, p.heads, slots);
  }
  const bool clusters = swap_ab && heads <= 16 && selection != Selection::unclustered;
  const bool fills_grid = launch.ctas + launch.cluster > kMaxGpuCtas;  // once clusters are full
  if (!clusters || fills_grid || gpu.clusters[launch.cluster] == 0) launch.cluster = 1;
  return launch;
}

}  // namespace

Gpu describe_gpu(int index) {
  static std::mutex mutex;
  static std::map<int, Gpu> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(index);
  if (found == known.end()) found = known.emplace(index, ask_gpu(index)).first;
  Gpu gpu = found->second;
  if (selection == Selection::portable) gpu.hopper = false;
  return gpu;
}

Gpu describe_current_gpu() { return describe_gpu(current_device()); }

void attention(const AttentionProblem& given_problem, const Launch& given, void* stream) {
  const Launch launch = fitted(given_problem, given);
  AttentionProblem p = in_units(given_problem);
  if (p.lists[0].cache.format.code == Code::e2m1) {  // what rows are divided by
    if (launch.kernel == Kernel::swap_ab) p.value_scale *= kNvfp4Lift;
    if (launch.kernel == Kernel::m64) p.scale *= kNvfp4Factor, p.value_scale *= kNvfp4Factor;
  }
  try {
#ifdef MLA_CUDA_SM90A
    if (launch.kernel == Kernel::swap_ab) return swap_ab_attention(p, launch, stream);
    if (launch.kernel == Kernel::m64) return m64_attention(p, launch, stream);
    if (launch.kernel == Kernel::m64_fp8) return m64_fp8_attention(p, launch, stream);
#endif
    portable_attention(p, launch, stream);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + (", of " + describe(launch)));
  }
}

bool select_kernel(const std::string& name) {
  static const std::map<std::string, Selection> names{
      {"auto", Selection::automatic}, {"portable", Selection::portable}, {"unclustered", Selection::unclustered}};
  const auto found = names.find(name);
  if (found != names.end()) selection = found->second;
  return found != names.end();
}

}  // namespace mla::cuda
