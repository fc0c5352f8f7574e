"""What is asked for before the launch ahead has ended, in the machine code: ptxas is free to move what it reads."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kimi_k2.kernels.common.build import FLAGS, KERNELS, find_nvcc, source_of

triton = pytest.importorskip("triton")
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
pytestmark = pytest.mark.skipif(
    find_nvcc() is None or not (DISASSEMBLER.exists() or shutil.which("nvdisasm")), reason="needs nvcc and nvdisasm"
)
WAIT = "ACQBULK"  # griddepcontrol.wait


def functions(library: str, directory: Path) -> dict[str, str]:
    """The machine code of a library's kernels."""
    nvcc, target = find_nvcc(), directory / "made.cubin"
    assert nvcc is not None
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-Xcompiler", "-fPIC")]
    subprocess.run([nvcc, *flags, "-cubin", f"-I{KERNELS}", "-o", str(target), str(source_of(library))], check=True)
    tool = str(DISASSEMBLER) if DISASSEMBLER.exists() else "nvdisasm"
    text = subprocess.run([tool, "-c", str(target)], check=True, capture_output=True, text=True).stdout
    parts = re.split(r"\.section\s+\.text\.(\S+?),", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("library", "early"), [("rowwise/add_norm", 1), ("attention/value_rows", 2)])
def test_weights_are_asked_for_before_the_wait(library: str, early: int, tmp_path: Path) -> None:
    """Each kernel's weights come before its wait, and nothing but weights does."""
    found = functions(library, tmp_path)
    assert found
    for name, code in found.items():
        before, _, behind = code.partition(WAIT)
        assert behind, name
        loads = re.findall(r"\bLDG\S*", before)
        assert len(loads) >= early and not any("STRONG" in load for load in loads), (name, loads)
        assert "CONSTANT" not in "".join(re.findall(r"\bLDG\S*", behind)), name
