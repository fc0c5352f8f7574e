"""Kinds of malformed shards: files, safetensors headers, and values that cannot be."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from damage import (
    DELETED,
    EXPERT,
    INDEX,
    SHARD,
    Damage,
    Kind,
    damaging,
    edited,
    entry,
    header,
    index,
    own,
    raw_header,
    renamed,
    value,
    write,
)
from kinds_of_text import of_file

from kimi_k2.checkpoint.index import header_bytes

W = f"{EXPERT}.weight"
NORM = "model.layers.1.input_layernorm.weight"
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@damaging
def claimed_header(directory: Path, size: int) -> None:
    """A shard of 21 GiB without blocks on the disk whose header would have that size."""
    path = own(directory / SHARD)
    path.write_bytes(size.to_bytes(8, "little"))
    os.truncate(path, 21 * 2**30)


def named_twice(directory: Path) -> None:
    """The same name twice in one header."""
    text = header_bytes(directory / SHARD)[8:].rstrip()
    again = json.dumps({W: json.loads(text)[W]})[1:-1].encode()
    raw_header(text[:-1] + b"," + again + b"}")(directory)


@damaging
def added(directory: Path, name: str, *, indexed: bool = False) -> None:
    """Another tensor, in the index too or not."""
    path = own(directory / SHARD)
    size = path.stat().st_size - len(header_bytes(path))
    place = {"dtype": "BF16", "shape": [256], "data_offsets": [size, size + 512]}
    header(lambda entries: entries.update({name: place}))(directory)
    edited(SHARD, lambda data: data + bytes(512))(directory)
    if indexed:
        index(lambda raw: raw["weight_map"].update({name: SHARD}))(directory)


def swapped(directory: Path) -> None:
    """Two shards under each other's name."""
    other = directory / "model-3-of-3.safetensors"
    (directory / SHARD).rename(directory / "held")
    other.rename(directory / SHARD)
    (directory / "held").rename(other)


def moved(by: int) -> Damage:
    """A tensor's data elsewhere."""
    return header(
        lambda entries: entries[W].update(data_offsets=[offset + by for offset in entries[W]["data_offsets"]])
    )


def without(name: str) -> Damage:
    """No such tensor, in header and index; its bytes belong to another name that is ignored."""
    return renamed(name, "model.layers.1.self_attn.rotary_emb.inv_freq", indexed=True)


