// What the indexer's ops solve: how well the keys of its context fit a token, and which keys fit best.
#pragma once

#include <cstdint>

#include "mla/format.h"
#include "mla/number.h"
#include "mla/problem.h"

namespace mla {

constexpr int kIndexDim = 128;

// How keys are stored: bf16; e4m3 with an fp32 scale a key; or MXFP4, e2m1 with a power of two (ue8m0) for each 32.
enum class KeyNumber : int32_t { bf16, e4m3, mxfp4 };

constexpr int kMxGroup = 32;       // values with one scale; a key's four scales are four bytes
constexpr int kKeyScaleBytes = 4;  // of a quantised key
constexpr uint32_t kMxNan = 255;   // the scale that is no number; another one s is 2^(s - 127)

MLA_HOST_DEVICE constexpr int key_value_bytes(KeyNumber number) {
  return number == KeyNumber::bf16 ? 2 * kIndexDim : number == KeyNumber::e4m3 ? kIndexDim : kIndexDim / 2;
}

// The paged keys of an indexer: in a block first the values of all its tokens, then, if quantised, their scales.
struct KeyCacheView {
  const uint8_t* data;
  int64_t blocks;
  int64_t block_size;
  int64_t block_stride;  // bytes
  KeyNumber number;
};

// Keys that become MXFP4. One whose slot is in no block is left out.
struct WriteKeysProblem {
  int64_t tokens;
  const void* keys;  // [tokens, 128]
  bool fp32;         // else bf16
  int64_t key_token;
  const int64_t* slot;  // [tokens]
  uint8_t* data;        // of the cache
  KeyCacheView cache;

  MLA_HOST_DEVICE float at(int64_t token, int dim) const { return number_at(keys, fp32, token * key_token + dim); }
  // A token's values, and its scales; null if it has no slot.
  MLA_HOST_DEVICE uint8_t* values_of(int64_t token) const {
    const int64_t own = slot[token], block = own / cache.block_size;
    if (own < 0 || block >= cache.blocks) return nullptr;
    return data + block * cache.block_stride + own % cache.block_size * (kIndexDim / 2);
  }
  MLA_HOST_DEVICE uint8_t* scales_of(int64_t token) const {
    const int64_t block = slot[token] / cache.block_size, offset = slot[token] % cache.block_size;
    return data + block * cache.block_stride + cache.block_size * (kIndexDim / 2) + offset * kKeyScaleBytes;
  }
};

// What a query's numbers are.
enum class QueryNumber : int32_t { fp32, bf16, e4m3 };

MLA_HOST_DEVICE int bytes_of(QueryNumber number) {
  return number == QueryNumber::fp32 ? 4 : number == QueryNumber::bf16 ? 2 : 1;
}

// The positions that each token may choose from, in a list of its own: blocks of neighbouring positions.
struct CandidateBlocks {
  const int32_t* blocks;  // [tokens, count]
  int64_t stride;
  int32_t count;
  int32_t size;    // positions of a block; 0: no token has a list
  int32_t unless;  // nor has one that sees no more positions than this
};

// Tokens' queries, and which keys each of them sees.
struct IndexProblem {
  int64_t tokens;
  int32_t heads;
  const void* queries;  // [tokens, heads, 128]
  QueryNumber query_number;
  int64_t query_token, query_head;  // strides in elements
  const float* weights;             // [tokens, heads]
  int64_t weight_token;
  KeyCacheView cache;
  const int32_t* block_table;  // [requests, max_blocks]
  int64_t table_stride;
  int64_t requests;
  int32_t max_blocks;
  const int32_t* request;  // [tokens]
  const int32_t* length;   // [tokens]
  CandidateBlocks candidate_blocks;

  MLA_HOST_DEVICE bool has_candidates(int64_t token) const {
    return candidate_blocks.size > 0 && length[token] > candidate_blocks.unless;
  }
  // The position at a place of a token's list; -1 if the token sees none there.
  MLA_HOST_DEVICE int32_t position_at(int64_t token, int32_t place) const {
    if (!has_candidates(token)) return place;
    const int32_t entry = place / candidate_blocks.size;
    const int32_t block =
        entry < candidate_blocks.count ? candidate_blocks.blocks[token * candidate_blocks.stride + entry] : -1;
    const int64_t position = int64_t{block} * candidate_blocks.size + place % candidate_blocks.size;
    return block >= 0 && position < length[token] ? static_cast<int32_t>(position) : -1;
  }

