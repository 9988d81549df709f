"""The packages of `make dist`, made of the program under test: the wheel is installed and the command runs; one version everywhere.

    package.py MERIDIAN SCRATCH
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

import yaml

import pods

MERIDIAN, SCRATCH = sys.argv[1], pathlib.Path(sys.argv[2])


def output(*command, **options):
    ran = subprocess.run(command, capture_output=True, text=True, **options)
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def main():
    shutil.rmtree(SCRATCH, ignore_errors=True)
    out = SCRATCH / "dist"
    print(output(pods.DEPLOY / "package/dist.sh", MERIDIAN, out))
    output("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=out)
    assert len((out / "SHA256SUMS").read_text().splitlines()) == 3

    manifest = tomllib.loads((pods.REPOSITORY / "Cargo.toml").read_text())
    version = manifest["workspace"]["package"]["version"]
    client = tomllib.loads((pods.REPOSITORY / "loadtest/python/Cargo.toml").read_text())
    chart = yaml.safe_load((pods.CHART / "Chart.yaml").read_text())
    (newest, *_) = re.findall(r"^## (\S+)", (pods.REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert {version} == {client["package"]["version"], chart["version"], chart["appVersion"], newest}

    (wheel,) = out.glob("meridian-*.whl")
    environment = SCRATCH / "environment"
    output(sys.executable, "-m", "venv", environment)
    output(environment / "bin/pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", wheel)
    installed = output(environment / "bin/meridian", "--version")
    assert installed == output(MERIDIAN, "--version") and installed.startswith(f"meridian {version}"), installed
    output("bash", "-n", environment / "share/bash-completion/completions/meridian")
    page = (environment / "share/man/man1/meridian-gateway.1").read_text()
    assert "take\\-over" in page, page
    units = {path.name for path in (environment / "share/meridian/systemd").iterdir()}
    assert units == {path.name for path in (pods.DEPLOY / "systemd").iterdir()}

    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        assert files.getmember(f"meridian-{version}/bin/meridian").mode & 0o111
    with tarfile.open(out / f"meridian-chart-{version}.tgz") as files:
        assert "meridian/Chart.yaml" in files.getnames()


main()
