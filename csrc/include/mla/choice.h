// Which kernel computes attention on a GPU, and how its work is laid out there: chosen here and nowhere else. The
// default plan and the launch both read it. Comments give measured times: "b 32 24.5 us (27.3)" means 24.5 us for 32
// tokens, and 27.3 us without the branch. They are of an H200 with 132 multiprocessors, 2048 slots a token, fp8 rows
// and 16 heads, unless a line says otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "mla/format.h"
#include "mla/plan.h"

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
  CacheFormat format;         // of the first list's rows
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
constexpr int64_t kFewTokens = 320;  // from so many on, their number no longer says how many rows a plan has
constexpr int kPortableHeads = 16, kPortableBlocksPerProcessor = 2, kManyHeads = 64, kWideHeads = 32;

inline int64_t blocks_for(int32_t heads, int32_t heads_per_block) {
  return (int64_t{heads} + heads_per_block - 1) / heads_per_block;
}

// Rows of a plan whose blocks all run at once, if each row is read by so many blocks of heads.
inline int64_t rows_at_once(int64_t blocks_at_once, int64_t head_blocks) {
  return std::max<int64_t>(blocks_at_once / head_blocks, 1);
}

// Tiles of the largest of a token's equal parts.
inline int64_t tiles_of_part(int64_t token_tiles, int64_t parts) { return (token_tiles + parts - 1) / parts; }

// What a kernel's launch takes between other kernels, in us, so that the least of these times is that of the fastest
// launch: fitted to all sensible plans of 1,900 sizes, 1 to 256 tokens with 8 to 128 heads and 512 to 32768 slots in
// four formats, on an H100 with 132 multiprocessors. There the default plan was 0.24 % slower than the best on average.
// Times as such may be too long, by 4 % (few_heads_wide), 10 % (many_heads) or 30 % (few_heads).
struct KernelTime {
  Choice::Kernel kernel;
  int32_t heads_per_block;
  double begin;      // and end
  double tile;       // of 64 rows of e4m3 numbers that are multiplied as they are, one after the other in a block
  double plain;      // of rows of 16-bit numbers
  double converted;  // of rows that become such
  double cut;        // what a merge in the workspace takes
  double late_part;  // what it takes longer for each part of a token beyond eight: they come one after the other

  bool converts(const CacheFormat& format) const {
    return format.quantised() && format.scale != Scale::fp32 &&
           !(format.scale == Scale::tensor && kernel == Choice::few_heads);
  }
  double tile_of(const CacheFormat& format) const {
    return converts(format) ? converted : format.quantised() ? tile : plain;
  }
};
constexpr KernelTime kManyHeadsTime{Choice::many_heads, kManyHeads, 19, 1.95, 1.9, 2.3, 5.5, 0.35};
constexpr KernelTime kWideTime{Choice::few_heads_wide, kWideHeads, 16, 1.3, 0, 0, 5, 0.35};  // it has no other rows
constexpr KernelTime kFewHeadsTime{Choice::few_heads, 16, 9.5, 1.15, 1.7, 2.7, 8.5, 0.7};

// What memory takes for tokens' tiles of 64 rows, in us: 2.5 TB/s.
inline double memory_time(const CacheFormat& format, double tiles) {
  return 0.0165 / 656 * format.token_bytes() * tiles;
}

// Of computing and memory at once: where both take as long, neither hides the other quite, and it is 12 % more. This is
// the sixth root of the sum of their sixth powers.
inline double busy_time(double computing, double memory) {
  const double longer = std::max(computing, memory), shorter = std::min(computing, memory);
  if (longer == 0) return 0;
  const double ratio = shorter / longer, cube = ratio * ratio * ratio;
  return longer * std::cbrt(std::sqrt(1 + cube * cube));
}

// How `few_heads` spreads few tokens over the whole GPU: a cluster for each token and group of heads, a block for each
// of the token's parts.
struct Spread {
  int32_t heads_per_block;
  int32_t parts;  // 0: there are too many tokens
};

