"""The packages of `make dist`, made of the program under test: the wheel is installed and the command runs; one version everywhere.

    package.py MERIDIAN SCRATCH
"""

import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib

import yaml

REPOSITORY = pathlib.Path(__file__).parents[2]
DEPLOY = REPOSITORY / "configs/deploy"
MERIDIAN, SCRATCH = sys.argv[1], pathlib.Path(sys.argv[2])


def output(*command, **options):
    ran = subprocess.run(command, capture_output=True, text=True, **options)
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def check_versions():
    """Returns the version, which is the same in all manifests."""
    version = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    client = tomllib.loads((REPOSITORY / "loadtest/python/Cargo.toml").read_text())["package"]["version"]
    chart = yaml.safe_load((DEPLOY / "helm/meridian/Chart.yaml").read_text())
    (newest, *_) = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert {version} == {client, chart["version"], chart["appVersion"], newest}, (version, client, chart, newest)
    return version


def check_wheel(wheel, version):
    """Installs the wheel into a folder, and runs the command."""
    folder = SCRATCH / "environment"
    output(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", "--ignore-installed",
           "--prefix", folder, wheel)
    installed = output(folder / "bin/meridian", "--version")
    assert installed == output(MERIDIAN, "--version") and installed.startswith(f"meridian {version}"), installed
    output("bash", "-n", folder / "share/bash-completion/completions/meridian")
    page = (folder / "share/man/man1/meridian-gateway.1").read_text()
    assert "take\\-over" in page, page
    units = {path.name for path in (folder / "share/meridian/systemd").iterdir()}
    assert units == {path.name for path in (DEPLOY / "systemd").iterdir()}, units


def main():
    out = SCRATCH / "dist"
    SCRATCH.mkdir(parents=True)
    print(output(DEPLOY / "package/dist.sh", MERIDIAN, out))
    output("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=out)
    assert len((out / "SHA256SUMS").read_text().splitlines()) == 3
    version = check_versions()
    (wheel,) = out.glob("meridian-*.whl")
    check_wheel(wheel, version)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        assert files.getmember(f"meridian-{version}/bin/meridian").mode & 0o111
    with tarfile.open(out / f"meridian-chart-{version}.tgz") as files:
        assert "meridian/Chart.yaml" in files.getnames()


main()
