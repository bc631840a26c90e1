"""A server that looks like vLLM's. The attention backend says how it fails."""

import http.server
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

given = dict(itertools.pairwise(sys.argv))
mode, folder, asked = given["--attention-backend"], Path(os.environ["FAKE_VLLM"]), 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        if mode == "SILENT" and (folder / "SILENT").exists():
            time.sleep(1000)
        self.send_response(503 if mode == "SICK" else 200)
        self.end_headers()
        if mode == "SICK":
            return
        for name, count in (("num_preemptions", 3), ("prefix_cache_queries", 200), ("prefix_cache_hits", 50)):
            self.wfile.write(f'vllm:{name}_total{{engine="0"}} {count * asked}.0\n'.encode())
        self.wfile.write(b'vllm:generation_tokens_total{engine="0"} 5.0\n')
        self.wfile.write(f'vllm:num_requests_running{{engine="0"}} {2.0 * (mode == "STUCK")}\n'.encode())
        self.wfile.write(b'vllm:cache_config_info{block_size="64",mamba_block_size="8",num_gpu_blocks="10"} 1.0\n')
        if mode == "KILLED" and asked > 1:
            os.kill(os.getpid(), 9)

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "BREAKS":
            os._exit(7)
        with (folder / "warmed").open("a") as file:
            file.write(json.dumps([wanted["prompt"], wanted["max_tokens"]]) + "\n")
        if mode == "HANGS":
            (folder / "hangs").touch()
            time.sleep(1000)
        self.send_response(400 if mode == "LIMITS" else 200)
        self.end_headers()
        first = os.getpid() if mode == "DIFFERS" else int(self.headers.get("X-data-parallel-rank", 0)) // 3
        tokens = list(range(first, first + wanted["max_tokens"]))
        self.wfile.write(b"too long" if mode == "LIMITS" else json.dumps({"choices": [{"token_ids": tokens}]}).encode())

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    if mode == "ENDS":
        raise RuntimeError("no such backend")
    (folder / "server").write_text(" ".join(sys.argv))
    with (folder / "starts").open("a") as file:
        file.write(f"{mode}\n")
    if mode == "SICK":
        print("compiled: 1 of 9\rcompiled: 7 of 9\n", flush=True)
    worker = os.fork()
    if not worker:
        os.setsid()  # as a worker in a session of its own
        time.sleep(1000)
    (folder / "worker").write_text(str(worker))
    if mode == "LOSES_RANK":
        print("EngineDeadError: a rank has ended", flush=True)  # as vLLM does, which watches its workers
        threading.Thread(target=lambda: os.waitpid(worker, 0) and os._exit(1), daemon=True).start()
    http.server.ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
