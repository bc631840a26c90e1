"""The engine's proofs on a GPU: the same tests as on a CPU, with the `device` of this folder.

transformers' reference stays on the CPU, in fp32.
"""

import pytest

from tests.engine.conftest import one_thread
from tests.engine.test_model import (
    checkpoints,
    exact,
    load,
    test_kernels_stay_within_bounds,
    test_keys_of_fewer_bits_select_mostly_the_same,
    test_logits_and_tokens_are_those_of_transformers,
    test_models_compute_in_bf16,
    test_prompts_in_a_batch_give_what_they_give_alone,
    test_prompts_in_chunks_give_the_same,
)
from tests.engine.test_running import (
    engine,
    folder,
    test_bits_are_the_same_from_host_memory,
    test_bits_of_a_forked_sample_are_those_of_a_request_of_its_own,
    test_forked_samples_survive_preemption,
)
from tests.engine.test_soak import test_2000_requests_aborted_and_preempted_at_random_leave_an_empty_pool_and_no_memory

pytestmark = pytest.mark.gpu
