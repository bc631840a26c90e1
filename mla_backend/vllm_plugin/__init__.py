"""The plugin for vLLM: `vllm serve MODEL --attention-backend SPARSE_MLA`, or DENSE_MLA.

vLLM finds the two functions here through the package's entry points. It calls them in each of its processes, more than
once. Nothing here imports vLLM before vLLM calls it. docs/serving.md tells how to serve with it.

    versions.py      everything that differs between vLLM's versions
    replacements.py  what is replaced inside vLLM, and whether this version's functions are the known ones
    config.py        what the user asked for: checked, and completed
    models.py        which models the backends serve; model_check.py what that means for a checkpoint
    backend.py       the attention backend of sparse MLA: its metadata and its layers
    beginnings.py    which tokens of a prompt attend densely
    dense_backend.py the same of dense MLA
    host_tier.py     where rows are if vLLM keeps them on the host
    step.py          what a step's layers share: lengths, plan, buffers; dense_step.py the same of dense MLA
    deepseek_v4.py   the layers of DeepSeek-V4, which vLLM keeps apart; deepseek_v41.py those of V4.1
    gpu_worker.py    puts them there
    cpu_platform.py  vLLM's CPU platform, with sparse attention
    products.py      how FP8 rows are multiplied
    selection.py     whether our op selects on a GPU, and what the tokens of a step see
    sharing.py       whether several GPUs select for a share of the tokens each; shared_indexer.py has them do it
    cpu_indexer.py   the indexer on a CPU; gpu_indexer.py the one on a GPU, where it is on
    mxfp4_keys.py    the cache of its keys in MXFP4, and who writes them
"""

import contextlib


def register() -> None:
    """Entry point `vllm.general_plugins`: adds the backends to vLLM's list. They are used only where asked for."""
    from mla_backend.vllm_plugin import config, replacements, versions

    missing = versions.missing() or replacements.missing(replacements.CONFIG)
    if missing is not None:
        versions.logger().error("mla-backend: %s", missing)
        return
    versions.add_backends()
    replacements.call_with_config(config.settle)


def platform() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform to use, on vLLM's CPU builds; elsewhere None.

    vLLM asks this while `vllm.config` is being imported, so the backends are added here too: Python code may name one
    in an `AttentionConfig` before vLLM loads other plugins.
    """
    from mla_backend import tried_versions
    from mla_backend.vllm_plugin import versions

    # Little of vLLM can be imported at this point. Where its list of backends can't, `register` adds them later.
    with contextlib.suppress(ImportError):
        versions.add_backends()
    if not tried_versions.is_cpu_build_of_vllm() or not tried_versions.vllm_has_cpu_mla():
        return None
    return "mla_backend.vllm_plugin.cpu_platform.SparseMLACpuPlatform"
