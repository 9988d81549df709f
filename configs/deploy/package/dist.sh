#!/bin/sh
# Packages a built program: an archive, a wheel that carries it, the Helm chart, and checksums. The last step of `make dist`.
#
#     dist.sh PROGRAM DIR
set -eu
program=$1 out=$2
here=$(dirname "$0")
repository=$here/../../..

# `meridian 0.1.0 (8d352fa8c9f1)`
version=$("$program" --version | cut -d ' ' -f 2)
machine=$(uname -m)
mkdir -p "$out"
staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT

# Completions and man pages, where shells and `man` look for them below a prefix such as /usr or a virtual environment.
"$program" generate --dir "$staged/generated"
share=$staged/meridian-$version/share
mkdir -p "$staged/meridian-$version/bin" "$share/man/man1" "$share/bash-completion/completions" "$share/zsh/site-functions" \
    "$share/fish/vendor_completions.d" "$share/meridian/systemd"
cp "$staged"/generated/man/*.1 "$share/man/man1/"
cp "$staged/generated/completions/meridian.bash" "$share/bash-completion/completions/meridian"
cp "$staged/generated/completions/_meridian" "$share/zsh/site-functions/"
cp "$staged/generated/completions/meridian.fish" "$share/fish/vendor_completions.d/"
cp "$repository"/configs/deploy/systemd/* "$share/meridian/systemd/"
cp "$repository/LICENSE" "$repository/CHANGELOG.md" "$share/meridian/"

# The archive has line numbers for panics; the wheel, which is downloaded more often, has names of functions only.
cp "$program" "$staged/meridian-$version/bin/meridian"
tar -C "$staged" --owner=0 --group=0 --sort=name -czf "$out/meridian-$version-$machine-linux-gnu.tar.gz" "meridian-$version"
strip --strip-debug -o "$staged/stripped" "$program"
python3 "$here/wheel.py" "$staged/stripped" "$version" "$share" "$out"

tar -C "$repository/configs/deploy/helm" --owner=0 --group=0 --sort=name -czf "$out/meridian-chart-$version.tgz" meridian

cd "$out"
sha256sum -- *.tar.gz *.whl *.tgz > SHA256SUMS
ls -l
