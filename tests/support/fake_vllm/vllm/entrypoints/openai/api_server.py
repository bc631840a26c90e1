"""A server that looks like vLLM's. The attention backend says how it fails."""

import http.server
import itertools
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
        if mode == "KILLED" and asked > 1:
            os.kill(os.getpid(), 9)
        self.send_response(503 if mode == "SICK" else 200)
        self.end_headers()

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
