"""NKI's dtypes by name, their NumPy forms, and conversion between them as the engines round.

Sources: aws-neuron-sdk `nki/api/nki.api.shared.rst` (names and layouts), `rounding-modes.rst` (round to nearest, ties
to even), `EVRF051.rst` and the Llama-3.1-405B tutorial (FP8 e4m3 of Trainium2 is the IEEE-754 form: largest value 240,
exponent 15 is Inf and NaN). Float to integer is undocumented; see README.md.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_OF_NUMPY = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32")
_OF_ML_DTYPES = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
NUMPY: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.uint8),
    **{name: np.dtype(name) for name in _OF_NUMPY},
    "tfloat32": np.dtype(np.float32),
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _OF_ML_DTYPES},
}
# Four values an element; Trainium3 alone computes with them.
PACKED = {"float8_e4m3fn_x4": 4, "float8_e5m2_x4": 4, "float4_e2m1fn_x4": 2}
INTEGERS = frozenset(name for name, form in NUMPY.items() if form.kind in "iu")
FP8 = frozenset({"float8_e4m3", "float8_e5m2"})


def size_of(dtype: str) -> int:
    """Bytes of one element."""
    return PACKED[dtype] if dtype in PACKED else NUMPY[dtype].itemsize


def name_of(dtype: Any) -> str:
    """NKI's name of a NumPy, ml_dtypes or torch dtype; `KeyError` where there is none."""
    if isinstance(dtype, str):
        name = dtype
    else:
        name = str(dtype).removeprefix("torch.") if str(dtype).startswith("torch.") else np.dtype(dtype).name
    if name not in NUMPY and name not in PACKED:
        raise KeyError(name)
    return name


def narrow(values: Array, dtype: str) -> Array:
    """Float32 results in the form that they are stored in: to nearest, ties to even.

    tfloat32 keeps 10 bits of the fraction. Integers are rounded to nearest even and saturate; NaN becomes 0.
    """
    form = NUMPY[dtype]
    if dtype == "tfloat32":
        return _to_tfloat32(values)
    if dtype not in INTEGERS or values.dtype.kind in "iub":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(form)
    limits = np.iinfo(form)
    wide = np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0))
    return np.clip(wide, limits.min, limits.max).astype(form)


def _to_tfloat32(values: Array) -> Array:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> 13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))
