// What a call of attention runs, and what has to be known of a GPU to decide that. choose_launch() (cost.h) decides
// once, from shapes alone. A plan carries the launch, and the dispatcher reads it; nobody decides again.
#pragma once

#include <cstdint>
#include <string>

#include "mla/platform.h"

namespace mla {

constexpr int kMaxCluster = 16;

enum class Kernel : int32_t { cpu, portable, swap_ab, m64, m64_fp8 };
constexpr const char* kKernelNames[] = {"cpu", "portable", "swap_ab", "m64", "m64_fp8"};
constexpr int kKernelCount = sizeof(kKernelNames) / sizeof(kKernelNames[0]);

struct Launch {
  Kernel kernel;
  int32_t heads_per_cta;
  int32_t splits;   // of every token; 1: tokens stay whole if all lists are full; 0: where the load says
  int32_t cluster;  // CTAs of a cluster, which combine a token's splits in distributed shared memory; 1: none
  int32_t rounds;  // whole tokens that a CTA takes one after the other; 0 if split, or if any number of tokens may come
  int32_t ctas;    // for each group of heads: entries of the plan. On a CPU: items of work for its threads
};
constexpr int kLaunchNumbers = 6;  // in a list of ints, in this order

// As Python prints one.
inline std::string describe(const Launch& launch) {
  const auto field = [](const char* name, int32_t number) {
    return std::string(", ") + name + "=" + std::to_string(number);
  };
  return std::string("Launch(kernel='") + kKernelNames[static_cast<int>(launch.kernel)] + "'" +
         field("heads_per_cta", launch.heads_per_cta) + field("splits", launch.splits) +
         field("cluster", launch.cluster) + field("rounds", launch.rounds) + field("ctas", launch.ctas) + ")";
}

// cuda::describe_gpu() asks for it.
struct Gpu {
  int32_t multiprocessors;
  int32_t hopper;                     // whether it can run sm90/, and the library was built with it
  int32_t clusters[kMaxCluster + 1];  // [n]: clusters of n CTAs, a multiprocessor each, that run at once
  double clock_ghz;
  double memory_tbs;  // TB/s
};

constexpr int kGpuTileSlots = 64;  // of every GPU kernel

// What a token costs a CTA of a GPU besides its tiles, in tiles, as plans count it. With two CTAs or more for each
// token, most CTAs pay for one token's beginning and end, whatever their share.
constexpr int kTokenTiles = 3;
inline int32_t token_units(int64_t tokens, int64_t ctas) { return 2 * tokens > ctas ? kTokenTiles : 1; }

constexpr int kPortableHeads = 16, kPortableCtasPerProcessor = 2;
// Heads per CTA up to which swap_ab combines splits itself, within clusters too.
constexpr int kClusterHeads = 16;
// If a token has at most so many results in the workspace, a warp loads the lse of all its heads at once.
constexpr int kEarlySplits = 8;

MLA_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many CTAs a plan by load uses: a multiple of the number of tokens, if that leaves at most one in 16 idle. Equal
// tokens then share no CTA.
MLA_HOST_DEVICE int64_t ctas_of_load(int64_t tokens, int64_t ctas) {
  const int64_t even = ctas - ctas % tokens;
  return 16 * even >= 15 * ctas ? even : ctas;
}

// How many equal splits such a plan makes of each token; 0: unequal ones.
inline int64_t even_splits(int64_t tokens, int64_t ctas) {
  const int64_t used = tokens > 0 ? ctas_of_load(tokens, ctas) : 0;
  return tokens > 0 && used % tokens == 0 ? used / tokens : 0;
}

// CTAs of each group of heads that all run at once.
inline int32_t ctas_at_once(int64_t of_gpu, int64_t head_groups) {
  return static_cast<int32_t>(of_gpu > head_groups ? of_gpu / head_groups : 1);
}

}  // namespace mla
