// The problems that the ops solve, as plain pointers and strides. Strides count elements unless they say bytes.
#pragma once

#include <cstdint>

#include "mla/format.h"
#include "mla/plan.h"
#include "mla/platform.h"
#include "mla/workspace.h"

namespace mla {

struct CacheView {
  uint8_t* data;
  int64_t blocks;
  int64_t block_size;
  int64_t block_stride;  // bytes
  int64_t row_stride;    // bytes; of rows whose scales lie at the page's end, without these
  CacheFormat format;    // by value: a GPU can't follow a pointer to it

  MLA_HOST_DEVICE int64_t slots() const { return blocks * block_size; }
  MLA_HOST_DEVICE bool holds(int64_t slot) const { return slot >= 0 && slot < slots(); }
  MLA_HOST_DEVICE uint8_t* row(int64_t slot) const {
    return data + slot / block_size * block_stride + slot % block_size * row_stride;
  }
  // A slot's scales: in its row, or with those of its page behind the page's rows.
  MLA_HOST_DEVICE uint8_t* scales(int64_t slot) const {
    if (format.scales_at != ScalesAt::end_of_page) return row(slot) + format.scale_offset();
    return data + slot / block_size * block_stride + block_size * row_stride + slot % block_size * format.scale_bytes();
  }
};

// A slot a token, as int32 or int64. CacheView::holds() says whether it is in a cache.
struct SlotArray {
  const void* data;
  bool wide;  // int64

  MLA_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The slots that each token attends to in one cache: a list, or the pages of a sequence.
struct SlotList {
  CacheView cache;
  const int32_t* entries;  // [tokens, topk] slots or, if paged, [tokens, topk / block_size] blocks
  int64_t stride;          // from one token's entries to the next token's
  int32_t topk;            // slots of a token
  bool paged;
  const int32_t* length;            // [tokens] or null: only the first n slots count
  uint32_t row_units, block_units;  // the cache's strides in units of AttentionProblem::row_unit

  // Only entries of the first `length` slots are read: beyond them a page table may hold anything.
  MLA_HOST_DEVICE int64_t slot(int64_t token, int32_t i) const {
    return paged ? slot_in_pages(token, i) : entries[token * stride + i];
  }
  MLA_HOST_DEVICE int64_t slot_in_pages(int64_t token, int32_t i) const {
    const uint32_t size = static_cast<uint32_t>(cache.block_size), page = static_cast<uint32_t>(i) / size;
    const int32_t block = entries[token * stride + page];
    if (block < 0 || block >= cache.blocks) return -1;
    return block * cache.block_size + (static_cast<uint32_t>(i) - page * size);
  }
};

// Rows [tokens, heads, ...] of one query a token.
template <typename T>
struct HeadRows {
  T* data;
  int64_t token, head;  // from one to the next

  MLA_HOST_DEVICE T* at(int64_t t) const { return data + t * token; }
  MLA_HOST_DEVICE T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

// Where the rows of a token lie: the heads of its query, or of its queries. See AttentionProblem::offset().
struct RowStrides {
  int64_t token, query, head;
};

// Sparse attention has a query a token. In dense attention a token is a request: its queries share a list, and the
// heads of all of them are the kernels' heads. If it is causal, the last query sees the whole list, the one before it
// one slot less, and so on.
struct AttentionProblem {
  int32_t tokens;
  int32_t heads;              // of all queries of a token
  int32_t query_heads;        // of one query
  uint32_t query_reciprocal;  // 2^31 / query_heads, rounded up
  bool causal;
  Products products;       // fp8: of fp8 rows only
  TileType tile;           // of the first list's rows. Queries and outputs are f16 with TileType::f16_576, else bf16
  const uint16_t* q_nope;  // [tokens, heads, 512]
  RowStrides q_nope_strides;
  const uint16_t* q_rope;  // [tokens, heads, 64]; null with rows of 512
  RowStrides q_rope_strides;
  float scale;        // of scores, the caches' own (Scale::tensor) included
  float value_scale;  // of outputs: the caches' own, or 1
  const float* sink;  // [query_heads] or null
  SlotList
      lists[2];  // the main one and, where there is a second cache, the extra one; of one head_dim, f16 both or none
  int32_t list_count;
  uint32_t row_unit;  // bytes that divide the strides of all caches. Set where Hopper kernels are launched
  uint32_t odd_unit;  // 1 where that is an odd multiple of 16, else 0

  uint16_t* out;  // [tokens, heads, 512]
  RowStrides out_strides;
  float* lse;  // [tokens, heads], natural logarithm
  RowStrides lse_strides;
  float* max_logits;  // [tokens, heads] or null
  RowStrides max_strides;

  const PlanEntry* plan;  // null: the op makes one
  int32_t ctas;
  bool whole_tokens;  // in a plan that the op makes: never split a token
  float* workspace;   // on a GPU, see Workspace
  int32_t* arrivals;  // on a GPU: the counters in the workspace

