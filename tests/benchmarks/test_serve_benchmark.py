"""The benchmark of servers, with a server and a client that only look like vLLM's: what it makes of their numbers, what
it does when they fail, and that it leaves no process behind.
"""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from serving_benchmarks.run import serve, server, supervisor, vllm_options
from serving_benchmarks.run.processes import wait_until
from serving_benchmarks.run.workloads import Workload
from tests.benchmarks.test_supervisor import alive

WAIT_SECONDS = 60
SERVER = """
    import http.server, json, os, signal, sys, time
    port, notes, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # as a server that hangs
    if mode == "ends":
        raise RuntimeError("no such backend")
    if os.fork() == 0:
        os.setsid()  # as a worker in a session of its own
        worker = True
    else:
        worker = False
    with open(notes, "a") as file:
        file.write(f"{os.getpid()}\\n")
    if worker:
        time.sleep(1000)
    asked = 0
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            global asked
            asked += 1
            self.send_response(503 if mode == "sick" else 200)
            self.end_headers()
            self.wfile.write(f'''# HELP metrics
    vllm:num_preemptions_total{{engine="0"}} {3.0 * asked}
    vllm:prefix_cache_queries_total{{engine="0"}} {200.0 * asked}
    vllm:prefix_cache_hits_total{{engine="0"}} {50.0 * asked}
    vllm:kv_cache_usage_perc{{engine="0"}} 0.25
    vllm:request_success_total{{reason="stop"}} 1.0
    vllm:request_success_total{{reason="length"}} 2.0
    '''.replace("\\n    ", "\\n").encode())
            if mode == "dies" and asked > 2:
                os._exit(7)
            if mode == "killed" and asked > 2:
                print("WARNING 11-23 12:00:00 [a.py:1] errors like `OSError: too many open files`", flush=True)
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
            self.send_response(400 if mode in ("refuses", "mumbles") else 200)
            self.send_header("Content-Length", str(len(said) + 99 * (mode == "mumbles")))
            self.end_headers()
            self.wfile.write(said)
        def log_message(self, *_):
            pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
CLIENT = """
    import json, sys, time
    path, mode = sys.argv[1:]
    if mode == "fails":
        raise ValueError("no such dataset")
    if mode == "hangs":
        time.sleep(1000)
    if mode == "slow":
        time.sleep(2)
    json.dump({
        "date": "today", "model_id": "/a/folder", "duration": 2.0, "request_throughput": 1.5,
        "completed": 3, "failed": 1,
        "input_lens": [10, 10, 10, 10], "output_lens": [3, 3, 1, 0], "ttfts": [0.5, 1.5, 0.25, 0.0],
        "itls": [[0.1, 0.3], [0.1, 0.1], [], []], "errors": ["", "", "", "refused"], "generated_texts": ["a"] * 4,
    }, open(path, "w"))
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Takes the place of vLLM. A backend's name says how its server behaves."""
    for name, code in (("server", SERVER), ("client", CLIENT)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 4000}))
    (tmp_path / "pids").touch()
    patch(tmp_path, monkeypatch.setattr)
    return tmp_path


def patch(folder: Path, setattr, client: str = "works") -> None:
    def server_command(options, backend, port):
        return [sys.executable, str(folder / "server.py"), str(port), str(folder / "pids"), backend]

    def bench_command(options, load, seed, port, result):
        return [sys.executable, str(folder / "client.py"), str(result), client]

    setattr(serve, "server_command", server_command)
    setattr(serve, "bench_command", bench_command)
    setattr(serve, "METRICS_SECONDS", 0.01)
    setattr(server, "POLL_SECONDS", 0.02)
    setattr(serve, "serving", lambda *given, **more: server.serving(*given, **more, grace=0.1))


def no_process_left(folder: Path) -> bool:
    return not any(alive(int(line)) for line in (folder / "pids").read_text().split())


