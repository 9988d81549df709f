#!/usr/bin/env python3
"""Writes a wheel that carries the program, as `ruff` and `uv` do: pip installs it as a command.

    wheel.py PROGRAM VERSION SHARE OUT

SHARE is a folder that pip installs below `share/` of the environment. The platform tag has the version of the C library of this machine, with
which the program was linked. Needs no packages.
"""

import base64
import hashlib
import os
import pathlib
import platform
import sys
import zipfile

METADATA = """Metadata-Version: 2.3
Name: meridian
Version: {version}
Summary: One global endpoint for embedding, rerank and classification models in many regions of many clouds
License-Expression: Apache-2.0
Requires-Python: >=3.9
Description-Content-Type: text/markdown

The program `meridian`: gateways, spokes, replicas and hubs, and the command line. `meridian up` starts a local fleet.
"""
# Times in the archive, so that equal contents give an equal wheel.
TIME = (1980, 1, 1, 0, 0, 0)


def platform_tag():
    name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
    assert name == "glibc", name
    return f"manylinux_{version.replace('.', '_')}_{platform.machine()}"


def main():
    program, version, share, out = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4])
    tag = f"py3-none-{platform_tag()}"
    info, data = f"meridian-{version}.dist-info", f"meridian-{version}.data"
    wheel = f"Wheel-Version: 1.0\nGenerator: meridian\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {f"{data}/scripts/meridian": (pathlib.Path(program).read_bytes(), 0o755)}
    for file in sorted(path for path in share.rglob("*") if path.is_file()):
        files[f"{data}/data/share/{file.relative_to(share)}"] = (file.read_bytes(), 0o644)
    files[f"{info}/METADATA"] = (METADATA.format(version=version).encode(), 0o644)
    files[f"{info}/WHEEL"] = (wheel.encode(), 0o644)
    record = []
    path = out / f"meridian-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        def add(name, content, mode):
            entry = zipfile.ZipInfo(name, TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, content)

        for name, (content, mode) in files.items():
            add(name, content, mode)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
        record.append(f"{info}/RECORD,,")
        add(f"{info}/RECORD", "\n".join(record) + "\n", 0o644)
    print(path.name)


main()
