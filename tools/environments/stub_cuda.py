"""Stand-ins for the CUDA libraries that a CUDA build of torch wants at its import.

On a machine without a GPU nothing of them is ever called. They are gigabytes to download, and so
the small environment of XLA has these in their place: libraries with the names that torch looks for
in them, which all abort. Needs gcc and readelf.

    python stub_cuda.py .../site-packages/torch/lib
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

STOOD_IN_FOR = {
    "libcublasLt.so.12": "cublasLt",
    "libcublas.so.12": "cublas",
    "libcudnn.so.9": "cudnn",
    "libcufft.so.11": "cufft",
    "libcusparseLt.so.0": "cusparseLt",
    "libcusparse.so.12": "cusparse",
    "libcurand.so.10": "curand",
    "libnccl.so.2": "nccl",
    "libnvshmem_host.so.3": "nvshmem",
}
"""Library to what its names begin with; the first that fits has a name."""

_WANTED = re.compile(r"UND ((?:cu|nccl|nvshmem)\w+)(?:@(\S+))?")
"""A name, and the version of it that is wanted."""


def main(folder: Path) -> None:
    """Make them in torch's folder of libraries."""
    wanted = dict(each for library in folder.glob("*.so") for each in _wanted(library))
    for library, prefix in STOOD_IN_FOR.items():
        names = sorted(name for name in wanted if name.startswith(prefix))
        _make(folder / library, {name: wanted.pop(name) for name in names})


def _wanted(library: Path) -> list[tuple[str, str]]:
    """Names that a library does not have itself, with their versions; empty: in any."""
    command = ["readelf", "--dyn-syms", "-W", str(library)]
    return _WANTED.findall(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )


def _make(library: Path, names: dict[str, str]) -> None:
    """A library with these names in these versions."""
    # Torch may want a library and nothing in it; an own name, since a version is not without one.
    by_version = {library.name: [f"stub_{library.name.split('.')[0]}"]}
    for name, version in names.items():
        by_version.setdefault(version or library.name, []).append(name)
    with tempfile.TemporaryDirectory() as place:
        source, versions = Path(place, "stub.c"), Path(place, "versions")
        functions = [f"void {n}(void) {{ abort(); }}" for own in by_version.values() for n in own]
        source.write_text("\n".join(["#include <stdlib.h>", *functions, ""]))
        versions.write_text(
            "".join(f"{v} {{ global: {'; '.join(own)}; }};\n" for v, own in by_version.items())
        )
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library.name}"]
        options.append(f"-Wl,--version-script={versions}")
        subprocess.run(["gcc", *options, "-o", str(library), str(source)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