def run(folder: Path, *arguments: str) -> tuple[int, dict]:
    output = folder / "out.json"
    small = ("--input-len", "10", "--output-len", "3", "--num-prompts", "4", "--output", str(output))
    status = serve.main(["--model", str(folder), *small, *arguments])
    return status, json.loads(output.read_text())


def test_each_load_has_an_entry_made_of_what_the_client_saved(fakes, capsys):
    arguments = ("--request-rate", "1,2.5", "--concurrency", "8", "--ttft-limit", "1", "--tpot-limit", "0.25")
    status, report = run(fakes, "--backend", "works", *arguments)
    assert status == 0 and no_process_left(fakes) and (fakes / "pids").read_text()
    assert report["environment"]["benchmark"] == "serve"
    cases = [r["case"] for r in report["results"]]
    assert [(c["request_rate"], c["concurrency"], c["seed"]) for c in cases] == [(1.0, 8, 0), (2.5, 8, 1)]
    for result in report["results"]:
        assert (result["completed"], result["failed"], result["error"]) == (3, 1, None)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 7)
        assert result["requests_per_second"] == 1.5 and result["output_tokens_per_second"] == 3.5
        requests = result["requests"]
        assert requests["ttft_s"] == [0.5, 1.5, 0.25] and requests["output_tokens"] == [3, 3, 1]
        assert requests["tpot_s"] == [pytest.approx(0.2), pytest.approx(0.1), None]
        assert requests["e2e_s"] == pytest.approx([0.9, 1.7, 0.25])
        # of the four one was too late, and one was refused
        assert result["goodput"]["good"] == 2 and result["goodput"]["share"] == 0.5
        assert result["goodput"]["requests_per_second"] == 1.0
        assert result["bench"] == {
            "date": "today", "duration": 2.0, "request_throughput": 1.5, "completed": 3, "failed": 1
        }  # fmt: skip
        assert result["cache"] == {"peak_usage": 0.25, "prefix_hit_share": 0.25}
        assert result["preemptions"] > 0 == result["preemptions"] % 3
    shown, said = capsys.readouterr()
    assert "2.5 requests/s, 8 in flight" in shown and "1.00/s, 50 %" in shown
    numbers = "1.50 requests/s, 3.5 output tokens/s, TTFT p50 500.0 ms, TPOT p50 150.0 ms"
    lines = said.splitlines()
    assert lines.pop(1).startswith("works: healthy after ")
    assert lines[: lines.index(f"written to {fakes / 'out.json'}")] == [
        "works: starting the server",
        "works: rehearsal: 2.5 requests/s, 8 in flight",
        "works: load 1 of 2: 1 requests/s, 8 in flight",
        f"works, 1 requests/s, 8 in flight: {numbers}",
        "works: load 2 of 2: 2.5 requests/s, 8 in flight",
        f"works, 2.5 requests/s, 8 in flight: {numbers}",
    ]


@pytest.mark.parametrize(
    ("more", "rehearsed"), [((), [((2.5, 8), 4)]), (("--rehearsal",), [((2.5, 8), 4)]), (("--no-rehearsal",), [])]
)
def test_the_heaviest_load_is_run_once_before_any_counts_with_prompts_of_its_own(fakes, monkeypatch, more, rehearsed):
    asked = []
    real = serve.bench_command

    def bench_command(options, load, seed, port, result):
        asked.append((load, seed))
        return real(options, load, seed, port, result)

    monkeypatch.setattr(serve, "bench_command", bench_command)
    status, report = run(fakes, "--backend", "works", "--request-rate", "2.5,1", "--concurrency", "8,4", *more)
    assert status == 0 and report["environment"]["settings"]["rehearsal"] == bool(rehearsed)
    assert asked == [*rehearsed, ((2.5, 8), 0), ((2.5, 4), 1), ((1.0, 8), 2), ((1.0, 4), 3)]
    assert [result["case"]["seed"] for result in report["results"]] == [0, 1, 2, 3]


