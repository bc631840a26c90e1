"""What the hardware allows, as it was measured: what the times and rates of kernels are held to."""

GPU = "NVIDIA H200"
"""Where the ceilings were measured. Held to them, another GPU looks better or worse than it is."""
MATH_FLOPS = 780e12
"""A second: a bf16 matrix product of 8192^3."""
MEMORY_BYTES = 3.65e12
"""A second: gathering random FP8 rows of 656 bytes from memory into shared memory. BF16 rows of 1152 bytes are gathered
faster, our kernel itself reaches 4.03e12; how fast at most was not measured, so times with them can be below a floor
that is made of this."""
L2_BYTES = {"fp8_ds_mla": 5.7e12, "bf16": 7.7e12}
"""A second: gathering rows of a format from L2, out of a pool of 32K tokens."""