  // The problem of `count` of its tokens, from `first` on.
  IndexProblem piece(int64_t first, int64_t count) const {
    IndexProblem some = *this;
    some.tokens = count;
    some.queries = static_cast<const uint8_t*>(queries) + first * query_token * bytes_of(query_number);
    some.weights += first * weight_token, some.request += first, some.length += first;
    if (candidate_blocks.size > 0) some.candidate_blocks.blocks += first * candidate_blocks.stride;
    return some;
  }
};

struct IndexScoresProblem : IndexProblem {
  float* scores;  // [tokens, positions]
  int64_t score_token;
  int32_t positions;
};

struct SelectTopProblem {
  int64_t tokens;
  const float* scores;  // [tokens, positions]
  int64_t score_token;
  int32_t positions;
  const int32_t* length;  // [tokens]
  int32_t topk;
  int32_t* chosen;  // [tokens, topk]
  int64_t chosen_token;
};

constexpr int32_t kMaxSelected = 4096;                      // positions of a token that select_tokens chooses
constexpr int32_t kMaxSelectPositions = 1 << 24;            // of a request's row of the block table
constexpr int64_t kMaxSelectWorkspace = int64_t{64} << 20;  // bytes; scores of so many positions fit
constexpr int64_t kSelectAlignment = 16;                    // bytes, of the workspace

// Of each token's keys the best: their positions, rising, then -1. A token that sees no more than topk positions gets
// all of them; any other one gets no position whose score is -inf, which it is where there is no key. With candidates
// what is scored and compared are places of a token's list, which become positions last.
struct SelectTokensProblem : IndexProblem {
  int32_t positions;  // that a token's list may have: what lies behind has no key
  int32_t topk;
  int32_t* chosen;  // [tokens, topk]
  int64_t chosen_token;
  float* chosen_scores;  // [tokens, topk] or null: -inf where nothing is chosen
  int64_t chosen_score_token;
  SlotTable slots;     // unless its block size is 0, `chosen` gets slots in place of positions
  uint8_t* workspace;  // what is in it does not matter
  int64_t workspace_bytes;
};

// Of each position: the cosines of kRope / 2 pairs, and their sines.
struct Rotations {
  const void* data;  // [positions, kRope]
  bool fp32;         // else bf16
  int64_t positions;
  int64_t stride;  // elements
};

struct RotateQueriesProblem {
  int64_t tokens;
  int32_t heads;                     // of attention
  HeadRows<const uint16_t> queries;  // bf16 [tokens, heads, kRope]: pairs are neighbours
  int32_t index_heads;
  HeadRows<const uint16_t> index_queries;  // bf16 [tokens, index_heads, kIndexDim]
  bool interleaved;                        // pairs of index queries are neighbours; else kRope / 2 apart
  const void* weights;                     // [tokens, index_heads]
  bool weights_fp32;                       // else bf16
  int64_t weight_token;
  float weight_scale;
  const int64_t* position;  // [tokens]; one outside of a table counts as the nearest in it
  Rotations rotations, index_rotations;
  HeadRows<uint16_t> out;       // bf16 [tokens, heads, kRope]
  HeadRows<uint8_t> index_out;  // e4m3 [tokens, index_heads, kIndexDim]
  float* weights_out;           // [tokens, index_heads]: times the power of two by which the head's query was divided
  int64_t weight_out_token;
};

// The row of a table for a token.
MLA_HOST_DEVICE int64_t rotation_of(const Rotations& rotations, int64_t position) {
  const int64_t last = rotations.positions - 1;
  return (position < 0 ? 0 : position > last ? last : position) * rotations.stride;
}

// Turns a pair. Each product is rounded, so that a CPU and a GPU give the same bits.
MLA_HOST_DEVICE void rotate(float& x, float& y, float cosine, float sine) {
#ifdef __CUDA_ARCH__
  const float turned = __fmul_rn(x, cosine) - __fmul_rn(y, sine);
  y = __fmul_rn(y, cosine) + __fmul_rn(x, sine);
#else
  const float turned = x * cosine - y * sine;
  y = y * cosine + x * sine;
#endif
  x = turned;
}

}  // namespace mla
