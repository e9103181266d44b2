#!/usr/bin/env bash
# Install the real Apptainer on Debian 12 or 13, and prove that it works unprivileged.
#
#   install-apptainer.sh [--user NAME] [--force]
#
# Run as root; running it again is cheap. --user NAME gets subordinate ids (for
# --fakeroot) and is the user of the closing check (default: nobody, without ids).
#
# Debian carries Apptainer in unstable only. The package is fetched with apt lists
# of this script's own: the machine's apt sources are read for the mirror and left
# as they are. Where the machine's C library is new enough (Debian 13) the package
# is installed as it is; elsewhere (Debian 12) it is unpacked and its programs are
# pointed at a private copy of unstable's C library, which nothing else uses.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
runtime_dir=/opt/hpcroll/apptainer-runtime
user=nobody
force=no
work=

say() { printf 'install-apptainer: %s\n' "$*"; }
die() { printf 'install-apptainer: %s\n' "$*" >&2; exit 1; }

read_arguments() {
    while [ $# -gt 0 ]; do
        case $1 in
            --user) user=${2:?--user needs a name}; shift 2 ;;
            --force) force=yes; shift ;;
            *) die "unknown argument: $1 (usage: install-apptainer.sh [--user NAME] [--force])" ;;
        esac
    done
    [ "$(id -u)" -eq 0 ] || die "run it as root"
    command -v apt-get >/dev/null || die "only Debian is supported; elsewhere ask your site for Apptainer >= 1.2"
    id "$user" >/dev/null 2>&1 || die "there is no user $user; create it first"
}

# --- the package from unstable ------------------------------------------------

# A mirror, or a snapshot of one, may lag behind; its signature is checked all the same.
unstable_apt() {
    apt-get -qq -o Dir::Etc::SourceList="$work/unstable.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" \
        -o Acquire::Check-Valid-Until=false -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"
}

fetch_lists() {
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed_by=
    [ ! -e "$keyring" ] || signed_by="[signed-by=$keyring] "
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
    echo "deb ${signed_by}$("$here/debian-mirror") unstable main" >"$work/unstable.list"
    say "reading the package list of unstable from $("$here/debian-mirror")"
    unstable_apt update || die "cannot read Debian unstable; set HPCROLL_DEBIAN_MIRROR to a mirror that has it"
}

download() { (cd "$work/debs" && unstable_apt download "$@") || die "cannot download from unstable: $*"; }

machine_libc_suffices() {
    local wanted
    wanted=$(dpkg-deb -f "$1" Depends | sed -n 's/.*libc6 (>= \([^)]*\)).*/\1/p')
    dpkg --compare-versions "$(dpkg-query -W -f '${Version}' libc6)" ge "${wanted:-0}"
}

install_package() {
    fetch_lists
    download apptainer
    local deb
    deb=$(echo "$work"/debs/apptainer_*.deb)
    if machine_libc_suffices "$deb"; then
        say "installing $(basename "$deb")"
        "$here/apt-install" "$deb"
    else
        say "this machine's C library is too old for $(basename "$deb"): giving it a private one in $runtime_dir"
        "$here/apt-install" patchelf
        download libc6 libseccomp2 libsqlite3-0
        unpack_with_private_libc "$deb"
    fi
}

is_elf() { [ "$(head -c 4 "$1" | tail -c 3)" = ELF ]; }

