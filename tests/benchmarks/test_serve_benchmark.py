"""`serve` with a server and a client that only look like vLLM's: what it makes of their numbers, what it does when they
fail, and that it leaves no process behind.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import alive, parsed, wait_until

from serving_benchmarks.__main__ import main
from serving_benchmarks.run import common, serve, server, supervisor, vllm_options
from serving_benchmarks.run.workloads import Workload

SERVER = """
import http.server, json, os, signal, sys, time
port, notes, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)  # as a server that hangs
if mode == "ends":
    raise RuntimeError("no such backend")
child = os.fork()
if not child:
    os.setsid()  # as a worker in a session of its own
with open(notes, "a") as file:
    file.write(f"{os.getpid()}\\n")
if not child:
    time.sleep(1000)
asked = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        self.send_response(503 if mode == "sick" else 200)
        self.end_headers()
        counts = {"num_preemptions": 3, "prefix_cache_queries": 200, "prefix_cache_hits": 50}
        for name, count in counts.items():
            self.wfile.write(f'vllm:{name}_total{{engine="0"}} {count * asked}.0\\n'.encode())
        if mode == "killed" and asked > 1:
            os.kill(os.getpid(), 9)

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "breaks":
            os._exit(7)
        with open(notes + ".asked", "a") as file:
            file.write(json.dumps([self.path, wanted]) + "\\n")
        if mode == "hangs":
            time.sleep(1000)
        said = b'{"error": "too long"}'
        self.send_response(400 if mode == "refuses" else 200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
CLIENT = """
import json, sys, time
path, mode = sys.argv[1:]
if "unasked" in path:
    raise ValueError("no such dataset")
if mode == "hangs":
    time.sleep(1000)
json.dump({
    "date": "today", "model_id": "/a/folder", "duration": 2.0, "request_throughput": 1.5, "completed": 3, "failed": 1,
    "input_lens": [10, 10, 10, 10], "output_lens": [3, 3, 1, 0], "ttfts": [0.5, 1.5, 0.25, 0.0],
    "itls": [[0.1, 0.3], [0.1, 0.1], [], []], "errors": ["", "", "", "refused"], "generated_texts": ["a"] * 4,
}, open(path, "w"))
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Takes the place of vLLM. A backend's name says how its server behaves."""
    for name, code in (("server", SERVER), ("client", CLIENT)):
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 4000}))
    (tmp_path / "pids").touch()
    patch(tmp_path, monkeypatch.setattr)
    return tmp_path


def patch(folder: Path, setattr, client: str = "works") -> None:
    def server_command(options, plan, backend, port):
        return [sys.executable, str(folder / "server.py"), str(port), str(folder / "pids"), backend]

    def client_command(options, load, seed, port, result):
        with (folder / "loads").open("a") as file:
            file.write(json.dumps([*load, seed]) + "\n")
        return [sys.executable, str(folder / "client.py"), str(result), client]

    setattr(serve, "server_command", server_command)
    setattr(serve, "client_command", client_command)
    setattr(server, "POLL_SECONDS", 0.02)
    setattr(server, "READY_SECONDS", 2)
    setattr(serve, "serving", lambda *given: server.serving(*given, grace=0.1))


def no_process_left(folder: Path) -> bool:
    return not any(alive(int(line)) for line in (folder / "pids").read_text().split())


SMALL = ("--input-len", "10", "--output-len", "3", "--num-prompts", "4")


def run(folder: Path, *arguments: str) -> tuple[int, dict]:
    output = folder / "out.json"
    status = main(["serve", "--model", str(folder), *SMALL, "--output", str(output), *arguments])
    return status, json.loads(output.read_text())


