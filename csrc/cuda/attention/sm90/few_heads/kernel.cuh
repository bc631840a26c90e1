// Sparse attention for up to 16 heads on Hopper. Tokens are the 64 rows of wgmma and heads its columns, so that 8 or 16
// heads fill the instruction:
//
//   scores  S^T [64 tokens x heads] = K [64 x 576] Q^T, the four groups of a scale apart
//   values  O^T [512 dims x heads] += V^T [512 x 64] P^T, P in four copies, each times one of a token's scales
//
// K and V^T are the same tile, read along and across its rows. Other warps bring the tiles (produce_e4m3.cuh,
// produce_bf16.cuh). Two warpgroups consume them, taking turns; each keeps a softmax of its own over its tiles, so they
// never wait for one another before the end of a token, where their results are merged in the place of the last tile.
// What other workers found for the token joins them there (cut_tokens.cuh).
//
//   produce  | load 3 | store 2 | load 4 | store 3 | ...
//   group 0  | scores 0, softmax 0, values 0 | scores 2, ...
//   group 1           | scores 1, softmax 1, values 1 | ...
//
// A tile costs a warpgroup one barrier: weights are computed with the running maximum as it is, stored, and the barrier
// tells whether any warp has seen a score that is larger by a factor of more than 2^8. Only then are maxima exchanged,
// sums rescaled and weights computed once more. The result is exact either way; 2^8 is what f16 weights have to spare.
#pragma once

#include <cstdint>

#include "cuda/attention/sm90/few_heads/config.h"
#include "cuda/attention/sm90/queries.cuh"
#include "cuda/attention/sm90/results.cuh"
#include "cuda/common/order.cuh"
#include "cuda/common/wgmma.cuh"

namespace mla::cuda::sm90::few_heads {

// Named barriers of the consumer warpgroups: 1 and 2, and one for both.
constexpr int kGroupThreads = 128;
__device__ __forceinline__ int group_barrier(int group) { return 1 + group; }
constexpr int kBothGroups = 3;

// Of a token with these scales.
__device__ __forceinline__ float lift_of(const float (&x)[kGroups]) {
  const float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  return static_cast<float>(power_above(largest));
}

template <Code kCode, int kHeads>
struct Consumer {
  static constexpr bool kScaled = kCode == Code::e4m3;
  static constexpr Number kNumber = kScaled ? Number::f16 : Number::bf16;  // of the latent dims and the weights
  static constexpr int kSums = kHeads / 2;                                 // a lane's numbers of 64 rows
  static constexpr int kColumns = kHeads / 4;                              // a lane's heads
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
  float scale[2][kGroups];  // of the lane's two tokens
  // log2 of a power of two above every scale of a token: weights times scales, with it as part of the exponent that the
  // reference bounds, fit into f16
  float lift[2];

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

  __device__ void compute_scores(int tile) {
    constexpr int kBatches = kScaled ? kGroups + 1 : 1;
    constexpr int kBlocksPerBatch = kScaled ? kGroupBlocks : kBlocks;
    float sum[kBatches][kSums];
    const uint64_t k_rows = describe_atoms(shared_address(s.tiles[group])), q = describe_atoms(shared_address(s.q));
    begin_products();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t a = k_rows + ((block * kBlockBytes + k * 32) >> 4);
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
    float bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TileInfo& info = s.info[tile % kInfoTiles];
      const int token = row() + 8 * i;
      bias[i] = info.held[token] ? 0.0f : -INFINITY;
      lift[i] = 0.0f;
      if constexpr (kScaled) {
        *reinterpret_cast<float4*>(scale[i]) = *reinterpret_cast<const float4*>(info.scale[token]);
        lift[i] = lift_of(scale[i]);
      }
    }
    wait_for_products();
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) sums_change(sum[batch]);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float value = sum[kBatches - 1][i];
      if constexpr (kScaled) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) value += sum[g][i] * scale[half(i)][g];
      }
      score[i] = value * q_scale[column(i)] + bias[half(i)];
    }
  }

  // Stores weights for the reference as it is.
  __device__ void store_weights(float (&weight)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) weight[i] = exp2_approximate(score[i] - reference[column(i)]);
    // a lane names the row (head) of one of the 8 x 8 blocks: eight tokens, that is one piece, of eight heads
    const int own_head = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    const uint32_t to = shared_address(s.weights[group]) + own_head * kRowBytes + (piece ^ lane % 8) * kPieceBytes;
