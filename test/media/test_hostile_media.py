"""Malformed and hostile files: each a MediaError that names it, in bounded memory, and never a hang."""

from __future__ import annotations

import io
import os
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pictures import chunks_of_frames, drawn, write_video
from PIL import Image

from kimi_k2.errors import MediaError
from kimi_k2.limits import MEDIA_BYTES, MEDIA_TOKENS
from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import process_image
from kimi_k2.media.video import process_video

CONFIG = MediaConfig()
MOST_MEMORY = 600 * 2**20


@pytest.fixture(autouse=True)
def _bounded(no_hang: None) -> Iterator[None]:
    """Memory out of all proportion is a failure."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_MEMORY


def encoded(kind: str, height: int = 40, width: int = 60, **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(drawn(height, width, 3)).save(out, kind, **options)
    return out.getvalue()


def animated(kind: str) -> bytes:
    frames = [Image.fromarray(drawn(20, 30, seed)) for seed in range(4)]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2, extra: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def bmp(width: int, height: int) -> bytes:
    body = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 2835, 2835, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + body


def far_tiff() -> bytes:
    """A page whose pixels lie beyond the end, in a directory that names itself as the next."""
    entries = [(256, 4, 1, 4), (257, 4, 1, 4), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 10**6), (279, 4, 1, 16)]
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + struct.pack("<I", 8) + bytes(300)


IMAGES: dict[str, Callable[[], bytes]] = {
    "text": lambda: b"This is no picture. " * 50,
    "PNG cut in its header": lambda: encoded("PNG")[:20],
    "PNG with a wrong checksum": lambda: flipped(encoded("PNG"), 18),
    "PNG whose data do not inflate": lambda: flipped(encoded("PNG"), 45),
    "PNG of no width": lambda: png(0, 10),
    "PNG of 65535 squared": lambda: png(65535, 65535),
    "PNG of 2^31 - 1": lambda: png(2**31 - 1, 2**31 - 1),
    "one-bit bomb of 30000 squared": lambda: png(30000, 30000, bytes(3751 * 30000), 1, 0),
    "PNG that inflates to a gigabyte of text": lambda: png(
        4, 4, bytes(52), extra=chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**27)))
    ),
    "animated GIF": lambda: animated("GIF"),
    "animated WebP": lambda: animated("WEBP"),
    "animated PNG": lambda: animated("PNG"),
    "TIFF of four pages": lambda: animated("TIFF"),
    "TIFF whose pixels lie beyond its end": far_tiff,
    "BMP of no height": lambda: bmp(10, 0),
    "BMP of 100000 squared": lambda: bmp(100000, 100000),
    "PPM of no pixels": lambda: b"P6 0 0 255\n",
    "PPM of 10^10 pixels": lambda: b"P6 100000 100000 255\n" + bytes(100),
    "PPM without its pixels": lambda: b"P6 100 100 255\n" + bytes(100),
    "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n",
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "PDF": lambda: b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "float TIFF with NaN": lambda: _float_tiff(float("nan")),
}


def _float_tiff(value: float) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((4, 4), value, dtype=np.float32)).save(out, "TIFF")
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "JPEG2000", "BMP", "GIF", "TIFF", "PPM", "TGA", "AVIF"])
def test_whole_files_and_halves(kind: str) -> None:
    data = encoded(kind)
    assert tuple(process_image(data, CONFIG, name="picture").grid) == (1, 4, 6)
    with pytest.raises(MediaError, match="picture"):
        process_image(data[: len(data) // 3], CONFIG, name="picture")


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str) -> None:
    data = IMAGES[name]()
    with pytest.raises(MediaError, match="picture"):
        process_image(data, CONFIG, name="picture")


def boxes(*parts: tuple[bytes, bytes]) -> bytes:
    return b"".join(struct.pack(">I", 8 + len(body)) + kind + body for kind, body in parts)


VIDEOS: dict[str, bytes] = {
    "text": b"This is no film. " * 50,
    "a picture": encoded("PNG"),
    "MP4 of nothing": boxes((b"ftyp", b"isom\0\0\2\0isomiso2mp41")),
    "MP4 of noise": boxes((b"ftyp", b"isom\0\0\2\0")) + np.random.default_rng(0).bytes(5000),
    "MP4 nested a thousand deep": boxes((b"ftyp", b"isom\0\0\2\0")) + struct.pack(">I4s", 9000, b"moov") * 1000,
    "Matroska of noise": b"\x1a\x45\xdf\xa3" + np.random.default_rng(1).bytes(5000),
    "AVI of noise": b"RIFF\xff\xff\0\0AVI " + np.random.default_rng(2).bytes(5000),
    "a playlist of other files": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n",
    "a script of other files": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "a session description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
    "GIF of 65535 squared": b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\2\2L\1\0;",
}


@pytest.mark.parametrize("name", VIDEOS)
def test_videos(name: str) -> None:
    pytest.importorskip("av", reason="videos need PyAV")
    with pytest.raises(MediaError, match="film"):
        process_video(VIDEOS[name], CONFIG, name="film")


def test_truncated_videos(tmp_path: Path) -> None:
    frames = np.stack([drawn(64, 64, seed) for seed in range(30)])
    late = write_video(tmp_path / "late.mp4", frames, 10).read_bytes()
    early = write_video(tmp_path / "early.mp4", frames, 10, container_options={"movflags": "+faststart"}).read_bytes()
    assert len(process_video(early, CONFIG)) == 2
    for data in (late[: len(late) // 2], early[: len(early) * 2 // 3], late[:40]):
        with pytest.raises(MediaError, match="film"):
            process_video(data, CONFIG, name="film")


def test_a_frame_that_is_larger_than_its_film(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before it becomes a picture."""
    av = pytest.importorskip("av", reason="videos need PyAV")
    path = tmp_path / "film.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.height, stream.width, stream.pix_fmt = 40, 60, "yuvj420p"
        for number, side in enumerate((1, 1, 5)):
            packet = av.Packet(encoded("JPEG", 40 * side, 60 * side))
            packet.stream, packet.pts, packet.dts = stream, number, number
            container.mux(packet)
    with pytest.raises(MediaError, match="changes its size"):
        process_video(path, CONFIG)
    monkeypatch.setattr("kimi_k2.media.video.FRAME_PIXELS", 40 * 60)
    with pytest.raises(MediaError, match="a frame of 300 x 200 pixels"):
        process_video(path, CONFIG)


