// Sparse attention for up to 16 heads on Hopper. Tokens are the 64 rows of wgmma and heads its columns, so that 8 or 16
// heads fill the instruction:
//
//   scores  S^T [64 tokens x heads] = K [64 x 576] Q^T, the four groups of a scale apart
//   values  O^T [512 dims x heads] += V^T [512 x 64] P^T, P in four copies, each times one of a token's scales
//
// K and V^T are the same tile, read along and across its rows. Warps 8 to 15 bring the tiles (gather.cuh). Two warpgroups
// consume them, taking turns; each keeps a softmax of its own over its tiles, so they never wait for one another before
// the end of a token, where their results are merged in the place of the last tile.
//
//   gather   | load 3 | store 2 | load 4 | store 3 | ...
//   group 0  | scores 0, softmax 0, values 0 | scores 2, ...
//   group 1           | scores 1, softmax 1, values 1 | ...
//
// A tile costs a warpgroup one barrier: weights are computed with the running maximum as it is, stored, and the barrier
// tells whether any warp has seen a score that is larger by a factor of more than 2^8. Only then are maxima exchanged,
// sums rescaled and weights computed once more. The result is exact either way; 2^8 is what f16 weights have to spare.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/few_heads/config.h"
#include "cuda/attention/sm90/gather.cuh"
#include "cuda/attention/sm90/queries.cuh"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/common/wgmma.cuh"
#include "mla/number.h"

namespace mla::cuda::sm90::few_heads {

constexpr float kLog2E = 1.44269504088896f;
constexpr float kLn2 = 0.693147180559945f;
constexpr float kLowest = -1e30f;  // a maximum of nothing, from which another one can be subtracted
constexpr float kSlack = 8.0f;

// Named barriers of the consumer warpgroups: 1 and 2.
constexpr int kGroupThreads = 128;
__device__ __forceinline__ int group_barrier(int group) { return 1 + group; }

template <Code kCode, int kHeads>
struct Consumer {
  static constexpr bool kScaled = kCode == Code::e4m3;
  static constexpr Number kNumber = kScaled ? Number::f16 : Number::bf16;  // of the latent dims and the weights
  static constexpr int kSums = kHeads / 2;     // a lane's numbers of 64 rows
  static constexpr int kColumns = kHeads / 4;  // a lane's heads
  using Memory = Shared<kCode, kHeads>;

  const AttentionProblem& p;
  Memory& s;
  const int head_begin;
  const int group, warp, lane;  // warp of the warpgroup

  float out[kLatentBlocks][kSums];  // O^T: dims 64 * block + 16 * warp + lane / 4 (+ 8)
  float reference[kColumns];        // weights are 2^(score - reference)
  float total[kColumns];            // of the lane's rows
  float highest[kColumns];
  float q_scale[kColumns];
  float score[kSums];

  static __device__ constexpr int column(int i) { return i / 4 * 2 + i % 2; }
  static __device__ constexpr int half(int i) { return i / 2 % 2; }  // row lane / 4, or that plus 8
  __device__ int head(int column) const { return column / 2 * 8 + lane % 4 * 2 + column % 2; }
  __device__ int row() const { return warp * 16 + lane / 4; }

