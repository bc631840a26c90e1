// wgmma, the matrix instruction of sm_90a: a warpgroup multiplies 64 x 16 by 16 x n. The second factor lies in shared
// memory, the first one there too or in registers. In shared memory they are rows of 128 bytes (64 numbers), eight of
// which make a swizzled atom of 1024 bytes: the 16-byte piece c of row r stands at place c ^ (r % 8).
#pragma once

#include <cstdint>

namespace mla::cuda {

enum class Number { f16, bf16 };
// How a factor's numbers lie: rows of the dimension that is summed over, or rows of the other one.
enum class Rows : int { along_sum, across_sum };

// Hides from the compiler how a number came about, so that it neither shares that with other numbers nor does it
// earlier.
__device__ __forceinline__ void hide(uint32_t& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ void hide(uint64_t& number) { asm volatile("" : "+l"(number)); }

// A lane, for what is done once a token, or once a tile by warps without a register to spare: what follows from a lane
// that the compiler knows is worked out before the loop, and spilled.
__device__ __forceinline__ int hidden(int lane) {
  auto number = static_cast<uint32_t>(lane);
  hide(number);
  return static_cast<int>(number);
}

// What wgmma is told of a factor: where it begins, that its atoms are 1024 bytes apart, and, of one whose rows go
// across the sum and that is longer than an atom there, how far the next 64 numbers of a row are.
__device__ __forceinline__ uint64_t describe_atoms(uint32_t shared_address, uint32_t next_atom_of_row = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kAtomDistance = uint64_t{1024 >> 4} << 32;
  uint64_t description =
      kSwizzle128 | kAtomDistance | uint64_t{next_atom_of_row >> 4} << 16 | (shared_address & 0x3ffff) >> 4;
  hide(description);  // or the compiler works out those of all products before a loop, and spills them
  return description;
}

// Around a batch of products: begin_products before the first, end_products after the last, wait_for_products before
// the sums are read or the factors overwritten.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last kUnderWay batches.
template <int kUnderWay = 0>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kUnderWay) : "memory");
}

// The same where the number is known only when loops have been unrolled; three at most.
__device__ __forceinline__ void wait_for_all_products_but(int under_way) {
  if (under_way >= 3)
    wait_for_products<3>();
  else if (under_way == 2)
    wait_for_products<2>();
  else if (under_way == 1)
    wait_for_products<1>();
  else
    wait_for_products<0>();
}

// Tells the compiler that sums change here, so that it reads none of them before a wait.
template <int kCount>
__device__ __forceinline__ void sums_change(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// The sums of a product, as asm operands and by their numbers; the operands after them are written out where they are
// used, as inline assembly has no names for them.
#define MLA_4_SUMS(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MLA_8_SUMS(i) MLA_4_SUMS(i), MLA_4_SUMS(i + 4)
#define MLA_16_SUMS(i) MLA_8_SUMS(i), MLA_8_SUMS(i + 8)
#define MLA_32_SUMS(i) MLA_16_SUMS(i), MLA_16_SUMS(i + 16)
#define MLA_64_SUMS(i) MLA_32_SUMS(i), MLA_32_SUMS(i + 32)
#define MLA_SUM_NUMBERS_4 "%0, %1, %2, %3"
#define MLA_SUM_NUMBERS_8 MLA_SUM_NUMBERS_4 ", %4, %5, %6, %7"
#define MLA_SUM_NUMBERS_16 MLA_SUM_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MLA_SUM_NUMBERS_32 \
  MLA_SUM_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MLA_SUM_NUMBERS_64                                                           \
  MLA_SUM_NUMBERS_32                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// sum += a b, or sum = a b unless `add`. In the 64 x n sums a lane has, for each 8 columns, rows lane / 4 and that plus
// 8 of its warp's 16, and columns 2 * (lane % 4) and the next: sum[4 * j + 2 * (row >= 8) + column % 2].
#define MLA_MULTIPLY(n, type, sums, sum_numbers, a_number, b_number, add_number, rows_of_a, rows_of_b)          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_number ", 0;\nwgmma.mma_async.sync.aligned.m64n" n   \
               "k16.f32." type "." type " {" sum_numbers "}, " a_number ", " b_number ", add, 1, 1, " rows_of_a \
               ", " rows_of_b ";\n}"                                                                            \
               : sums                                                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA), "n"(kB))

template <Number kNumber, Rows kRowsOfA, Rows kRowsOfB, int kSums>
__device__ __forceinline__ void multiply(float (&sum)[kSums], uint64_t a, uint64_t b, bool add) {
  constexpr int kA = static_cast<int>(kRowsOfA), kB = static_cast<int>(kRowsOfB);
  static_assert(kSums == 32 || (kNumber == Number::bf16 && (kSums == 4 || kSums == 8 || kSums == 16)),
                "n is 64, or of bf16 8, 16 or 32");
  if constexpr (kSums == 4 && kNumber == Number::bf16)
    MLA_MULTIPLY("8", "bf16", MLA_4_SUMS(0), MLA_SUM_NUMBERS_4, "%4", "%5", "%6", "%7", "%8");
  if constexpr (kSums == 8 && kNumber == Number::bf16)
    MLA_MULTIPLY("16", "bf16", MLA_8_SUMS(0), MLA_SUM_NUMBERS_8, "%8", "%9", "%10", "%11", "%12");
  if constexpr (kSums == 16 && kNumber == Number::bf16)
    MLA_MULTIPLY("32", "bf16", MLA_16_SUMS(0), MLA_SUM_NUMBERS_16, "%16", "%17", "%18", "%19", "%20");
  if constexpr (kSums == 32 && kNumber == Number::f16)
    MLA_MULTIPLY("64", "f16", MLA_32_SUMS(0), MLA_SUM_NUMBERS_32, "%32", "%33", "%34", "%35", "%36");
  if constexpr (kSums == 32 && kNumber == Number::bf16)
    MLA_MULTIPLY("64", "bf16", MLA_32_SUMS(0), MLA_SUM_NUMBERS_32, "%32", "%33", "%34", "%35", "%36");
}
#undef MLA_MULTIPLY

