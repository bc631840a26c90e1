// Blocks of one cluster: they run at the same time and read one another's shared memory. A block that was launched
// without a cluster is alone in one.
#pragma once

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"

namespace mla::cuda {

// CuTe's block_rank_in_cluster() and cluster_shape() are volatile, so every use would read them again.
__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// They are neighbours in the grid's second dimension.
__device__ __forceinline__ uint32_t blocks_of_cluster() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(blocks));
  return blocks;
}

// After cute::cluster_arrive(): waits for all threads of the cluster. Warps may wait in different places. Without a
// cluster ptxas would put __syncthreads() into each of them, which has to be one place for all.
__device__ __forceinline__ void wait_for_cluster() {
  uint32_t clustered;
  asm("{ .reg .pred p; mov.pred p, %%is_explicit_cluster; selp.u32 %0, 1, 0, p; }" : "=r"(clustered));
  if (clustered)
    cute::cluster_wait();
  else
    asm volatile("barrier.cta.sync 0, %0;" ::"r"(blockDim.x) : "memory");
}

__device__ __forceinline__ float4 load4(uint32_t shared_address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared_address)
               : "memory");
  return x;
}

__device__ __forceinline__ float4 load4_of_block(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// The thread's reads of other blocks' memory are done (MEMBAR.ALL.CTA waits for loads), so that these may be told that
// they can end. No write follows there, so nothing has to be released.
__device__ __forceinline__ void finish_reads() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// What stands here in this block's shared memory, in the block of that rank.
__device__ __forceinline__ uint32_t in_block(uint32_t shared_address, int rank) {
  return cute::set_block_rank(shared_address, rank);
}

// A number in another block's shared memory: who loads it sees everything that this thread has done, and what it knows
// of.
__device__ __forceinline__ void store_in_block(uint32_t address, uint32_t number) {
  asm volatile("st.release.cluster.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(number) : "memory");
}

__device__ __forceinline__ uint32_t load_released(uint32_t shared_address) {
  uint32_t number;
  asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];" : "=r"(number) : "r"(shared_address) : "memory");
  return number;
}

// How an arrival at another block's barrier lets that block read this block's shared memory.
enum class ClusterRelease {
  // Release and acquire at cluster scope, of shared memory only. This is what PTX promises something for. A release of
  // everything at cluster scope would also wait for stores to global memory, about a thousand cycles (MEMBAR.ALL.GPU).
  shared,
  // Release and acquire at block scope, for comparison: one instruction less, and PTX promises other blocks nothing.
  block,
};
constexpr ClusterRelease kClusterRelease = ClusterRelease::shared;

// Before arrive_in_block(), in the thread that arrives: what this block has written to its shared memory, as far as the
// thread knows of it, is there for whoever waits with wait_for_blocks().
template <ClusterRelease kRelease = kClusterRelease>
__device__ __forceinline__ void release_shared() {
  if constexpr (kRelease == ClusterRelease::shared)
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
}

// `count` arrivals at a barrier of any block of the cluster; CUTLASS's arrive(block) counts one.
template <ClusterRelease kRelease = kClusterRelease>
__device__ __forceinline__ void arrive_in_block(uint32_t barrier, int count) {
  if constexpr (kRelease == ClusterRelease::shared)
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
                 : "memory");
  else
    asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Until other blocks have arrived at this block's barrier. Then their shared memory can be read. ptxas makes the fence
// no instruction.
template <ClusterRelease kRelease = kClusterRelease>
__device__ __forceinline__ void wait_for_blocks(Barrier& barrier, uint32_t parity) {
  if constexpr (kRelease == ClusterRelease::shared) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "fence.acquire.sync_restrict::shared::cluster.cluster;\n"
        "}" ::"r"(cast_smem_ptr_to_uint(&barrier)),
        "r"(parity)
        : "memory");
  } else {
    wait(barrier, parity);
  }
}

}  // namespace mla::cuda
