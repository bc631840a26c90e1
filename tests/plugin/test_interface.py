"""What vLLM asks of both backends' classes."""

import inspect

import pytest
import torch

import vllm_installed  # noqa: F401
from mla_backend import FORMATS, reference

DTYPES = {"bf16": "auto", "bf16_512": "auto", "fp8_tensor_576": "fp8", "fp8_tensor_512": "fp8"}
"""How vLLM says which format a cache has, if not by its name."""


@pytest.mark.parametrize(
    ("kind", "fmt", "rope"),
    [
        *(("sparse", "bf16", 64), ("sparse", "fp8_ds_mla", 64), ("sparse", "bf16_512", 0), ("sparse", "fp8_ds_mla", 0)),
        *(("sparse", "fp8_tensor_512", 0), ("sparse", "nvfp4_352", 64)),
        *(("dense", "bf16", 64), ("dense", "fp8_tensor_576", 64)),
    ],
)
def test_tokens_are_written_as_the_reference_writes_them(backend, dense, kind, fmt, rope):
    layer = object.__new__(backend.SparseMLALayer if kind == "sparse" else dense.DenseMLALayer)
    scale = torch.tensor(0.03 if FORMATS[fmt].scale == "tensor" else 1.0)
    kv_c, k_pe = torch.randn(7, 512).bfloat16(), torch.randn(7, 1, rope).bfloat16()
    slots = torch.tensor([3, -1, 40, 0, 17])  # two tokens of the seven are padding
    cache, want = (FORMATS[fmt].new_cache(4, 16) for _ in range(2))
    how = slots, DTYPES.get(fmt, "auto"), scale
    layer.do_kv_cache_update(kv_c, k_pe, cache, *how, False)
    written = k_pe[:5, 0] if rope else None if FORMATS[fmt].rope == 0 else torch.zeros(5, 64).bfloat16()
    reference.cache_write(kv_c[:5], written, want, slots, format=fmt, scale=scale.item())
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))
    layer.do_kv_cache_update(kv_c, k_pe, torch.empty(0), *how, True)  # before there is a cache


def test_what_the_classes_override_takes_what_vllm_passes(backend, dense, v4):
    """All arguments of the method that is overridden, in their order: of whichever version is installed."""
    from mla_backend.vllm_plugin import deepseek_v41

    for ours in (
        *(backend.SparseMLABackend, backend.SparseMLAMetadataBuilder, backend.SparseMLALayer),
        *(dense.DenseMLABackend, dense.DenseMLAMetadataBuilder, dense.DenseMLALayer),
        *(v4.SparseMLAV4Attention, deepseek_v41.SparseMLAV41Attention),
    ):
        assert not getattr(ours, "__abstractmethods__", None)
        own = [base for base in ours.__mro__ if base.__module__.startswith("mla_backend.vllm_plugin")]
        for name, method in (pair for base in own for pair in vars(base).items()):
            theirs = next(
                (getattr(base, name) for base in ours.__mro__ if base not in own and name in vars(base)), None
            )
            if theirs is None or not callable(getattr(ours, name)) or isinstance(method, type):
                continue
            wanted, taken = (inspect.signature(f).parameters for f in (theirs, getattr(ours, name)))
            named = [p.name for p in wanted.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            open_ended = any(p.kind == p.VAR_KEYWORD for p in taken.values())
            missing = [argument for argument in named if argument not in taken]
            assert open_ended or not missing, f"{ours.__name__}.{name} lacks {missing}"
            common = [argument for argument in named if argument in taken]
            assert common == [argument for argument in taken if argument in named], f"{ours.__name__}.{name}"


def test_the_backends_say_of_themselves_what_vllm_asks(backend, dense):
    ours, other = backend.SparseMLABackend, dense.DenseMLABackend
    assert ours.get_name() == "SPARSE_MLA" and ours.is_sparse() and ours.supports_sink()
    assert other.get_name() == "DENSE_MLA" and not other.is_sparse()
    assert ours.get_supported_head_sizes() == [576, 512] and other.get_supported_head_sizes() == [576]
    for each, dtypes in ((ours, {"fp8_ds_mla"}), (other, set())):
        assert each.is_mla() and each.supports_batch_invariance() and not each.supports_dtype(torch.float16)
        taken = {d for d in ("auto", "bfloat16", "fp8", "fp8_ds_mla", "fp8_e5m2") if each.supports_kv_cache_dtype(d)}
        assert taken == {"auto", "bfloat16", "fp8", *dtypes}
    assert ours.get_kv_cache_shape(10, 64, 1, 576, "fp8_ds_mla") == (10, 64, 656)
    for width in (576, 512):
        assert ours.get_kv_cache_shape(10, 64, 1, width, "auto") == (10, 64, width)
    assert other.get_preferred_block_size(16) == 64 and other.supports_block_size(128)
