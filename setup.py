"""Builds the one shared library, and tags the wheel for every Python.

The library registers its ops through torch's stable ABI: one build serves every Python, and every torch that
pyproject.toml allows. ninja compiles what has changed.

Environment: MLA_BACKEND_CUDA=1 makes a missing nvcc an error, =0 leaves CUDA out, unset takes nvcc if it is there.
CUDA_HOME says where nvcc is. MLA_BACKEND_CUDA_ARCHS (default "80 89 90a 100 120") says for which GPUs. CUTLASS's
headers come from the nvidia-cutlass wheel: the installed one, or else one that is unpacked into build/.
MLA_BACKEND_SANITIZE=1 builds the CPU kernels with AddressSanitizer and UBSan; MLA_BACKEND_RACECHECK=1 builds CUDA
kernels whose barriers compute-sanitizer's racecheck can follow. Each has a build folder of its own.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).parent
TORCH_NEEDED = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
CUDA_ARCHS = "80 89 90a 100 120"
CUTLASS = "nvidia-cutlass==4.2.0.0"  # its headers, needed only where nvcc is, and only to build
CUTLASS_HEADERS = "cutlass_library/source/include"
CUTLASS_FOLDER = ROOT / "build" / CUTLASS.replace("==", "-")

WARNINGS = "-Wall -Wextra -Wno-psabi -Wno-unused-parameter"
CXX_FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -MMD -MF $out.d"
AVX512 = "-mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl"
# GCC 12's own headers leave a value undefined on purpose
AVX512_BF16 = f"{AVX512} -mavx512vbmi -mavx512bf16 -Wno-maybe-uninitialized"
# Extra flags of single files. Which of the instruction sets' kernels run is chosen when they do.
FILE_FLAGS = {
    "isa_portable": "-ffp-contract=fast",
    "isa_avx2": "-ffp-contract=fast -mavx2 -mfma",
    "isa_avx512": f"-ffp-contract=fast {AVX512}",
    "isa_avx512_bf16": f"-ffp-contract=fast {AVX512_BF16}",
    "isa_amx_bf16": f"-ffp-contract=fast {AVX512_BF16} -mamx-tile -mamx-bf16",
}


def find_installed(file: str) -> Path | None:
    """Where a file of an installed package is. pip's isolated build environment hides the packages of the environment
    that is being installed into from `import`, but not from the interpreter's own installation paths."""
    folders = [Path(p) for p in (*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))]
    return next((p / file for p in folders if (p / file).is_file()), None)


def find_torch() -> Path:
    """The torch that the library will be used with."""
    found = find_installed("torch/version.py")
    if found is None:
        raise SetupError(
            "mla-backend is built against the torch it will run with, and none is installed here. "
            f"Install torch {TORCH_NEEDED} or newer first, then try again (outside of pip: without build isolation)."
        )
    found = found.parent
    if release(torch_version(found)) < release(TORCH_NEEDED):
        raise SetupError(f"mla-backend needs torch {TORCH_NEEDED} or newer, found {torch_version(found)} in {found}.")
    return found


def torch_version(torch: Path) -> str:
    return re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())[1]


def release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def find_cutlass() -> Path | None:
    """The folder of CUTLASS's headers."""
    header = find_installed(f"{CUTLASS_HEADERS}/cutlass/cutlass.h")
    unpacked = CUTLASS_FOLDER / CUTLASS_HEADERS
    return header.parent.parent if header else unpacked if unpacked.is_dir() else None


def find_pip() -> Path | None:
    """The folder of pip, which Python can run."""
    found = find_installed("pip/__main__.py")
    return found.parent if found else None


def download_cutlass() -> None:
    """Unpacks the headers into CUTLASS_FOLDER. The wheel is not installed, as it requires packages that nobody uses
    here. Does nothing where there is no pip, or where it fails."""
    pip = find_pip()
    if pip is None:
        return
    CUTLASS_FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CUTLASS_FOLDER.parent) as folder:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--dest", folder]
        if subprocess.run([sys.executable, pip, "download", *options, CUTLASS]).returncode == 0:
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as files:
                headers = [name for name in files.namelist() if name.startswith(CUTLASS_HEADERS)]
                files.extractall(Path(folder) / "unpacked", headers)
            (Path(folder) / "unpacked").rename(CUTLASS_FOLDER)


