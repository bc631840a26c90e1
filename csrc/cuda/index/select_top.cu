// The best of each token's scores, by rising position: a block a token.
//
// Scores become integers of the same order. Histograms of their upper 11 bits, of the next 11 among those that share
// the upper ones with the last to be chosen, and of the rest find that last one exactly. Then one walk over the
// positions, with a scan over the block, gives each chosen one its rank. Threads keep a row in registers that is not
// longer than the variant is made for; of a longer one they have a part at a time, again and again.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/common/scan.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/ops.h"
#include "mla/number.h"

namespace mla::cuda {
namespace {

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kPiece = 4;  // neighbouring scores that a thread reads at once

struct Problem : SelectTopProblem {
  bool aligned;  // the rows of scores, to pieces
};

constexpr uint32_t kMinusInfinity = 0xff800000u;

// A score's bits as an integer of the same order: NaN above all, both zeros the same. 0 is what can't be chosen: -inf.
__device__ __forceinline__ uint32_t ordered(uint32_t bits) {
  if (bits == kMinusInfinity) return 0;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return ~0u;
  return bits >> 31 ? 0x80000000u - magnitude : 0x80000000u + magnitude;
}

template <int kThreads, int kRounds>
struct Selector {
  static_assert(kThreads <= kBins / 2 && kThreads * kPiece < 1 << 16, "counts of a round have 16 bits");

  struct Shared {
    alignas(16) uint32_t bins[kBins];
    uint32_t warps[2][kMaxWarps];  // double-buffered: scans alternate
    uint32_t bin, above, count;    // where the last to be chosen is, how many are above that bin, how many in it
  };

  const Problem& p;
  Shared& s;
  const float* scores;
  int32_t* chosen;
  int32_t length;
  int buffer = 0;
  int32_t part = -1;  // that keys are of, which follow one another in rounds of pieces, a piece a thread
  uint32_t keys[kRounds][kPiece];

  static constexpr uint32_t kRound = kThreads * kPiece, kPart = kRounds * kRound;  // scores

  // Positions have no sign, as the piece just past the last one may begin at 2^31.
  __device__ uint32_t first_of_piece() const { return part * kPart + threadIdx.x * kPiece; }

  // What is beyond the length can't be chosen.
  __device__ void load() {
    const uint32_t end = length, begin = first_of_piece();
    const float* from = scores + begin;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t first = begin + round * kRound;
      if (p.aligned && first + kPiece <= end) {
        const uint4 vector = *reinterpret_cast<const uint4*>(from + round * kRound);
        keys[round][0] = vector.x, keys[round][1] = vector.y, keys[round][2] = vector.z, keys[round][3] = vector.w;
      } else {
#pragma unroll
        for (int i = 0; i < kPiece; ++i)
          keys[round][i] = first + i < end ? float_bits(from[round * kRound + i]) : kMinusInfinity;
      }
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round)
#pragma unroll
      for (int i = 0; i < kPiece; ++i) keys[round][i] = ordered(keys[round][i]);
  }

  // Calls visit(first position, keys) for a thread's pieces in their order until it returns false, which it does for
  // all threads.
  template <typename Visit>
  __device__ __forceinline__ void each_piece(Visit visit) {
    const uint32_t end = length;
#pragma unroll 1
    for (int32_t next = 0; next * kPart < end; ++next) {
      if (next != part) {
        part = next;
        load();
      }
#pragma unroll
      for (int round = 0; round < kRounds; ++round)
        if (next * kPart + round * kRound >= end || !visit(first_of_piece() + round * kRound, keys[round])) return;
    }
  }

