// What the indexer's ops solve: how well the keys of its context fit a token, and which fit best.
#pragma once

#include <cstdint>

#include "mla/platform.h"

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

}  // namespace mla