  MLA_HOST_DEVICE int32_t head_dim() const { return tile == TileType::bf16_512 ? 512 : 576; }
  MLA_HOST_DEVICE int64_t offset(const RowStrides& strides, int64_t token, int32_t head) const {
    const int32_t query = query_of(head);
    return token * strides.token + query * strides.query + (head - query * query_heads) * strides.head;
  }
  // head / query_heads, as a division takes twenty instructions wherever a row's address is computed. It is exact while
  // heads * query_heads < 2^31.
  MLA_HOST_DEVICE int32_t query_of(int32_t head) const {
    return static_cast<int32_t>(uint64_t{2 * static_cast<uint32_t>(head)} * query_reciprocal >> 32);
  }
  // How many of the token's last slots a head does not see, and how many the first query's heads don't.
  MLA_HOST_DEVICE int32_t unseen(int32_t head) const { return most_unseen() - (causal ? query_of(head) : 0); }
  MLA_HOST_DEVICE int32_t most_unseen() const { return causal ? query_of(heads - 1) : 0; }
};

// Results over disjoint sets of slots, to be weighted by their lse: out = sum_i e^(lse_i - lse) out_i.
template <typename Value>
struct CombineProblem {
  int32_t partials;
  int64_t tokens;
  int32_t heads;
  int32_t dim;
  const Value* outs;  // [partials, tokens, heads, dim]
  int64_t outs_partial, outs_token, outs_head;
  const float* lses;  // [partials, tokens, heads]
  int64_t lses_partial, lses_token, lses_head;
  HeadRows<Value> out;
  HeadRows<float> lse;
};

enum class Source : int32_t { bf16, f16, fp32 };

struct CacheWriteProblem {
  int64_t tokens;
  const void* latent;  // [tokens, latent] of `source` numbers
  int64_t latent_token;
  const void* rope;  // [tokens, rope]; null where the format has none
  int64_t rope_token;
  Source source;
  SlotArray slots;    // [tokens]
  bool power_of_two;  // of fp32 scales; ue8m0 ones are nothing else
  float scale;        // the cache's own (Scale::tensor)
  CacheView cache;
};

struct CacheGatherProblem {
  int64_t rows;
  SlotArray slots;  // [rows]
  CacheView cache;
  float scale;    // the cache's own (Scale::tensor)
  uint16_t* out;  // [rows, head_dim], f16 where the cache is, else bf16; zeros where the slot is not in the cache
  int64_t out_row;
};

// Copies the rows of requests' sequences from an fp8_ds_mla cache to a staged one: row for row what the kernel for many
// heads makes of them in shared memory, which takes longer than to read them once they are so.
struct StageProblem {
  int64_t requests;
  int32_t max_blocks;
  const int32_t* block_table;  // [requests, max_blocks]: blocks of the cache
  int64_t table_stride;
  const int32_t* staged_table;  // the same: blocks of the staged cache. Null: consecutive ones
  int64_t staged_stride;
  const int32_t* lengths;  // [requests]: rows
  CacheView cache;
  CacheView staged;  // of the same block size

  // Of a sequence's rows, those that the tables have blocks for.
  MLA_HOST_DEVICE int64_t rows(int64_t request) const {
    const int64_t most = max_blocks * cache.block_size, length = lengths[request];
    return length < 0 ? 0 : length < most ? length : most;
  }
  // Where a row is in both caches. False where it is in none.
  MLA_HOST_DEVICE bool find(int64_t request, int64_t row, int64_t& from, int64_t& to) const {
    const int64_t entry = row / cache.block_size, offset = row - entry * cache.block_size;
    const int64_t consecutive = request * max_blocks + entry;
    const int64_t block = block_table[request * table_stride + entry];
    const int64_t staged_block = staged_table ? staged_table[request * staged_stride + entry] : consecutive;
    from = block * cache.block_size + offset, to = staged_block * cache.block_size + offset;
    return cache.holds(from) && staged.holds(to);
  }
};

// Where the positions of requests lie in a paged cache.
struct SlotTable {
  const int32_t* blocks;  // [requests, max_blocks]: physical blocks
  int64_t stride;
  int64_t requests;
  int32_t max_blocks;
  int32_t block_size;
};

// The physical slot of a position in a request's sequence, or -1 if there is none.
MLA_HOST_DEVICE int32_t slot_of_position(const SlotTable& table, int64_t request, int32_t position) {
  if (position < 0 || request < 0 || request >= table.requests) return -1;
  const int32_t entry = position / table.block_size;
  if (entry >= table.max_blocks) return -1;
  const int64_t block = table.blocks[request * table.stride + entry];
  const int64_t slot = block * table.block_size + position % table.block_size;
  return block < 0 || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
}

struct ConvertProblem {
  int64_t tokens;
  int32_t topk;
  const int32_t* positions;  // [tokens, topk]: in the token's own sequence
  int64_t position_stride;
  SlotTable table;
  const int32_t* request;           // [tokens]: which row of the table a token uses
  int32_t ranks, rank, interleave;  // runs of `interleave` positions go to the ranks round robin; others' have no slot
  bool compact;                     // valid slots first, in their order, then -1
  int32_t* slots;                   // [tokens, topk]; may be the positions' own memory, unless compact
  int64_t slot_stride;
  int32_t* counts;  // [tokens] or null: how many are valid
};

// The same on one of several ranks, whose table has only the positions that it keeps.
MLA_HOST_DEVICE int32_t slot_of_position(const ConvertProblem& p, int64_t request, int32_t position) {
  const int32_t run = position / p.interleave;
  if (position < 0 || run % p.ranks != p.rank) return -1;
  return slot_of_position(p.table, request, run / p.ranks * p.interleave + position % p.interleave);
}

}  // namespace mla
