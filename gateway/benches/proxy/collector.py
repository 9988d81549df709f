"""Collector of traces: accepts every export by HTTP and discards it. collector.py HOST:PORT"""

import asyncio
import sys

RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            writer.write(RESPONSE)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main():
    host, port = sys.argv[1].split(":")
    server = await asyncio.start_server(serve, host, int(port), limit=1 << 22)
    await server.serve_forever()


asyncio.run(main())
