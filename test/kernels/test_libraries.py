"""The list of libraries to compile ahead is what the modules load."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common import build, libraries
from kimi_k2.kernels.experts.w4a16_layout import FORMATS


def test_every_library_that_a_module_loads_is_listed() -> None:
    asked = set()
    for path in build.KERNELS.glob("*/*.py"):
        asked |= set(re.findall(r'\b(?:launch|launch_product|load_library)\(\s*"([\w/]+)"', path.read_text()))
    asked |= {one.library for one in FORMATS}
    assert asked == set(libraries.LIBRARIES)
    for library in libraries.LIBRARIES:
        assert 'extern "C"' in build.source_of(library).read_text()


def test_all_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(libraries, "load_library", built.append)
    times = libraries.build_all(2)
    assert sorted(built) == sorted(libraries.LIBRARIES)
    assert all(seconds >= 0 for seconds in times.values())


@pytest.mark.parametrize(
    ("folder", "file", "owner", "says"),
    [
        (0o755, 0o755, 0, None),
        (0o1777, 0o644, 0, None),  # in /tmp itself
        (0o777, 0o644, 0, "cache: users other than its owner may write"),
        (0o755, 0o666, 0, "lib.so: users other than its owner may write"),
        (0o755, 0o644, 1, "lib.so: belongs to user"),
    ],
)
def test_a_library_that_others_could_have_put_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: int, file: int, owner: int, says: str | None
) -> None:
    library = tmp_path / "cache" / "lib.so"
    library.parent.mkdir()
    library.write_bytes(b"")
    library.chmod(file)
    library.parent.chmod(folder)
    if owner and os.geteuid() == 0:
        os.chown(library, 4321, -1)
    elif owner:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    (tmp_path / "link.so").symlink_to(library)
    for path in (library, tmp_path / "link.so"):
        if says is None:
            build.check_private(path)
        else:
            with pytest.raises(KernelError, match=says):
                build.check_private(path)
