"""A server that looks like vLLM's. The attention backend says how it fails."""

import http.server
import itertools
import json
import os
import sys
import time
from pathlib import Path

given = dict(itertools.pairwise(sys.argv))
mode, folder, asked = given["--attention-backend"], Path(os.environ["FAKE_VLLM"]), 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        self.send_response(503 if mode == "SICK" else 200)
        self.end_headers()
        for name, count in (("num_preemptions", 3), ("prefix_cache_queries", 200), ("prefix_cache_hits", 50)):
            self.wfile.write(f'vllm:{name}_total{{engine="0"}} {count * asked}.0\n'.encode())
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
        self.wfile.write(b"too long")

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    if mode == "ENDS":
        raise RuntimeError("no such backend")
    (folder / "server").write_text(" ".join(sys.argv))
    if not os.fork():
        os.setsid()  # as a worker in a session of its own
        time.sleep(1000)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