def test_the_server_is_looked_at_all_through_a_load(fakes, monkeypatch):
    """The fake's cache is full at one look alone, the 10th."""
    looks = []

    def metrics(self):
        looks.append(1.0 if len(looks) == 9 else 0.25)
        return {"vllm:kv_cache_usage_perc": looks[-1]}

    monkeypatch.setattr(server.Server, "metrics", metrics)
    patch(fakes, monkeypatch.setattr, client="slow")
    status, report = run(fakes, "--backend", "works", "--no-rehearsal")
    assert status == 0 and len(looks) > 10 and report["results"][0]["cache"]["peak_usage"] == 1.0


def test_a_server_is_taken_through_sizes_of_steps_before_anything_else(fakes, monkeypatch, capsys):
    sizes = [Workload([[5]], [2]), Workload([[6, 7], [8], [9]], [1, 3, 2])]
    monkeypatch.setattr(serve, "sizes_of", lambda options: sizes if options.size_warmup else [])
    asked_before = []
    real = serve.bench_command

    def bench_command(*given):
        asked_before.append(len((fakes / "pids.asked").read_text().splitlines()))
        return real(*given)

    monkeypatch.setattr(serve, "bench_command", bench_command)
    status, report = run(fakes, "--backend", "works", "--size-warmup")
    assert status == 0 and report["environment"]["settings"]["size_warmup"] is True
    asked = [json.loads(line) for line in (fakes / "pids.asked").read_text().splitlines()]
    assert asked_before == [4, 4], "before the rehearsal and the load"
    assert {path for path, _ in asked} == {"/v1/completions"}
    found = [(wanted["prompt"], wanted["max_tokens"]) for _, wanted in asked]
    assert found[0] == ([5], 2) and sorted(found[1:]) == [([6, 7], 1), ([8], 3), ([9], 2)]
    assert all(wanted["ignore_eos"] and wanted["model"] == str(fakes) for _, wanted in asked)
    said = capsys.readouterr().err
    assert said.index("healthy after") < said.index("warm-up of step sizes") < said.index("rehearsal")


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("refuses", 'a request was refused: HTTP Error 400: Bad Request {"error": "too long"}'),
        ("mumbles", "a request was refused: HTTP Error 400: Bad Request"),
        ("breaks", "the server ended"),
    ],
)
def test_a_server_that_fails_in_its_warm_up_is_said_to(fakes, backend, why):
    status, report = run(fakes, "--backend", f"{backend},works", "--size-warmup")
    assert status == 1 and no_process_left(fakes)
    failed, works = report["results"]
    assert failed["error"].startswith(why) and works["error"] is None


@pytest.mark.parametrize(
    ("arguments", "most", "in_flight"),
    [
        ((), 100 * 10, 100),
        (("--concurrency", "1,3"), 3 * 10, 3),
        (("--concurrency", "3", "--max-num-seqs", "2"), 2 * 10, 2),
        (("--max-num-batched-tokens", "50"), 50, 100),
        (("--num-prompts", "5000"), serve.MOST_WARMED * 10, serve.MOST_WARMED),
        (("--no-size-warmup",), None, None),
        (("--no-rehearsal",), None, None),
        (("--no-rehearsal", "--size-warmup"), 100 * 10, 100),
    ],
)
def test_sizes_of_steps_are_those_that_the_loads_need(fakes, monkeypatch, arguments, most, in_flight):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    small = ("--input-len", "10", "--output-len", "3", "--num-prompts", "100")
    given = serve.parse_arguments(["--model", str(fakes), *small, *arguments])
    sizes = serve.sizes_of(given)
    assert given.size_warmup is (most is not None) is bool(sizes)
    if sizes:
        *prompts, decode = [requests.prompts[len(requests) > 1 :] for requests in sizes]
        assert sum(map(len, prompts[-1])) == most and len(decode) == in_flight
        assert max(requests.longest for requests in sizes) <= given.max_model_len


