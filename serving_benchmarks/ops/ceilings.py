"""What the hardware allows, as measured: the yardstick for the times and rates of kernels."""

GPU = "NVIDIA H200"
"""Where the ceilings were measured. Compared with them, another GPU looks better or worse than it is."""
MATH_FLOPS = 780e12
"""FLOP/s of a bf16 matrix product of 8192^3."""
MEMORY_BYTES = 3.65e12
"""Bytes/s of gathering random FP8 rows of 656 bytes from memory into shared memory. BF16 rows of 1152 bytes are
gathered faster: our kernel reaches 4.03e12. Their limit was not measured, so times with BF16 rows can be below a floor
made of this."""
L2_BYTES = {"fp8_ds_mla": 5.7e12, "bf16": 7.7e12}
"""Bytes/s of gathering rows of a format from L2, out of a pool of 32K tokens."""
