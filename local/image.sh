#!/usr/bin/env bash
# Builds the training image from its shipped Dockerfile without a Docker engine: `bash local/image.sh`, as root.
#
# Needs buildah and debootstrap. Afterwards the image is named localhost/holdfast-training. A base for it is made of
# Debian's own packages once, and kept as localhost/holdfast-base. What pip is told on this machine (index, certificate,
# constraints) holds for the build too, and is not in the image.
set -euo pipefail
cd "$(dirname "$0")/.."
pip=${1:-.venv/bin/pip}

missing=()
for tool in buildah debootstrap; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if ((${#missing[@]})); then
    echo "missing: ${missing[*]}; on Debian: apt-get install buildah debootstrap" >&2
    exit 3
fi
if ((EUID)); then
    echo "building without a Docker engine needs root; you are $(id -un)" >&2
    exit 3
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! buildah inspect --type image localhost/holdfast-base >/dev/null 2>&1; then
    mirror=$(awk '/^URIs:/ {print $2} /^deb / {for (i = 2; i <= NF; i++) if ($i ~ /^http/) print $i}' \
        /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -E '/debian/?$' | head -1 || true)
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    debootstrap --variant=minbase --include=python3,python3-pip,python-is-python3,ca-certificates,tini \
        "$release" "$work/root" "${mirror:-http://deb.debian.org/debian}" >"$work/debootstrap.log" ||
        { tail -20 "$work/debootstrap.log" >&2; exit 1; }
    rm -rf "$work"/root/var/cache/apt/archives/*.deb
    base=$(buildah from scratch)
    buildah add -q "$base" "$work/root" / >/dev/null
    # Debian marks its Python as its own; in an image there is no other.
    buildah config --env PIP_BREAK_SYSTEM_PACKAGES=1 "$base"
    buildah commit -q --rm "$base" localhost/holdfast-base >/dev/null
    rm -rf "$work/root"
fi

declare -A told
volumes=()
while IFS='=' read -r name value; do
    option=${name##*.} value=${value//\'/}
    # The environment counts more than a file.
    if [[ $name == :env:* || -z ${told[$option]:-} ]]; then told[$option]=$value; fi
    for path in $value; do
        # A simple index in a folder points to files beside it.
        case $path in
            file:///*) path=$(dirname "${path#file://}") ;;
            /*) ;;
            *) continue ;;
        esac
        if [[ -e $path ]]; then volumes+=(--volume "$path:$path:ro"); fi
    done
done < <("$pip" config list)
{
    echo "[global]"
    for option in "${!told[@]}"; do echo "$option = ${told[$option]}"; done
} >"$work/pip.conf"
volumes+=(--volume "$work/pip.conf:/etc/pip.conf:ro")
# Where the index of torch's CPU builds is not named, what pip knows has to do.
torch_index=${TORCH_INDEX_URL:-${told[index-url]:-https://pypi.org/simple}}

buildah bud --layers --isolation chroot "${volumes[@]}" \
    --build-arg BASE=localhost/holdfast-base --build-arg TORCH_INDEX_URL="$torch_index" \
    -f training_image/Dockerfile -t localhost/holdfast-training .
