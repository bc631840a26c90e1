// wgmma, the matrix instruction of sm_90a, by CUTLASS's names: a warpgroup multiplies A [64 x 16] by B [16 x n]. B lies
// in shared memory, A there too (SS) or in registers (RS).
//
// Shared memory: rows of 128 bytes with the 128-byte swizzle. Eight rows make an atom of 1024 bytes, and the 16-byte
// piece c of row r lies at c ^ (r % 8) (swizzle.cuh). Rows run along k (Major::K), or along m or n (Major::MN).
//
// Accumulators [64 x n]: of each 8 columns, a lane has columns 2 * (lane % 4) and the next, in rows lane / 4 and
// lane / 4 + 8 of its warp's 16: acc[4 * j + 2 * (row >= 8) + column % 2].
//
// A in registers: four pairs. Pairs 0 and 1 are columns 2 * (lane % 4) and the next of the same two rows, pairs 2 and 3
// the columns 8 further on.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

#include "cuda/common/pairs.cuh"

namespace mla::cuda {

namespace gmma = cute::SM90::GMMA;
using gmma::Major;

template <int kColumns, typename N8, typename N16, typename N32, typename N64 = void>
using ByColumns =
    std::conditional_t<kColumns == 8, N8,
                       std::conditional_t<kColumns == 16, N16, std::conditional_t<kColumns == 32, N32, N64>>>;

// The instructions whose n depends on a kernel's heads. Those of e4m3 have k = 32.
template <int kColumns, Major kA, Major kB>
using F16Atom = ByColumns<kColumns, gmma::MMA_64x8x16_F32F16F16_SS<kA, kB>, gmma::MMA_64x16x16_F32F16F16_SS<kA, kB>,
                          gmma::MMA_64x32x16_F32F16F16_SS<kA, kB>, gmma::MMA_64x64x16_F32F16F16_SS<kA, kB>>;
template <int kColumns, Major kA, Major kB>
using Bf16Atom =
    ByColumns<kColumns, gmma::MMA_64x8x16_F32BF16BF16_SS<kA, kB>, gmma::MMA_64x16x16_F32BF16BF16_SS<kA, kB>,
              gmma::MMA_64x32x16_F32BF16BF16_SS<kA, kB>, gmma::MMA_64x64x16_F32BF16BF16_SS<kA, kB>>;
template <int kColumns>
using E4m3Atom = ByColumns<kColumns, void, gmma::MMA_64x16x32_F32E4M3E4M3_SS_TN<>,
                           gmma::MMA_64x32x32_F32E4M3E4M3_SS_TN<>, gmma::MMA_64x64x32_F32E4M3E4M3_SS_TN<>>;
template <int kColumns>
using F16RowsAtom =
    ByColumns<kColumns, gmma::MMA_64x8x16_F32F16F16_RS<Major::K, Major::K>,
              gmma::MMA_64x16x16_F32F16F16_RS<Major::K, Major::K>, gmma::MMA_64x32x16_F32F16F16_RS<Major::K, Major::K>>;

template <Number kNumber, int kColumns, Major kA, Major kB>
using HalfAtom = std::conditional_t<kNumber == Number::f16, F16Atom<kColumns, kA, kB>, Bf16Atom<kColumns, kA, kB>>;

template <typename Atom>
using AccRegistersOf = std::make_integer_sequence<int, std::extent_v<typename Atom::CRegisters>>;

template <typename Atom, int kFirst, int kAccRegisters, int... i, typename... Factors>
__device__ __forceinline__ void fma(float (&acc)[kAccRegisters], std::integer_sequence<int, i...>, gmma::ScaleOut scale,
                                    const Factors&... factors) {
  Atom::fma(factors..., acc[kFirst + i]..., scale);
}

// acc += a b, or acc = a b unless `add`; in the registers from acc[kFirst] on. `a` is a descriptor ...
template <typename Atom, int kFirst = 0, int kAccRegisters>
__device__ __forceinline__ void wgmma(float (&acc)[kAccRegisters], uint64_t a, uint64_t b, bool add = true) {
  fma<Atom, kFirst>(acc, AccRegistersOf<Atom>{}, add ? gmma::ScaleOut::One : gmma::ScaleOut::Zero, a, b);
}

// ... or registers, which must not change until the product has been waited for.
template <typename Atom, int kFirst = 0, int kAccRegisters>
__device__ __forceinline__ void wgmma(float (&acc)[kAccRegisters], const uint32_t (&a)[4], uint64_t b,
                                      bool add = true) {
  fma<Atom, kFirst>(acc, AccRegistersOf<Atom>{}, add ? gmma::ScaleOut::One : gmma::ScaleOut::Zero, a[0], a[1], a[2],
                    a[3], b);
}

// Hides from the compiler how a number was computed, so that it neither reuses parts of it nor computes it earlier.
__device__ __forceinline__ void hide(uint32_t& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ void hide(uint64_t& number) { asm volatile("" : "+l"(number)); }

// The lane, hidden. For code that runs once per token, or per tile in warps without spare registers: else the compiler
// computes everything that depends on the lane before the loop, and spills it.
__device__ __forceinline__ int hidden(int lane) {
  auto number = static_cast<uint32_t>(lane);
  hide(number);
  return static_cast<int>(number);
}

// The shared-memory descriptor of an operand that begins at this address, with atoms 1024 bytes apart. For Major::MN
// with rows longer than 64 numbers, `next_atom_of_row` is the distance to a row's next 64.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t shared_address, uint32_t next_atom_of_row = 16) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = (shared_address & 0x3ffff) >> 4;
  descriptor.bitfield.leading_byte_offset_ = next_atom_of_row >> 4;
  descriptor.bitfield.stride_byte_offset_ = 1024 >> 4;
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(gmma::LayoutType::B128);
  hide(descriptor.desc_);  // or the compiler computes those of all products before a loop, and spills them
  return descriptor;
}

// The same, and the compiler knows that it is uniform: offsets are then added in uniform registers. Narrow products,
// which come in large numbers, would otherwise wait for their descriptors.
__device__ __forceinline__ uint64_t smem_descriptor_uniform(uint32_t shared_address, uint32_t next_atom_of_row = 16) {
  const uint64_t descriptor = smem_descriptor(shared_address, next_atom_of_row);
  const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(descriptor), 0);
  return (uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62) | low;
}

// cute::warpgroup_wait with a number that is constant only after unrolling; three at most.
__device__ __forceinline__ void wait_for_all_products_but(int under_way) {
  if (under_way >= 3)
    cute::warpgroup_wait<3>();
  else if (under_way == 2)
    cute::warpgroup_wait<2>();
  else if (under_way == 1)
    cute::warpgroup_wait<1>();
  else
    cute::warpgroup_wait<0>();
}

// Tells the compiler that accumulators change here, so that it reads none of them before a wait.
template <int kCount>
__device__ __forceinline__ void fence_acc(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(acc[i]);
}

}  // namespace mla::cuda
