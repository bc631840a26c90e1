// Keys as the second factor of m16n8k16, keys as its columns.
//
// A strip is 16 keys, a warp's. A lane copies its own part of two of them, 16 bytes at a time, by cp.async into a
// ring in shared memory, and nobody but this lane reads that: no barrier is needed until the copies of the lane itself
// have arrived. The part is just what the lane holds of the factor, in the order of dims that `sum_position` says.
//
// e4m3 becomes f16 without its scale, which is exact. MXFP4 becomes f16 divided by its largest scale and times 2^13:
// exact where a scale is no less than 2^-36 of that one. bf16 becomes f16 divided by a power of two for each key, so
// that its largest number is 2^14 to 2^15: what is above 2^-31 of that is exact. Score times scale, or times the power
// of two, is what the key itself would have got, as relu(s x) is s relu(x) where s is positive; where a scale is
// negative, the key's values change their signs.
#pragma once

#include <cstdint>

#include "cuda/common/cp_async.cuh"
#include "cuda/common/e4m3.cuh"
#include "cuda/common/pairs.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/index/queries.cuh"

namespace mla::cuda::index {

constexpr float kNoKey = -1.0f;  // instead of a key's factor, which is not negative

// A lane's part of a strip, as the product wants it: two numbers of each step for either side.
struct Strip {
  uint32_t b[kSides][2 * kSteps];
  float factor[kSides];  // of key lane / 4 of each side
};

template <KeyNumber kKeys>
struct KeyRing {
  static constexpr bool kScales = kKeys != KeyNumber::bf16;
  static constexpr int kPieces = key_value_bytes(kKeys) / 64;  // of 16 bytes, a lane's part of a key
  static constexpr int kStages = kScales ? 4 : 2;

  struct Stage {
    uint4 pieces[kSides][kPieces][32];      // by lane
    float scale[kScales ? kSides : 1][32];  // MXFP4: four bytes
  };
  Stage stages[kStages];
};

// A warp's way through strips of one request that are kUnit keys apart. A strip is named by its first key's position,
// without a sign, as it may lie behind the last strip. kAligned: blocks are, to 16 bytes.
template <KeyNumber kKeys, bool kAligned>
struct KeyReader {
  using Ring = KeyRing<kKeys>;
  static constexpr int kTokenBytes = key_value_bytes(kKeys);

  const Problem& p;
  Ring& ring;
  int64_t token;
  const int32_t* table;   // null if the request is none
  uint32_t end;           // of the keys that anybody wants
  int32_t ahead[kSides];  // the blocks of the next copies
  uint32_t valid = 0;     // kSides bits a stage: the valid mask of its keys

  __device__ KeyReader(const Problem& p, Ring& ring, int64_t token, uint32_t end)
      : p(p), ring(ring), token(token), table(nullptr), end(end) {
    const int32_t request = p.request[token];
    if (request >= 0 && request < p.requests) table = p.block_table + request * p.table_stride;
  }

  __device__ static uint32_t key_of(uint32_t strip, int side) { return strip + 8 * side + threadIdx.x % 32 / 4; }

  // The position of a key before the end; ~0u if there is none.
  __device__ uint32_t position_of(uint32_t key) const {
    return p.candidate_blocks.size > 0 ? static_cast<uint32_t>(p.position_at(token, static_cast<int32_t>(key))) : key;
  }

  // The block of a lane's key; negative, as in the table, if there is none.
  __device__ int32_t block_of(uint32_t strip, int side) const {
    const uint32_t key = key_of(strip, side);
    if (!table || key >= end) return -1;
    const uint32_t position = position_of(key), entry = p.table_index(position);
    return position != ~0u && entry < static_cast<uint32_t>(p.max_blocks) ? table[entry] : -1;
  }

  __device__ void find(uint32_t strip, int32_t (&blocks)[kSides]) const {
#pragma unroll
    for (int side = 0; side < kSides; ++side) blocks[side] = block_of(strip, side);
  }

  __device__ void ask(uint32_t strip, int stage, const int32_t (&blocks)[kSides]) {
    const int lane = threadIdx.x % 32;
    typename Ring::Stage& to = ring.stages[stage];
    valid &= ~(((1u << kSides) - 1) << kSides * stage);
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
      const bool there = blocks[side] >= 0 && blocks[side] < p.cache.blocks;
      valid |= uint32_t{there} << (kSides * stage + side);
      const uint32_t key = there ? position_of(key_of(strip, side)) : 0;
      const uint32_t within = key - p.table_index(key) * p.table_index.divisor;
      const uint8_t* block = p.cache.data + (there ? blocks[side] * p.cache.block_stride : 0);
      const uint8_t* from = block + (there ? int64_t{within} * kTokenBytes + lane % 4 * 16 : 0);
      const uint8_t* scale = block + (there ? p.cache.block_size * kTokenBytes + int64_t{within} * 4 : 0);
      if constexpr (kAligned) {
#pragma unroll
        for (int i = 0; i < Ring::kPieces; ++i)
          copy_16_or_zero(cast_smem_ptr_to_uint(&to.pieces[side][i][lane]), from + 64 * i, there);
        if constexpr (Ring::kScales) copy_4_or_zero(cast_smem_ptr_to_uint(&to.scale[side][lane]), scale, there);
      } else {
#pragma unroll 1
        for (int i = 0; i < Ring::kPieces; ++i) {
          alignas(16) uint4 piece = {};
          if (there) load_bytes<16, false>(from + 64 * i, &piece);
          to.pieces[side][i][lane] = piece;
        }
        if constexpr (Ring::kScales) {
          uint32_t bits = 0;
          for (int i = 0; i < 4 && there; ++i) bits |= uint32_t{scale[i]} << 8 * i;
          to.scale[side][lane] = bits_float(bits);
        }
      }
    }
  }

