// ldmatrix, stmatrix and mma.m16n8k16 of bf16 or f16 (sm_80 and later).
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/util.hpp>

namespace mla::cuda {

using cute::cast_smem_ptr_to_uint;

// The compiler moves no memory access across this. It may move them across CUTLASS's asm, which does not clobber
// memory.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// ldmatrix and stmatrix are ours, because CuTe's take references and kernels compute 32-bit shared addresses.

// Loads four 8x8 tiles of 16-bit numbers. Eight lanes each give the row addresses of a tile. A lane gets two
// neighbouring numbers of row lane / 4 of each tile.
__device__ __forceinline__ void load_tiles(uint32_t (&tiles)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row_address)
               : "memory");
}

// The same, each tile transposed.
__device__ __forceinline__ void load_tiles_transposed(uint32_t (&tiles)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row_address)
               : "memory");
}

// acc[16 x 8] += a[16 x 16] b[16 x 8], a row-major, b column-major.
template <typename Atom>
__device__ __forceinline__ void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Atom::fma(acc[0], acc[1], acc[2], acc[3], a[0], a[1], a[2], a[3], b0, b1, acc[0], acc[1], acc[2], acc[3]);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Stores four or two 8x8 tiles, each transposed: a lane has two neighbouring numbers of column lane / 4 of each.
__device__ __forceinline__ void store_tiles_transposed(uint32_t row_address, const uint32_t (&tiles)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
               : "memory");
}

__device__ __forceinline__ void store_tiles_transposed(uint32_t row_address, const uint32_t (&tiles)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(tiles[0]),
               "r"(tiles[1])
               : "memory");
}

// Stores four tiles as they are.
__device__ __forceinline__ void store_tiles(uint32_t row_address, const uint32_t (&tiles)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(tiles[0]),
               "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
               : "memory");
}
#endif

// Transposes an 8x8 tile that a warp has in registers.
__device__ __forceinline__ uint32_t transpose_tile(uint32_t tile) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(tile));
  return transposed;
}

// max(x, 0); NaN stays NaN.
__device__ __forceinline__ float relu(float x) {
  float positive;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return positive;
}

// The maxima of two pairs of bf16. NaN is ignored.
__device__ __forceinline__ uint32_t max_bf16(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// 2^x to 22 bits. Subnormal results are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace mla::cuda