inline Spread spread_few_tokens(const AttentionShape& shape, const Device& device) {
  const int64_t tokens = shape.tokens, token_tiles = shape.token_tiles;
  const int32_t heads = shape.heads;
  const auto fits = [&](int32_t heads_per_block, int32_t parts) {
    const int64_t clusters = device.clusters[parts];
    return tokens > 0 && tokens * blocks_for(heads, heads_per_block) <= clusters;
  };
  // 8 heads a block instead of 16: b 1 8.9 us (11.4), b 3 9.3 (11.2). Half of such a launch is a token's beginning and
  // end, which cost less for half as many heads.
  // A cluster of 16 starts later: 10 tiles of fp8_model1 rows and 4 tokens 12.1 us (10.9 with 8), 18 tiles 11.8 (12.6).
  constexpr int64_t kTilesOfMostParts = 17;
  if (fits(8, 16) && token_tiles >= kTilesOfMostParts) return {8, 16};
  // With 16 heads a block, on an H100, and in brackets 8 parts with 8 heads. In situ:
  //   1 token, 64 heads: 2048 slots of fp8_ds_mla 11.3 us (10.3), 4096 13.9 (14.7), 2048 of fp8_model1 12.3 (14.1)
  //   1 token, 96 heads: 2048 slots of fp8_ds_mla 11.2 us (12.1), 4096 14.2 (16.5), of bf16 14.2 (16.1)
  //   7 tokens, 16 heads: 2048 slots of bf16 15.0 us (13.8), 8192 of fp8_ds_mla 25.2 (27.8)
  // 8 parts are slower where two of their clusters share a GPC. Longer lists with up to 16 heads stay with cuts that
  // follow the load: of 16384 slots 5 tokens of fp8_ds_mla take 34.2 us, and 33.4 so; of fp8_model1 36.1 and 42.1.
  constexpr int64_t kGpcs = 8, kLongestPart = 9;
  const double tile = kFewHeadsTime.tile_of(shape.format), tiles = static_cast<double>(token_tiles);
  const bool shared = heads > 16 && tokens * blocks_for(heads, 8) > kGpcs;
  const double merge_of_most_parts = shared ? 2 : 4;  // what it takes more than one of 8
  const auto saved = [&](int64_t parts, int64_t more) {
    return tile * static_cast<double>(tiles_of_part(token_tiles, parts) - tiles_of_part(token_tiles, more));
  };
  const bool most_pay =
      (heads > 16 || tiles_of_part(token_tiles, 16) <= kLongestPart) && saved(8, 16) > merge_of_most_parts;
  if (fits(16, 16) && token_tiles >= kTilesOfMostParts && (shape.workers ? shape.workers == 16 * tokens : most_pay))
    return {16, 16};
  // 9 to 16 heads, 8 parts of 128 slots, whole in brackets: 4 tokens of fp8_ds_mla 8.1 us (7.1), 6 of bf16 7.7 (6.8)
  constexpr double kMergeOfEighths = 2;
  if (fits(8, 8) && (heads > 8 ? saved(1, 8) > kMergeOfEighths : token_tiles >= 8)) return {8, 8};
  const int32_t heads_per_block = heads <= 8 ? 8 : 16;
  // instead of cuts that follow the load:
  //   8, 4 parts: b 15 19.7 us (33.1), b 24 26.8 (35.6)
  //   3 parts:    b 32 24.5 us (27.3), b 36 24.6 (35.1), b 8 with 64 heads 22.7 (38.6)
  //   2 parts:    b 60 33.6 us (44.4), b 7 with 128 heads 28.7 (44.5)
  // A merge of 6 parts gives some warps two rows and some one. b 8 with 32 heads, in 4 parts in brackets:
  //   18 tiles of fp8_model1 16.0 us (18.0), 64 of fp8_ds_mla 22.9 (25.8), but 32 of those 17.2 (16.7)
  // Parts of short lists save less than a merge takes. On an H100:
  //   128 slots: b 12 in 8 parts 9.9 us, whole 8.2; 8 heads, b 2 8.4, b 12 7.5
  //   256 slots: b 14 in 8 parts 10.0 us, b 16 in 4 9.1
  // Halves save half of the tiles, or what memory leaves of that. 512 slots, 16 heads, in situ, whole in brackets:
  //   fp8_ds_mla: b 40 15.3 us (15.7), b 66 19.0 (17.4)    bf16: b 40 17.2 us (19.0), b 66 22.6 (22.0)
  //   fp8_model1: b 40 17.3 us (23.3), b 66 19.3 (23.8)
  constexpr double kMergeOfHalves = 3, kMemory = 0.88, kPlainMemory = 0.75;  // of what other launches wait for it
  const double memory = memory_time(shape.format, static_cast<double>(tokens) * tiles) *
                        (shape.format.quantised() ? kMemory : kPlainMemory);
  const bool halves_pay = std::max(tile * tiles / 2, memory) + kMergeOfHalves < tile * tiles;
  constexpr double kMergeOfSixths = 3;  // what it takes more than one of quarters
  const bool sixths_pay = saved(4, 6) > kMergeOfSixths;
  for (const int32_t parts : {8, 6, 4, 3, 2}) {
    const bool pays = token_tiles >= (parts == 4 ? 4 : 8) && (parts != 6 || sixths_pay) && (parts > 2 || halves_pay);
    if (pays && fits(heads_per_block, parts)) return {heads_per_block, parts};
  }
  return {heads_per_block, 0};
}