def test_sound_alone(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="videos need PyAV")
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="no video stream"):
        process_video(path, CONFIG)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    fifo, empty, large = (tmp_path / "pipe", tmp_path / "empty.png", tmp_path / "large.mp4")
    os.mkfifo(fifo)
    empty.touch()
    large.touch()
    os.truncate(large, MEDIA_BYTES + 1)
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop)
    for path in (tmp_path, tmp_path / "missing.png", fifo, empty, large, loop, Path("/dev/zero"), Path("a\0b")):
        for process in (process_image, process_video):
            with pytest.raises(MediaError):
                process(path, CONFIG)


def test_a_film_of_too_many_tokens() -> None:
    frame = np.zeros((448, 448, 3), np.uint8)
    with pytest.raises(MediaError, match="tokens"):
        chunks_of_frames([frame] * (4 * MEDIA_TOKENS // 256 + 1), 1.0, CONFIG)  # one chunk too many


def test_a_picture_of_too_many_tokens() -> None:
    most = 4 * MEDIA_TOKENS
    config = MediaConfig(max_patches=most, max_side=most, patch_size=1, merge_size=1)
    assert process_image(Image.new("L", (512, MEDIA_TOKENS // 512)), config).grid.patches == MEDIA_TOKENS
    with pytest.raises(MediaError, match=r"picture.*tokens"):
        process_image(Image.new("L", (513, MEDIA_TOKENS // 512)), config, name="picture")
