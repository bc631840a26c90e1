// wgmma, the matrix instruction of sm_90a: a warpgroup multiplies 64 x 16 by 16 x n, with the second factor and, in
// these wrappers, the first one too in shared memory. Both lie in rows of 128 bytes (64 numbers), eight of which make a
// swizzled atom of 1024 bytes: the 16-byte piece c of row r stands at place c ^ (r % 8).
#pragma once

#include <cstdint>

namespace mla::cuda {

enum class Number { f16, bf16 };
// How a factor's numbers lie: rows of the dimension that is summed over, or rows of the other one.
enum class Rows : int { along_sum, across_sum };

// What wgmma is told of a factor: where it begins, that its atoms are 1024 bytes apart, and, of one whose rows go
// across the sum and that is longer than an atom there, how far the next 64 numbers of a row are.
__device__ __forceinline__ uint64_t describe_atoms(uint32_t shared_address, uint32_t next_atom_of_row = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kAtomDistance = uint64_t{1024 >> 4} << 32;
  uint64_t description =
      kSwizzle128 | kAtomDistance | uint64_t{next_atom_of_row >> 4} << 16 | (shared_address & 0x3ffff) >> 4;
  asm volatile(""
               : "+l"(description));  // or the compiler works out those of all products before a loop, and spills them
  return description;
}

// Around a batch of products: begin_products before the first, end_products after the last, wait_for_products before
// the sums are read or the factors overwritten.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Tells the compiler that sums change here, so that it reads none of them before a wait.
template <int kCount>
__device__ __forceinline__ void sums_change(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// sum += a b, or sum = a b unless `add`. In the 64 x n sums a lane has, for each 8 columns, rows lane / 4 and that plus
// 8 of its warp's 16, and columns 2 * (lane % 4) and the next: sum[4 * j + 2 * (row >= 8) + column % 2].
template <Number kNumber, Rows kRowsOfA, Rows kRowsOfB, int kSums>
__device__ __forceinline__ void multiply(float (&sum)[kSums], uint64_t a, uint64_t b, bool add) {
  constexpr int kA = static_cast<int>(kRowsOfA), kB = static_cast<int>(kRowsOfB);
  static_assert(kSums == 4 || kSums == 8 || kSums == 32, "n is 8, 16 or 64");
  if constexpr (kSums == 4 && kNumber == Number::f16) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
        "{%0, %1, %2, %3}, "
        "%4, %5, add, 1, 1, %7, %8;\n}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA), "n"(kB));
  } else if constexpr (kSums == 4 && kNumber == Number::bf16) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3}, "
        "%4, %5, add, 1, 1, %7, %8;\n}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA), "n"(kB));
  } else if constexpr (kSums == 8 && kNumber == Number::f16) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, add, 1, 1, %11, %12;\n}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA), "n"(kB));
  } else if constexpr (kSums == 8 && kNumber == Number::bf16) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, add, 1, 1, %11, %12;\n}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA), "n"(kB));
  } else if constexpr (kSums == 32 && kNumber == Number::f16) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, %35, %36;\n}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]),
          "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]),
          "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]),
          "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]),
          "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA), "n"(kB));
  } else if constexpr (kSums == 32 && kNumber == Number::bf16) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, add, 1, 1, %35, %36;\n}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]),
          "+f"(sum[7]), "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]),
          "+f"(sum[14]), "+f"(sum[15]), "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]),
          "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]), "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]),
          "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kA), "n"(kB));
  }
}

// n = 128: 64 sums a lane, from sum[kFirst] on. `a` is a description as above, or the lane's four pairs of numbers of
// its rows: of row lane / 4 and the one 8 below it, columns 2 * (lane % 4) and the next, then both once more for
// columns 8 further on.
#define MLA_SUMS_OF_8(i)                                                                                  \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), \
      "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define MLA_64_SUMS                                                                                         \
  MLA_SUMS_OF_8(kFirst), MLA_SUMS_OF_8(kFirst + 8), MLA_SUMS_OF_8(kFirst + 16), MLA_SUMS_OF_8(kFirst + 24), \
      MLA_SUMS_OF_8(kFirst + 32), MLA_SUMS_OF_8(kFirst + 40), MLA_SUMS_OF_8(kFirst + 48), MLA_SUMS_OF_8(kFirst + 56)
#define MLA_64_OPERANDS                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <Number kNumber, Rows kRowsOfB, int kFirst, int kSums>
__device__ __forceinline__ void multiply_wide(float (&sum)[kSums], uint64_t a, uint64_t b) {
  constexpr int kB = static_cast<int>(kRowsOfB);
  if constexpr (kNumber == Number::f16)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" MLA_64_OPERANDS "}, %64, %65, 1, 1, 1, 0, %66;"
                 : MLA_64_SUMS
                 : "l"(a), "l"(b), "n"(kB));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MLA_64_OPERANDS
                 "}, %64, %65, 1, 1, 1, 0, %66;"
                 : MLA_64_SUMS
                 : "l"(a), "l"(b), "n"(kB));
}

template <Number kNumber, Rows kRowsOfB, int kFirst, int kSums>
__device__ __forceinline__ void multiply_wide(float (&sum)[kSums], const uint32_t (&a)[4], uint64_t b) {
  constexpr int kB = static_cast<int>(kRowsOfB);
  if constexpr (kNumber == Number::f16)
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" MLA_64_OPERANDS
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
                 : MLA_64_SUMS
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kB));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MLA_64_OPERANDS
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
                 : MLA_64_SUMS
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kB));
}
#undef MLA_SUMS_OF_8
#undef MLA_64_SUMS
#undef MLA_64_OPERANDS

}  // namespace mla::cuda
