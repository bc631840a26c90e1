"""Fetches the kernels of FlashMLA and FlashAttention 3 for `kernels`: 700 MB of downloads, of which 30 MB are kept.

They are libraries inside vLLM's wheels, which pip downloads. FOLDER/vllm-VERSION/ then holds each library, compressed.
The folder can be copied to a machine without a network; `kernels --peers FOLDER` uses it there, without vLLM.
FlashInfer is installed with pip instead: see peer_kernels. SGLang's opt-in kernel Q8KV8 is compiled here.
"""

import argparse
import ctypes
import hashlib
import importlib.util
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from serving_benchmarks import options as opt
from serving_benchmarks.results.file import replace

VERSIONS = ("0.23.0", "0.33.0")  # the newest built for torch 2.11, and the newest
LIBRARIES = {"flashmla": "_flashmla_C.abi3.so", "flashmla_fp8": "_flashmla_extension_C.abi3.so"}
LIBRARIES |= {"fa3": "vllm_flash_attn/_vllm_fa3_C.abi3.so"}  # path of each peer's library in the package vllm
Q8KV8 = "kernels/jit/csrc/sparse_mla_q8kv8_prefill_sm90"  # in the package sglang
FLAGS = "-O3 -std=c++17 -arch=sm_90a --expt-relaxed-constexpr --use_fast_math -DNDEBUG -DCUTE_USE_PACKED_TUPLE=1"
FLAGS += " -DCUTLASS_ENABLE_TENSOR_CORE_MMA=1 -shared -Xcompiler -fPIC"  # but for the last three SGLang's
CUTLASS = "flashinfer/data/cutlass/include", "cutlass_library/source/include"
CALL = """#include "kernel.cuh"
extern "C" void q8kv8(const uint8_t* q, const uint8_t* rows, int* indices, const float* scales, void* out, float* lse,
                      int tokens, int heads, int row_count, int topk, float scale_log2, cudaStream_t stream) {
  SparseMlaQ8Kv8PrefillParams call{};
  call.s_q = tokens, call.s_kv = row_count, call.h_q = heads, call.h_kv = 1, call.topk = topk, call.d_v = 512;
  call.d_qk = call.stride_q_h_q = call.stride_kv_h_kv = 576, call.stride_kv_s_kv = 576, call.stride_q_s_q = heads * 576;
  call.q = q, call.kv = rows, call.indices = indices, call.q_scale_ptr = scales, call.kv_scale_ptr = scales + 1;
  call.out = static_cast<cutlass::bfloat16_t*>(out), call.lse = lse, call.max_logits = lse + tokens * heads;
  call.stride_indices_s_q = call.stride_indices_h_kv = topk, call.sm_scale_div_log2 = scale_log2, call.stream = stream;
  sm90::fwd::run_sparse_mla_q8kv8_prefill_kernel<576, false, false>(call);
}
"""


class PeerError(Exception):
    """A peer is missing, or a file is not what it should be. The text says so in one line."""


def download(version: str, folder: Path) -> Path:
    """The wheel of this version of vLLM for Python 3.12 on Linux, x86-64, whatever Python runs here."""
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"vllm=={version}"]
    words += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3"]
    words += [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 31, 35)]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    wheels = sorted(folder.glob(f"vllm-{version}-*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip() or "pip downloaded no wheel").splitlines()[-1]
        raise PeerError(f"vllm {version} could not be downloaded: {last}")
    return wheels[0]


def pack(wheel: Path, folder: Path) -> list[Path]:
    """Copies the libraries from a wheel of vLLM to folder/vllm-VERSION/, compressed."""
    target = folder / "-".join(wheel.name.split("-")[:2])
    try:
        with zipfile.ZipFile(wheel) as archive:
            libraries = [archive.read(f"vllm/{path}") for path in LIBRARIES.values()]
    except (zipfile.BadZipFile, KeyError) as error:
        raise PeerError(f"{wheel.name} is broken, or no wheel of vllm for CUDA: {error}") from error
    target.mkdir(parents=True, exist_ok=True)
    packed = [target / f"{Path(path).name}.xz" for path in LIBRARIES.values()]
    for path, library in zip(packed, libraries, strict=True):
        path.write_bytes(lzma.compress(library, preset=1))
    return packed


def find(name: str, folder: Path, version: str) -> Path:
    """The library of a peer, in a folder that `pack` filled (unpacked if need be) or in an installed package vllm."""
    inside = LIBRARIES[name]
    for library in (folder / inside, folder / f"vllm-{version}" / Path(inside).name):
        if library.is_file():
            return library
        packed = library.with_name(library.name + ".xz")
        if packed.is_file():
            content = packed.read_bytes()
            unpacked = Path(tempfile.gettempdir()) / f"peers-{hashlib.sha256(content).hexdigest()[:16]}" / library.name
            if not unpacked.is_file():
                unpacked.parent.mkdir(exist_ok=True)
                replace(unpacked, lzma.decompress(content))
            return unpacked
    raise PeerError(f"{folder} has no {Path(inside).name} of vllm {version}; the command `peers` fetches it")


def q8kv8() -> ctypes.CDLL:
    """SGLang's kernel, compiled from the installed package. It ends the process if its arguments are wrong."""
    package = importlib.util.find_spec("sglang")
    folder = Path((package and package.origin) or "").parent / Q8KV8
    roots = [*map(Path, sys.path), *Path(__file__).parents[2].glob("build/nvidia-cutlass-*")]
    headers = [root / inside for root in roots for inside in CUTLASS if (root / inside / "cutlass/cutlass.h").is_file()]
    if not headers or not folder.is_dir():
        raise PeerError("it takes: pip install --no-deps sglang==0.5.23 nvidia-cutlass==4.2.0.0")
    content = "".join([CALL, FLAGS, *(path.read_text() for path in sorted(folder.iterdir()))]).encode()
    compiled = Path(tempfile.gettempdir()) / f"peers-{hashlib.sha256(content).hexdigest()[:16]}" / "q8kv8.so"
    if not compiled.is_file():
        compiled.parent.mkdir(exist_ok=True)
        words = [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc", *FLAGS.split(), "-x", "cu", "-"]
        words += [f"-I{folder}", f"-I{headers[0]}", "-o", str(compiled)]
        done = subprocess.run(words, input=CALL, capture_output=True, text=True)
        if done.returncode:
            raise PeerError(f"nvcc failed: {(done.stderr.strip() or 'it said nothing').splitlines()[0]}")
    return ctypes.CDLL(str(compiled))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=opt.new_folder, metavar="FOLDER", help="where the libraries go")
    opt.add_list(parser, "--vllm", str, "versions", ",".join(VERSIONS))
    parser.add_argument("--wheels", type=Path, nargs="+", metavar="FILE", help="wheels of vllm that are here already")


def run(options: argparse.Namespace) -> int:
    try:
        with tempfile.TemporaryDirectory() as downloads:
            for wheel in options.wheels or (download(version, Path(downloads)) for version in options.vllm):
                for packed in pack(wheel, options.folder):
                    print(f"{packed.stat().st_size / 2**20:6.1f} MiB  {packed}")
    except (PeerError, OSError) as error:
        raise opt.Refused(str(error)) from error
    return 0
