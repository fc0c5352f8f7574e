"""Scratch memory of the kernels: ordinary temporaries for data, and a little that must be zero before every launch.

Data buffers live for one call: `torch.empty` takes them from PyTorch's allocator, so they are shared with all other
temporaries of the stream, and inside a CUDA graph's capture they come from the graph's own memory and live as long as
it. Their size is bounded by `MAX_BYTES`: callers cut longer inputs into several launches.

Control words outlive a call: counters that every launch leaves at zero, and flags that carry the number of the launch
that set them. They are kept for each stream, so that launches on two streams do not share them, and shared by all
shapes and kernels of a stream. A capture gets its own, in the graph's memory, and clears them at the beginning of every
replay: graphs captured on one stream may be replayed on several at once.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.errors import KernelError

# Data of one launch. 16,384 tokens of 8 experts need about 2.2 GB, 32,768 4.3: where these are cut in two, each part
# reads all weights (H100, FP8: 38.8 ms and 27.4 ms uncut at TP1, 9.7 and 8.8 at TP4).
MAX_BYTES = 5 * 2**30
# Streams (and one capture for each of them) whose control words are kept, the last used.
MAX_STREAMS = 64
# Of a buffer: lines of 128 bytes are discarded from the L2, and PyTorch's own alignment is 512.
ALIGNMENT = 512
# Control words before the counters: claimed items, finished blocks, launches so far.
HEADER_WORDS = 32
MIN_WORDS = 2**13

Sizes = Mapping[str, tuple[int, torch.dtype]]  # elements and dtype by name


class Layout(NamedTuple):
    """Where the named buffers of one launch lie.

    Attributes:
        data: byte offsets into the data buffer.
        bytes: its size.
        counters: word offsets among the counters.
        counter_words, flag_words: how many control words the launch needs.
    """

    data: dict[str, int]
    bytes: int
    counters: dict[str, int]
    counter_words: int
    flag_words: int


def lay_out(sizes: Sizes, counters: frozenset[str] = frozenset()) -> Layout:
    """Offsets of the named buffers.

    Args:
        sizes: by name. "ctrl" is the control words' header, "flags" the launch-numbered flags; both are int32.
        counters: names of int32 buffers that are zero before and after every launch.
    """
    data, words, total, counted = {}, {}, 0, 0
    for name, (count, dtype) in sizes.items():
        if name in counters:
            words[name] = counted
            counted += count + -count % 4
        elif name not in ("ctrl", "flags"):
            data[name] = total
            total += count * dtype.itemsize + -(count * dtype.itemsize) % ALIGNMENT
    # A whole power of two and its eighths: few sizes, so that the allocator finds a block it has.
    step = max(ALIGNMENT, 1 << max(0, total.bit_length() - 4))
    return Layout(data, max(total + -total % step, ALIGNMENT), words, counted, sizes.get("flags", (0, torch.int32))[0])


class Scratch(NamedTuple):
    """Addresses by name, and the tensors that own them: to be held until the launch is in its stream."""

    addresses: dict[str, int]
    owners: tuple[Tensor, ...]


def scratch(layout: Layout, device: torch.device) -> Scratch:
    """Scratch memory for one launch on the current stream."""
    data = torch.empty(layout.bytes, dtype=torch.uint8, device=device)
    words = control(layout.counter_words, layout.flag_words, device)
    base, first = data.data_ptr(), words.data_ptr()
    middle = words.numel() // 2
    addresses = {name: base + offset for name, offset in layout.data.items()}
    addresses |= {name: first + 4 * (HEADER_WORDS + offset) for name, offset in layout.counters.items()}
    addresses |= {"ctrl": first, "flags": first + 4 * middle}
    return Scratch(addresses, (data, words))


_lock = threading.Lock()
# (device, stream, capture or 0) -> initial value -> words
_kept: OrderedDict[tuple[int, int, int], dict[int, Tensor]] = OrderedDict()


def control(counters: int, flags: int, device: torch.device) -> Tensor:
    """int32 control words of the current stream: a header and `counters` in the first half, `flags` in the second.

    Halves, so that what is a flag for one shape is never a counter for another: flags are not reset.
    """
    half = max(HEADER_WORDS + counters, flags, MIN_WORDS)
    return _words(2 << (half - 1).bit_length(), 0, device)


def marked(words: int, device: torch.device) -> Tensor:
    """int32 words of the current stream, all -1 before and after every launch."""
    return _words(words, -1, device)


def _words(count: int, value: int, device: torch.device) -> Tensor:
    key = _place(device)
    with _lock:
        by_value = _kept.setdefault(key, {})
        _kept.move_to_end(key)
        if value not in by_value or by_value[value].numel() < count:
            if key[2]:  # of captures on a stream only the last may still be under way
                for other in [other for other in _kept if other[:2] == key[:2] and other[2] not in (0, key[2])]:
                    del _kept[other]
            # In a capture this becomes a node of the graph. The smaller ones go back to the allocator, which hands them
            # out on this stream only: after the launches that use them.
            by_value[value] = torch.full((count,), value, dtype=torch.int32, device=device)
        while len(_kept) > MAX_STREAMS:
            _kept.popitem(last=False)
        return by_value[value]


def _place(device: torch.device) -> tuple[int, int, int]:
    """Device index, current stream, and the number of the capture that the stream is in, or 0."""
    stream = torch.cuda.current_stream(device)
    capturing = torch.cuda.is_current_stream_capturing()
    return stream.device_index, stream.cuda_stream, capture_number(stream.cuda_stream) if capturing else 0


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def capture_number(stream: int) -> int:
    """The driver's number of the capture that a stream is in, unique in the process.

    Raises:
        KernelError: the driver does not say, or the stream is in none.
    """
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error or status.value != 1:
        raise KernelError(f"no capture on stream {stream:#x}: CUDA error {error}, capture status {status.value}")
    return number.value


def release() -> None:
    """Give up all control words; the next launches make them anew.

    No launch that uses them may be under way: synchronize first. Captured graphs are not affected.
    """
    with _lock:
        _kept.clear()
