// The ops as torch calls them; library.cpp has their schemas. Each checks its arguments, turns them into a
// problem of plain pointers, and hands that to the device's implementation.
#pragma once

#include "bindings/check.h"

namespace mla::bindings {

void sparse_attention(Tensor q, OptionalTensor q_rope, Tensor cache, Tensor indices, double scale,
                      OptionalTensor topk_length, OptionalTensor sink, OptionalTensor extra_cache,
                      OptionalTensor extra_indices, OptionalTensor extra_topk_length, OptionalTensor plan,
                      OptionalTensor workspace, bool batch_invariant, Tensor out, Tensor lse,
                      OptionalTensor max_logits);
void plan(OptionalTensor topk_length, OptionalTensor extra_topk_length, int64_t tokens, int64_t topk,
          int64_t extra_topk, bool batch_invariant, Tensor out);
void merge_partials(Tensor outs, Tensor lses, Tensor out, Tensor lse);
void cache_write(Tensor kv_c, Tensor k_pe, Tensor cache, Tensor slots, bool power_of_two);
void cache_gather(Tensor cache, Tensor slots, Tensor out);
void convert_indices(Tensor positions, Tensor block_table, Tensor request_ids, int64_t block_size, bool compact,
                     Tensor slots, Tensor counts);
void index_scores(Tensor queries, Tensor weights, Tensor cache, Tensor block_table, Tensor requests, Tensor lengths,
                  Tensor scores);
void select_top(Tensor scores, Tensor lengths, Tensor chosen);

}  // namespace mla::bindings
