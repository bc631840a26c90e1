"""vLLM's server with our backend, on a CPU, and clients that mean it no good: it answers the next one, or ends with a
sentence."""

import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

import hostile
import vllm_installed  # noqa: F401
from vllm_server import OPTIONS, becomes_idle, ends, healthy, serving

MOST_CLIENTS = 100


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with serving(checkpoint, tmp_path_factory.mktemp("hostile") / "log", *OPTIONS) as server:
        yield server


@pytest.fixture(autouse=True)
def answers_the_next_one(server, request, prompts):
    """After each test but that of an engine that is killed."""
    yield
    if "killed" not in request.node.name:
        assert healthy(server) and len(server.complete(prompts[1])) > 0


def post(server, body: bytes, path: str = "/v1/completions", seconds: float = 60) -> int:
    """The status of what is answered."""
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=seconds).status
    except urllib.error.HTTPError as error:
        return error.code


def connected(server, body: bytes) -> socket.socket:
    """A client that has asked, and has read nothing."""
    port = int(server.url.rpartition(":")[2])
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    return client


def completion(tokens: int = 100, prompt: list[int] | str = (5, 6, 7), **more) -> bytes:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return json.dumps({**body, **more}).encode()


def test_malformed_bodies_are_refused_or_answered(server):
    random = Random(35)
    good = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "logprobs": 2}
    bodies = [b"", b"[" * 100_000, b"\xff\xfe", b'{"model": "m", "prompt": ' + b"9" * 5000 + b"}"]
    for _ in range(60):
        body = json.dumps({**hostile.mutated_json(random, good, random.randint(1, 2)), "max_tokens": 2}).encode()
        bodies.append(hostile.mutated_bytes(random, body) if random.random() < 0.3 else body)
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda body: post(server, body), bodies))
    assert set(statuses) <= {200, 400, 404, 413, 422, 500}
    assert all(status >= 400 for status in statuses[:4])


@pytest.mark.parametrize("prompt", [[5] * 10**6, "t5 " * 10**6], ids=["tokens", "text"])
def test_a_prompt_of_a_million_tokens_is_refused(server, prompt):
    assert post(server, completion(prompt=prompt), seconds=120) in (400, 413)


@pytest.mark.parametrize("tokens", [[-1], [10**6], [2**63], [10**30], [1.5], [[]], [None]])
def test_tokens_that_are_none_are_refused(server, tokens):
    assert post(server, completion(prompt=tokens, tokens=2)) >= 400


def test_many_clients_that_disconnect_leave_nothing_behind(server):
    random = Random(0)

    def hang_up(number: int) -> None:
        prompt = [random.randrange(5, 60) for _ in range(random.randint(1, 120))]
        with connected(server, completion(prompt=prompt, stream=number % 2 == 0)) as client:
            if number % 4:
                time.sleep(random.random())
            if number % 4 == 1:
                client.recv(100)
            if number % 4 == 2:  # a reset in place of an orderly end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(hang_up, range(MOST_CLIENTS)))
    assert becomes_idle(server, 60)


def test_clients_that_read_slowly_or_never_hold_nobody_up(server, prompts):
    clients = [connected(server, completion(stream=True, tokens=100)) for _ in range(20)]
    clients += [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(20)]
    for client in clients[20:]:  # the beginning of a request, and no more
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100000\r\n")
    assert len(server.complete(prompts[0])) > 0
    for client in clients[:5]:
        for _ in range(3):
            client.recv(10)
            time.sleep(0.05)
    for client in clients:
        client.close()
    assert becomes_idle(server, 60)


def test_a_server_whose_engine_is_killed_says_so_and_ends(server, prompts):
    """The last test of this server."""
    engine = server.member("EngineCore")
    client = connected(server, completion(stream=True))
    client.recv(100)
    engine.send_signal(signal.SIGKILL)
    assert ends(server, prompts[0]), "the server goes on without an engine"
    client.close()
    assert re.search(r"[Ee]ngine.* died|EngineDeadError", server.log.read_text())