  // Asks for the strips that begin at `strip` and every kUnit keys, before `stop`, as far as the ring goes.
  __device__ void begin(uint32_t strip, uint32_t stop) {
    int32_t blocks[Ring::kStages][kSides];
#pragma unroll
    for (int stage = 0; stage < Ring::kStages; ++stage) find(strip + stage * kUnit, blocks[stage]);
#pragma unroll
    for (int stage = 0; stage < Ring::kStages; ++stage) {
      if (strip + stage * kUnit < stop) ask(strip + stage * kUnit, stage, blocks[stage]);
      cute::cp_async_fence();
    }
    find(strip + Ring::kStages * kUnit, ahead);
  }

  // Waits for a strip, and starts the copies of the one that will take its stage of the ring.
  __device__ void next(uint32_t strip, uint32_t stop, int stage, Strip& keys) {
    wait_for_copies<Ring::kStages - 1>();
    take(stage, keys);
    const uint32_t later = strip + Ring::kStages * kUnit;
    if (later < stop) ask(later, stage, ahead);
    cute::cp_async_fence();
    find(later + kUnit, ahead);
  }

  __device__ void take(int stage, Strip& keys) const {
    const int lane = threadIdx.x % 32;
    const typename Ring::Stage& from = ring.stages[stage];
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
      float factor;
      if constexpr (kKeys == KeyNumber::e4m3) {
        const float scale = from.scale[side][lane];
        const uint32_t signs = scale < 0.0f ? 0x80808080u : 0;
#pragma unroll
        for (int i = 0; i < Ring::kPieces; ++i) {
          const uint4 fp8 = from.pieces[side][i][lane];
          const uint32_t words[4] = {fp8.x, fp8.y, fp8.z, fp8.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t pairs[2];
            e4m3_to_f16(words[j] ^ signs, pairs);
            keys.b[side][8 * i + 2 * j] = pairs[0], keys.b[side][8 * i + 2 * j + 1] = pairs[1];
          }
        }
        factor = fabsf(scale);
      } else if constexpr (kKeys == KeyNumber::mxfp4) {
        const uint4 piece = from.pieces[side][0][lane];
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        const uint32_t own = float_bits(from.scale[side][lane]) >> lane % 4 * 8 & 255;
        const bool zeros = !((piece.x | piece.y | piece.z | piece.w) & 0x77777777u) && own != kMxNan;
        uint32_t largest = zeros ? 0 : own;
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const int power = 127 + 13 + static_cast<int>(min(own, largest)) - static_cast<int>(largest);
        const float multiplier = bits_float(max(power, 1) << 23);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            keys.b[side][4 * i + j] = pack_f16(e2m1_to_float(words[i] >> 8 * j) * multiplier,
                                               e2m1_to_float(words[i] >> (8 * j + 4)) * multiplier);
        factor = ue8m0_to_float(largest) * 0x1p-13f;
      } else {
#pragma unroll
        for (int i = 0; i < Ring::kPieces; ++i) {
          const uint4 numbers = from.pieces[side][i][lane];
          keys.b[side][4 * i] = numbers.x, keys.b[side][4 * i + 1] = numbers.y;
          keys.b[side][4 * i + 2] = numbers.z, keys.b[side][4 * i + 3] = numbers.w;
        }
        factor = balance(keys.b[side]);
      }
      keys.factor[side] = valid >> (kSides * stage + side) & 1 ? factor : kNoKey;
    }
  }

  // bf16 to f16, and what the key was divided by. Four lanes have a key.
  __device__ static float balance(uint32_t (&pairs)[2 * kSteps]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) largest = max_bf16(largest, pairs[i] & 0x7fff7fffu);
    uint32_t bits = max(largest & 0xffffu, largest >> 16);
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
    const Balance balance(bits >> 7);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i)
      pairs[i] = pack_f16(bits_float(pairs[i] << 16) * balance.multiplier,
                          bits_float(pairs[i] & 0xffff0000u) * balance.multiplier);
    return balance.factor;
  }
};

}  // namespace mla::cuda::index