// Rows of a plan for few tokens whose lists are too long to be spread; each row is read by so many blocks of heads.
// Clusters of 8 leave a merge in the workspace an eighth of the parts. 1 token of 32768 slots with 32 heads,
// fp8_ds_mla, on an H100: 24.9 us with 56 rows, 31.6 with 33, 36.5 with 66. Those fit in clusters of 2 only.
constexpr int32_t kLongListCluster = 8;
inline int32_t long_list_workers(const Device& device, int64_t head_blocks = 1) {
  const auto most = static_cast<int32_t>(rows_at_once(device.processors, head_blocks));
  const auto clusters = static_cast<int32_t>(device.clusters[kLongListCluster] / head_blocks);
  return clusters > 0 ? std::min(most, kLongListCluster * clusters) : most;
}

// Whether the lists are so long that even parts of so few tokens take longer than cuts that follow the load, with up to
// 16 heads. A cluster for each token leaves multiprocessors idle; cuts have a second merge, in the workspace. Times are
// of a tile of 64 rows and of that merge, in us. b 2 with 16384 slots, bf16, on an H100: 36 us in 64 blocks, of which
// each tile takes 1.3 us.
inline bool too_long_to_spread(const Device& device, int64_t tokens, int64_t token_tiles, const Spread& spread) {
  constexpr double kTile = 1.3, kMerge = 7;
  constexpr int64_t kLongPart = 8;  // tiles of a part that is worth a thought
  const int64_t workers = long_list_workers(device);
  const int64_t part_tiles = tiles_of_part(token_tiles, spread.parts);
  if (token_tiles == kAnyTiles || part_tiles <= kLongPart) return false;
  const double spread_time = kTile * static_cast<double>(part_tiles);
  // as of fp8 rows, which memory holds up least
  const double tiles = static_cast<double>(tokens * token_tiles), worker_tiles = tiles / static_cast<double>(workers);
  return spread_time > std::max(kTile * worker_tiles, memory_time(kFp8DsMla, tiles)) + kMerge;
}

// A plan for two rounds of whole tokens has a row less than blocks fit at once. By that number the plan op and the
// launch know it. If not all lists are full, the op cuts by load over all rows after all.
inline bool has_two_rounds(const Device& device, int64_t workers) {
  const int64_t blocks = device.processors / (workers + 1);  // of heads, for each row
  return blocks > 0 && device.processors / blocks == workers + 1;
}

// If the plan cuts every token into the same number of parts, a cluster has a block for each part of a token. Otherwise
// it has 8 blocks, which merge more in shared memory, 2 where 8 would not let all busy workers run at once, or none.
// Versus 8 always: b 32 28.8 us (46.9), b 128 66.8 (125.5), because too many clusters run in two waves. So do clusters
// of 2 if 33 workers are four blocks each: 28 us for 66 tokens of 128 slots with 64 heads, and 18 for 64.
inline int32_t cluster_for(const Device& device, const AttentionShape& shape, int32_t heads_per_block,
                           int32_t workers) {
  const int64_t busy = std::max<int64_t>(std::min<int64_t>(workers, shape.tokens * shape.token_tiles), 1);
  const int64_t head_blocks = blocks_for(shape.heads, heads_per_block);
  const auto fits = [&](int64_t blocks) {
    return (busy + blocks - 1) / blocks * head_blocks <= device.clusters[blocks];
  };
  const int64_t parts = workers / std::max<int64_t>(shape.tokens, 1);
  if (parts * shape.tokens == workers && parts >= 2 && parts <= kMaxCluster && fits(parts))
    return static_cast<int32_t>(parts);
  if (parts * shape.tokens == workers && parts == 1) return 1;
  if (fits(8)) return 8;
  return fits(2) ? 2 : 1;
}

