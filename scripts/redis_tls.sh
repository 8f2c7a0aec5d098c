#!/usr/bin/env bash
# Prints the path of a redis-server that speaks TLS, for the tests of that. Fetches Debian's into .cache/ where there is none on
# the PATH; REDIS_TLS_SERVER names another one. Nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/.cache/redis-tls
packages=(redis-server redis-tools libjemalloc2 liblzf1 libatomic1 libssl3 libsystemd0)

fail() { echo "scripts/redis_tls.sh: $*" >&2; exit 1; }

if [ -n "${REDIS_TLS_SERVER:-}" ]; then echo "$REDIS_TLS_SERVER"; exit; fi
found=$(command -v redis-server || true)
if [ -n "$found" ] && ldd "$found" 2> /dev/null | grep -q libssl; then echo "$found"; exit; fi
if [ ! -x "$folder/redis-server" ]; then
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || fail "no redis-server with TLS on the PATH, and no apt-get that could fetch one"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    chmod 755 "$scratch"
    download() { (cd "$scratch" && apt-get download -qq "${packages[@]}" > log 2>&1); }
    # What is known of the archive may be old.
    download || { apt-get update -qq > /dev/null 2>&1; download; } || fail "apt-get cannot fetch ${packages[*]}: $(tail -1 "$scratch/log")"
    for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$scratch/root"; done
    mkdir -p "$folder/lib"
    cp -a "$scratch"/root/usr/lib/*/*.so* "$folder/lib/"
    cp "$(readlink -f "$scratch/root/usr/bin/redis-server")" "$folder/redis-server.bin"
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s/lib" exec "%s/redis-server.bin" "$@"\n' "$folder" "$folder" > "$folder/.redis-server.$$"
    chmod 755 "$folder/.redis-server.$$"
    # In one move: several may fetch at once.
    mv "$folder/.redis-server.$$" "$folder/redis-server"
fi
"$folder/redis-server" --version > /dev/null || fail "$folder/redis-server does not run here"
echo "$folder/redis-server"
