// What launches cost on the GPUs that were measured, in us: written by `python -m serving_benchmarks ops tune`.
#pragma once

namespace mla {

// Of a kernel with so many heads per CTA.
struct KernelCosts {
  double begin;           // and end, of a CTA
  double tile_fp8;        // 64 rows that are multiplied as e4m3 numbers
  double tile_16bit;      // rows of 16-bit numbers
  double tile_converted;  // rows that become such
  double token;           // another token, or split of one, in the same CTA
  double cluster[4];      // to combine splits within a cluster of 2, 4, 8 and 16 CTAs
  double uneven;          // and for each CTA that a cluster lacks to the next of these
  double combine;         // to combine splits in the workspace
  double combine_split;   // and more for each beyond eight
};

struct GpuCosts {
  const char* name;
  double clock_ghz, memory_tbs;  // as the driver says, to find the nearest
  double memory_kb;              // to read 1000 bytes of rows from memory
  double shared_row;             // share of that for another group of heads that reads the same row
  double partial_row;            // a partial result of one head, written and read
  KernelCosts swap_ab_8, swap_ab_16, swap_ab_32, m64;
};

constexpr GpuCosts kGpuCosts[] = {
    {"NVIDIA H200", 1.980, 4.814, 0.0002467, 0.03404, 0.000877,
     {4.915, 1.013, 1.366, 2.266, 2.752, 1.981, 1.548, 1.99, 3.438, 0.3607, 5.381, 0.6023},
     {7.222, 1.1, 1.435, 2.315, 3.358, 1.234, 0.1622, 0.8952, 1.777, 0.5688, 6.031, 0.7137},
     {12.1, 1.4, 1.3, 1.3, 7.207, 0.01, 0.01, 0.01, 0.01, 0.01, 2.027, 0.09564},
     {11.31, 2.184, 1.75, 2.4, 5, 0.01, 0.01, 0.01, 0.01, 0.01, 3.056, 0.2735}},
};

}  // namespace mla