  __device__ void start_token() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      reference[c] = highest[c] = kLowest;
      total[c] = 0.0f;
      q_scale[c] = s.q_scale[head(c)];
    }
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kSums; ++i) out[b][i] = 0.0f;
  }

  __device__ void compute_scores() {
    constexpr int kBatches = kScaled ? kGroups + 1 : 1;
    constexpr int kBlocksPerBatch = kScaled ? kGroupBlocks : kBlocks;
    float sum[kBatches][kSums];
    const uint64_t tile = describe_atoms(shared_address(s.tiles[group])), q = describe_atoms(shared_address(s.q));
    begin_products();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t a = tile + ((block * kBlockBytes + k * 32) >> 4);
        const uint64_t b = q + ((block * kHeads * kRowBytes + k * 32) >> 4);
        constexpr Number kRopeNumber = Number::bf16;
        const bool add = block % kBlocksPerBatch > 0 || k > 0;
        if (block < kLatentBlocks)
          multiply<kNumber, Rows::along_sum, Rows::along_sum>(sum[block / kBlocksPerBatch], a, b, add);
        else
          multiply<kRopeNumber, Rows::along_sum, Rows::along_sum>(sum[kBatches - 1], a, b, add);
      }
    }
    end_products();
    const TokenInfo &upper = s.info[group][row()], &lower = s.info[group][row() + 8];
    const float bias[2] = {upper.bias, lower.bias};
    wait_for_products();
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) sums_change(sum[batch]);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float value = sum[kBatches - 1][i];
      if constexpr (kScaled) {
        const TokenInfo& info = half(i) ? lower : upper;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) value += sum[g][i] * info.scale[g];
      }
      score[i] = value * q_scale[column(i)] + bias[half(i)];
    }
  }

  // Stores weights for the reference as it is. `copy` is of two, since a slower warp may still read the one before.
  __device__ void store_weights(uint8_t (&copy)[Memory::kWeightCopies][kHeads * kRowBytes], float (&weight)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) weight[i] = exp2_approximate(score[i] - reference[column(i)]);
    const TokenInfo &upper = s.info[group][row()], &lower = s.info[group][row() + 8];
    // a lane names the row (head) of one of the 8 x 8 blocks: eight tokens, that is one piece, of eight heads
    const int own_head = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    const uint32_t to = shared_address(copy[0]) + own_head * kRowBytes + (piece ^ lane % 8) * kPieceBytes;