struct Layout {
  int64_t workers;
  double time;
};

// A launch with a plan of so many rows. Tokens are whole, or all cut into equal parts, or cuts follow the load.
inline Layout layout_of(const KernelTime& kernel, const AttentionShape& shape, const Device& device, int64_t workers) {
  constexpr double kTokenTiles = 3.25;  // that the next token of a worker, or part of one, costs besides its own
  constexpr double kSharedRow = 0.2;    // of memory's time, for another block of heads that reads the same row
  // A head's 512 sums, written and read. many_heads rounds those of some rows to f16.
  const bool compact =
      kernel.kernel == Choice::many_heads && shape.format.scale != Scale::fp32 && shape.format.scale != Scale::tensor;
  const double partial_row = compact ? 0.0007 : 0.0011;
  const auto tokens = static_cast<double>(shape.tokens), tiles = static_cast<double>(shape.token_tiles);
  const int64_t blocks = blocks_for(shape.heads, kernel.heads_per_block);
  const auto waves = static_cast<double>((workers * blocks + device.processors - 1) / device.processors);
  const int64_t rounds = (shape.tokens + workers - 1) / workers;
  double most;          // tiles of a worker
  double partials = 0;  // partial results
  if (workers % shape.tokens == 0) {
    const int64_t parts = workers / shape.tokens;
    most = static_cast<double>(tiles_of_part(shape.token_tiles, parts));
    if (parts > 1) partials = static_cast<double>(workers);
  } else if (workers < shape.tokens &&
             whole_tokens_pay(shape.tokens, shape.token_tiles, workers, has_two_rounds(device, workers))) {
    most = (tiles + kTokenTiles) * static_cast<double>(rounds) - kTokenTiles;
  } else {
    // a worker has parts of one token more than there are rounds
    most = tokens * tiles / static_cast<double>(workers) + kTokenTiles * static_cast<double>(rounds);
    partials = static_cast<double>(workers) + static_cast<double>(std::min(shape.tokens, workers)) / 2;
  }
  const double sharing = shape.format.quantised() ? 1 : 1 + kSharedRow * static_cast<double>(blocks - 1);
  const double memory = memory_time(shape.format, tokens * tiles) * sharing;
  const double busy = busy_time(kernel.tile_of(shape.format) * most * waves, memory);
  double merge = 0;
  if (partials > 0) {
    int32_t cluster = 1;
    if (kernel.kernel == Choice::few_heads)
      cluster = cluster_for(device, shape, kernel.heads_per_block, static_cast<int32_t>(workers));
    const double token_parts = std::min(static_cast<double>(workers) / tokens, tiles) / cluster;  // in the workspace
    merge = kernel.cut + kernel.late_part * std::max(token_parts - 8, 0.0) + partial_row * partials * shape.heads;
  }
  return {workers, kernel.begin * waves + busy + merge};
}

