"""The systemd units: `systemd-analyze verify` and `systemd-analyze security`, which read files only.

    units.py MERIDIAN SCRATCH
"""

import pathlib
import re
import shutil
import subprocess
import sys

UNITS = pathlib.Path(__file__).parents[2] / "configs/deploy/systemd"
INSTANCES = ["meridian-hub.service", "meridian-spoke.service", "meridian-gateway@a.service", "meridian-replica@minilm.service"]
# Largest exposure level of a unit ("OK" begins at 2). The remaining points are the network, which the roles need.
EXPOSURE_MAX = 1.5


def root_with_units(scratch, change=lambda text: text):
    root = scratch / "units"
    shutil.rmtree(root, ignore_errors=True)
    folder = root / "etc/systemd/system"
    folder.mkdir(parents=True)
    for unit in UNITS.glob("*.service"):
        (folder / unit.name).write_text(change(unit.read_text()))
    (root / "usr/bin").mkdir(parents=True)
    shutil.copy("/bin/true", root / "usr/bin/meridian")
    # Targets and sockets that the units refer to.
    shutil.copytree("/lib/systemd/system", root / "lib/systemd/system", symlinks=True)
    return root


def verify(root):
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={root}", *INSTANCES],
                         capture_output=True, text=True)
    return ran.returncode, [line for line in ran.stderr.splitlines() if "meridian" in line]


def main():
    meridian, scratch = sys.argv[1], pathlib.Path(sys.argv[2])
    root = root_with_units(scratch)
    code, problems = verify(root)
    assert code == 0 and not problems, f"{code}: {problems}"
    for unit in INSTANCES:
        name = re.sub("@.*[.]", "@.", unit)
        ran = subprocess.run(["systemd-analyze", "security", "--offline=true", f"--root={root}",
                              f"--threshold={int(EXPOSURE_MAX * 10)}", unit], capture_output=True, text=True)
        level = re.search(r"exposure level for \S+: (\S+)", ran.stdout)
        assert level and ran.returncode == 0, ran.stdout + ran.stderr
        print(f"{name}: verified, exposure level {level[1]}")
        # The command line is one that the program accepts; the configuration does not exist here.
        text = (UNITS / name).read_text()
        assert "Type=notify" in text, "a role reports that it is ready"
        command = re.search(r"^ExecStart=/usr/bin/meridian (.*)$", text, re.M)[1].replace("%i", "minilm").split()
        ran = subprocess.run([meridian, *command], capture_output=True, text=True, cwd=scratch)
        assert ran.returncode in (1, 2) and "/etc/meridian/" in ran.stderr and "cannot be read" in ran.stderr, ran.stderr
        users = (UNITS / "meridian.sysusers").read_text()
        user = re.search(r"^User=(.*)$", text, re.M)[1]
        assert re.search(rf"^u {user} ", users, re.M) and f"StateDirectory={user}\n" in text, user
    # A misspelt line is found.
    code, problems = verify(root_with_units(scratch, lambda text: text.replace("ProtectHome=yes", "ProtectHomes=yes")))
    assert any("ProtectHomes" in problem for problem in problems), (code, problems)


main()