#pragma unroll
    for (int g = 0; g < Memory::kWeightCopies; ++g) {
      uint32_t pairs[kSums / 2];
#pragma unroll
      for (int i = 0; i < kSums; i += 2) {
        if constexpr (kScaled) {
          const float scale = half(i) ? lower.scale[g] : upper.scale[g];
          pairs[i / 2] = pack_f16(weight[i] * scale, weight[i + 1] * scale);
        } else {
          pairs[i / 2] = pack_bf16(weight[i], weight[i + 1]);
        }
      }
      store_tiles_transposed(to + g * kHeads * kRowBytes, pairs);
    }
  }

  __device__ void softmax(uint8_t (&copy)[Memory::kWeightCopies][kHeads * kRowBytes]) {
    float lift[2] = {};
    if constexpr (kScaled) lift[0] = s.info[group][row()].lift, lift[1] = s.info[group][row() + 8].lift;
    float weight[kSums];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      highest[column(i)] = fmaxf(highest[column(i)], score[i]);
      grows |= score[i] + lift[half(i)] > reference[column(i)] + kSlack;
    }
    store_weights(copy, weight);
    publish_to_wgmma();
    if (sync_named_or<kGroupThreads>(group_barrier(group), grows)) {
      raise_reference(lift);
      store_weights(copy, weight);
      publish_to_wgmma();
      sync_named<kGroupThreads>(group_barrier(group));
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[column(i)] += weight[i];
  }

  __device__ void raise_reference(const float (&lift)[2]) {
    float top[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = c / 2 * 4 + c % 2;
      top[c] = fmaxf(score[i] + lift[0], score[i + 2] + lift[1]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        top[c] = fmaxf(top[c], __shfl_xor_sync(~0u, top[c], distance));
      if (lane < 4) s.largest[group][warp][head(c)] = top[c];
    }
    sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float raised = reference[c];
#pragma unroll
      for (int w = 0; w < 4; ++w) raised = fmaxf(raised, s.largest[group][w][head(c)]);
      const float rescale = exp2_approximate(reference[c] - raised);
      reference[c] = raised;
      total[c] *= rescale;
#pragma unroll
      for (int b = 0; b < kLatentBlocks; ++b) {
        out[b][c / 2 * 4 + c % 2] *= rescale;
        out[b][c / 2 * 4 + c % 2 + 2] *= rescale;
      }
    }
  }

  __device__ void add_values(uint8_t (&copy)[Memory::kWeightCopies][kHeads * kRowBytes]) {
    const uint64_t tile = describe_atoms(shared_address(s.tiles[group])), weights = describe_atoms(shared_address(copy));
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b) sums_change(out[b]);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int block = 0; block < kLatentBlocks; ++block) {
        const int g = kScaled ? block / kGroupBlocks : 0;
        multiply<kNumber, Rows::across_sum, Rows::along_sum>(
            out[block], tile + ((block * kBlockBytes + k * 16 * kRowBytes) >> 4),
            weights + ((g * kHeads * kRowBytes + k * 32) >> 4), true);
      }
    }
    end_products();
    wait_for_products();
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b) sums_change(out[b]);
  }

  // What the warpgroup found, but for its output, to where the other one sees it.
  __device__ void leave_sums(int parity) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        total[c] += __shfl_xor_sync(~0u, total[c], distance);
        highest[c] = fmaxf(highest[c], __shfl_xor_sync(~0u, highest[c], distance));
      }
      if (lane >= 4) continue;
      s.total[parity][group][warp][head(c)] = total[c];
      s.highest[parity][group][warp][head(c)] = highest[c];
      if (warp == 0) s.reference[parity][group][head(c)] = reference[c];
    }
  }

  __device__ float (*exchange(int stage))[kExchangeStride] {
    return reinterpret_cast<float(*)[kExchangeStride]>(s.tiles[stage]);
  }
  __device__ int dim(int block, int i) const {
    return block * kBlockDims + warp * 16 + lane / 4 + 8 * (half(i) ^ (block & 1));
  }

  // The warpgroup that had a token's last tile leaves its output in that tile's place...
  __device__ void deposit(int parity) {
    leave_sums(parity);
    // the other warps may still read the tile
    sync_named<kGroupThreads>(group_barrier(group));
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kSums; ++i) exchange(group)[head(column(i))][dim(b, i)] = out[b][i];
    arrive_as_warp(s.deposited);
  }

  // ... and the other one merges it with its own, and writes the token's results.
  __device__ void collect(const TokenWork& work, int64_t place, int parity, uint32_t deposit_parity) {
    const int other = 1 - group;
    leave_sums(parity);
    wait(s.deposited, deposit_parity);
    sync_named<kGroupThreads>(group_barrier(group));
    const bool whole = work.whole();
    const Partials partials(p.workspace, p.workers, p.heads);
    float mine[kColumns], theirs[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float raised = fmaxf(reference[c], s.reference[parity][other][head(c)]);
      mine[c] = exp2_approximate(reference[c] - raised);
      theirs[c] = exp2_approximate(s.reference[parity][other][head(c)] - raised);
    }
    if (threadIdx.x % kGroupThreads < kHeads) {
      const int own = threadIdx.x % kGroupThreads;
      const float a = s.reference[parity][group][own], b = s.reference[parity][other][own], raised = fmaxf(a, b);
      float sums[2] = {}, highest = kLowest;
      for (int w = 0; w < 4; ++w) {
        sums[0] += s.total[parity][group][w][own], sums[1] += s.total[parity][other][w][own];
        highest = fmaxf(highest, fmaxf(s.highest[parity][group][w][own], s.highest[parity][other][w][own]));
      }
      const float sum = add_in_any_order(sums[0] * exp2_approximate(a - raised), sums[1] * exp2_approximate(b - raised));
      s.factor[own] = finish_head(p, work.token, head_begin + own, whole, place, sum, raised, highest);
    }
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float& meeting = exchange(other)[head(column(i))][dim(b, i)];
        meeting = add_in_any_order(out[b][i] * mine[column(i)], meeting * theirs[column(i)]);
      }
    sync_named<kGroupThreads>(group_barrier(group));
    for (int own = warp; own < kHeads && head_begin + own < p.heads; own += 4)
      write_row(p, work.token, head_begin + own, whole, place, exchange(other)[own], s.factor[own], lane);
    arrive_as_warp(s.empty[other]);
  }

  __device__ void run(const Worker& worker) {
    int ordinal = 0, visits = 0, tokens = 0;  // tiles of both groups, own tiles, tokens with tiles
    for (int token = worker.token_begin; token < worker.token_end; ++token) {
      const TokenWork work = worker.work(token);
      const int tiles = work.tile_end - work.tile_begin;
      if (tiles == 0) {
        if (group == 0) write_empty(work, worker.place(work));
        continue;
      }
      const int own_tiles = (tiles + (ordinal % 2 == group)) / 2;
      const bool has_last = (ordinal + tiles - 1) % 2 == group;
      const int parity = tokens % 2;
      wait(s.q_full, parity);
      start_token();
      if (own_tiles == 0) arrive_as_warp(s.q_empty);
      for (int i = 0; i < own_tiles; ++i, ++visits) {
        wait(s.full[group], visits % 2);
        publish_to_wgmma();
        compute_scores();
        if (i == own_tiles - 1) arrive_as_warp(s.q_empty);
        auto& copy = s.weights[group][visits % 2];
        softmax(copy);
        add_values(copy);
        if (i < own_tiles - 1 || !has_last) arrive_as_warp(s.empty[group]);
      }
      if (has_last)
        deposit(parity);
      else
        collect(work, worker.place(work), parity, parity);
      ordinal += tiles;
      ++tokens;
    }
  }

  __device__ void write_empty(const TokenWork& work, int64_t place) {
    for (int own = warp; own < kHeads && head_begin + own < p.heads; own += 4) {
      if (lane == 0) finish_head(p, work.token, head_begin + own, work.whole(), place, 0.0f, kLowest, kLowest);
      write_row(p, work.token, head_begin + own, work.whole(), place, nullptr, 0.0f, lane);
    }
  }
};

