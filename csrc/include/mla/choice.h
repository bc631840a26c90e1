// Which kernel computes attention on a GPU, and how its work is laid out there: chosen here and nowhere else. The
// default plan and the launch both read it. Comments give measured times: "b 32 24.5 us (27.3)" means 24.5 us for 32
// tokens, and 27.3 us without the branch. They are of an H200 with 132 multiprocessors, 2048 slots a token, fp8 rows
// and 16 heads, unless a line says otherwise.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mla/format.h"

namespace mla {

constexpr int kMaxCluster = 16;

// What the choice needs to know of a GPU. cuda::describe_device() asks for it.
struct Device {
  int32_t processors;                 // multiprocessors
  int32_t hopper_kernels;             // whether it can run sm90/, and the library was built with it
  int32_t clusters[kMaxCluster + 1];  // [n]: clusters of n blocks, a multiprocessor each, that run at once
};

// What it needs to know of a problem.
struct AttentionShape {
  int64_t tokens;
  int32_t heads;
  Tile tile;                  // of the first list's rows
  bool whole_tokens;          // batch-invariant: a token's bits must not depend on how many others there are
  bool suits_hopper_kernels;  // see cuda/attention/dispatch.cu
  int32_t workers;            // rows of the plan; 0: the choice says how many
  int64_t token_tiles;        // of a token whose lists are full, in tiles of 64 slots
};

struct Choice {
  enum Kernel { portable, few_heads, few_heads_wide, many_heads };