def test_each_load_has_an_entry_made_of_what_the_client_saved(fakes, monkeypatch):
    monkeypatch.setattr(common, "size_warmup", lambda *_: [Workload([[5]], [2]), Workload([[6, 7], [8]], [1, 3])])
    loads = ("--request-rate", "1,2.5", "--concurrency", "8", "--tensor-parallel-size", "4", "--requests")
    status, report = run(fakes, "--backend", "works", *loads, "--ttft-limit", "1", "--tpot-limit", "0.25")
    assert status == 0 and no_process_left(fakes) and (fakes / "pids").read_text()
    assert report["environment"]["benchmark"] == "serve" and report["environment"]["settings"]["size_warmup"] is True
    assert [(r["case"]["request_rate"], r["case"]["concurrency"]) for r in report["results"]] == [(1.0, 8), (2.5, 8)]
    for result in report["results"]:
        assert (result["completed"], result["failed"], result["error"], result["gpus"]) == (3, 1, None, 4)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 7)
        assert result["requests_per_second"] == 1.5 and result["output_tokens_per_second"] == 3.5
        requests = result["requests"]
        assert requests["ttft_s"] == [0.5, 1.5, 0.25] and requests["output_tokens"] == [3, 3, 1]
        assert requests["tpot_s"] == [pytest.approx(0.2), pytest.approx(0.1), None]
        assert requests["e2e_s"] == pytest.approx([0.9, 1.7, 0.25])
        assert result["ttft_s"] == {"p50": 0.5, "p99": pytest.approx(1.48)}
        assert result["itl_s"] == {"p50": pytest.approx(0.1), "p99": pytest.approx(0.294)}
        # of the four one was too late, and one was refused
        assert result["goodput"]["good"] == 2 and result["goodput"]["share"] == 0.5
        assert result["goodput"]["requests_per_second"] == 1.0
        assert result["bench"] == {"date": "today", "duration": 2.0, "request_throughput": 1.5} | KEPT
        assert result["cache"] == {"prefix_hit_share": 0.25} and result["preemptions"] == 3
    asked = [json.loads(line) for line in (fakes / "pids.asked").read_text().splitlines()]
    prompts = [(wanted["prompt"], wanted["max_tokens"]) for _, wanted in asked]
    assert prompts[0] == ([5], 2) and sorted(prompts[1:]) == [([6, 7], 1), ([8], 3)], "the warm-up of step sizes"
    # the heaviest load comes once before the others, with prompts of its own
    assert [json.loads(line) for line in (fakes / "loads").open()] == [[2.5, 8, 2], [1.0, 8, 0], [2.5, 8, 1]]


KEPT = {"completed": 3, "failed": 1}


FAILING = {
    "ends": "RuntimeError: no such backend",
    "sick": "not ready",
    "killed": "killed by signal 9",
    "refuses": "too long",
    "breaks": "the server ended",
    "unasked": "ValueError: no such dataset",
}


def test_backends_that_fail_are_said_to_and_the_others_go_on(fakes, monkeypatch):
    monkeypatch.setattr(common, "size_warmup", lambda *_: [Workload([[5]], [2])])
    status, report = run(fakes, "--backend", ",".join([*FAILING, "works"]), "--concurrency", "1,2", "--no-warmup")
    assert status == 1 and no_process_left(fakes)
    found = [(r["backend"], r["case"]["concurrency"]) for r in report["results"]]
    assert found == [(name, n) for name in (*FAILING, "works") for n in (1, 2)]
    for result in report["results"]:
        if result["backend"] in FAILING:
            assert FAILING[result["backend"]] in result["error"]
        else:
            assert result["error"] is None and "requests" not in result


