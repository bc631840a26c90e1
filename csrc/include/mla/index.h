// What the indexer's ops solve: how well the keys of its context fit a token, and which fit best.
#pragma once

#include <cstdint>

#include "mla/format.h"
#include "mla/number.h"

namespace mla {

constexpr int kIndexDim = 128;

// The paged keys of an indexer: in a block first the values of all its tokens, then, if quantised, an fp32 scale a
// token.
struct KeyCacheView {
  const uint8_t* data;
  int64_t blocks;
  int64_t block_size;
  int64_t block_stride;  // bytes
  bool quantised;        // e4m3 and scales; else bf16
};

struct IndexScoresProblem {
  int64_t tokens;
  int32_t heads;
  const void* queries;              // [tokens, heads, 128]
  bool queries_fp32;                // else bf16
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
  float* scores;           // [tokens, positions]
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

// Of each position: the cosines of kRope / 2 pairs, and their sines.
struct Rotations {
  const void* data;  // [positions, kRope]
  bool fp32;         // else bf16
  int64_t positions;
  int64_t stride;  // elements
};

struct RotateQueriesProblem {
  int64_t tokens;
  int32_t heads;            // of attention
  const uint16_t* queries;  // bf16 [tokens, heads, kRope]: pairs are neighbours
  int64_t query_token, query_head;
  int32_t index_heads;
  const uint16_t* index_queries;  // bf16 [tokens, index_heads, kIndexDim]
  int64_t index_token, index_head;
  bool interleaved;     // pairs of index queries are neighbours; else kRope / 2 apart
  const void* weights;  // [tokens, index_heads]
  bool weights_fp32;    // else bf16
  int64_t weight_token;
  float weight_scale;
  const int64_t* position;  // [tokens]; one outside of a table counts as the nearest in it
  Rotations rotations, index_rotations;
  uint16_t* out;  // bf16 [tokens, heads, kRope]
  int64_t out_token, out_head;
  uint8_t* index_out;  // e4m3 [tokens, index_heads, kIndexDim]
  int64_t index_out_token, index_out_head;
  float* weights_out;  // [tokens, index_heads]: times the power of two by which the head's query was divided
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
