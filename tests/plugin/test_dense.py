"""Models with dense MLA on a CPU: how vLLM is configured for them, and `LLM(...)` against transformers' model."""

import functools
from types import SimpleNamespace

import pytest

import vllm_installed  # noqa: F401
from mla_backend.vllm_plugin import config as plugin_config
from vllm_models import config_of, errors_of, gauge, generate, make_checkpoint, make_dense_checkpoint, running


@pytest.fixture(scope="module")
def dense(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("v3")
    model, continued = make_dense_checkpoint(folder, prompts)
    return SimpleNamespace(folder=folder, model=model, continued=continued)


def test_many_at_a_time_give_the_models_probabilities(dense, prompts):
    """Short prompts share steps with requests that decode."""
    with running(dense.folder, attention_backend="DENSE_MLA", enforce_eager=True) as llm:
        assert llm.llm_engine.vllm_config.cache_config.cache_dtype == "bfloat16"
        behind, off = errors_of(dense.model, prompts, generate(llm, prompts, logprobs=0))
    assert behind < 0.02 and off < 0.05


def test_drafts_over_an_fp8_cache_give_them_as_far_as_its_three_bits_go(dense, prompts):
    options = dict(kv_cache_dtype="fp8", speculative_config=dict(method="mtp", num_speculative_tokens=2))
    options |= dict(max_num_batched_tokens=512)  # with drafts vLLM does not raise it to a whole prompt
    with running(dense.folder, attention_backend="DENSE_MLA", enforce_eager=True, **options) as llm:
        config = llm.llm_engine.vllm_config
        assert config.speculative_config.attention_backend.name == "DENSE_MLA"
        behind, off = errors_of(dense.model, prompts, generate(llm, prompts, logprobs=0))
        drafted, accepted = (gauge(llm, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    assert behind < 0.4 and off < 0.5
    assert 0.2 * drafted < accepted < drafted, "some drafts are right, some are not"


def test_on_a_cpu_prefill_has_the_limits_of_vllms_own(dense):
    config = config_of(dense.folder, attention_backend="DENSE_MLA", dtype="float32")
    assert config.attention_config.backend.name == "DENSE_MLA" and config.cache_config.cache_dtype == "bfloat16"
    assert not config.scheduler_config.enable_chunked_prefill and not config.cache_config.enable_prefix_caching
    assert "-rotary_embedding" in config.compilation_config.custom_ops
    assert config_of(dense.folder).attention_config.backend is None, "it is used only where it is asked for"


def test_each_backend_names_the_other_where_that_is_the_one(dense, tmp_path):
    with pytest.raises(ValueError, match="deepseek_v3 is none. Use --attention-backend DENSE_MLA"):
        config_of(dense.folder, attention_backend="SPARSE_MLA")
    sparse = make_checkpoint("deepseek_v32", tmp_path)
    with pytest.raises(ValueError, match="DENSE_MLA does not run sparse attention on a CPU.* name SPARSE_MLA"):
        config_of(sparse, attention_backend="DENSE_MLA")
    reason = plugin_config._model("DENSE_MLA", config_of(sparse).model_config, on_cpu=False)
    assert reason.endswith("deepseek_v32 is none. Use --attention-backend SPARSE_MLA.")


def test_what_cannot_be_is_refused_at_start_with_a_reason(dense):
    with pytest.raises(ValueError, match="--kv-cache-dtype must be one of auto, bfloat16, fp8, fp8_e4m3; got fp8_ds"):
        config_of(dense.folder, attention_backend="DENSE_MLA", kv_cache_dtype="fp8_ds_mla")
    for given in ("fp8", "fp8_e4m3", "bfloat16", "auto"):  # each stays what it is
        config = config_of(dense.folder, attention_backend="DENSE_MLA", kv_cache_dtype=given, block_size=32)
        assert config.cache_config.cache_dtype == given
    config = config_of(dense.folder, attention_backend="DENSE_MLA", kv_cache_dtype="fp8", block_size=32)
    features = functools.partial(plugin_config._features, "DENSE_MLA", config, on_cpu=False)
    assert features() is None
    config.cache_config.calculate_kv_scales = True  # as vLLM 0.23 has it
    assert "Leave out --calculate-kv-scales" in features()
    config.parallel_config.decode_context_parallel_size = 2
    assert "no context parallelism over such a cache" in features()
    config.speculative_config = SimpleNamespace(attention_backend=None)
    assert "--decode-context-parallel-size or --speculative-config" in features()