@pytest.mark.parametrize(("more", "sizes"), [((), False), (("--size-warmup",), True)])
def test_without_a_gpu_sizes_of_steps_are_warmed_up_only_if_that_is_asked_for(fakes, monkeypatch, more, sizes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = serve.parse_arguments(["--model", str(fakes), *more])
    assert given.size_warmup is sizes is bool(serve.sizes_of(given))


def test_no_limit_is_heavier_than_any():
    assert serve.heaviest([(1.0, None), (None, 2), (None, 1)]) == (None, 2)
    assert serve.heaviest([(2.0, 64), (2.0, None), (1.0, None)]) == (2.0, None)


@pytest.mark.parametrize(
    ("limits", "good"), [((None, None), None), ((1.0, None), 2), ((None, 0.15), 2), ((0.4, 0.15), 1), ((0.1, 0.1), 0)]
)
def test_goodput_counts_those_that_keep_to_all_limits(limits, good):
    bench = {"duration": 2.0, "input_lens": [1] * 4, "output_lens": [3, 3, 1, 0], "errors": ["", "", "", "refused"]}
    bench |= {"ttfts": [0.5, 1.5, 0.25, 0.0], "itls": [[0.1, 0.3], [0.1, 0.1], [], []]}
    goodput = serve.entry(bench, *limits)["goodput"]
    assert goodput is None if good is None else goodput["good"] == good


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("ends", "the server ended before it was ready: RuntimeError: no such backend"),
        ("sick", "the server was not ready after 2 s"),
        ("dies", "the server ended"),
        ("killed", "the server ended: killed by signal 9; it said last: WARNING 11-23"),
    ],
)
def test_a_backend_whose_server_fails_is_said_to_and_the_others_go_on(fakes, backend, why, capsys):
    arguments = ("--concurrency", "1,2", "--ready-seconds", "2")
    status, report = run(fakes, "--backend", f"{backend},works", *arguments)
    assert status == 1 and no_process_left(fakes)
    found = [(r["backend"], r["case"]["concurrency"], r["error"] is None) for r in report["results"]]
    assert found[-2:] == [("works", 1, True), ("works", 2, True)] and [f[:2] for f in found[:2]] == [
        (backend, 1),
        (backend, 2),
    ]
    assert report["results"][1]["error"].startswith(why) and why in capsys.readouterr().err


def test_a_client_that_fails_is_said_to(fakes, monkeypatch, capsys):
    patch(fakes, monkeypatch.setattr, client="fails")
    status, report = run(fakes, "--backend", "works")
    assert status == 1 and no_process_left(fakes)
    assert report["results"][0]["error"] == "vllm bench serve failed: ValueError: no such dataset"


