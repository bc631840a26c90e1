// CTAs of one cluster run at the same time and read one another's shared memory. A CTA that was launched without a
// cluster is alone in one.
#pragma once

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

#include "cuda/common/mbarrier.cuh"
#include "cuda/common/mma.cuh"

namespace mla::cuda {

// Ours, because CuTe's block_rank_in_cluster() and cluster_shape() are volatile: every use reads the register again.
__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A cluster's CTAs are neighbours in the grid's y dimension.
__device__ __forceinline__ uint32_t ctas_of_cluster() {
  uint32_t ctas;
  asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(ctas));
  return ctas;
}

// After cute::cluster_arrive(): waits for all threads of the cluster. Warps may wait in different places of the code.
// Without a cluster, ptxas would turn cluster_wait() into __syncthreads(), which must be one place for all warps.
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

__device__ __forceinline__ float4 load4_of_cta(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// Waits until this thread's loads from other CTAs' memory have arrived (MEMBAR.ALL.CTA), so that those CTAs may be told
// to end. They only end and write nothing more, so no release is needed.
__device__ __forceinline__ void finish_reads() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// The same shared address in the CTA of that rank.
__device__ __forceinline__ uint32_t in_cta(uint32_t shared_address, int rank) {
  return cute::set_block_rank(shared_address, rank);
}

// Stores a number to another CTA's shared memory. Whoever loads it with load_released() also sees all that this thread
// wrote before, and all that it had seen.
__device__ __forceinline__ void store_in_cta(uint32_t address, uint32_t number) {
  asm volatile("st.release.cluster.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(number) : "memory");
}

__device__ __forceinline__ uint32_t load_released(uint32_t shared_address) {
  uint32_t number;
  asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];" : "=r"(number) : "r"(shared_address) : "memory");
  return number;
}

// How an arrival at another CTA's barrier lets that CTA read this CTA's shared memory.
enum class ClusterRelease {
  // Release and acquire at cluster scope, restricted to shared memory. PTX guarantees what we need. An unrestricted
  // release at cluster scope (MEMBAR.ALL.GPU) also waits for stores to global memory, about a thousand cycles.
  shared,
  // Release and acquire at CTA scope: no fence instruction, but PTX guarantees other CTAs nothing.
  cta,
};
// The restricted fences need PTX ISA 8.6.
constexpr ClusterRelease kClusterRelease =
    __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208 ? ClusterRelease::shared : ClusterRelease::cta;

// Call it in the arriving thread before arrive_in_cta(). It makes this CTA's writes to its shared memory, which the
// thread must have synchronised with, visible to whoever waits with wait_for_ctas().
__device__ __forceinline__ void release_shared() {
  if constexpr (kClusterRelease == ClusterRelease::shared)
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
}

// `count` arrivals at a barrier of any CTA of the cluster. (CUTLASS's arrive(cta) counts one.)
__device__ __forceinline__ void arrive_in_cta(uint32_t barrier, int count) {
  if constexpr (kClusterRelease == ClusterRelease::shared)
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
                 : "memory");
  else
    asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Waits until other CTAs have arrived at this CTA's barrier. Then their shared memory may be read. The fence costs no
// instruction.
__device__ __forceinline__ void wait_for_ctas(Barrier& barrier, uint32_t parity) {
  if constexpr (kClusterRelease == ClusterRelease::shared) {
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
