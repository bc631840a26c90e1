"""Rotary position embedding, with YaRN where the model has it."""

import math

import torch
from torch import Tensor

from mla_backend.engine.config import ModelConfig, Yarn


def inverse_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """fp32 `[rope_dim / 2]`: the angle that each pair of dims is rotated by from one position to the next."""
    exponents = torch.arange(0, config.rope_dim, 2, device=device).float() / config.rope_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.yarn is None:
        return frequencies
    # Pairs that rotate many times within a context keep their frequency, so that neighbours still differ. Pairs that
    # rotate less than once are slowed down by the factor, so that positions beyond training give angles seen in it.
    yarn = config.yarn
    low, high = (_pair_with_rotations(beta, config, yarn) for beta in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rope_dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(config.rope_dim // 2, device=device).float() - low) / (high - low)).clamp(0, 1)
    return frequencies / yarn.factor * slowed + frequencies * (1 - slowed)


def _pair_with_rotations(rotations: float, config: ModelConfig, yarn: Yarn) -> float:
    """The number, not always whole, of the pair that rotates this many times within a context of the pre-training."""
    frequency = rotations * 2 * math.pi / yarn.original_positions
    return -config.rope_dim * math.log(frequency) / (2 * math.log(config.rope_theta))


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotation_scale(yarn: Yarn | None) -> float:
    """What YaRN multiplies the rotated dims of queries and keys with."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def attention_scale(config: ModelConfig) -> float:
    """What scores are multiplied with before the softmax. YaRN's factor in it is for all dims, not only the rotated."""
    scale = config.query_dim**-0.5
    if config.yarn is not None and config.yarn.mscale_all_dim:
        scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def rotations_of(angles: Tensor, size: float) -> Tensor:
    """Complex64 numbers of these angles `[...]` and this magnitude, for `rotate` to multiply with."""
    return torch.polar(torch.full_like(angles, size), angles)


def rotate(x: Tensor, rotations: Tensor, dtype: torch.dtype, *, interleaved: bool) -> Tensor:
    """Rotates x `[..., rope_dim]`, whose pairs of dims are complex numbers.

    A product of complex numbers is one kernel; sines and cosines apart take six.

    Args:
        rotations: complex64 `[..., rope_dim / 2]` that broadcast to the pairs.
        dtype: of the result.
        interleaved: the pairs are the dims (2i, 2i + 1); otherwise (i, i + rope_dim / 2). In the result a pair's dims
            are always neighbours: scores don't depend on the order of dims, as long as queries and keys agree.
    """
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    pairs = pairs.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    return torch.view_as_real(torch.view_as_complex(pairs) * rotations).flatten(-2).to(dtype)
