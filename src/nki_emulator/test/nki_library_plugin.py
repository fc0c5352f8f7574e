"""pytest plugin: run nki-library's own tests, unmodified, on the emulator.

In a checkout of aws-neuron/nki-library: `pytest --noconftest -p nki_library_plugin test/integration/...`, with this
directory and the package on PYTHONPATH. Their parametrization, inputs, torch references and tolerances are used as they
stand; what runs a kernel on a device is replaced. Of the vendor's private modules only `neuron_dtypes` has to behave.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from nki_emulator import install
from nki_emulator.dtypes import NUMPY, PACKED, name_of, narrow, size_of
from nki_emulator.launch import Kernel
from nki_emulator.settings import settings

# Reporting, remote hosts and the compiler: imported by their test framework, not used here.
_INERT = (
    "aws_embedded_metrics", "allpairspy", "boto3", "botocore", "fabric2", "filelock", "plotext", "pytest_html",
    "neuronxcc",
)  # fmt: skip


class _Inert(mock.MagicMock, ModuleType):
    """A module in which every name exists."""

    is_standin = True  # which `nki_emulator.install` may replace


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        inert = fullname.partition(".")[0] in _INERT or fullname == "test.utils.perf_analysis_private"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if inert else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Inert(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """An inert module has nothing to run."""


def static_cast(values: Any, dtype: Any) -> Any:
    """`neuron_dtypes.static_cast`: to another dtype as the hardware rounds."""
    array = np.asarray(values)
    return narrow(array.astype(np.float32) if array.dtype.name in NUMPY else array, name_of(dtype))


class _Mended(importlib.machinery.SourceFileLoader):
    """Two files of the snapshot of 2026-04-13 are mended.

    mlp.py does not parse, as half of a docstring stands there twice;
    cross_partition_copy.py fills any dtype with 0.0, which NKI 0.3 refuses for integers (its migration guide).
    """

    MODULES = ("nkilib.core.mlp.mlp", "nkilib.core.utils.cross_partition_copy")  # how their names end

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if path.endswith("cross_partition_copy.py"):
            return data.replace(b"value=0.0)", b"value=0)")
        head, middle, tail = data.partition(b'    """\n\n        TKG mode supports:')
        return head + b'    """\n' + tail.partition(b'    """\n')[2] if middle else data

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


class _MendedFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.endswith(_Mended.MODULES) or not path:
            return None
        file = str(Path(next(iter(path))) / f"{fullname.rpartition('.')[2]}.py")
        return importlib.machinery.ModuleSpec(fullname, _Mended(fullname, file), origin=file)


def _put_module(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


class Orchestrator:
    """Runs a kernel on the emulator and compares it as their OutputValidator does."""

    trace_mode = None

    def execute(self, kernel_args: Any) -> None:
        """Run `kernel_args.kernel_func` and raise AssertionError where its results leave the tolerance."""
        max_all_close = import_module("test.integration.nkilib.utils.comparators").maxAllClose
        classes = import_module("test.utils.common_dataclasses")

        function = kernel_args.kernel_func
        cores = kernel_args.compiler_input.logical_nc_config
        kernel = Kernel(function.function if isinstance(function, Kernel) else function, cores)
        inputs = {name.removesuffix(".must_alias_input"): value for name, value in kernel_args.kernel_input.items()}
        out = kernel(**inputs)
        checks = kernel_args.validation_args
        golden = checks.golden_output
        expected = golden.golden if isinstance(golden, classes.LazyGoldenGenerator) else golden
        results = list(out) if isinstance(out, list | tuple) else [out]
        assert len(results) >= len(expected), f"{len(results)} results for {list(expected)}"
        for (name, want), got in zip(expected.items(), results, strict=False):
            if isinstance(want, classes.CustomValidatorWithOutputTensorData):
                assert want.validator().validate(np.ascontiguousarray(got).reshape(-1).view(np.uint8)), name
                continue
            left, right = got.astype(np.float32).reshape(want.shape), np.asarray(want).astype(np.float32)
            scale = float(np.linalg.norm(right)) or 1.0
            error = float(np.linalg.norm(left - right)) / scale
            close = max_all_close(left, right, checks.relative_accuracy, checks.absolute_accuracy, verbose=1)
            assert close, f"{name}: relative L2 {error:.3e}"


def pytest_configure(config: pytest.Config) -> None:
    """Put the emulator, and names for what only has to be importable, in place."""
    root = Path(str(config.rootpath))
    sys.path[:0] = [str(root), str(root / "src"), str(root / "src" / "nkilib_src")]
    install()
    # The documentation has the compiler spill; some kernels write the same values from both cores, and compute on
    # partitions whose results nobody takes. NaN in them would show.
    settings.spills_allowed = settings.races_allowed = settings.unwritten_allowed = True
    sys.meta_path.append(_Finder())
    sys.meta_path.insert(0, _MendedFinder())
    _put_module(
        "neuron_dtypes",
        static_cast=static_cast,
        sizeinbytes=lambda dtype: size_of(name_of(dtype)),
        is_float_type=lambda dtype: "float" in name_of(dtype),
        finfo=lambda dtype: ml_dtypes.finfo(NUMPY[name_of(dtype)]),
        **{name: name for name in PACKED},
        **NUMPY,
    )
    _put_module("test.utils.test_orchestrator", Orchestrator=Orchestrator)
    _put_module("test.utils.pytest_test_metadata", pytest_test_metadata=lambda *_, **__: lambda tested: tested)
    builtins.Platforms = import_module("test.utils.common_dataclasses").Platforms  # type: ignore[attr-defined]  # test_qkv_tkg.py names it without importing it


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Their older parametrization by ranges; pairwise sweeps need `allpairspy` and are left out."""
    if "range_test_options" not in metafunc.fixturenames:
        return
    ranges = import_module("test.utils.ranged_test_harness")
    config = getattr(metafunc.function, ranges.RANGE_TEST_CONFIG_ATTR_KEY)
    ids, cases = ranges.RangeTestHarness(config).get_unique_test_cases()
    metafunc.parametrize(ranges.RANGE_TEST_FIXTURE_NAME, cases, ids=ids)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep at most NKI_EACH cases of a test function, spread over its list, and none that nothing parametrizes."""
    each = int(os.environ.get("NKI_EACH", "0"))
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("coverage_parametrize") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: list[pytest.Item] = []
    for cases in functions.values():
        step = max(1, -(-len(cases) // each)) if each else 1
        kept += cases[::step]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture
def test_manager() -> Orchestrator:
    """What their tests hand a kernel to."""
    return Orchestrator()


@pytest.fixture
def collector() -> Any:
    """Metrics, dropped."""
    return mock.MagicMock()


@pytest.fixture
def platform_target() -> Any:
    """Trainium2."""
    return import_module("test.utils.common_dataclasses").Platforms.TRN2