// The best number of rows of a plan for a kernel. Whole tokens in two rounds leave processors idle, and are the better
// for it where memory holds them up. In us, two rounds and even cuts:
//   16 heads: fp8_ds_mla, 192 tokens of 1024 slots 62.6 and 73.4; bf16, 160 of them 75.3 and 86.3
//   rows that are converted: fp8_model1, 16 heads, 160 of 1152 slots 84.2 and 72.2; 32 heads, 148 of 640 63.8 and 58.8
inline Layout best_layout(const KernelTime& kernel, const AttentionShape& shape, const Device& device) {
  const int64_t head_blocks = blocks_for(shape.heads, kernel.heads_per_block);
  const int64_t most = rows_at_once(device.processors, head_blocks);
  Layout best = layout_of(kernel, shape, device, most);
  const auto consider = [&](int64_t workers) {
    const Layout other = layout_of(kernel, shape, device, workers);
    if (other.time < best.time) best = other;
  };
  constexpr int64_t kMostParts = 16;
  for (int64_t parts = 1; parts <= kMostParts && parts * shape.tokens <= most; ++parts) consider(parts * shape.tokens);
  // A token would have more than 16 parts, which the workspace merges one after the other. Kernels without clusters
  // gain from the second number, too: it is equal parts of 5 and 6 tokens. The plan op takes it for rows in clusters,
  // which makes no difference to full lists, and 7 % at most to others.
  if (most > kMostParts * shape.tokens) {
    consider(most / 2);
    consider(long_list_workers(device, head_blocks));
  }
  const int64_t rounds = (shape.tokens + most - 1) / most;
  // of more rounds the last one matters little
  if (rounds == 2 && most > 1 && !kernel.converts(shape.format)) consider(most - 1);
  return best;
}

// Blocks of the clusters that a launch has with a plan of so many rows, if that is one for long lists with a cluster
// for each token; else 0.
inline int32_t long_list_cluster(const Device& device, int64_t tokens, int64_t token_tiles, int32_t workers) {
  constexpr int32_t kMostHeads = 16;
  const bool long_lists = device.hopper_kernels && device.clusters[kLongListCluster] > 0;
  if (!long_lists || workers != long_list_workers(device)) return 0;
  const AttentionShape shape{tokens, kMostHeads, kFp8DsMla, false, true, workers, token_tiles};
  const int32_t cluster = cluster_for(device, shape, kMostHeads, workers);
  return tokens * cluster <= workers ? cluster : 0;
}

// What kind of plan the plan op is to make, as its number of rows says.
inline void set_kind(PlanShape& shape, const Device& device, int32_t workers) {
  shape.cluster = long_list_cluster(device, shape.tokens, full_tiles(shape), workers);
  shape.two_rounds = has_two_rounds(device, workers);
}

// With more than 16 heads. `few_heads` reads a row again for each 16 heads, and is the fastest all the same where there
// are few tiles: 17 tokens of 512 slots with 64 heads take 16 us, with `many_heads` 35. Their order is no better than
// some percent, so in doubt it is the kernel for more heads.
inline Choice choose_by_time(AttentionShape shape, const Device& device, const Spread& spread) {
  constexpr double kClearly = 0.97;
  constexpr double kClusterMerge = 2, kMergeOfMostParts = 4;  // us; the second of lists of 8192 slots and more
  shape.tokens = std::min(shape.tokens, kFewTokens);
  const KernelTime* best = nullptr;
  Layout layout{};
  for (const KernelTime* kernel : {&kManyHeadsTime, &kWideTime, &kFewHeadsTime}) {
    // 300 tokens with 96 heads take 6 % longer in the wide kernel than in many_heads
    const bool narrow = shape.heads <= kWideHeads || shape.tokens <= device.processors;
    const bool scaled = shape.format.tile() == TileType::scaled_576;
    if (kernel->kernel == Choice::few_heads_wide && !(scaled && narrow)) continue;
    const Layout own =
        shape.workers ? layout_of(*kernel, shape, device, shape.workers) : best_layout(*kernel, shape, device);
    if (!best || own.time < kClearly * layout.time) best = kernel, layout = own;
  }
  if (spread.parts && (!shape.workers || shape.workers == shape.tokens * spread.parts)) {
    const int64_t part_tiles = tiles_of_part(shape.token_tiles, spread.parts);
    const double merge = spread.parts > 8 ? kMergeOfMostParts : kClusterMerge;
    const double time =
        kFewHeadsTime.begin + kFewHeadsTime.tile_of(shape.format) * static_cast<double>(part_tiles) + merge;
    const double clearly = best->kernel == Choice::few_heads ? 1 : kClearly;
    if (time < clearly * layout.time) {
      const auto workers = static_cast<int32_t>(shape.tokens * spread.parts);
      return {Choice::few_heads, spread.heads_per_block, spread.parts, workers, 1};
    }
  }
  return {best->kernel, best->heads_per_block, 0, static_cast<int32_t>(layout.workers), 1};
}

