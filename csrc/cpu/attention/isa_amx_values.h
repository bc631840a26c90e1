// The value loop in AMX tiles: out[head][dim] += P[head][token] x values[token][dim]. Included after amx.h.
//
// A step is a pair of tokens. Values are paired up as for the other instruction sets, which makes them columns of a
// product; P comes as columns, too, and has to become rows.

struct TileValues {
  static constexpr int kRows = 32;  // tokens, 16 steps: the words of a tile's row
  static constexpr int kBlocks = 4, kHeadBlocks = 2, kMaxGroups = 4;

  alignas(64) uint32_t probs[kMaxGroups][kHeadBlocks][kBlocks][16][16];  // [head][step]
  alignas(64) uint32_t values[kBlocks][2][16][16];                       // [step][dim]

  // From [group][step][32 heads]. Steps beyond `steps` count as zeros.
  void load_probs(const uint32_t* from, int group_steps, int groups, int heads, int steps) {
    for (int g = 0; g < groups; ++g)
      for (int h = 0; h * 16 < heads; ++h)
        for (int block = 0; block * 16 < steps; ++block) {
          const int count = steps - block * 16 < 16 ? steps - block * 16 : 16;
          __m512i rows[16];
          for (int step = 0; step < 16; ++step)
            rows[step] = step < count
                             ? _mm512_loadu_si512(from + ((g * group_steps + block * 16 + step) * kHeadBlocks + h) * 16)
                             : _mm512_setzero_si512();
          transpose(rows, probs[g][h][block]);
        }
  }

  // Adds to 32 dims of some heads, whose rows of `out` lie kValueDim numbers apart, what `steps` pairs of rows hold.
  void add_values(float* out, const float* rescale, bool first_tile, const uint32_t* rows, int row_stride, int group,
                  int heads, int steps) {
    const int blocks = (steps + 15) / 16;
    for (int step = 0; step < blocks * 16; ++step) {
      __m512bh pair[2];
      Bf16Isa::load_values(rows + step * 2 * row_stride, row_stride, pair);
      for (int half = 0; half < 2; ++half) _mm512_store_si512(values[step / 16][half][step % 16], (__m512i)pair[half]);
    }
    for (int h = 0; h * 16 < heads; ++h, out += 16 * kValueDim, rescale += 16) {
      if (first_tile) {
        _tile_zero(0);
        _tile_zero(1);
      } else {
        for (int head = 0; head < 16; ++head)
          for (int half = 0; half < 2; ++half) {
            float* const sum = out + head * kValueDim + half * 16;
            store(load(sum) * rescale[head], sum);
          }
        _tile_loadd(0, out, kValueDim * 4);
        _tile_loadd(1, out + 16, kValueDim * 4);
      }
      for (int block = 0; block < blocks; ++block) {
        _tile_loadd(2, probs[group][h][block], 64);
        _tile_loadd(4, values[block][0], 64);
        _tile_dpbf16ps(0, 2, 4);
        _tile_loadd(5, values[block][1], 64);
        _tile_dpbf16ps(1, 2, 5);
      }
      _tile_stored(0, out, kValueDim * 4);
      _tile_stored(1, out + 16, kValueDim * 4);
    }
  }

 private:
  // 16 rows of 16 words: pairs of rows are interleaved by words, then by two and four and eight of them.
  static void transpose(__m512i (&rows)[16], uint32_t (*to)[16]) {
    __m512i a[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
      a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rows[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
      rows[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
      rows[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
      rows[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    // now each 128-bit lane of rows[4 * i + j] has column 4 * lane + j of the rows 4 * i to 4 * i + 3
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i first = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);  // lanes 0 and 2 of both
      const __m512i second = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
      const __m512i third = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);  // lanes 1 and 3
      const __m512i fourth = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
      _mm512_store_si512(to[j], _mm512_shuffle_i32x4(first, second, 0x88));
      _mm512_store_si512(to[8 + j], _mm512_shuffle_i32x4(first, second, 0xdd));
      _mm512_store_si512(to[4 + j], _mm512_shuffle_i32x4(third, fourth, 0x88));
      _mm512_store_si512(to[12 + j], _mm512_shuffle_i32x4(third, fourth, 0xdd));
    }
  }
};
