// What the two kernels of select_tokens hand over in the workspace.
//
// Tokens come in groups of a fixed number of neighbours, and each CTA of the filter has an equal share of all groups'
// tiles of keys. Where a CTA and a group meet, they have four lists: group + CTA is a number of its own for each such
// meeting, because both only rise from one to the next. A list's candidates lie by rising position, and those of a
// token's lists, too, one list after the other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/divide.h"
#include "mla/index.h"

namespace mla::cuda::index::sm90 {

constexpr int kTileKeys = 64;
constexpr int kUnitKeys = 8;  // of a tile, that lie in one piece where tokens have lists of candidates
constexpr int kLists = 4;     // of a CTA and a group: one a token, or several if the group has fewer tokens
constexpr int kCtasPerProcessor = 2;
constexpr int kMaxCtas = 320;  // of the filter

// A score as an integer of the same order, and its position.
struct alignas(8) Candidate {
  uint32_t score;
  uint32_t position;
};

struct alignas(16) ListEnd {
  int32_t count;
  uint32_t lowest, highest;  // bounds of the scores, ordered()
  uint32_t floor;            // topk of the token's scores are above it
};

struct Lists {
  int32_t* first_cta;  // [groups], of those that have a share of the group
  int32_t* last_cta;
  ListEnd* ends;          // [groups + ctas, kLists]
  Candidate* candidates;  // [groups + ctas, kLists, capacity]
  int32_t capacity;       // of a list
};

// Room for as many candidates again as are chosen, or for a thousand; a multiple of 32.
constexpr int32_t list_capacity(int32_t topk) {
  return (topk + (topk < 1024 ? 1024 : topk < 2048 ? topk : 2048) + 31) / 32 * 32;
}

constexpr int64_t list_bytes(int32_t topk) {
  return int64_t{list_capacity(topk)} * sizeof(Candidate) + sizeof(ListEnd);
}

constexpr int64_t lists_bytes(int64_t groups, int64_t ctas, int32_t topk) {
  return (groups + ctas) * kLists * list_bytes(topk) + (2 * groups * sizeof(int32_t) + 15) / 16 * 16;
}

inline Lists lay_out(uint8_t* workspace, int64_t groups, int64_t ctas, int32_t topk) {
  Lists lists;
  lists.capacity = list_capacity(topk);
  lists.candidates = reinterpret_cast<Candidate*>(workspace);
  workspace += (groups + ctas) * kLists * lists.capacity * sizeof(Candidate);
  lists.ends = reinterpret_cast<ListEnd*>(workspace);
  workspace += (groups + ctas) * kLists * sizeof(ListEnd);
  lists.first_cta = reinterpret_cast<int32_t*>(workspace);
  lists.last_cta = lists.first_cta + groups;
  return lists;
}

struct Problem : SelectTokensProblem {
  CUtensorMap keys;  // [blocks, block_size, 128], where whole_tiles
  PositionDivisor table_index;
  bool queries_aligned;  // to 16 bytes
  bool whole_tiles;      // a tile of keys lies in one block; with candidates, each unit does
  int32_t group;         // tokens
  int32_t kept;          // candidates that a CTA of the last kernel has room for
  Lists lists;

  explicit Problem(const SelectTokensProblem& p) : SelectTokensProblem(p), table_index(p.cache.block_size) {
    const auto starts = reinterpret_cast<uintptr_t>(p.queries) | p.query_token | p.query_head;
    queries_aligned = starts % 16 == 0;
    whole_tiles = candidate_blocks.size > 0 ? (candidate_blocks.size | cache.block_size) % kUnitKeys == 0
                                            : cache.block_size % kTileKeys == 0;
  }

  MLA_HOST_DEVICE int32_t length_of(int64_t token) const { return length[token] < 0 ? 0 : length[token]; }

  // How many of a token's keys need scores.
  MLA_HOST_DEVICE int32_t scored(int64_t token) const {
    const int32_t wanted = length_of(token);
    if (wanted <= topk && !chosen_scores) return 0;
    return wanted < positions ? wanted : positions;
  }
};

MLA_HOST_DEVICE uint32_t tiles_of(uint32_t keys) { return (keys + kTileKeys - 1) / kTileKeys; }

// Scores as integers of the same order: NaN above all, both zeros the same.
constexpr uint32_t kNaN = 0xfffffffeu, kMinusInfinity = 0x007fffffu;

__device__ __forceinline__ uint32_t ordered(float score) {
  score += 0.0f;  // -0 becomes 0
  const uint32_t bits = __float_as_uint(score), sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return score == score ? bits ^ (sign | 0x80000000u) : kNaN;
}

__device__ __forceinline__ float score_of(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// Candidates of a token in one order: the better score first, of equal ones the earlier position.
__device__ __forceinline__ uint64_t rank_key(const Candidate& c) { return uint64_t{c.score} << 32 | ~c.position; }

}  // namespace mla::cuda::index::sm90