inline Choice choose(AttentionShape shape, const Device& device) {
  shape.tokens = std::max<int64_t>(shape.tokens, 1);  // there may be none
  const auto workers_for = [&](int64_t at_once, int32_t heads_per_block) {
    const int64_t workers = rows_at_once(at_once, blocks_for(shape.heads, heads_per_block));
    return shape.workers ? shape.workers : static_cast<int32_t>(workers);
  };
  if (!device.hopper_kernels || !shape.suits_hopper_kernels) {
    const int64_t at_once = int64_t{device.processors} * kPortableBlocksPerProcessor;
    return {Choice::portable, kPortableHeads, 0, workers_for(at_once, kPortableHeads), 1};
  }
  if (shape.format.tile() == TileType::staged_576)  // no other kernel has such rows
    return {Choice::many_heads, kManyHeads, 0, workers_for(device.processors, kManyHeads), 1};
  Choice choice;
  Spread spread{shape.heads <= 8 ? 8 : 16, 0};
  if (!shape.whole_tokens) spread = spread_few_tokens(shape, device);
  if (shape.heads > 16 && shape.whole_tokens) {
    const bool wide = shape.heads <= kWideHeads && shape.format.tile() == TileType::scaled_576;
    choice = {wide ? Choice::few_heads_wide : Choice::many_heads, wide ? kWideHeads : kManyHeads, 0, 0, 1};
    choice.workers = workers_for(device.processors, choice.heads_per_block);
  } else if (shape.heads > 16) {
    choice = choose_by_time(shape, device, spread);
  } else {
    const bool long_lists = spread.parts > 0 && too_long_to_spread(device, shape.tokens, shape.token_tiles, spread);
    if (long_lists) spread = {shape.heads <= 8 ? 8 : 16, 0};
    int64_t workers = device.processors;
    if (spread.parts)
      workers = shape.tokens * spread.parts;
    else if (long_lists)
      workers = long_list_workers(device);
    else if (!shape.whole_tokens)
      workers = best_layout(kFewHeadsTime, shape, device).workers;
    choice = {Choice::few_heads, spread.heads_per_block, spread.parts, 0, 1};
    choice.workers = shape.workers ? shape.workers : static_cast<int32_t>(workers);
  }
  if (choice.kernel != Choice::few_heads) return choice;
  // Short lists that stay whole, on an H100: in blocks of 8 heads, and in brackets of 16, with the same bits.
  //   12 tokens of 128 slots with 16 heads: fp8_ds_mla 7.4 us (8.2)
  //   20 tokens of 128 slots with 24 heads: bf16 7.9 us (8.3)    20 of 192: fp8_model1 11.6 us (12.3)
  // Rows that more than two such blocks read and multiply as they are gain nothing once these fill two thirds of a GPU:
  //   fp8_ds_mla: 15 tokens of 128 slots with 48 heads 8.3 us (8.4), 16 of 192 with 64 10.6 (9.9)
  constexpr int64_t kShortList = 8;
  const int64_t narrow_blocks = int64_t{choice.workers} * blocks_for(shape.heads, 8);
  const bool read_often = shape.heads > 16 && shape.format.quantised() && !kFewHeadsTime.converts(shape.format);
  const int64_t room = read_often ? device.processors * 2 / 3 : device.processors;
  if (!shape.whole_tokens && choice.parts == 0 && shape.token_tiles < kShortList && narrow_blocks <= room)
    choice.heads_per_block = 8;
  // a plan may have more rows than there is room for blocks of 8 heads
  if (shape.heads > 8 && narrow_blocks > device.processors) choice.heads_per_block = 16;
  choice.cluster = cluster_for(device, shape, choice.heads_per_block, choice.workers);
  return choice;
}

// A plan for other rows is right and slower: 32 tokens of bf16 rows with 128 heads take 67 us with one for fp8_ds_mla,
// whose wide kernel they don't have, and 55 with their own.
inline int32_t default_workers(int64_t tokens, int64_t token_tiles, int32_t heads, const CacheFormat& format,
                               const Device& device) {
  return choose({tokens, heads, format, false, true, 0, token_tiles}, device).workers;
}

}  // namespace mla
