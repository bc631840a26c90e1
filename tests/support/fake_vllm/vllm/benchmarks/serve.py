"""vLLM's client, as far as what it saves."""

import json
import os
import time
from pathlib import Path

SAVED = {
    **{"date": "today", "model_id": "/a/folder", "duration": 2.0, "completed": 3, "failed": 1},
    **{"input_lens": [10, 10, 10, 10], "output_lens": [3, 3, 1, 0], "ttfts": [0.5, 1.5, 0.25, 0.0]},
    **{"itls": [[0.1, 0.3], [0.1, 0.1], [], []], "errors": ["", "", "", "refused"], "generated_texts": ["a"] * 4},
}


def add_cli_args(parser):
    for name in ("request-rate", "max-concurrency", "seed", "result-dir", "result-filename", "random-input-len"):
        parser.add_argument(f"--{name}")


def main(given):
    folder = Path(os.environ["FAKE_VLLM"])
    with (folder / "loads").open("a") as file:
        length = int(given.random_input_len)
        file.write(json.dumps([given.request_rate, given.max_concurrency, given.seed, length]) + "\n")
    mode = given.result_filename.split("-")[0]
    if mode == "NO_DATA":
        raise ValueError("no such dataset")
    if mode == "LOSES_RANK":
        os.kill(int((folder / "worker").read_text()), 9)
    if mode in ("SLOW", "LOSES_RANK"):
        (folder / "hangs").touch()
        time.sleep(1000)
    (Path(given.result_dir) / given.result_filename).write_text(json.dumps(SAVED))
