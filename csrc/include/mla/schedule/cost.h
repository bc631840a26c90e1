// Which launch is the fastest: candidates, one cost model, and a table of constants for each GPU (constants.h), which
// `python -m serving_benchmarks ops tune` fits to the timings in results/. Times are in us, of a call between other
// kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "mla/format.h"
#include "mla/schedule/constants.h"
#include "mla/schedule/launch.h"

namespace mla {

struct AttentionShape {
  int64_t tokens;  // kAny: any number
  int64_t tiles;   // of a token whose lists are full
  int32_t heads;
  CacheFormat format;    // of the first list's rows
  bool batch_invariant;  // a token's bits must not depend on how many others there are
  Products products;
};
constexpr int64_t kAny = -1;

inline const GpuCosts& costs_of(const Gpu& gpu) {
  const auto distance = [&](const GpuCosts& known) {
    return std::fabs(std::log(gpu.clock_ghz / known.clock_ghz)) +
           std::fabs(std::log(gpu.memory_tbs / known.memory_tbs));
  };
  const GpuCosts* nearest = kGpuCosts;
  for (const GpuCosts& known : kGpuCosts)
    if (distance(known) < distance(*nearest)) nearest = &known;
  return *nearest;
}

inline const KernelCosts& costs_of(const GpuCosts& gpu, const Launch& launch) {
  if (launch.kernel == Kernel::m64) return gpu.m64;
  if (launch.kernel == Kernel::m64_fp8) return gpu.m64_fp8;
  return launch.heads_per_cta == 8 ? gpu.swap_ab_8 : launch.heads_per_cta == 16 ? gpu.swap_ab_16 : gpu.swap_ab_32;
}

// To combine splits within a cluster. Warps share its heads evenly if it has a power of two of CTAs.
inline double cluster_cost(const KernelCosts& costs, int32_t cluster) {
  int doublings = 1;
  while (1 << doublings < cluster) ++doublings;
  return costs.cluster[doublings - 1] + costs.uneven * ((1 << doublings) - cluster);
}

// Whether swap_ab is compiled for 32 heads per CTA with such rows.
inline bool has_swap_ab_32(const CacheFormat& format) {
  return format.scale == Scale::fp32 || format.scale == Scale::e4m3;
}

inline double tile_cost(const KernelCosts& costs, const Launch& launch, const CacheFormat& format) {
  if (!format.quantised()) return costs.tile_16bit;
  if (format.code == Code::e2m1) return costs.tile_fp4;
  const bool as_it_is = format.scale == Scale::fp32 ||
                        (format.scale == Scale::tensor && format.rope > 0 && launch.kernel == Kernel::swap_ab);
  return as_it_is ? costs.tile_fp8 : costs.tile_converted;
}

// The model. The busiest CTA's tiles and the memory's time overlap, neither quite hiding the other: the sixth root of
// the sum of their sixth powers.
inline double launch_time(const AttentionShape& shape, const Launch& launch, const Gpu& gpu, const GpuCosts& all) {
  const KernelCosts& costs = costs_of(all, launch);
  const auto tokens = static_cast<double>(shape.tokens), tiles = static_cast<double>(shape.tiles);
  const int64_t head_groups = ceil_div(shape.heads, launch.heads_per_cta);
  const auto waves = static_cast<double>(ceil_div(launch.ctas * head_groups, gpu.multiprocessors));
  const auto rounds = static_cast<double>(ceil_div(shape.tokens, launch.ctas));
  const double tile = tile_cost(costs, launch, shape.format);
  double computing, combine = 0;
  if (launch.splits == 1) {
    computing = tile * tiles * rounds + costs.token * (rounds - 1);
  } else {
    // By load, the plan counts some tiles for each token, and a CTA with its share of them costs what that leaves out.
    const bool by_load = launch.splits == 0;
    const int64_t even = by_load ? even_splits(shape.tokens, launch.ctas) : launch.splits;
    const double counted = token_units(shape.tokens, launch.ctas);
    computing = even > 0 ? tile * static_cast<double>(ceil_div(shape.tiles, even))
                         : tile * tokens * (tiles + counted) / launch.ctas +
                               std::max(costs.token - counted * tile, 0.0) * rounds;
    const double splits = even > 0 ? static_cast<double>(even) : launch.ctas / tokens + 1;
    const double written = even > 0 ? tokens * splits : launch.ctas + std::min(tokens, double(launch.ctas)) / 2;
    if (launch.cluster == launch.splits) {
      combine = cluster_cost(costs, launch.cluster);
    } else {
      const double results = std::min(splits, std::max(tiles, 1.0)) / launch.cluster;  // of a token, in the workspace
      const double late = std::max(results - kEarlySplits, 0.0);
      combine = costs.combine + costs.combine_split * late + all.partial_row * written * shape.heads;
    }
  }
  const double kilorows = kGpuTileSlots / 1000.0 * tokens * tiles;
  const double memory = all.memory_kb * kilorows * shape.format.token_bytes() +
                        all.l2_kilorow * kilorows * static_cast<double>(head_groups - 1);
  const double longer = std::max({computing * waves, memory, 1e-9});
  const double ratio = std::min(computing * waves, memory) / longer;
  return costs.begin * waves + longer * std::cbrt(std::sqrt(1 + std::pow(ratio, 6))) + combine;
}

// FP8 products have a kernel for more than 32 heads and rows of 576 numbers, which takes the place of m64. Its
// outputs' accumulators keep 13 to 14 bits as they grow, so it takes no longer lists than DeepSeek-V3.2's.
constexpr int64_t kMostFp8Slots = 2048;
inline Kernel m64_kernel(Products products, const CacheFormat& format, int32_t heads, int64_t slots) {
  const bool suits = heads > 32 && format.code == Code::e4m3 && format.head_dim() == 576 && slots <= kMostFp8Slots;
  return products == Products::fp8 && suits ? Kernel::m64_fp8 : Kernel::m64;
}

// CTAs of a cluster that is not made for a token's splits: the most that CUDA promises of every GPU.
constexpr int kUsualCluster = 8;

// Calls use(launch) for every launch that may be the fastest on a Hopper GPU: all its CTAs and clusters run at once.
template <typename Use>
void for_each_candidate(const AttentionShape& shape, const Gpu& gpu, Use use) {
  const TileType tile = shape.format.tile();
  const auto of_kernel = [&](Kernel kernel, int32_t heads_per_cta) {
    const int64_t head_groups = ceil_div(shape.heads, heads_per_cta), tokens = shape.tokens;
    const int32_t most = ctas_at_once(gpu.multiprocessors, head_groups);
    const bool clusters = kernel == Kernel::swap_ab && heads_per_cta <= kClusterHeads;
    const auto fits = [&](int64_t ctas, int32_t cluster) {
      return clusters && ceil_div(ctas, cluster) * head_groups <= gpu.clusters[cluster];
    };
    // Clusters that don't all run at once would come in two waves: 28.8 us become 46.9.
    const auto largest_cluster = [&](int64_t ctas) {
      return fits(ctas, kUsualCluster) ? kUsualCluster : fits(ctas, 2) ? 2 : 1;
    };
    const auto by_load = [&](int32_t ctas) {
      const int64_t even = even_splits(tokens, ctas);  // up to kMaxCluster they are a candidate already
      if (ctas > 0 && (even == 0 || even > kMaxCluster))
        use(Launch{kernel, heads_per_cta, 0, largest_cluster(ctas), 0, ctas});
    };
    const auto whole = static_cast<int32_t>(std::min<int64_t>(tokens, most));
    const auto rounds = static_cast<int32_t>(ceil_div(tokens, whole));
    // a cluster is for lists that turn out not to be full
    use(Launch{kernel, heads_per_cta, 1, rounds > 1 ? largest_cluster(whole) : 1, rounds, whole});
    for (int32_t splits = 2; splits <= kMaxCluster && tokens * splits <= most; ++splits) {
      const auto ctas = static_cast<int32_t>(tokens * splits);
      const bool together = fits(ctas, splits);
      if (together) use(Launch{kernel, heads_per_cta, splits, splits, 0, ctas});
      if (!together || splits > kUsualCluster)
        use(Launch{kernel, heads_per_cta, splits, largest_cluster(ctas), 0, ctas});
    }
    by_load(most);
    if (tokens < most) by_load(most / 2);
    if (clusters) by_load(static_cast<int32_t>(kUsualCluster * (gpu.clusters[kUsualCluster] / head_groups)));
  };
  // With the numbers of heads per CTA that kernels are compiled for.
  if (tile != TileType::staged_576) {
    of_kernel(Kernel::swap_ab, 8);
    if (shape.heads > 8) of_kernel(Kernel::swap_ab, 16);
    if (shape.heads > 16 && has_swap_ab_32(shape.format)) of_kernel(Kernel::swap_ab, 32);
  }
  if (shape.heads > 16 || tile == TileType::staged_576)
    of_kernel(m64_kernel(shape.products, shape.format, shape.heads, shape.tiles * kGpuTileSlots), 64);
}

inline Launch choose_launch(const AttentionShape& given, const Gpu& gpu) {
  if (!gpu.hopper) {
    const int64_t at_once = int64_t{gpu.multiprocessors} * kPortableCtasPerProcessor;
    const int32_t ctas = ctas_at_once(at_once, ceil_div(given.heads, kPortableHeads));
    return {Kernel::portable, kPortableHeads, given.batch_invariant, 1, 0, ctas};
  }
  // Where the launch must not depend on the numbers of tokens and slots, it is the best for much work: sixteen tokens
  // for each multiprocessor, each with the 2048 slots that DeepSeek-V3.2's indexer picks.
  constexpr int64_t kManyRounds = 16, kUsualTiles = 2048 / kGpuTileSlots;
  AttentionShape shape = given;
  const bool any = given.batch_invariant || given.tokens == kAny || given.tiles == kAny;
  if (any) shape.tokens = kManyRounds * gpu.multiprocessors, shape.tiles = kUsualTiles;
  shape.tokens = std::max<int64_t>(shape.tokens, 1);
  const GpuCosts& costs = costs_of(gpu);
  Launch best{};
  double least = std::numeric_limits<double>::infinity();
  for_each_candidate(shape, gpu, [&](const Launch& launch) {
    if (any && launch.splits != given.batch_invariant) return;
    const double time = launch_time(shape, launch, gpu, costs);
    if (time < least) least = time, best = launch;
  });
  if (any) best.rounds = 0;
  return best;
}

}  // namespace mla
