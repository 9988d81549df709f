#!/bin/sh
# Builds the root file system of the CPU image: the program, the shared libraries that it needs, the certificate authorities of the
# system, and an unprivileged user. It has no shell and no package manager.
#
#     rootfs.sh PROGRAM DIR
set -eu
program=$1 root=$2

mkdir -p "$root/usr/bin" "$root/etc/ssl/certs" "$root/etc/meridian" "$root/var/lib/meridian" "$root/tmp"
chmod 1777 "$root/tmp"
cp "$program" "$root/usr/bin/meridian"
chmod 0755 "$root/usr/bin/meridian"
# Symbols stay, for the functions of a panic; line numbers and types do not.
strip --strip-debug "$root/usr/bin/meridian"

# `ldd` prints the path of each library, and that of the loader.
for library in $(ldd "$program" | grep -o '/[^ ]*'); do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done

cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
printf 'root:x:0:0:root:/:/sbin/nologin\nmeridian:x:65532:65532:meridian:/var/lib/meridian:/sbin/nologin\n' > "$root/etc/passwd"
printf 'root:x:0:\nmeridian:x:65532:\n' > "$root/etc/group"
# Without a volume the directory belongs to the user, too.
[ "$(id -u)" -ne 0 ] || chown 65532:65532 "$root/var/lib/meridian"
