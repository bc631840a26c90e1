// wgmma, the matrix instruction of sm_90a, by CUTLASS's names: a warpgroup multiplies 64 x 16 by 16 x n. The second
// factor lies in shared memory, the first one there too or in registers. In shared memory they are rows of 128 bytes,
// eight of which make a swizzled atom of 1024 bytes: the 16-byte piece c of row r stands at c ^ (r % 8). Major::K means
// rows of the dimension that is summed over, Major::MN rows of the other one.
//
// In the 64 x n sums a lane has, for each 8 columns, rows lane / 4 and that plus 8 of its warp's 16, and columns
// 2 * (lane % 4) and the next: sum[4 * j + 2 * (row >= 8) + column % 2]. Of a first factor in registers it has the same
// rows: four pairs, of each row columns 2 * (lane % 4) and the next, then both once more for columns 8 further on.
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

// The atoms whose number of columns depends on a kernel's heads. Those of e4m3 sum over 32 numbers.
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

// sum += a b, from sum[kFirst] on, or sum = a b unless `add`. `a` is a descriptor ...
template <typename Atom, int kFirst = 0, int kAccRegisters>
__device__ __forceinline__ void wgmma(float (&acc)[kAccRegisters], uint64_t a, uint64_t b, bool add = true) {
  fma<Atom, kFirst>(acc, AccRegistersOf<Atom>{}, add ? gmma::ScaleOut::One : gmma::ScaleOut::Zero, a, b);
}

// ... or what the lane has of its rows, which has to stay as it is until the product is waited for.
template <typename Atom, int kFirst = 0, int kAccRegisters>
__device__ __forceinline__ void wgmma(float (&acc)[kAccRegisters], const uint32_t (&a)[4], uint64_t b,
                                      bool add = true) {
  fma<Atom, kFirst>(acc, AccRegistersOf<Atom>{}, add ? gmma::ScaleOut::One : gmma::ScaleOut::Zero, a[0], a[1], a[2],
                    a[3], b);
}

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

// The descriptor of a factor that begins at this address, with atoms 1024 bytes apart. Of one that is Major::MN and
// longer than an atom there, `next_atom_of_row` says how far the next 64 numbers of a row are.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t shared_address, uint32_t next_atom_of_row = 16) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = (shared_address & 0x3ffff) >> 4;
  descriptor.bitfield.leading_byte_offset_ = next_atom_of_row >> 4;
  descriptor.bitfield.stride_byte_offset_ = 1024 >> 4;
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(gmma::LayoutType::B128);
  hide(descriptor.desc_);  // or the compiler works out those of all products before a loop, and spills them
  return descriptor;
}

// The same, and the compiler knows that it is the same for all lanes. Then what is added to it takes no vector
// registers, and products of few columns, of which many are asked for, don't wait for their descriptors.
__device__ __forceinline__ uint64_t smem_descriptor_uniform(uint32_t shared_address, uint32_t next_atom_of_row = 16) {
  const uint64_t descriptor = smem_descriptor(shared_address, next_atom_of_row);
  const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(descriptor), 0);
  return (uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62) | low;
}

// cute::warpgroup_wait where the number is known only when loops have been unrolled; three at most.
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

// Tells the compiler that sums change here, so that it reads none of them before a wait.
template <int kCount>
__device__ __forceinline__ void fence_acc(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(acc[i]);
}

}  // namespace mla::cuda