LOADED, WARMING_UP = ["--backend", "works"], ["--backend", "hangs", "--size-warmup"]
STOPPED = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import test_serve_benchmark as fakes
from pathlib import Path
from serving_benchmarks.run import serve
fakes.patch(Path({folder!r}), setattr, client="hangs")
files = ["--logs", {folder!r} + "/logs", "--output", {output!r}]
sys.exit(serve.main(["--model", {folder!r}, *{arguments!r}, "--no-rehearsal", *files]))
"""


@pytest.mark.usefixtures("children_hear_ctrl_c")
@pytest.mark.parametrize(
    ("how", "status", "earlier", "arguments"),
    [
        (signal.SIGINT, 130, "results of yesterday", LOADED),
        (signal.SIGTERM, 143, None, LOADED),
        (signal.SIGKILL, -9, None, LOADED),
        (signal.SIGINT, 130, None, WARMING_UP),
        (signal.SIGTERM, 143, None, WARMING_UP),
    ],
)
def test_no_process_and_no_empty_file_is_left_when_it_is_stopped(fakes, how, status, earlier, arguments):
    here, output = Path(__file__).parent, fakes / "out.json"
    if earlier is not None:
        output.write_text(earlier)
    code = STOPPED.format(
        tests=str(here.parent), here=str(here), folder=str(fakes), output=str(output), arguments=arguments
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        busy = fakes / ("logs/works-0.log" if arguments == LOADED else "pids.asked")  # the client's log
        assert wait_until(lambda: busy.exists() and len((fakes / "pids").read_text().split()) == 2, WAIT_SECONDS)
        assert not no_process_left(fakes)
        started = supervisor.descendants(process.pid)
        process.send_signal(how)
        assert process.wait(WAIT_SECONDS) == status
        assert wait_until(lambda: no_process_left(fakes), WAIT_SECONDS), "processes are left"
    finally:
        process.kill()
    assert wait_until(lambda: not any(map(alive, started)), WAIT_SECONDS), "a supervisor is left"
    assert (output.read_text() if output.exists() else None) == earlier


def test_metrics_are_summed_up_over_their_labels():
    text = '# TYPE a counter\na{b="1"} 2.0\na{b="2"} 3.5\nvllm:c 1e3\nbad line\nd{x="y z"} +Inf\n'
    assert server.parse_metrics(text) == {"a": 5.5, "vllm:c": 1000.0, "d": float("inf")}


def options(*more: str):
    return serve.parse_arguments(["--model", str(Path(__file__).parents[2] / "examples/recall/checkpoint"), *more])


def test_vllms_server_and_client_get_what_was_asked_for():
    settings = ("--kv-cache-dtype", "fp8", "--no-prefix-caching", "--no-compile", "--vllm-args", '{"block_size": 64}')
    prompts = ("--input-len", "100", "--shared-prefix", "30", "--output-len", "7", "--concurrency", "3,5")
    given = options(*settings, *prompts)
    words = " ".join(serve.server_command(given, "SPARSE_MLA", 123))
    for part in (
        "--port 123",
        "--attention-backend SPARSE_MLA",
        "--kv-cache-dtype fp8",
        "--no-enable-prefix-caching",
        '--compilation-config {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
        "--block-size 64",
        f"--max-model-len {107 + serve.LENGTH_ROOM}",
        "--max-num-seqs 5",
    ):
        assert part in words
    words = " ".join(serve.bench_command(given, (0.5, 3), 4, 123, Path("/r/x.json")))
    for part in (
        "--request-rate 0.5",
        "--max-concurrency 3",
        "--random-input-len 70",
        "--random-prefix-len 30",
        "--random-output-len 7",
        "--num-warmups 0",
        "--ready-check-timeout-sec 0",
        "--seed 4",
        "--result-dir /r",
        "--result-filename x.json",
        "--ignore-eos",
    ):
        assert part in words
    assert "--request-rate inf" in " ".join(serve.bench_command(given, (None, None), 0, 1, Path("/r/x.json")))


def test_what_is_not_given_is_left_to_vllm():
    arguments = vllm_options.arguments(vllm_options.settings(options()), "B")
    assert arguments.keys() == {"attention_backend", "kv_cache_dtype", "tensor_parallel_size", "max_model_len"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--request-rate", "0"], "must be numbers above 0, such as 0.5,1,2; got '0'"),
        (["--request-rate", "inf"], "must be numbers above 0"),
        (["--ttft-limit", "0"], "--ttft-limit must be a number above 0; got 0"),
        (["--logs", __file__], "--logs must be a folder, or the name of a new one"),
        (["--ttft-limit", "nan"], "--ttft-limit must be a number above 0; got nan"),
        (["--tpot-limit", "inf"], "--tpot-limit must be a number above 0; got inf"),
        (["--shared-prefix", "9", "--input-len", "9"], "--shared-prefix must be less than --input-len, 9; got 9"),
        (["--output-len", "2000"], "--max-model-len must be 3024, --input-len and --output-len, to 2048"),
        (["--input-len", "5", "--max-model-len", "9"], "--max-model-len must be 133"),
        (["--backend", ","], "--backend must name one or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        options(*arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err
