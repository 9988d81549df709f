"""Clients with idle connections: one request per connection over HTTP/1.1 or HTTP/2, in plaintext or over TLS.

Raw sockets keep the cost of a connection in the client low and send exactly the bytes below. A source address has at
most SOURCE_CONNECTIONS connections, far fewer than it has ports; the addresses are in the loopback network.
"""

import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

SOURCE_CONNECTIONS = 2_000
# Number of concurrent handshakes and requests; all other connections are idle.
CALLERS = 16
TIMEOUT = 30.0
MODEL = "bench"
SMALL_BODY, LARGE_BODY = 300, 256 << 10

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, GOAWAY = 0, 1, 4, 7
ACK, END_STREAM, END_HEADERS = 1, 1, 4
FRAME_BYTES = 16 << 10


class Broken(Exception):
    """The connection was closed, or the status of a response is not 200."""


def body(size):
    before, after = f'{{"model":"{MODEL}","input":"', '"}'
    return (before + "word " * (size // 5))[: size - len(after)].encode() + after.encode()


class Connection:
    """Keep-alive connection to the proxy."""

    def __init__(self, number, address, headers, tls, http2):
        self.headers, self.http2, self.stream = headers, http2, 1
        host, port = address.split(":")
        self.host = host
        raw = socket.socket()
        raw.settimeout(TIMEOUT)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.bind((f"127.0.1.{1 + number // SOURCE_CONNECTIONS}", 0))
        raw.connect((host, int(port)))
        self.socket = raw if tls is None else tls.wrap_socket(raw, server_hostname="localhost")
        if http2:
            self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            # The flow-control windows for large requests apply after the SETTINGS frame of the proxy.
            while self.next_frame()[0] != SETTINGS:
                pass

    def send_request(self, size):
        """Sends a request with a body of this size and reads its response."""
        if self.http2:
            self.send_http2(body(size))
        else:
            self.send_http1(body(size))

    def send_http1(self, text):
        lines = ["POST /v1/embeddings HTTP/1.1", f"host: {self.host}", "content-type: application/json"]
        lines += [*self.headers, f"content-length: {len(text)}", "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + text)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.receive()
        head, rest = received.split(b"\r\n\r\n", 1)
        if not head.startswith(b"HTTP/1.1 200"):
            raise Broken(head.split(b"\r\n", 1)[0].decode())
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while len(rest) < length:
            rest += self.receive()

    def send_http2(self, text):
        fields = [(":method", "POST"), (":scheme", "http"), (":path", "/v1/embeddings"), (":authority", self.host)]
        fields += [("content-type", "application/json"), *(line.split(": ", 1) for line in self.headers)]
        block = b"".join(literal(name, value) for name, value in fields)
        sent = frame(HEADERS, END_HEADERS, self.stream, block)
        for begin in range(0, len(text), FRAME_BYTES):
            piece = text[begin : begin + FRAME_BYTES]
            sent += frame(DATA, END_STREAM if begin + FRAME_BYTES >= len(text) else 0, self.stream, piece)
        self.socket.sendall(sent)
        while True:
            kind, flags, stream, payload = self.next_frame()
            if kind == HEADERS and stream == self.stream and payload[:1] != b"\x88":
                raise Broken("not the indexed status 200")
            if kind in (DATA, HEADERS) and stream == self.stream and flags & END_STREAM:
                self.stream += 2
                return

    def next_frame(self):
        """Returns kind, flags, stream and payload of the next frame; acknowledges SETTINGS."""
        head = self.receive_exactly(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
        payload = self.receive_exactly(int.from_bytes(head[:3]))
        if kind == SETTINGS and not flags & ACK:
            self.socket.sendall(frame(SETTINGS, ACK, 0, b""))
        if kind == GOAWAY:
            raise Broken("GOAWAY")
        return kind, flags, stream, payload

    def receive(self):
        data = self.socket.recv(64 << 10)
        if not data:
            raise Broken("closed")
        return data

    def receive_exactly(self, length):
        data = b""
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            if not piece:
                raise Broken("closed")
            data += piece
        return data

    def close(self):
        self.socket.close()


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    """Encodes a header without indexing and Huffman coding; names and values here are shorter than 127 bytes."""
    name, value = name.encode(), value.encode()
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def tls_context(http2):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2" if http2 else "http/1.1"])
    return context


def open_all(count, address, headers, tls, http2):
    """Opens `count` connections and sends one small request over each."""
    local = threading.local()

    def opened(number):
        if tls is not None and not hasattr(local, "context"):
            # One context per thread, because a context has a lock.
            local.context = tls_context(http2)
        connection = Connection(number, address, headers, getattr(local, "context", None), http2)
        connection.send_request(SMALL_BODY)
        return connection

    with ThreadPoolExecutor(CALLERS) as threads:
        return list(threads.map(opened, range(count)))


def send_requests(connections, size):
    """Sends one request with a body of `size` bytes over each connection."""
    with ThreadPoolExecutor(CALLERS) as threads:
        list(threads.map(lambda one: one.send_request(size), connections))
