// Marks the small functions that the CPU and CUDA compilers both compile, and that files compiled for different
// instruction sets share. They are always inlined: were one emitted as a function of its own, the linker would
// keep a single copy for everybody, and that one might be compiled for instructions this CPU lacks.
#pragma once

#ifdef __CUDACC__
#define MLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MLA_HOST_DEVICE inline __attribute__((always_inline))
#endif