STOPPED = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import test_serve_benchmark as fakes
from pathlib import Path
from serving_benchmarks.__main__ import main
fakes.patch(Path({folder!r}), setattr, client="hangs")
files = ["--logs", {folder!r} + "/logs", "--output", {output!r}]
sys.exit(main(["serve", "--model", {folder!r}, *{arguments!r}, "--no-warmup", *files]))
"""
LOADED, WARMING_UP = ["--backend", "works"], ["--backend", "hangs", "--size-warmup"]


@pytest.mark.usefixtures("children_hear_ctrl_c")
@pytest.mark.parametrize(
    ("how", "status", "earlier", "arguments"),
    [
        (signal.SIGINT, 130, None, LOADED),
        (signal.SIGKILL, -signal.SIGKILL, "a file of an earlier run", LOADED),
        (signal.SIGTERM, 143, None, WARMING_UP),
    ],
)
def test_no_process_and_no_empty_file_is_left_when_it_is_stopped(fakes, how, status, earlier, arguments):
    here, output = Path(__file__).parent, fakes / "out.json"
    if earlier is not None:
        output.write_text(earlier)
    tests = str(here.parent / "support")
    code = STOPPED.format(tests=tests, here=str(here), folder=str(fakes), output=str(output), arguments=arguments)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        busy = fakes / ("logs/works-0.log" if arguments == LOADED else "pids.asked")  # the client's log
        assert wait_until(lambda: busy.exists() and len((fakes / "pids").read_text().split()) == 2)
        assert not no_process_left(fakes)
        started = supervisor.descendants(process.pid)
        process.send_signal(how)
        assert process.wait(60) == status
        assert wait_until(lambda: no_process_left(fakes)), "processes are left"
    finally:
        process.kill()
    assert wait_until(lambda: not any(map(alive, started))), "a supervisor is left"
    assert (output.read_text() if output.exists() else None) == earlier


def test_no_limit_is_heavier_than_any():
    assert serve.heaviest([(1.0, None), (None, 2), (None, 1)]) == (None, 2)
    assert serve.heaviest([(2.0, 64), (2.0, None), (1.0, None)]) == (2.0, None)


def test_metrics_are_summed_up_over_their_labels():
    text = '# TYPE a counter\na{b="1"} 2.0\na{b="2"} 3.5\nvllm:c 1e3\nbad line\nd{x="y z"} +Inf\n'
    assert server.parse_metrics(text) == {"a": 5.5, "vllm:c": 1000.0, "d": float("inf")}


TINY = Path(__file__).parents[2] / "examples" / "recall" / "checkpoint"


def test_vllms_server_and_client_get_what_was_asked_for():
    settings = ("--kv-cache-dtype", "fp8", "--no-prefix-caching", "--no-compile", "--vllm-args", '{"block_size": 64}')
    settings += ("--drafts", "2", "--decode-context-parallel-size", "2", "--tensor-parallel-size", "2")
    prompts = ("--input-len", "100", "--output-len", "7", "--concurrency", "3,5")
    given = parsed("serve", "--model", TINY, *settings, *prompts)
    plan = serve.plan_of(given)
    words = " ".join(serve.server_command(given, plan, "SPARSE_MLA", 123))
    wanted = "--port 123|--attention-backend SPARSE_MLA|--kv-cache-dtype fp8|--no-enable-prefix-caching|--block-size 64"
    wanted += '|--compilation-config {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}|--max-num-seqs 5'
    wanted += f"|--max-model-len {107 + serve.LENGTH_ROOM}|--decode-context-parallel-size 2"
    wanted += '|--speculative-config {"method": "mtp", "num_speculative_tokens": 2}'
    assert [part for part in wanted.split("|") if part not in words] == []
    words = " ".join(serve.client_command(given, (0.5, 3), 4, 123, Path("/r/x.json")))
    wanted = "--request-rate 0.5|--max-concurrency 3|--random-input-len 100|--random-output-len 7|--num-warmups 0"
    wanted += "|--ready-check-timeout-sec 0|--seed 4|--result-dir /r|--result-filename x.json|--ignore-eos"
    assert [part for part in wanted.split("|") if part not in words] == []
    case = serve.case_of(given, plan, (None, 3))
    assert (case["drafts"], case["decode_context_parallel_size"], case["tensor_parallel_size"]) == (2, 2, 2)


def test_what_is_not_given_is_left_to_vllm():
    arguments = vllm_options.arguments(vllm_options.settings(parsed("serve", "--model", TINY)), "B")
    assert arguments.keys() == {"attention_backend", "kv_cache_dtype", "tensor_parallel_size"}
    assert vllm_options.gpus(arguments) == 1 and vllm_options.gpus({**arguments, "data_parallel_size": 3}) == 3


BELOW_0 = ["--ttft-limit", "nan"], ["--request-rate", "0"]
TOO_LONG = ["--output-len", "2000"], ["--input-len", "5", "--max-model-len", "9"]


@pytest.mark.parametrize("arguments", [*BELOW_0, *TOO_LONG])
def test_wrong_arguments_are_refused(arguments, monkeypatch):
    monkeypatch.setattr(common, "collect", None)  # nothing is measured
    try:
        status = main(["serve", "--model", str(TINY), *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
