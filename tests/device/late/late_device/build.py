"""Builds the device's extension with g++ alone: half a minute of one idle core."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("late.cpp")


def build(directory: Path) -> Path:
    """Compile `late.cpp` into `directory` and return the library's file."""
    library, part = directory / "late_extension.so", directory / f"part-{os.getpid()}.so"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=late_extension"),
            *("-DTORCH_API_INCLUDE_EXTENSION_H", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
            *(f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]),
            str(SOURCE),
            *("-o", str(part)),
            *(f"-L{path}" for path in library_paths()),
            *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        ],
        check=True,
    )
    return part.replace(library)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