// The producers: tiles, and before a token's first tile its queries.
template <Code kCode, int kHeads>
__device__ void gather(const AttentionProblem& p, Shared<kCode, kHeads>& s, const Worker& worker, int head_begin) {
  const int warp = warp_of_block() - kConsumerWarps, lane = threadIdx.x % 32;
  TileCursor cursor(worker);
  // the tile that is stored, the one whose rows are loaded, and the one whose slots are
  TileRequest next(cursor, warp, lane), after(cursor, warp, lane), later(cursor, warp, lane);
  HalfTile<kCode> first, second;
  const uint8_t* row = next.row(p);
  first.load(row, 0, lane);
  second.load(row, kHalfRows, lane);
  int tokens = 0;
  for (int ordinal = 0; next.exists; ++ordinal) {
    if (next.starts_token) load_queries<kCode, kHeads>(p, s.q, s.q_scale, next.token, head_begin, warp, lane, [&] {
      wait(s.q_empty, (tokens + 1) % 2);
    });
    const int stage = ordinal % kStages;
    row = after.row(p);
    wait(s.empty[stage], (ordinal / kStages + 1) % 2);
    first.store(s.tiles[stage], s.info[stage], warp, 0, lane);
    first.load(row, 0, lane);
    second.store(s.tiles[stage], s.info[stage], warp, kHalfRows, lane);
    if (next.starts_token) arrive_as_warp(s.q_full), ++tokens;
    arrive_as_warp(s.full[stage]);
    second.load(row, kHalfRows, lane);
    next = after, after = later, later = TileRequest(cursor, warp, lane);
  }
}

// Block x: heads of a worker, y: the worker.
template <Code kCode, int kHeads>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kCode, kHeads>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) init_barrier(s.full[i], kGatherWarps), init_barrier(s.empty[i], 4);
    init_barrier(s.q_full, kGatherWarps), init_barrier(s.q_empty, kConsumerWarps);
    init_barrier(s.deposited, 4);
  }
  __syncthreads();
  const int head_begin = blockIdx.x * kHeads;
  if (threadIdx.x < 32 * kConsumerWarps) {
    take_registers<kConsumerRegisters<kCode>>();
    const int warp = warp_of_block();
    Consumer<kCode, kHeads> consumer{p, s, head_begin, warp / 4, warp % 4, static_cast<int>(threadIdx.x) % 32};
    consumer.run(Worker(p, blockIdx.y, kTileTokens));
  } else {
    give_registers<kGatherRegisters<kCode>>();
    gather<kCode, kHeads>(p, s, Worker(p, blockIdx.y, kTileTokens), head_begin);
  }
}

}  // namespace mla::cuda::sm90::few_heads