def find_nvcc() -> Path | None:
    wanted = os.environ.get("MLA_BACKEND_CUDA")
    if wanted not in (None, "", "0", "1"):
        raise SetupError(f"MLA_BACKEND_CUDA is 0, 1 or unset, not {wanted!r}.")
    if wanted == "0" or sanitize():
        return None
    home = os.environ.get("CUDA_HOME")
    found = Path(home) / "bin" / "nvcc" if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    if found.is_file():
        return found.resolve()
    if wanted == "1":
        raise SetupError(
            f"MLA_BACKEND_CUDA=1, but there is no nvcc ({found} does not exist). "
            "Install the CUDA toolkit or set CUDA_HOME; MLA_BACKEND_CUDA=0 builds for the CPU alone."
        )
    return None


def sanitize() -> bool:
    return os.environ.get("MLA_BACKEND_SANITIZE") == "1"


def racecheck() -> bool:
    return os.environ.get("MLA_BACKEND_RACECHECK") == "1"


def ask(*command: object) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True).stdout


def find_cuda_home(nvcc: Path) -> Path:
    """The folder with include/ and lib64/, which is not always nvcc's parent (it may be a wrapper)."""
    top = re.search(
        r"TOP=(.*)", subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    )
    return Path(top[1].strip()).resolve() if top else nvcc.parent.parent


