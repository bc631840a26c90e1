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
  double l2_kilorow;             // for each further group of heads that reads 1000 rows again
  double partial_row;            // a partial result of one head, written and read
  KernelCosts swap_ab_8, swap_ab_16, swap_ab_32, m64;
};

constexpr GpuCosts kGpuCosts[] = {
    {"NVIDIA H200", 1.980, 4.814, 0.0002372, 0.04633, 0.001209,
     {4.915, 1.013, 1.339, 2.31, 3.373, 1.718, 1.548, 2.03, 3.438, 0.391, 5.82, 0.6143},
     {7.08, 1.1, 1.407, 2.315, 3.705, 1.539, 0.04875, 0.9496, 1.885, 0.6178, 6.644, 0.8208},
     {11.41, 1.428, 1.3, 1.3, 7.936, 0.01, 0.01, 0.01, 0.01, 0.01, 1.286, 0.2228},
     {11.31, 2.184, 1.75, 2.4, 5.726, 0.01, 0.01, 0.01, 0.01, 0.01, 1.261, 0.279}},
};

}  // namespace mla