  // Counts the keys whose bits from `shift + bits` on are `prefix` by their next `bits` bits, and finds the bin with
  // the `wanted`th largest of them: s.bin, s.above and s.count. Returns how many there are.
  __device__ uint32_t find_bin(uint32_t prefix, int shift, int bits, uint32_t wanted) {
    constexpr int kOwn = kBins / kThreads;
    const uint32_t lowest_bits = (1u << bits) - 1;  // fewer in the last round, which leaves upper bins empty
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s.bins[i * kThreads + threadIdx.x] = 0;
    __syncthreads();
    each_piece([&](uint32_t, const uint32_t (&piece)[kPiece]) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        if (piece[i] != 0 && uint64_t{piece[i]} >> (shift + bits) == prefix)
          atomicAdd(&s.bins[piece[i] >> shift & lowest_bits], 1u);
      return true;
    });
    __syncthreads();
    // a thread has kOwn neighbouring bins, the first thread the uppermost
    const int lowest = kBins - (static_cast<int>(threadIdx.x) + 1) * kOwn;
    struct alignas(kOwn < 4 ? 4 * kOwn : 16) Counts {
      uint32_t of_bin[kOwn];
    };
    const Counts counts = *reinterpret_cast<const Counts*>(s.bins + lowest);
    uint32_t own = 0, all;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own += counts.of_bin[i];
    uint32_t above = exclusive_sum(own, all, s.warps[buffer]);
    buffer ^= 1;
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      const uint32_t count = counts.of_bin[i];
      if (above < wanted && wanted <= above + count) s.bin = lowest + i, s.above = above, s.count = count;
      above += count;
    }
    __syncthreads();
    return all;
  }

  __device__ void fill(int32_t from) {
    for (int64_t i = int64_t{from} + threadIdx.x; i < p.topk; i += kThreads) chosen[i] = -1;
  }

  __device__ void run() {
    if (length <= p.topk) {
      for (int64_t i = threadIdx.x; i < length; i += kThreads) chosen[i] = static_cast<int32_t>(i);
      fill(length);
      return;
    }
    if (p.topk <= 0) return;
    // Chosen are all keys whose bits from `shift` on are above `last`, and the first `ties` of those where they are it.
    uint32_t last = 0, ties = p.topk;
    int32_t kept = p.topk;
    int shift = 32;
#pragma unroll 1
    while (shift > 0) {
      const int bits = min(kBinBits, shift);
      shift -= bits;
      const uint32_t all = find_bin(last, shift, bits, ties);
      if (all < ties) {  // in the first round: too few that can be chosen, so they all are
        kept = static_cast<int32_t>(all);
        last = ties = shift = 0;
        break;
      }
      last = last << bits | s.bin;
      ties -= s.above;
      if (s.count == ties) break;  // all of the bin
      __syncthreads();             // before s.bin is written again
    }

    uint32_t above = 0, equal = 0;  // in the rounds so far
    each_piece([&](uint32_t first, const uint32_t (&piece)[kPiece]) {
      uint32_t own = 0;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) own += (piece[i] >> shift > last) + ((piece[i] >> shift == last) << 16);
      uint32_t all;
      const uint32_t before = exclusive_sum(own, all, s.warps[buffer]);
      buffer ^= 1;
      uint32_t own_above = above + (before & 0xffff), own_equal = equal + (before >> 16);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const bool is_above = piece[i] >> shift > last, is_equal = piece[i] >> shift == last;
        if (is_above || (is_equal && own_equal < ties))
          chosen[own_above + min(own_equal, ties)] = static_cast<int32_t>(first + i);
        own_above += is_above, own_equal += is_equal;
      }
      above += all & 0xffff, equal += all >> 16;
      return above + min(equal, ties) < static_cast<uint32_t>(kept);
    });
    fill(kept);
  }
};

// Threads, and how many pieces of four scores each keeps.
template <int kThreads, int kRounds>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) select_kernel(const __grid_constant__ Problem p) {
  using Own = Selector<kThreads, kRounds>;
  __shared__ typename Own::Shared s;
  const int64_t token = blockIdx.x;
  const int32_t length = min(max(p.length[token], 0), p.positions);
  Own{p, s, p.scores + token * p.score_token, p.chosen + token * p.chosen_token, length}.run();
}

struct Variant {
  void (*kernel)(Problem);
  int threads;
  int64_t kept;  // scores
};

template <int kThreads, int kRounds>
constexpr Variant variant() {
  return {select_kernel<kThreads, kRounds>, kThreads, Selector<kThreads, kRounds>::kPart};
}

constexpr Variant kVariants[] = {variant<256, 4>(), variant<512, 8>(), variant<1024, 8>()};

}  // namespace

void select_top(const SelectTopProblem& p, void* stream) {
  if (p.tokens == 0) return;
  const Variant* chosen = kVariants;
  while (chosen < std::end(kVariants) - 1 && chosen->kept < p.positions) ++chosen;
  launch(chosen->kernel, p.tokens, chosen->threads, 0, stream, "select_top",
         Problem{p, aligned16(p.scores, p.score_token * 4)});
}

MLA_KERNELS {
  const auto entry = [](const char* name, const Variant& v) {
    return KernelEntry{name, reinterpret_cast<const void*>(v.kernel), v.threads, 0};
  };
  static const KernelEntry entries[] = {
      entry("select_top, up to 4096 positions", kVariants[0]),
      entry("select_top, up to 16384 positions", kVariants[1]),
      entry("select_top, more positions", kVariants[2]),
  };
  return {entries, sizeof(entries) / sizeof(entries[0])};
}

}  // namespace mla::cuda