#pragma unroll
    for (int g = 0; g < Memory::kWeightCopies; ++g) {
      uint32_t pairs[kSums / 2];
#pragma unroll
      for (int i = 0; i < kSums; i += 2) {
        if constexpr (kScaled) {
          pairs[i / 2] = pack_f16(weight[i] * scale[half(i)][g], weight[i + 1] * scale[half(i)][g]);
        } else {
          pairs[i / 2] = pack_bf16(weight[i], weight[i + 1]);
        }
      }
      store_tiles_transposed(to + g * kHeads * kRowBytes, pairs);
    }
  }

  // A warpgroup's first tile of a token raises the reference from nothing, so it is not asked whether it would.
  __device__ void softmax(bool first) {
    float weight[kSums];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      highest[column(i)] = fmaxf(highest[column(i)], score[i]);
      grows |= score[i] + lift[half(i)] > reference[column(i)] + kSlack;
    }
    if (!first) {
      store_weights(weight);
      publish_to_wgmma();
    }
    if (first || sync_named_or<kGroupThreads>(group_barrier(group), grows)) {
      raise_reference();
      store_weights(weight);
      publish_to_wgmma();
      sync_named<kGroupThreads>(group_barrier(group));
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[column(i)] += weight[i];
  }

  __device__ void raise_reference() {
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

  __device__ void add_values() {
    const uint64_t tile = describe_atoms(shared_address(s.tiles[group])),
                   weights = describe_atoms(shared_address(s.weights[group]));
#pragma unroll
    for (int b = 0; b < kLatentBlocks; ++b) sums_change(out[b]);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int block = 0; block < kLatentBlocks; ++block) {
        const int g = kScaled ? block / kGroupBlocks : 0;
        multiply<kNumber, Rows::across_sum, Rows::along_sum>(out[block],
                                                             tile + ((block * kBlockBytes + k * 16 * kRowBytes) >> 4),
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

  __device__ float (*exchange(int stage)) [kExchangeStride] {
    return reinterpret_cast<float (*)[kExchangeStride]>(s.tiles[stage]);
  } __device__ int dim(int block, int i) const {
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

  // ... and the other one merges it with its own, if it had any, and writes the token's results if they are whole.
  __device__ void collect(const TokenWork& work, int own_tiles, int parity, uint32_t deposit_parity) {
    const int other = 1 - group;
    leave_sums(parity);
    wait(s.deposited, deposit_parity);
    sync_named<kGroupThreads>(group_barrier(group));
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
      const float sum =
          add_in_any_order(sums[0] * exp2_approximate(a - raised), sums[1] * exp2_approximate(b - raised));
      if (work.whole()) {
        s.factor[own] = finish_head(p, work.token, head_begin + own, true, 0, sum, raised, highest);
      } else {
        const HeadResult result = result_of_head(sum, raised, highest);
        s.part[own] = {result.lse, result.factor, result.largest, shared_address(exchange(other)[own])};
      }
    }
    if (own_tiles > 0) {
#pragma unroll
      for (int b = 0; b < kLatentBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          float& meeting = exchange(other)[head(column(i))][dim(b, i)];
          meeting = add_in_any_order(out[b][i] * mine[column(i)], meeting * theirs[column(i)]);
        }
    }
    if (!work.whole()) return;
    sync_named<kGroupThreads>(group_barrier(group));
    for (int own = warp; own < kHeads && head_begin + own < p.heads; own += 4)
      write_row(p, work.token, head_begin + own, true, 0, exchange(other)[own], s.factor[own], lane);
    arrive_as_warp(s.empty[other]);
  }

  // Both warpgroups bring the part of a cut token together with the token's other parts.
  __device__ void join(const TokenWork& work) {
    const Joints& joints = s.joints[4 * group + warp];
    const Team team = joints.team;
    sync_named<2 * kGroupThreads>(kBothGroups);
    if (team.count > 1) {
      if (group == 0 && warp == 0) team.arrive(s.team, lane);
      wait_for_blocks(s.team, 0);
    }
    join_parts<kHeads>(p, s.part, work.token, joints.parts[work.cut == TokenWork::kContinued], team, head_begin,
                       4 * group + warp, lane, [&] {
                         sync_named<2 * kGroupThreads>(kBothGroups);
                         if (team.count > 1 && group == 0 && warp == 0) team.arrive(s.team, lane);
                       });
    if (team.count > 1) wait_for_blocks(s.team, 1);  // nobody reads this block's memory any more
  }

  __device__ void run(const Worker& worker) {
    s.joints[4 * group + warp].note(worker, kTileTokens, lane);
    int ordinal = 0, visits = 0, tokens = 0;  // tiles of both groups, own tiles, tokens with tiles
    for (int token = worker.token_begin; token < worker.token_end; ++token) {
      const TokenWork work = worker.work(token);
      const int tiles = work.tile_end - work.tile_begin;
      if (tiles > 0) {
        const int own_tiles = (tiles + (ordinal % 2 == group)) / 2;
        wait(s.q_full, tokens % 2);
        start_token();
        if (own_tiles == 0) arrive_as_warp(s.q_empty);
        for (int i = 0; i < own_tiles; ++i, ++visits) {
          wait(s.full[group], visits % 2);
          publish_to_wgmma();
          compute_scores(ordinal + 2 * i + (ordinal % 2 != group));
          if (i == own_tiles - 1) arrive_as_warp(s.q_empty);
          wait(s.weights_free[group], visits % 2 ^ 1);
          softmax(i == 0);
          add_values();
          arrive_as_warp(s.weights_free[group]);
          if (i < own_tiles - 1 || (ordinal + tiles - 1) % 2 != group) arrive_as_warp(s.empty[group]);
        }
        ordinal += tiles;
        if (ordinal % 2 != group)
          deposit(tokens % 2);
        else
          collect(work, own_tiles, tokens % 2, tokens % 2);
        ++tokens;
      } else if (!work.whole()) {
        if (threadIdx.x < kHeads) s.part[threadIdx.x] = {-INFINITY, 0.0f, -INFINITY, shared_address(s.tiles)};
      } else if (group == 0) {
        write_empty(work);
      }
      if (work.whole()) continue;
      join(work);
      if (tiles > 0 && ordinal % 2 == group) arrive_as_warp(s.empty[1 - group]);
    }
  }

  __device__ void write_empty(const TokenWork& work) {
    for (int own = warp; own < kHeads && head_begin + own < p.heads; own += 4) {
      if (lane == 0) finish_head(p, work.token, head_begin + own, true, 0, 0.0f, kLowest, kLowest);
      write_row(p, work.token, head_begin + own, true, 0, nullptr, 0.0f, lane);
    }
  }
};

// What the warps between memory and the consumers do: tiles, and before a token's first tile its queries, whose loads
// begin before there is room for them.
template <Code kCode, int kHeads>
__device__ void produce(const AttentionProblem& p, Shared<kCode, kHeads>& s, int head_begin, int warp, int lane) {
  const Worker worker(p, blockIdx.y, kTileTokens);
  int tile = 0, tokens = 0;
  const auto queries = [&](int token) {
    load_queries<kCode, kHeads>(p, s.q, s.q_scale, token, head_begin, warp, lane,
                                [&] { wait(s.q_empty, tokens % 2 ^ 1); });
    arrive_as_warp(s.q_full);
    ++tokens;
  };
  if constexpr (kCode == Code::e4m3) {
    for (int token = worker.token_begin; token < worker.token_end; ++token) {
      const TokenWork work = worker.work(token);
      if (work.tile_end == work.tile_begin) continue;
      queries(token);
      for (const int end = tile + work.tile_end - work.tile_begin; tile < end; ++tile) {
        const int stage = tile % kStages;
#pragma unroll
        for (int slot = 0; slot < RawRing::kTileSlots; ++slot) {
          wait(s.ring.full[slot], tile % 2);
          RawRing::Rows rows;
          rows.load(s.ring, slot, warp, lane);
          arrive_as_warp(s.ring.empty[slot]);
          if (slot == 0) wait(s.empty[stage], tile / kStages % 2 ^ 1);
          rows.store(s.tiles[stage], slot, warp, lane);
        }
        arrive_as_warp(s.full[stage]);
      }
    }
  } else {
    TileCursor cursor(worker);
    const int at = warp * RowCopier::kRows + lane % RowCopier::kRows;
    TileRequest next(cursor, at);
    for (; next.token != TileRequest::kEnd; ++tile) {
      const uint32_t row = next.row(p);
      const uint8_t* cache = p.lists[next.list].cache.data;
      const int token = next.token;
      next = TileRequest(cursor, at);
      const int stage = tile % kStages;
      wait(s.empty[stage], tile / kStages % 2 ^ 1);
      RowCopier::copy(s.tiles[stage], s.info[tile % kInfoTiles].held, cache, row, warp, lane);
      arrive_when_copied(s.full[stage]);
      arrive_as_warp(s.full[stage]);
      if (token != TileRequest::kSameToken) queries(token);
    }
  }
}

// Block x: heads of a worker, y: the worker.
template <Code kCode, int kHeads>
__global__ void __launch_bounds__(Roles<kCode>::kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionProblem p) {
  using R = Roles<kCode>;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<kCode, kHeads>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) init_barrier(s.full[i], R::kTileArrivals), init_barrier(s.empty[i], 4);
    for (int i = 0; i < kConsumerGroups; ++i) init_barrier(s.weights_free[i], 4);
    init_barrier(s.q_full, R::kProducerWarps), init_barrier(s.q_empty, kConsumerWarps);
    init_barrier(s.deposited, 4), init_barrier(s.team, blocks_of_cluster());
    if constexpr (kCode == Code::e4m3) s.ring.init();
  }
  if (blocks_of_cluster() > 1)
    sync_cluster();
  else
    __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  const int head_begin = blockIdx.x * kHeads;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  if (warp < kConsumerWarps) {
    if constexpr (kCode == Code::e4m3) resize_registers<R::kConsumerRegisters, R::kRegisters>();
    Consumer<kCode, kHeads>{p, s, head_begin, warp / 4, warp % 4, lane}.run(Worker(p, blockIdx.y, kTileTokens));
  } else if (kCode == Code::bf16 || warp < kConsumerWarps + R::kProducerWarps) {
    if constexpr (kCode == Code::e4m3) resize_registers<R::kProducerRegisters, R::kRegisters>();
    produce<kCode, kHeads>(p, s, head_begin, warp - kConsumerWarps, lane);
  } else if constexpr (kCode == Code::e4m3) {
    resize_registers<R::kLoaderRegisters, R::kRegisters>();
    s.ring.load(Worker(p, blockIdx.y, kTileTokens), s.info, warp - kConsumerWarps - R::kProducerWarps, lane);
  }
}

}  // namespace mla::cuda::sm90::few_heads
