#!/usr/bin/env bash
# container.sh IMAGE FILES STATE COMMAND...: becomes the command in the image's files, in the mount,
# process and network namespaces that the caller gave it. What it writes goes to FILES; STATE is its /var/lib/holdfast.
set -euo pipefail
image=$1 files=$2 state=$3
shift 3
root=$files/root
mkdir -p "$files"/{changed,work,root}
mount -t overlay overlay -o "lowerdir=$image,upperdir=$files/changed,workdir=$files/work" "$root"
mkdir -p "$root"/{dev,proc,sys,tmp,var/lib/holdfast}
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$state" "$root/var/lib/holdfast"
exec chroot "$root" "$@"
