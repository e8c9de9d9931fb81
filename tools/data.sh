#!/usr/bin/env bash
# Fetch the data sets that recipes need and that do not ship, from Debian's packages: without root.
#
#     tools/data.sh
#
# Files are unpacked into the user's cache ($PHASELOOP_CACHE), once for all checkouts, and linked from
# data/ of this one. Their SHA-256 stand beside the recipe that reads them; what is there and whole is
# left alone. Where one cannot be fetched the others are; the exit code is then 1.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${PHASELOOP_CACHE:-${XDG_CACHE_HOME:-${HOME:?is not set: name a folder by PHASELOOP_CACHE}/.cache}/phaseloop}/data
[[ $cache == /* ]] || cache=$PWD/$cache # links lead there from another folder

fail() { echo "data.sh: $*" >&2; exit 1; }

# Said at once, and by name: a check of sums without its program would find every file damaged.
missing=
for program in apt-get dpkg-deb flock gunzip mktemp sha256sum; do
    command -v "$program" >/dev/null || missing+=" $program"
done
[[ -z $missing ]] ||
    fail "it needs programs that this machine does not have:$missing." \
        "The data sets are Debian's packages dataset-fashion-mnist and sword-text-kjv: fetch them elsewhere," \
        "unpack them by 'dpkg-deb -x', and give the recipe the folder."

whole() { # FOLDER SUMS: every file that the list names is there, as it should be
    [[ -d $1 ]] && (cd "$1" && sha256sum --quiet --strict -c "$2" >/dev/null 2>&1)
}

# Unpack a package's files into a new folder.
unpack() { # PACKAGE FOLDER
    # As whoever runs this: a user of apt's own could not write into this folder.
    (cd "$2" && apt-get -q -o APT::Sandbox::User="$(id -un)" download "$1" >&2) ||
        fail "apt-get could not fetch $1: if it does not know the package, run 'apt-get update' as root," \
            "with Debian's main archive among the sources"
    dpkg-deb -x "$2/$1"_*.deb "$2"
}

# Put the files that a list of SHA-256 names into the cache, unpacked where the package has them as .gz.
# In a shell of its own, which ends at the first thing that fails.
fetch() ( # NAME PACKAGE FOLDER-IN-IT SUMS
    set -e
    place=$cache/$1
    if ! whole "$place" "$4"; then
        made=$(mktemp -d "$cache/.$1.XXXXXX")
        trap 'rm -rf "$made"' EXIT
        mkdir "$made/package" "$made/files"
        unpack "$2" "$made/package"
        while read -r _ file; do
            if [[ -e $made/package/$3/$file.gz ]]; then
                gunzip -c "$made/package/$3/$file.gz" >"$made/files/$file"
            else
                cp "$made/package/$3/$file" "$made/files/$file"
            fi
        done <"$4"
        whole "$made/files" "$4" ||
            fail "what $2 holds is not what $4 says: another version of the package?"
        rm -rf "$place"
        mv "$made/files" "$place"
    fi
    mkdir -p "$root/data"
    # What the user has put there stays, a folder or a link; a link that leads nowhere is made anew.
    [[ -e $root/data/$1 ]] || ln -sfn "$place" "$root/data/$1"
    if [[ $root/data/$1 -ef $place ]]; then
        echo "ready: data/$1"
    else
        echo "data/$1 is not from here, and stays as it is: $place is ready too"
    fi
)

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9 # two checkouts may want it at once
code=0
# Not `fetch ... || code=1`: what is called so does not end at the first thing that fails.
set +e
fetch fashion-mnist dataset-fashion-mnist usr/share/datasets/fashion-mnist \
    "$root/recipes/fashion_mnist/files.sha256"
code=$((code | $?))
fetch kjv sword-text-kjv usr/share/sword/modules/texts/ztext/engKJV2006eb \
    "$root/recipes/char_lm/files.sha256"
code=$((code | $?))
exit $code