unpack_with_private_libc() {
    local deb=$1 libs="$work/libs" tree="$work/tree" new="$runtime_dir.new" name file interpreter
    mkdir -p "$libs" "$tree"
    for name in libc6 libseccomp2 libsqlite3-0; do
        dpkg-deb -x "$(echo "$work/debs/${name}"_*.deb)" "$libs"
    done
    dpkg-deb -x "$deb" "$tree"
    rm -rf "${tree:?}/usr/share" "$new"
    interpreter=$(basename "$(patchelf --print-interpreter "$tree/usr/bin/apptainer")")

    install -d -m 755 "$new"
    for name in "$interpreter" libc.so.6 libm.so.6 libseccomp.so.2 libsqlite3.so.0; do
        file=$(find "$libs" -path "*-linux-gnu/$name" | head -n 1)
        [ -n "$file" ] || die "unstable's packages no longer hold $name; please report this"
        install -m 755 "$(readlink -f "$file")" "$new/$name"
    done
    patchelf --set-rpath "$runtime_dir" "$new/libseccomp.so.2" "$new/libsqlite3.so.0"
    find "$tree/usr" -type f -perm -u+x -print0 | while IFS= read -r -d '' file; do
        is_elf "$file" || continue
        patchelf --set-interpreter "$runtime_dir/$interpreter" --set-rpath "$runtime_dir" "$file"
    done
    rm -rf "$runtime_dir"
    mv "$new" "$runtime_dir"
    # tar removes before it writes, so a program that runs meanwhile keeps its old file.
    tar -C "$tree" -cf - . | tar -C / -xf - --no-overwrite-dir --keep-directory-symlink
}

# --- what it needs around it ----------------------------------------------------

prepare_machine() {
    "$here/apt-install" ca-certificates squashfs-tools squashfuse fuse3 fuse-overlayfs uidmap fakeroot
    if [ ! -e /dev/fuse ]; then
        modprobe fuse 2>/dev/null || true
        [ -e /dev/fuse ] || mknod /dev/fuse c 10 229 || die "there is no /dev/fuse and it cannot be made"
    fi
    # udev leaves it at 666; a machine without udev does not.
    chmod 666 /dev/fuse
    grant_subordinate_ids
}

grant_subordinate_ids() {
    [ "$user" != nobody ] || return 0
    touch /etc/subuid /etc/subgid
    local first
    if ! grep -q "^$user:" /etc/subuid || ! grep -q "^$user:" /etc/subgid; then
        # Above every range that is given out, so that no two users share ids.
        first=$(cat /etc/subuid /etc/subgid | awk -F: 'BEGIN { top = 100000 } { if ($2 + $3 > top) top = $2 + $3 } END { print top }')
        grep -q "^$user:" /etc/subuid || usermod --add-subuids "$first-$((first + 65535))" "$user"
        grep -q "^$user:" /etc/subgid || usermod --add-subgids "$first-$((first + 65535))" "$user"
        say "gave $user 65536 subordinate ids from $first"
    fi
}

# --- the proof ---------------------------------------------------------------------

# A root file system of one shell and its libraries: enough to start a container.
make_tiny_image() {
    local image=$1 library
    mkdir -p "$image"/{bin,etc,proc,sys,dev,tmp,root,home}
    cp -L /bin/sh "$image/bin/sh"
    ldd /bin/sh | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$image$(dirname "$library")"
        cp -L "$library" "$image$library"
    done
    chmod -R a+rX "$image"
}

works_unprivileged() {
    command -v apptainer >/dev/null || { echo "apptainer is not installed"; return 1; }
    local interfaces
    # shellcheck disable=SC2016  # expanded by the shell in the container
    interfaces=$(cd / && setpriv --reuid "$user" --regid "$(id -g "$user")" --init-groups \
        env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME="$work" \
        apptainer -s exec --userns --containall --cleanenv --no-home --net --network none "$work/image" \
        /bin/sh -c 'n=0; while read -r line; do case $line in *:*) n=$((n + 1)) ;; esac; done </proc/net/dev; echo "interfaces=$n"' \
        2>&1 </dev/null) || { echo "$interfaces"; return 1; }
    [ "$interfaces" = interfaces=1 ] || { echo "a container without network sees: $interfaces"; return 1; }
}

read_arguments "$@"
work=$(mktemp -d)
chmod 755 "$work"
trap 'rm -rf "$work"' EXIT
make_tiny_image "$work/image"
prepare_machine
if [ "$force" = yes ] || ! works_unprivileged >/dev/null; then
    install_package
    fault=$(works_unprivileged) || die "installed, but it does not work as $user: $fault
Unprivileged user namespaces may be off: see user.max_user_namespaces and kernel.unprivileged_userns_clone."
fi
say "$(apptainer --version) works: exec of a directory image as $user with --userns --containall --net --network none"