  Kernel kernel;
  int32_t heads_per_block;
  int32_t parts;    // into which the default plan cuts every token, a cluster for each token; 0: cuts follow the load
  int32_t workers;  // rows of the plan
  int32_t cluster;  // blocks of a cluster, which merge a token's parts in distributed shared memory; 1: none
};

constexpr int64_t kAnyTiles = INT32_MAX / 64 + 1;  // of a token: as a plan is made that has to suit all lists
constexpr int kPortableHeads = 16, kPortableBlocksPerProcessor = 2, kManyHeads = 64, kWideHeads = 32;

inline int64_t blocks_for(int32_t heads, int32_t heads_per_block) {
  return (int64_t{heads} + heads_per_block - 1) / heads_per_block;
}

// How `few_heads` spreads few tokens over the whole GPU: a cluster for each token and group of heads, a block for each
// of the token's parts.
struct Spread {
  int32_t heads_per_block;
  int32_t parts;  // 0: there are too many tokens
};

inline Spread spread_few_tokens(const Device& device, int64_t tokens, int32_t heads, int64_t token_tiles) {
  const auto fits = [&](int32_t heads_per_block, int32_t parts) {
    const int64_t clusters = device.clusters[parts];
    return tokens > 0 && tokens * blocks_for(heads, heads_per_block) <= clusters;
  };
  // 8 heads a block instead of 16: b 1 8.9 us (11.4), b 3 9.3 (11.2). Half of such a launch is a token's beginning and
  // end, which cost less for half as many heads.
  // A cluster of 16 starts later: 10 tiles of fp8_model1 rows and 4 tokens 12.1 us (10.9 with 8), 18 tiles 11.8 (12.6).
  constexpr int64_t kTilesOfMostParts = 13;
  for (const int32_t parts : {16, 8})
    if (fits(8, parts) && (parts == 8 || token_tiles >= kTilesOfMostParts)) return {8, parts};
  const int32_t heads_per_block = heads <= 8 ? 8 : 16;
  // instead of cuts that follow the load:
  //   8, 4 parts: b 15 19.7 us (33.1), b 24 26.8 (35.6)
  //   6 parts:    b 17 keeps 102 multiprocessors busy, with 4 parts it would be 68
  //   3 parts:    b 32 24.5 us (27.3), b 36 24.6 (35.1), b 8 with 64 heads 22.7 (38.6)
  //   2 parts:    b 60 33.6 us (44.4), b 7 with 128 heads 28.7 (44.5)
  for (const int32_t parts : {8, 6, 4, 3, 2})
    if (fits(heads_per_block, parts)) return {heads_per_block, parts};
  return {heads_per_block, 0};
}

// Rows of the default plan for up to 16 heads and few tokens whose lists are too long to be spread. Clusters of 8 leave
// a merge in the workspace an eighth of the parts.
constexpr int32_t kLongListCluster = 8;
inline int32_t long_list_workers(const Device& device) {
  const int32_t clusters = device.clusters[kLongListCluster];
  return clusters > 0 ? std::min(device.processors, kLongListCluster * clusters) : device.processors;
}

// Whether the lists are so long that even parts of so few tokens take longer than cuts that follow the load. A cluster
// for each token leaves multiprocessors idle, and reads rows once for each 8 or 16 heads; cuts have a second merge, in
// the workspace. Times are of a tile of 64 rows and of that merge, in us. b 2 with 16384 slots, bf16, on an H100: 36 us
// in 64 blocks, of which each tile takes 1.3 us.
inline bool too_long_to_spread(const Device& device, int64_t tokens, int32_t heads, int64_t token_tiles,
                               const Spread& spread) {
  constexpr double kTile = 1.3, kMerge = 7, kManyTile = 2.3, kManyMerge = 12;
  constexpr double kMemoryTile = 0.0165;  // of all multiprocessors together, fp8 rows, which memory holds up least
  const bool few = heads <= 16;
  const int64_t long_part = few ? 8 : 16;  // tiles of a part that is worth a thought
  const int64_t blocks = few ? 1 : blocks_for(heads, kManyHeads);
  const int64_t workers = few ? long_list_workers(device) : device.processors / blocks;
  const int64_t part_tiles = (token_tiles + spread.parts - 1) / spread.parts;
  if (workers == 0 || token_tiles == kAnyTiles || part_tiles <= long_part) return false;
  const double spread_time = kTile * static_cast<double>(part_tiles);
  const double tiles = static_cast<double>(tokens * token_tiles), worker_tiles = tiles / static_cast<double>(workers);
  if (few) return spread_time > std::max(kTile * worker_tiles, kMemoryTile * tiles) + kMerge;
  return spread_time > kManyTile * worker_tiles + kManyMerge;
}

// If the plan cuts every token into the same number of parts, a cluster has a block for each part of a token. Otherwise
// it has 8 blocks, which merge more in shared memory, or 2 where 8 would not let all busy workers run at once. Versus 8
// always: b 32 28.8 us (46.9), b 128 66.8 (125.5), because too many clusters run in two waves.
inline int32_t cluster_for(const Device& device, const AttentionShape& shape, int32_t heads_per_block,
                           int32_t workers) {
  const int64_t busy =
      std::min<int64_t>(workers, shape.tokens * shape.token_tiles) * blocks_for(shape.heads, heads_per_block);
  const auto fits = [&](int64_t blocks) { return busy <= blocks * device.clusters[blocks]; };
  const int64_t parts = workers / std::max<int64_t>(shape.tokens, 1);
  if (parts * shape.tokens == workers && parts >= 2 && parts <= kMaxCluster && fits(parts))
    return static_cast<int32_t>(parts);
  if (fits(8)) return 8;
  return device.clusters[2] > 0 ? 2 : 1;
}

// Blocks of the clusters that a launch has with a plan of so many rows, if that is one for long lists with a cluster
// for each token; else 0.
inline int32_t long_list_cluster(const Device& device, int64_t tokens, int64_t token_tiles, int32_t workers) {
  constexpr int32_t kMostHeads = 16;
  const bool long_lists = device.hopper_kernels && device.clusters[kLongListCluster] > 0;
  if (!long_lists || workers != long_list_workers(device)) return 0;
  const AttentionShape shape{tokens, kMostHeads, Tile::bf16_576, false, true, workers, token_tiles};
  const int32_t cluster = cluster_for(device, shape, kMostHeads, workers);
  return tokens * cluster <= workers ? cluster : 0;
}

inline Choice choose(const AttentionShape& shape, const Device& device) {
  constexpr int64_t kManyTokens = INT32_MAX;
  const int64_t tokens = shape.whole_tokens ? kManyTokens : shape.tokens;
  Spread spread = spread_few_tokens(device, tokens, shape.heads, shape.token_tiles);
  const bool long_lists =
      spread.parts > 0 && too_long_to_spread(device, tokens, shape.heads, shape.token_tiles, spread);
  if (long_lists) spread = {shape.heads <= 8 ? 8 : 16, 0};

  Choice choice{Choice::portable, kPortableHeads, 0, shape.workers, 1};
  if (device.hopper_kernels && shape.suits_hopper_kernels) {
    if (shape.heads <= 16 || spread.parts) {
      // few tokens of many heads, too: b 1 with 128 heads 17.6 us, b 3 25.1 (portable kernel 53.9, 48.5 and more)
      choice.kernel = Choice::few_heads;
      choice.parts = spread.parts;
      // a caller's plan may have more rows than there is room for blocks of 8 heads
      const bool crowded = int64_t{shape.workers} * blocks_for(shape.heads, 8) > device.processors;
      choice.heads_per_block = shape.heads > 8 && crowded ? 16 : spread.heads_per_block;
    } else if (shape.heads <= 32 && shape.tile == Tile::scaled_576) {
      // b 128 with 32 heads 67 us (in blocks of 64 heads 106); there is no such kernel for other rows
      choice.kernel = Choice::few_heads_wide;
      choice.heads_per_block = kWideHeads;
    } else {
      choice.kernel = Choice::many_heads;
      choice.heads_per_block = kManyHeads;
    }
  }
  if (choice.workers == 0) {
    int64_t at_once =
        int64_t{device.processors} * (choice.kernel == Choice::portable ? kPortableBlocksPerProcessor : 1);
    if (long_lists && choice.kernel == Choice::few_heads) at_once = long_list_workers(device);
    const int64_t workers = at_once / blocks_for(shape.heads, choice.heads_per_block);
    choice.workers = static_cast<int32_t>(choice.parts ? tokens * choice.parts : std::max<int64_t>(workers, 1));
  }
  if (choice.kernel == Choice::few_heads)
    choice.cluster = cluster_for(device, shape, choice.heads_per_block, choice.workers);
  return choice;
}

// For plans that are made before the cache's format is known. It makes no difference: both kernels for 17 to 32 heads
// have all heads in one block.
inline int32_t default_workers(int64_t tokens, int64_t token_tiles, int32_t heads, const Device& device) {
  return choose({tokens, heads, Tile::bf16_576, false, true, 0, token_tiles}, device).workers;
}

}  // namespace mla
