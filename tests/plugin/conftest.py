"""What tests that run vLLM share: a checkpoint and prompts."""

from pathlib import Path

import pytest

from vllm_models import PROMPT_LENGTHS, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts are several times as long as what its indexer selects. Only the first layer selects, so that what is
    rounded differently later on can't change it: tokens can be compared with those of another implementation."""
    return make_checkpoint("glm_moe_dsa_smooth", tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Some begin alike, so that there is something to find in a prefix cache."""
    import engine_models

    shared = engine_models.prompt_of(max(PROMPT_LENGTHS), seed=1)
    alone = [engine_models.prompt_of(length, seed=10 + i) for i, length in enumerate(PROMPT_LENGTHS)]
    return [shared[: length // 2] + own[length // 2 :] for length, own in zip(PROMPT_LENGTHS, alone, strict=True)]
