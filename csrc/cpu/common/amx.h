// Products of bf16 matrices in AMX tiles: 16 rows of 16 words, a word being two neighbours along the sum. Like simd.h
// this is included inside the anonymous namespace of whoever needs it.

// All tiles are whole ones for as long as it lives. Another library's products on the same thread set them up anew.
struct TileSession {
  TileSession() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
};

// 16 * (2 / kVectors) rows against kVectors vectors of 16 columns: result[row][vector], over `words` words, a multiple
// of 16. The columns lie as [vector][word][column], a vector being `vector_words` words long.
template <int kVectors>
inline void multiply_tiles(const uint32_t (*columns)[16], int vector_words, const uint32_t* rows, int row_words,
                           int words, Floats (&result)[32 / kVectors][kVectors]) {
  static_assert(kVectors == 1 || kVectors == 2);
  const int row_bytes = row_words * 4;
  _tile_zero(0);
  _tile_zero(1);
  for (int word = 0; word < words; word += 16) {
    _tile_loadd(2, rows + word, row_bytes);
    _tile_loadd(4, columns[word], 64);
    _tile_dpbf16ps(0, 2, 4);
    if constexpr (kVectors == 2) {
      _tile_loadd(5, columns[vector_words + word], 64);
      _tile_dpbf16ps(1, 2, 5);
    } else {
      _tile_loadd(3, rows + 16 * row_words + word, row_bytes);
      _tile_dpbf16ps(1, 3, 4);
    }
  }
  _tile_stored(0, &result[0][0], 64 * kVectors);
  _tile_stored(1, kVectors == 2 ? &result[0][1] : &result[16][0], 64 * kVectors);
}
