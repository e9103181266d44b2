#!/usr/bin/env bash
# Build an image for sandboxes, without root, registry or daemon.
#
#   build.sh OUTPUT_DIR [--name base] [--dir-only] [--force]
#
# Leaves OUTPUT_DIR/NAME (a directory image; a link to the build of this recipe) and
# OUTPUT_DIR/NAME.sif, and prints both. What NAME holds is said by NAME.packages
# (Debian packages, one a line) and NAME.def (what Apptainer adds) beside this script.
#
# A recipe that was built before is not built again. Each image is built beside its
# place and renamed into it, so nobody sees half of one; a directory image that may
# be in use is never touched: an older build stays until you remove it.
#
# Needs mmdebstrap, and as an ordinary user newuidmap (package uidmap) with a line in
# /etc/subuid and /etc/subgid; apptainer for the SIF. SUITE (bookworm) and
# HPCROLL_DEBIAN_MIRROR may be set.
set -euo pipefail
umask 022

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
suite=${SUITE:-bookworm}
name=base
output=
want_sif=yes
force=no

say() { printf 'build: %s\n' "$*"; }
die() { printf 'build: %s\n' "$*" >&2; exit 1; }

read_arguments() {
    while [ $# -gt 0 ]; do
        case $1 in
            --name) name=${2:?--name needs a value}; shift 2 ;;
            --dir-only) want_sif=no; shift ;;
            --force) force=yes; shift ;;
            -*) die "unknown option: $1" ;;
            *)  [ -z "$output" ] || die "one output directory, please: $output or $1?"
                output=$1; shift ;;
        esac
    done
    [ -n "$output" ] || die "usage: build.sh OUTPUT_DIR [--name base] [--dir-only] [--force]"
    if [ ! -r "$here/$name.packages" ] || [ ! -r "$here/$name.def" ]; then
        die "no recipe named $name: $here has no $name.packages and $name.def"
    fi
    mkdir -p "$output"
    output=$(cd "$output" && pwd)
    command -v mmdebstrap >/dev/null || die "mmdebstrap is missing: apt-get install mmdebstrap uidmap"
    [ "$want_sif" = no ] || command -v apptainer >/dev/null ||
        die "apptainer is missing: run install-apptainer.sh, or pass --dir-only"
}

recipe_key() {
    { echo "$suite"; cat "$here/build.sh" "$here/$name.packages" "$here/$name.def"; } | sha256sum | cut -c 1-16
}

# $1: an absent directory that will hold the root file system, owned by the caller.
make_rootfs() {
    local packages
    packages=$(grep -v '^#' "$here/$name.packages" | paste -sd, -)
    mkdir "$1"
    # Unpacked as the caller, so that the image needs no subordinate ids to be read,
    # copied or removed. Devices are left out: they cannot be made, and a sandbox has its own.
    SOURCE_DATE_EPOCH=0 mmdebstrap --quiet --variant=minbase --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" - "$("$here/debian-mirror")" </dev/null |
        tar -x -C "$1" --no-same-owner --no-same-permissions --exclude './dev/*'
    # Package files that only root may read would break the SIF and every copy; no
    # set-uid program belongs in a sandbox.
    chmod -R u+rwX,a+rX,u-s,g-s "$1"
    [ -x "$1/bin/sh" ] || die "mmdebstrap left no system in $1"
}

build_directory() {
    local place="$output/.$name-$key"
    if [ "$force" = yes ] || [ ! -d "$place" ]; then
        say "root file system of $suite for $name"
        make_rootfs "$scratch/rootfs"
        # The fixed name may be in use by a build of the same recipe that was quicker.
        [ ! -d "$place" ] || mv "$place" "$scratch/replaced"
        mv "$scratch/rootfs" "$place"
    fi
    ln -sfn ".$name-$key" "$scratch/link"
    mv -T "$scratch/link" "$output/$name"
}

build_sif() {
    local place="$output/$name.sif" mark="$output/.$name-$key.sif-built"
    if [ "$force" = yes ] || [ ! -e "$place" ] || [ ! -e "$mark" ]; then
        say "SIF of $name"
        APPTAINER_TMPDIR=$scratch APPTAINER_CACHEDIR=$scratch/cache SOURCE_DATE_EPOCH=0 \
            apptainer -q build --force --build-arg rootfs="$output/.$name-$key" \
            --mksquashfs-args '-comp zstd -Xcompression-level 3' \
            "$scratch/image.sif" "$here/$name.def" </dev/null >"$scratch/log" 2>&1 ||
            { tail -n 20 "$scratch/log" >&2; die "apptainer could not build $name.sif"; }
        mv -f "$scratch/image.sif" "$place"
        rm -f "$output/.$name-"*.sif-built
        : >"$mark"
    fi
}

read_arguments "$@"
key=$(recipe_key)
exec 9>"$output/.$name.lock"
flock 9
rm -rf "$output/.building-$name-"*   # of a build that was killed: we hold the lock
scratch=$(mktemp -d "$output/.building-$name-XXXXXXXX")
trap 'chmod -R u+rwX "$scratch"; rm -rf "$scratch"' EXIT
build_directory
[ "$want_sif" = no ] || build_sif
say "directory image: $output/$name"
[ "$want_sif" = no ] || say "SIF: $output/$name.sif ($(du -h "$output/$name.sif" | cut -f 1))"
