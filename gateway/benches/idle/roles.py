"""Benchmark of roles: memory of each role at idle, and mutual TLS handshakes at the listener of a spoke.

A hub, a spoke and a gateway with default configurations run without load. Then clients with the certificate of a
gateway connect to a spoke, send a request that it rejects, and disconnect. The figure is the CPU time of the spoke
for such a connection, with a full handshake (both certificates are verified) and with a resumed one.
"""

import argparse
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "proxy"))

import peers  # noqa: E402
from processes import LOAD_CORE, PROXY_CORE, Failed  # noqa: E402

SETTLE_SECONDS = 5
HANDSHAKES = 3_000
WARM_UP = 200
REGION = "aws/us-east-1"
REQUEST = b"GET /unknown HTTP/1.1\r\nhost: spoke\r\nconnection: close\r\n\r\n"


def openssl(*words):
    made = subprocess.run(["openssl", *words], capture_output=True, check=False)
    if made.returncode != 0:
        raise Failed(made.stderr.decode())


def certificates(workspace):
    """Creates an authority, and certificates of a spoke and of a gateway that the authority has signed."""
    at = lambda name: os.path.join(workspace.files, name)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-subj", "/CN=fleet", "-days", "2", "-out", at("fleet.crt"), "-keyout", at("fleet.key"),
            "-addext", "keyUsage=critical,keyCertSign")
    for name in ("spoke", "gateway"):
        openssl("req", *key, "-subj", "/", "-out", at(f"{name}.csr"), "-keyout", at(f"{name}.key"))
        uri = f"URI:spiffe://bench/{name}/{REGION}/in/us-va"
        more = workspace.write(f"{name}.ext", f"subjectAltName={uri}\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("x509", "-req", "-in", at(f"{name}.csr"), "-CA", at("fleet.crt"), "-CAkey", at("fleet.key"), "-days", "1",
                "-CAcreateserial", "-extfile", more, "-out", at(f"{name}.crt"))


def role(workspace, name, words, config):
    """Starts a role and waits until its listener accepts connections."""
    path = workspace.write(f"idle-{name}.toml", config)
    listen = config.split('listen = "', 1)[1].split('"', 1)[0]
    process = workspace.start(f"idle-{name}", [workspace.meridian, words, "--config", path])
    host, port = listen.split(":")

    def accepts():
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    process.wait_until(accepts, "its listener to accept connections")
    process.address = (host, int(port))
    return process


def spoke_config(hub, more=""):
    listen, operations = peers.address(), peers.address()
    return f'region = "{REGION}"\nlisten = "{listen}"\nadvertise = "{listen}"\noperations = "{operations}"\nhub = "http://{hub}"\n{more}'


def idle_roles(workspace):
    """Returns the resident memory of each role in MB."""
    hub = peers.address()
    for name in ("idle-hub-data", "idle-routes"):
        shutil.rmtree(os.path.join(workspace.files, name), ignore_errors=True)
    started = {"hub": role(workspace, "hub", "hub", f'listen = "{hub}"\ndata = "idle-hub-data"\n')}
    try:
        started["spoke"] = role(workspace, "spoke", "spoke", spoke_config(hub))
        gateway = f'listen = "{peers.address()}"\noperations = "{peers.address()}"\nregion = "{REGION}"\nhub = "http://{hub}"\n'
        started["gateway"] = role(workspace, "gateway", "gateway", gateway + 'snapshot = "idle-routes"\n')
        time.sleep(SETTLE_SECONDS)
        return {name: process.rss_mb() for name, process in started.items()}
    finally:
        for process in started.values():
            process.end()


def connect(address, context, session=None):
    """Sends one request over a new connection; returns its session, and whether it resumed `session`."""
    with socket.create_connection(address, timeout=10) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(raw, server_hostname="spoke", session=session) as stream:
            stream.sendall(REQUEST)
            response = b""
            while piece := stream.recv(64 << 10):
                response += piece
            if not response.startswith(b"HTTP/1.1 4"):
                raise Failed(f"unexpected response of the spoke: {response[:80]}")
            return stream.session, stream.session_reused


def handshakes(workspace, count):
    """Returns the CPU time of the spoke in µs for a connection with a full and with a resumed handshake."""
    certificates(workspace)
    tls = '[identity]\ncertificate = "spoke.crt"\nkey = "spoke.key"\nauthorities = "fleet.crt"\n'
    spoke = role(workspace, "spoke-tls", "spoke", spoke_config(peers.address(), tls))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(os.path.join(workspace.files, "gateway.crt"), os.path.join(workspace.files, "gateway.key"))
    cpu_us = {}
    try:
        for kind in ("full", "resumed"):
            session = None
            for number in range(-WARM_UP, count):
                if number == 0:
                    before = spoke.cpu_seconds()
                latest, resumed = connect(spoke.address, context, session)
                if number >= 0 and resumed != (kind == "resumed"):
                    raise Failed(f"handshake {number} is not {kind}")
                session = latest if kind == "resumed" else None
            cpu_us[kind] = (spoke.cpu_seconds() - before) / count * 1e6
        return cpu_us
    finally:
        spoke.end()


def main():
    description = "Measures the memory of roles, and TLS handshakes."
    parser = argparse.ArgumentParser(prog="gateway/benches/idle/roles", description=description)
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--handshakes", type=int, default=HANDSHAKES, help="handshakes of each kind (default 3000)")
    options = parser.parse_args()
    workspace = peers.Workspace(options.made, options.tools, options.meridian, PROXY_CORE)
    print("| role at idle | resident MB |\n|---|---:|")
    for name, resident in idle_roles(workspace).items():
        print(f"| {name} | {resident:.1f} |", flush=True)
    print("\n| mutual TLS handshake at a spoke | CPU µs of the spoke | per second and core |\n|---|---:|---:|")
    os.sched_setaffinity(0, {LOAD_CORE})
    for kind, micros in handshakes(workspace, options.handshakes).items():
        print(f"| {kind} | {micros:.0f} | {1e6 / micros:.0f} |", flush=True)


if __name__ == "__main__":
    main()
