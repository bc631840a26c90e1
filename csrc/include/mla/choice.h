// Which kernel computes attention on a GPU, and how its work is laid out there: chosen here and nowhere else. The
// default plan and the launch both read it. Measured times are of an H200 with 132 multiprocessors, for 2048 slots a
// token in fp8 rows and 16 heads unless a line says otherwise; b is the number of tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mla/format.h"

namespace mla {

constexpr int kMaxCluster = 16;

// What the choice depends on of a GPU. cuda::describe_device() asks for it.
struct Device {
  int32_t processors;                 // multiprocessors
  int32_t hopper_kernels;             // whether it runs those under sm90/, and the library was built with them
  int32_t clusters[kMaxCluster + 1];  // [n]: clusters of n blocks, a multiprocessor each, that run at once
};

// What it depends on of a problem.
struct AttentionShape {
  int64_t tokens;
  int32_t heads;
  Code code;                  // of the first list's rows
  bool whole_tokens;          // a token's bits must not depend on how many others there are
  bool suits_hopper_kernels;  // see cuda/attention/dispatch.cu
  int32_t workers;            // rows of the plan; 0: the choice says how many
  int64_t token_tiles;        // of a token whose lists are full, in tiles of 64 slots
};

struct Choice {
  enum Kernel { portable, few_heads, few_heads_wide, many_heads };

  Kernel kernel;
  int32_t heads_per_block;
  int32_t parts;    // the default plan cuts every token into so many, for one cluster each; 0: it is cut by load alone
  int32_t workers;  // rows of the plan
  int32_t cluster;  // blocks that merge what they have of a token in one another's shared memory; 1: none
};

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

inline Spread spread_few_tokens(const Device& device, int64_t tokens, int32_t heads) {
  const auto fits = [&](int32_t heads_per_block, int32_t parts) {
    const int64_t clusters = device.clusters[parts];
    return tokens > 0 && tokens * blocks_for(heads, heads_per_block) <= clusters;
  };
  // b 1 11.4 us with 16 heads a block, 8.9 with eight; b 3 11.2 and 9.3: what is done for a token before and after its
  // tiles, half of such a launch, is done for half as many heads
  for (const int32_t parts : {16, 8})
    if (fits(8, parts)) return {8, parts};
  const int32_t heads_per_block = heads <= 8 ? 8 : 16;
  // 8 and 4: b 15 33.1 us when cut by load alone, 19.7 with a cluster for each token; b 24 35.6 and 26.8
  // 6: b 17 occupies 102 multiprocessors, with four parts 68
  // 3: b 32 27.3 us when cut by load alone, 24.5; b 36 35.1 and 24.6; 64 heads at b 8 38.6 and 22.7
  // 2: b 60 44.4 us when cut by load alone, 33.6; 128 heads at b 7 44.5 and 28.7
  for (const int32_t parts : {8, 6, 4, 3, 2})
    if (fits(heads_per_block, parts)) return {heads_per_block, parts};
  return {heads_per_block, 0};
}

// A cluster for each token where the plan cuts every token into as many parts as a cluster can have blocks. Else a
// large one, which merges more on the way, if all workers that can have work find room: b 8 29.0 us with clusters of 8
// everywhere and 19.3 like this, b 128 125.5 and 66.8, as clusters of 8 would run in two waves.
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

inline Choice choose(const AttentionShape& shape, const Device& device) {
  constexpr int64_t kManyTokens = INT32_MAX;
  const int64_t tokens = shape.whole_tokens ? kManyTokens : shape.tokens;
  const Spread spread = spread_few_tokens(device, tokens, shape.heads);

  Choice choice{Choice::portable, kPortableHeads, 0, shape.workers, 1};
  if (device.hopper_kernels && shape.suits_hopper_kernels) {
    if (shape.heads <= 16 || spread.parts) {
      // more heads, few tokens: 128 heads at b 1 17.6 us, b 3 25.1; the portable kernel takes 53.9 and more
      choice.kernel = Choice::few_heads;
      choice.parts = spread.parts;
      // a plan of the caller's may have more rows than there is room for blocks of eight heads
      const bool crowded = int64_t{shape.workers} * blocks_for(shape.heads, 8) > device.processors;
      choice.heads_per_block = shape.heads > 8 && crowded ? 16 : spread.heads_per_block;
    } else if (shape.heads <= 32 && shape.code == Code::e4m3) {
      // 32 heads at b 128: 66 us, and 100 in blocks of 64 heads. bf16 rows are not converted, so they gain nothing
      choice.kernel = Choice::few_heads_wide;
      choice.heads_per_block = kWideHeads;
    } else {
      choice.kernel = Choice::many_heads;
      choice.heads_per_block = kManyHeads;
    }
  }
  if (choice.workers == 0) {
    const int64_t at_once =
        int64_t{device.processors} * (choice.kernel == Choice::portable ? kPortableBlocksPerProcessor : 1);
    const int64_t workers = at_once / blocks_for(shape.heads, choice.heads_per_block);
    choice.workers = static_cast<int32_t>(choice.parts ? tokens * choice.parts : std::max<int64_t>(workers, 1));
  }
  if (choice.kernel == Choice::few_heads)
    choice.cluster = cluster_for(device, shape, choice.heads_per_block, choice.workers);
  return choice;
}

// The rows of a plan for any rows and lists: both kernels for 17 to 32 heads have them in one block.
inline int32_t default_workers(int64_t tokens, int32_t heads, const Device& device) {
  return choose({tokens, heads, Code::bf16, false, true, 0, INT32_MAX}, device).workers;
}

}  // namespace mla
