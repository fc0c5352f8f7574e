"""An OpenAI completions server that answers by the clock: to compare what benchmark clients measure of it.

    python scripts/paced_server.py 8000 --ttft 0.3 --itl 0.06

Every stream gets its first token after `ttft` seconds and each other one `itl` after the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import json


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ttft: float, itl: float) -> None:
    """Serve the requests of one connection."""
    clock = asyncio.get_running_loop().time
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            start, lines = clock(), head.decode().splitlines()
            sizes = [int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length:")]
            body = await reader.readexactly(sizes[0]) if sizes else b""
            if not body:
                text = json.dumps({"object": "list", "data": [{"id": "paced", "object": "model"}]}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text)
                )
                writer.write(text)
                continue
            asked = json.loads(body)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            count = asked["max_tokens"]
            for place in range(count):
                await asyncio.sleep(start + ttft + place * itl - clock())
                write_event(writer, {"choices": [{"index": 0, "text": " x"}]})
            words = asked["prompt"] if isinstance(asked["prompt"], list) else asked["prompt"].split()
            write_event(writer, {"choices": [], "usage": {"prompt_tokens": len(words), "completion_tokens": count}})
            write_chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def write_event(writer: asyncio.StreamWriter, fields: dict[str, object]) -> None:
    """One server-sent event."""
    write_chunk(writer, f"data: {json.dumps(fields)}\n\n".encode())


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One chunk of HTTP's chunked transfer."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--ttft", type=float, default=0.3, help="seconds")
    parser.add_argument("--itl", type=float, default=0.06, help="seconds")
    options = parser.parse_args()
    server = await asyncio.start_server(
        lambda reader, writer: answer(reader, writer, options.ttft, options.itl), "127.0.0.1", options.port
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