FILES: list[tuple[str, Damage, str]] = [
    *((way, damage, SHARD) for way, damage in of_file(SHARD).items()),
    ("four bytes", write(SHARD, b"abcd"), SHARD),
    ("a pickle", write(SHARD, b"\x80\x02}q\x00." + bytes(100)), SHARD),
    ("a byte short", edited(SHARD, lambda data: data[:-1]), "bytes by its header"),
    ("half", edited(SHARD, lambda data: data[: len(data) // 2]), "bytes by its header"),
    ("cut within the header", edited(SHARD, lambda data: data[:1000]), SHARD),
    ("longer", edited(SHARD, lambda data: data + bytes(16)), "bytes by its header"),
    ("a header of 20 GiB", claimed_header(20 * 2**30), SHARD),
    ("a header of 100 MB and a byte", claimed_header(100_000_001), SHARD),
    ("a header of 2^63", claimed_header(2**63), SHARD),
    ("swapped with another", swapped, "lm_head.weight"),
    ("a tensor in two", added("model.norm.weight"), "model.norm.weight"),
]
HEADERS: list[tuple[str, Damage]] = [
    ("empty", raw_header(b"")),
    ("no JSON", raw_header(b"{" * 64)),
    ("a list", raw_header(b"[]")),
    ("null", raw_header(b"null")),
    ("no UTF-8", raw_header(b'{"\xff\xfe": 1}')),
    ("deep", raw_header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)),
    ("no tensors", raw_header(b"{}")),
    ("an entry a number", header(lambda entries: entries.update({W: 3}))),
    ("an entry empty", header(lambda entries: entries.update({W: {}}))),
    ("dtype missing", entry(W, dtype=DELETED)),
    ("dtype a number", entry(W, dtype=3)),
    ("dtype unknown", entry(W, dtype="F4")),
    ("dtype complex", entry(W, dtype="C64")),
    ("shape missing", entry(W, shape=DELETED)),
    ("shape negative", entry(W, shape=[-128, -256])),
    ("shape of floats", entry(W, shape=[128.0, 256.0])),
    ("shape a string", entry(W, shape="128")),
    ("shape huge", entry(W, shape=[2**62, 2**62])),
    ("shape beyond 64 bits", entry(W, shape=[2**64, 1])),
    ("shape of more values", entry(W, shape=[128, 512])),
    ("shape empty", entry(W, shape=[])),
    ("shape of zeros", entry(W, shape=[0, 256])),
    ("shape of a thousand dimensions", entry(W, shape=[1] * 1000 + [128, 256])),
    ("offsets missing", entry(W, data_offsets=DELETED)),
    ("offsets reversed", header(lambda entries: entries[W]["data_offsets"].reverse())),
    ("offsets of strings", entry(W, data_offsets=["0", "1"])),
    ("offsets negative", moved(-(2**30))),
    ("offsets beyond the file", moved(2**40)),
    ("offsets overlapping", moved(-8)),
    ("one offset", entry(W, data_offsets=[0])),
    ("three offsets", entry(W, data_offsets=[0, 1, 2])),
    ("offsets of 2^64", entry(W, data_offsets=[2**64, 2**64 + 32768])),
    ("an entry twice", named_twice),
    ("a hole in the data", header(lambda entries: entries.pop(W))),
    ("metadata a list", header(lambda entries: entries.update(__metadata__=[]))),
    ("metadata of numbers", header(lambda entries: entries.update(__metadata__={"format": 3}))),
]
TENSORS: list[tuple[str, Damage, str]] = [
    ("renamed", renamed(W, f"{EXPERT}.wait", indexed=True), EXPERT),
    ("renamed, not in the index", renamed(W, f"{EXPERT}.wait", indexed=False), EXPERT),
    ("a name of 5,000 characters", renamed(W, "n" * 5000, indexed=True), "5000 characters"),
    ("a name with a line's end", renamed(W, f"{EXPERT}.we\night", indexed=True), EXPERT),
    ("no name", renamed(W, "", indexed=True), EXPERT),
    ("of a layer beyond", renamed(W, "model.layers.99.mlp.up_proj.weight", indexed=True), EXPERT),
    ("of an expert beyond", renamed(W, W.replace("experts.3", "experts.333"), indexed=True), EXPERT[:30]),
    ("a weight without its scale", without(f"{EXPERT}.weight_scale_inv"), f"{EXPERT}.weight_scale_inv"),
    ("a scale without its weight", without(W), W),
    ("a norm missing", without(NORM), NORM),
    ("a router's bias missing", without(BIAS), BIAS),
    ("transposed", entry(W, shape=[256, 128]), W),
    ("kv_b transposed", entry(KV_B, shape=[64, 256]), KV_B),
    ("a bias of two dimensions", entry(BIAS, shape=[4, 4]), BIAS),
    ("one too many", added("model.layers.1.extra.weight", indexed=True), "implies no such tensor"),
    ("flat", entry(W, shape=[128 * 256]), W),
    ("another FP8", entry(W, dtype="F8_E5M2"), W),
    ("integers", entry(W, dtype="U8"), W),
    ("a norm of integers", entry(NORM, dtype="I16"), NORM),
    ("a scale of integers", entry(f"{EXPERT}.weight_scale_inv", dtype="I32"), f"{EXPERT}.weight_scale_inv"),
    ("a scale transposed", entry(f"{EXPERT}.weight_scale_inv", shape=[2, 1]), f"{EXPERT}.weight_scale_inv"),
]


def of_bf16(number: float) -> bytes:
    """One value."""
    return struct.pack("<f", number)[2:]


E4M3_NAN = b"\x7f"
_NAN, _INF = float("nan"), float("inf")
VALUES: list[tuple[str, str, bytes, str]] = [
    ("fp8", W, E4M3_NAN, "NaN in an expert"),
    ("fp8", W, b"\xff", "negative NaN in an expert"),
    ("fp8", "model.layers.1.mlp.shared_experts.down_proj.weight", E4M3_NAN, "NaN in a shared expert"),
    ("fp8", "model.layers.0.mlp.up_proj.weight", E4M3_NAN, "NaN in the dense layer"),
    ("fp8", "model.layers.2.self_attn.o_proj.weight", E4M3_NAN, "NaN in attention"),
    ("fp8", f"{EXPERT}.weight_scale_inv", struct.pack("<f", _NAN), "NaN in a scale"),
    ("fp8", f"{EXPERT}.weight_scale_inv", struct.pack("<f", _INF), "Inf in a scale"),
    ("fp8", f"{EXPERT}.weight_scale_inv", struct.pack("<f", -1.0), "a negative scale"),
    ("fp8", f"{EXPERT}.weight_scale_inv", struct.pack("<f", 0.0), "a scale of zero"),
    ("fp8", f"{EXPERT}.weight_scale_inv", struct.pack("<f", 3e38), "a huge scale"),
    (
        "fp8",
        "model.layers.2.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
        struct.pack("<f", -_INF),
        "-Inf in a scale",
    ),
    ("fp8", BIAS, struct.pack("<f", _NAN), "NaN in a router's bias"),
    ("fp8", "model.layers.1.mlp.gate.weight", of_bf16(_NAN), "NaN in a router"),
    ("fp8", NORM, of_bf16(_INF), "Inf in a norm"),
    ("fp8", "model.norm.weight", of_bf16(_NAN), "NaN in the last norm"),
    ("fp8", "model.embed_tokens.weight", of_bf16(_NAN), "NaN in the embedding"),
    ("fp8", "lm_head.weight", of_bf16(-_INF), "Inf in the head"),
    ("bf16", W, of_bf16(_NAN), "NaN in a BF16 expert"),
    ("thinking", "model.layers.1.self_attn.q_a_proj.weight", of_bf16(_INF), "Inf in BF16 attention"),
    ("thinking", f"{EXPERT}.weight_scale", of_bf16(_NAN), "NaN in an INT4 scale"),
    ("thinking", f"{EXPERT}.weight_scale", of_bf16(-0.5), "a negative INT4 scale"),
    ("thinking", f"{EXPERT}.weight_shape", struct.pack("<ii", 64, 256), "another weight_shape"),
    ("thinking", f"{EXPERT}.weight_shape", struct.pack("<ii", -1, -1), "a negative weight_shape"),
    ("thinking", f"{EXPERT}.weight_shape", struct.pack("<ii", 2**31 - 1, 2**31 - 1), "a huge weight_shape"),
]


def kinds() -> list[Kind]:
    """All of them."""
    found = [Kind(f"shard: {name}", "fp8", damage, says) for name, damage, says in FILES]
    found += [Kind(f"header: {name}", "fp8", damage, SHARD) for name, damage in HEADERS]
    found += [Kind(f"tensor: {name}", "fp8", damage, says) for name, damage, says in TENSORS]
    found += [Kind(f"data: {name}", base, value(tensor, content), tensor) for base, tensor, content, name in VALUES]
    # Without its index and with a shard of that name alone, a checkpoint is that one file.
    found.append(Kind("a lone shard that is half the model", "fp8", lone, "missing from the checkpoint"))
    found += [
        Kind(f"int4: {part} missing", "thinking", without(f"{EXPERT}.{part}"), f"{EXPERT}.{part}")
        for part in ("weight_packed", "weight_scale", "weight_shape")
    ]
    # The same values in a wider format are a checkpoint too.
    found.append(Kind("a norm said to be F16", "fp8", entry(NORM, dtype="F16"), "", ()))
    found.append(Kind("an index with other spaces", "fp8", index(lambda raw: raw), "", ()))
    found.append(Kind("every file a link, as in Hugging Face's cache", "fp8", links, "", ()))
    return found


def links(directory: Path) -> None:
    blobs = directory.rename(directory.with_name("blobs"))
    directory.mkdir()
    for path in blobs.iterdir():
        (directory / path.name).symlink_to(path)


def lone(directory: Path) -> None:
    (directory / INDEX).unlink()
    (directory / SHARD).rename(directory / "model.safetensors")
