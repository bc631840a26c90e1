"""vLLM's server on a CPU and the OpenAI client: what its users get, also when some hang up or a worker dies."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import vllm_installed  # noqa: F401
from vllm_models import assert_follows
from vllm_server import OPTIONS, serving


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with serving(checkpoint, tmp_path_factory.mktemp("serve") / "log", *OPTIONS) as server:
        yield server


def test_clients_one_and_many_get_the_embedded_engines_tokens(server, checkpoint, prompts):
    assert "SPARSE_MLA" in server.process.says()
    assert_follows(checkpoint, prompts[:2], [server.complete(p) for p in prompts[:2]])
    many = prompts * 4
    with ThreadPoolExecutor(len(many)) as pool:
        assert_follows(checkpoint, many, list(pool.map(server.complete, many)))
    assert server.idle()


def test_clients_that_hang_up_leave_the_others_right_and_no_block_behind(server, checkpoint, prompts):
    chance = random.Random(0)

    def hang_up(prompt: list[int]) -> None:
        how = dict(max_tokens=100, temperature=0.0, stream=True, extra_body={"ignore_eos": True})
        stream = server.client().completions.create(model="m", prompt=prompt, **how)
        for _ in range(chance.randrange(1, 10)):
            next(iter(stream))
        stream.close()

    with ThreadPoolExecutor(16) as pool:
        hung = [pool.submit(hang_up, prompt) for prompt in prompts]
        answers = list(pool.map(server.complete, prompts))
        for one in hung:
            one.result()
    assert_follows(checkpoint, prompts, answers)
    assert server.becomes_idle()


def test_a_server_whose_worker_is_killed_says_so_and_ends(server, prompts):
    """The last test of this server. vLLM starts no worker anew: it must end, for whoever runs it, and say why."""
    server.kill_member("Worker")
    assert server.ends(prompts[0]), "the server goes on without a worker"
    assert re.search(r"[Ww]orker.* died", server.process.says())
