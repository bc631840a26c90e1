// Lists of the positions that each query sees, from a mask that is made of blocks. Strides count elements.
#pragma once

#include <cstdint>

#include "mla/problem.h"

namespace mla {

// What the table of blocks says of one, unless it says where the block's bits are.
constexpr int32_t kBlockUnseen = -1, kBlockFull = -2;

// A mask has a table of blocks for each batch element and head, or for all of them. A token is a query of a batch
// element and, if heads have masks of their own, of a head: (batch * heads + head) * queries + query.
struct MaskListsProblem {
  int64_t first, tokens;  // tokens first, first + 1, ...
  int64_t batches;        // of the table; 1: all batch elements share it
  int64_t heads;          // of the table
  int32_t queries, positions;
  int32_t q_block, kv_block;
  int32_t q_blocks, kv_blocks;
  const int32_t* blocks;  // [batches, heads, q_blocks, kv_blocks], dense
  int32_t bit_blocks, bit_rows, bit_words;
  const uint32_t* bits;  // [bit_blocks, bit_rows, bit_words], dense: of a block's queries, 32 positions a word
  bool list_full;        // or leave full blocks out

  SlotTable pages;  // of the batch elements. Without blocks a position's row lies at batch * positions + position

  int32_t* slots;  // [tokens, topk]: by rising position; -1 for one whose page is not in the table
  int64_t slot_stride;
  int32_t topk;
  int32_t* lengths;  // [tokens]: positions that the token sees, which may be more than topk
};

// One token's view of the mask, a word of up to 32 positions after another.
struct MaskRow {
  const int32_t* blocks;
  int64_t batch;
  int32_t bit_row;

  MLA_HOST_DEVICE MaskRow(const MaskListsProblem& p, int64_t token) {
    const int64_t row = token / p.queries;
    const auto query = static_cast<int32_t>(token - row * p.queries);
    batch = row / p.heads;
    const int64_t table = p.batches == 1 ? row - batch * p.heads : row;
    const int32_t q_block = query / p.q_block;
    blocks = p.blocks + (table * p.q_blocks + q_block) * p.kv_blocks;
    bit_row = query - q_block * p.q_block;
  }

  // The positions that are seen from `position` on, which is where the block's word `word` begins.
  MLA_HOST_DEVICE uint32_t seen(const MaskListsProblem& p, int32_t block, int32_t word, int32_t position) const {
    const int32_t entry = blocks[block];
    uint32_t found = 0;
    if (entry == kBlockFull)
      found = p.list_full ? ~0u : 0;
    else if (entry >= 0 && entry < p.bit_blocks && bit_row < p.bit_rows && word < p.bit_words)
      found = p.bits[(int64_t{entry} * p.bit_rows + bit_row) * p.bit_words + word];
    const int32_t of_block = p.kv_block - 32 * word, left = p.positions - position;
    const int32_t most = of_block < left ? of_block : left;
    return most >= 32 ? found : most <= 0 ? 0 : found & ((1u << most) - 1);
  }

  MLA_HOST_DEVICE int32_t slot(const MaskListsProblem& p, int32_t position) const {
    if (!p.pages.blocks) return static_cast<int32_t>(batch * p.positions + position);
    return slot_of_position(p.pages, batch, position);
  }
};

}  // namespace mla