def escaped(path: Path) -> str:
    """A path as ninja wants it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


@dataclass
class Tools:
    """What builds the library, and for which GPUs."""

    torch: Path
    cxx: str
    nvcc: Path | None
    nvcc_release: str
    cutlass: Path | None
    archs: list[str]
    x86: bool

    @property
    def hopper(self) -> list[str]:
        return [arch for arch in self.archs if arch == "90a"]


def find_tools() -> Tools:
    """Raises SetupError for what is missing."""
    torch, nvcc = find_torch(), find_nvcc()
    cxx = os.environ.get("CXX", "g++")
    if not shutil.which(shlex.split(cxx)[0]):
        raise SetupError(f"mla-backend needs a C++17 compiler; there is no {cxx}. Install g++, or set CXX.")
    archs = (os.environ.get("MLA_BACKEND_CUDA_ARCHS") or CUDA_ARCHS).split() if nvcc else []
    if wrong := [arch for arch in archs if not re.fullmatch(r"\d+[af]?", arch)]:
        raise SetupError(f"MLA_BACKEND_CUDA_ARCHS is a list like {CUDA_ARCHS!r}; {wrong[0]!r} is no architecture.")
    if nvcc and not find_cutlass():
        download_cutlass()
    cutlass = find_cutlass() if nvcc else None
    if nvcc and not cutlass:
        raise SetupError(
            f"The CUDA kernels need CUTLASS's headers. Install them with: pip install --no-deps {CUTLASS}; "
            "MLA_BACKEND_CUDA=0 builds for the CPU alone."
        )
    release = re.search(r"release ([\d.]+)", ask(nvcc, "--version"))[1] if nvcc else ""
    return Tools(torch, cxx, nvcc, release, cutlass, archs, platform.machine() in ("x86_64", "AMD64"))


def write_build_info(folder: Path, version: str, tools: Tools) -> None:
    """What the library says of itself."""
    info = {
        "VERSION": version,
        "TORCH": torch_version(tools.torch),
        "TORCH_TARGET": TORCH_NEEDED,
        "COMPILER": ask(*shlex.split(tools.cxx), "--version").splitlines()[0].replace('"', "'"),
        "NVCC": tools.nvcc_release,
        "CUDA_ARCHS": " ".join(tools.archs),
    }
    write_if_changed(folder / "build_info.h", "".join(f'#define MLA_{k} "{v}"\n' for k, v in info.items()))


def quoted(path: object) -> str:
    """A path for the shell, and for ninja, which reads it first. Both take a path with a space for two."""
    return shlex.quote(str(path)).replace("$", "$$")


def rules(tools: Tools) -> list[str]:
    """Of ninja: how to compile and link."""
    csrc, torch, cutlass = (quoted(path) for path in (ROOT / "csrc", tools.torch, tools.cutlass or ""))
    common = f"-I{csrc} -I{csrc}/include"
    host = (
        "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
        if sanitize()
        else "-O3"
    )
    host += " -ffp-contract=off"  # the same bits on every CPU; files of an instruction set have flags of their own
    host += " -DMLA_X86" if tools.x86 else ""
    libraries = f"-L{torch}/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10"
    smaller = ""
    if tools.nvcc:
        cuda = quoted(find_cuda_home(tools.nvcc))
        host += f" -DMLA_CUDA -I{cuda}/include"
        libraries += f" -L{cuda}/lib64 -lcudart_static -ldl -lrt -lpthread"
        if int(tools.nvcc_release.split(".")[0]) >= 13:
            smaller = "--compress-mode=size"  # a fifth of the library's size; older releases have no such option
    return [
        f"cxx = {tools.cxx}",
        f"nvcc = {tools.nvcc}",
        "rule cxx",
        f"  command = $cxx {CXX_FLAGS} {WARNINGS} {common} {host} $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule cuda",
        f"  command = $nvcc -std=c++17 -O3 -DNDEBUG --threads 2 -lineinfo {smaller} -Xcompiler "
        f"-fPIC,-fvisibility=hidden {common} -isystem {cutlass} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        f"  command = $cxx -shared {host} -o $out $in {libraries}",
        "  description = $out",
    ]


def sources(tools: Tools) -> list[Path]:
    """Of what these tools can build."""
    csrc = ROOT / "csrc"
    found = sorted((csrc / "bindings").glob("*.cpp")) + sorted((csrc / "cpu").rglob("*.cpp"))
    found += sorted((csrc / "cuda").rglob("*.cu")) if tools.nvcc else []
    for_x86 = FILE_FLAGS.keys() - {"isa_portable"}
    return [s for s in found if (tools.x86 or s.stem not in for_x86) and (tools.hopper or "sm90" not in s.parts)]


def flags_of(source: Path, tools: Tools) -> str:
    """Those of one file."""
    if source.suffix == ".cu":  # files under sm90 use instructions of that architecture alone
        archs = tools.hopper if "sm90" in source.parts else tools.archs
        flags = " ".join(f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in archs)
        flags += " -DMLA_CUDA_SM90A" if tools.hopper else ""
        return flags + (" -DMLA_RACECHECK" if racecheck() else "")
    if source.parent.name == "bindings":  # build_info.h lies where ninja runs
        stable = "0x{:02x}{:02x}000000000000".format(*release(TORCH_NEEDED))
        return f"-isystem {quoted(tools.torch)}/include -DTORCH_TARGET_VERSION={stable} -DUSE_CUDA -I."
    return FILE_FLAGS.get(source.stem, "")


def write_ninja(folder: Path, version: str) -> None:
    """folder/build.ninja, which makes folder/libmla_backend.so."""
    tools = find_tools()
    print(
        f"mla-backend: torch {torch_version(tools.torch)}, "
        + (
            f"CUDA {tools.nvcc_release} for sm_{', sm_'.join(tools.archs)}"
            if tools.nvcc
            else "CPU only (no nvcc, or CUDA switched off)"
        )
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_build_info(folder, version, tools)
    lines, objects = rules(tools), []
    for source in sources(tools):
        objects.append(f"{source.relative_to(ROOT / 'csrc').with_suffix('').as_posix().replace('/', '.')}.o")
        lines += [
            f"build {objects[-1]}: {'cuda' if source.suffix == '.cu' else 'cxx'} {escaped(source)}",
            f"  flags = {flags_of(source, tools)}",
        ]
    lines += [f"build libmla_backend.so: link {' '.join(objects)}", "default libmla_backend.so", ""]
    write_if_changed(folder / "build.ninja", "\n".join(lines))


class BuildLibrary(build_ext):
    """Compiles the library with ninja, in a folder that survives, and puts it into the package."""

    def build_extension(self, ext: Extension) -> None:
        special = "sanitize" if sanitize() else "racecheck" if racecheck() else None
        folder = ROOT / "build" / (special or f"native-{platform.machine()}")
        write_ninja(folder, self.distribution.get_version())
        ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
        if not ninja:
            raise SetupError("ninja is needed to build; install it with: pip install ninja")
        if subprocess.run([ninja, "-C", folder, *(["-v"] if self.verbose and self.verbose > 1 else [])]).returncode:
            raise SetupError("Compiling the library failed; the compiler's message is above.")
        target = Path(self.build_lib) / self.get_ext_filename(ext.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / "libmla_backend.so", target)

    def get_ext_filename(self, name: str) -> str:
        return "mla_backend/libmla_backend.so"


class AnyPythonWheel(bdist_wheel):
    """The library is no Python extension: one wheel serves every Python, on every Linux with a C library as new as the
    newest function that it calls."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        library = Path(self.get_finalized_command("build").build_lib) / "mla_backend" / "libmla_backend.so"
        if library.is_file() and platform.startswith("linux_"):  # not there where an editable wheel is made
            minor = max(map(int, re.findall(rb"GLIBC_2\.(\d+)\0", library.read_bytes())))
            platform = platform.replace("linux_", f"manylinux_2_{minor}_", 1)
        return "py3", "none", platform


if "sdist" not in sys.argv:
    find_torch()  # before pip downloads a torch of gigabytes as a dependency, only to fail in the build after that
setup(
    # for build environments of tools that are not pip
    setup_requires=[CUTLASS] if "egg_info" in sys.argv and find_nvcc() and not (find_cutlass() or find_pip()) else [],
    ext_modules=[Extension("mla_backend.library_file", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
)
