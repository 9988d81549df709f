"""The Terraform example: parsed with python-hcl2, its references resolved, and its user data checked as cloud-init and the roles read it.

    terraform.py MERIDIAN SCRATCH

The schemas of the providers are not published where this test runs, so arguments of resources are not checked.
"""

import pathlib
import re
import subprocess
import sys

import hcl2
import yaml

import pods

MERIDIAN, SCRATCH = sys.argv[1], pathlib.Path(sys.argv[2])
FOLDER = pods.DEPLOY / "terraform"


def plain(text):
    return text.strip('"')


def parsed(folder):
    found = {}
    for file in sorted(folder.glob("*.tf")):
        for kind, blocks in hcl2.loads(file.read_text()).items():
            found.setdefault(kind, []).extend(blocks if isinstance(blocks, list) else [blocks])
    return found


def names(blocks):
    return {plain(name) for block in blocks for name in block if not name.startswith("__")}


def check_references(folder):
    """Every variable, local, module and resource that an expression names is defined, and every variable is used."""
    text = "\n".join(file.read_text() for file in sorted(folder.glob("*.tf")))
    blocks = parsed(folder)
    variables = names(blocks.get("variable", []))
    used = set(re.findall(r"\bvar\.(\w+)", text))
    assert used == variables, f"{folder}: {used ^ variables}"
    locals_ = {plain(name) for block in blocks.get("locals", []) for name in block if not name.startswith("__")}
    assert set(re.findall(r"\blocal\.(\w+)", text)) == locals_, locals_
    assert set(re.findall(r"\bmodule\.(\w+)", text)) == names(blocks.get("module", []))
    defined = {f"{plain(kind)}.{plain(name)}" for block in blocks.get("resource", []) for kind, given in block.items()
               for name in given}
    for resource in re.findall(r"(?<![\w.\"])((?:aws|google)_\w+\.\w+)\.", text):
        assert resource in defined, resource
    return blocks


def main():
    root = check_references(FOLDER)
    module = check_references(FOLDER / "aws")
    expected = names(module["variable"]) | {"source", "providers"}
    calls = {plain(name): call for block in root["module"] for name, call in block.items()}
    for name, call in calls.items():
        given = {plain(key) for key in call if not key.startswith("__")}
        assert given == expected, f"module {name}: {given ^ expected}"
    text = (FOLDER / "main.tf").read_text()
    regions = re.findall(r'"(\w+/[\w-]+)"', re.search(r"regions = toset\(\[(.*?)\]\)", text)[1])
    assert len(regions) == 3 and len({region.split("/")[0] for region in regions}) == 2
    template = (FOLDER / "cloud-init.yaml").read_text()
    call = text[text.index("templatefile"):].split("})")[0]
    given = set(re.findall(r"^      (\w+) +=", call, re.M))
    assert set(re.findall(r"\$\{(\w+)\}", template)) == given, "the variables of the template"
    authority = pods.Authority()
    for region, jurisdiction in zip(regions, ["de", "us-va", "nl"]):
        values = {name: "x" for name in given} | {"region": region, "hub": "hub.example.com", "address_command": "curl -H \"A: $(curl -H 'B: 60' http://x)\" http://x"}
        document = yaml.safe_load(re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], template))
        assert template.startswith("#cloud-config\n")
        assert all(isinstance(command, str) for command in document["runcmd"]), document["runcmd"]
        files = {pathlib.Path(file["path"]): file for file in document["write_files"]}
        checked = []
        for role in ["spoke", "gateway"]:
            assert files[pathlib.Path(f"/etc/meridian/meridian-{role}.env")]["permissions"] == "0600", "a token is secret"
            issued = authority.secret(uris=[f"spiffe://m.example/{role}/{region}/in/{jurisdiction}"])
            folder = SCRATCH / region / role
            identity = folder / "var/lib" / f"meridian-{role}" / "identity"
            identity.mkdir(parents=True)
            for ours, theirs in [("certificate", "tls.crt"), ("key", "tls.key"), ("authorities", "ca.crt")]:
                (identity / f"{ours}.pem").write_bytes(issued[theirs])
            content = files[pathlib.Path(f"/etc/meridian/{role}.toml")]["content"].replace("ADDRESS", "203.0.113.7")
            (folder / f"{role}.toml").write_text(content.replace('"/var/lib', f'"{folder}/var/lib'))
            checked.append(folder / f"{role}.toml")
        subprocess.run([MERIDIAN, "check", *checked], check=True)
        units = " ".join(command for command in document["runcmd"] if "systemctl enable" in command)
        for unit in re.findall(r"(meridian-\S+)\.service", units):
            assert (pods.DEPLOY / "systemd" / f"{unit.replace('@a', '@')}.service").exists(), unit
    print(f"{len(regions)} regions, {len(calls)} modules: parsed, and the files of the machines are valid")


main()