// The same for 64 x 32 and 32 x n numbers of e4m3. Their rows are always along the sum; 32 of them are 32 bytes, like
// 16 of 16 bits.
#define MLA_MULTIPLY(n, sums, sum_numbers, a_number, b_number, add_number)                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_number ", 0;\nwgmma.mma_async.sync.aligned.m64n" n \
               "k32.f32.e4m3.e4m3 {" sum_numbers "}, " a_number ", " b_number ", add, 1, 1;\n}"               \
               : sums                                                                                         \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))

template <int kSums>
__device__ __forceinline__ void multiply_codes(float (&sum)[kSums], uint64_t a, uint64_t b, bool add) {
  static_assert(kSums == 8 || kSums == 16 || kSums == 32, "n is 16, 32 or 64");
  if constexpr (kSums == 8) MLA_MULTIPLY("16", MLA_8_SUMS(0), MLA_SUM_NUMBERS_8, "%8", "%9", "%10");
  if constexpr (kSums == 16) MLA_MULTIPLY("32", MLA_16_SUMS(0), MLA_SUM_NUMBERS_16, "%16", "%17", "%18");
  if constexpr (kSums == 32) MLA_MULTIPLY("64", MLA_32_SUMS(0), MLA_SUM_NUMBERS_32, "%32", "%33", "%34");
}
#undef MLA_MULTIPLY

// sum += a b in f16, with a lane's four pairs of numbers of its rows: of row lane / 4 and the one 8 below it, columns
// 2 * (lane % 4) and the next, then both once more for columns 8 further on. They stay as they are until the product is
// waited for. Rows of b are along the sum.
#define MLA_MULTIPLY(n, sums, sum_numbers, a_numbers, b_number)                                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" sum_numbers "}, " a_numbers ", " b_number \
               ", 1, 1, 1, 0;"                                                                                     \
               : sums                                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <int kSums>
__device__ __forceinline__ void multiply_rows(float (&sum)[kSums], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kSums == 4 || kSums == 8 || kSums == 16, "n is 8, 16 or 32");
  if constexpr (kSums == 4) MLA_MULTIPLY("8", MLA_4_SUMS(0), MLA_SUM_NUMBERS_4, "{%4, %5, %6, %7}", "%8");
  if constexpr (kSums == 8) MLA_MULTIPLY("16", MLA_8_SUMS(0), MLA_SUM_NUMBERS_8, "{%8, %9, %10, %11}", "%12");
  if constexpr (kSums == 16) MLA_MULTIPLY("32", MLA_16_SUMS(0), MLA_SUM_NUMBERS_16, "{%16, %17, %18, %19}", "%20");
}
#undef MLA_MULTIPLY

// sum += a b for n = 128: 64 sums a lane, from sum[kFirst] on. `a` is a description as above, of rows along the sum, or
// the lane's four pairs of numbers of its rows: of row lane / 4 and the one 8 below it, columns 2 * (lane % 4) and the
// next, then both once more for columns 8 further on.
#define MLA_MULTIPLY(type, a_numbers, b_number, rows, ...)                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" MLA_SUM_NUMBERS_64 "}, " a_numbers \
               ", " b_number ", 1, 1, 1, " rows ";"                                                                 \
               : MLA_64_SUMS(kFirst)                                                                                \
               : __VA_ARGS__, "l"(b), "n"(static_cast<int>(kRowsOfB)))

template <Number kNumber, Rows kRowsOfB, int kFirst, int kSums>
__device__ __forceinline__ void multiply_wide(float (&sum)[kSums], uint64_t a, uint64_t b) {
  if constexpr (kNumber == Number::f16)
    MLA_MULTIPLY("f16", "%64", "%65", "0, %66", "l"(a));
  else
    MLA_MULTIPLY("bf16", "%64", "%65", "0, %66", "l"(a));
}

template <Number kNumber, Rows kRowsOfB, int kFirst, int kSums>
__device__ __forceinline__ void multiply_wide(float (&sum)[kSums], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kNumber == Number::f16)
    MLA_MULTIPLY("f16", "{%64, %65, %66, %67}", "%68", "%69", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
  else
    MLA_MULTIPLY("bf16", "{%64, %65, %66, %67}", "%68", "%69", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
#undef MLA_MULTIPLY
#undef MLA_4_SUMS
#undef MLA_8_SUMS
#undef MLA_16_SUMS
#undef MLA_32_SUMS
#undef MLA_64_SUMS
#undef MLA_SUM_NUMBERS_4
#undef MLA_SUM_NUMBERS_8
#undef MLA_SUM_NUMBERS_16
#undef MLA_SUM_NUMBERS_32
#undef MLA_SUM_NUMBERS_64

}  // namespace mla::cuda
