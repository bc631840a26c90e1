"""A worked example: write tokens into an FP8 cache, attend to the ones an indexer picked, check the answer.

python examples/sparse_attention.py
"""

import torch

import mla_backend
from mla_backend import reference

HEADS, TOPK, BLOCK_SIZE = 16, 2048, 64
SCALE = 192**-0.5  # of DeepSeek-V3.2: its heads are 128 + 64 wide before they are absorbed

torch.manual_seed(0)

# Two requests of 5000 and 3000 tokens, each with the blocks that a scheduler gave it.
lengths = [5000, 3000]
fp8 = mla_backend.FORMATS["fp8_ds_mla"]
cache = fp8.new_cache(blocks=160, block_size=BLOCK_SIZE)
free_blocks = torch.randperm(160, dtype=torch.int32)
block_table = torch.full((2, 80), -1, dtype=torch.int32)
for request, length in enumerate(lengths):
    blocks = -(-length // BLOCK_SIZE)
    block_table[request, :blocks], free_blocks = free_blocks[:blocks], free_blocks[blocks:]
    positions = torch.arange(length)
    slots = block_table[request, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    mla_backend.cache_write(torch.randn(length, 512).bfloat16(), torch.randn(length, 64).bfloat16(), cache, slots)
print(
    f"cache: {cache.shape[0]} blocks of {cache.shape[1]} tokens, {fp8.name}, {fp8.token_bytes} bytes per token, "
    f"{cache.nbytes / 2**20:.1f} MiB"
)

# One query token per request. The indexer picked 2048 positions of its own sequence for each.
q = torch.randn(2, HEADS, 576).bfloat16()
picked = torch.stack([torch.randperm(length)[:TOPK] for length in lengths]).int()
indices, counts = mla_backend.convert_indices(picked, block_table, torch.tensor([0, 1], dtype=torch.int32), BLOCK_SIZE)
out, lse = mla_backend.sparse_attention(q, cache, indices, scale=SCALE)
print(f"attention: {counts.tolist()} slots -> out {list(out.shape)}, lse {list(lse.shape)}")

exact, exact_lse, _ = reference.sparse_attention(q, cache, indices, scale=SCALE)
print(
    f"against the float64 reference: out differs by at most {(out - exact).abs().max():.1e}, "
    f"lse by {(lse - exact_lse).abs().max():.1e}"
)

# The same in two halves, as two GPUs that share a sequence would do it.
halves = [mla_backend.sparse_attention(q, cache, half.contiguous(), scale=SCALE) for half in indices.chunk(2, dim=1)]
combined, _ = mla_backend.combine_partials([h[0] for h in halves], [h[1] for h in halves])
print(f"two halves combined: differ from the whole by at most {(combined.float() - out.float()).abs().max():.1e}")
