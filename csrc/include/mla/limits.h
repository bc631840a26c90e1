// The largest problems that the ops accept. docs/contract.md promises these numbers.
#pragma once

#include <cstdint>

namespace mla {

constexpr int kMaxHeads = 256;                  // query heads of attention
constexpr int kMaxQueries = 64;                 // of a request in dense attention
constexpr int kMaxIndexHeads = 128;             // query heads of an indexer
constexpr int kMaxCombineDim = 1024;            // values of a head that combine_partials takes
constexpr int kMaxGpuCtas = 65535;              // entries of a plan on a GPU: the second dimension of a grid
constexpr int64_t kMaxSize = INT32_MAX;         // tokens, slots of a token, positions, blocks of a request
constexpr int64_t kMaxMaskPositions = 1 << 30;  // queries and positions of a mask of blocks

}  // namespace mla
