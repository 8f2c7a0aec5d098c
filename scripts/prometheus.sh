#!/usr/bin/env bash
# Prints the folder of a promtool and a prometheus to check metrics with; PROMETHEUS_BIN names another one. Where PATH has
# none, they are taken out of Debian's package into .cache/: installing it would start a service.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/.cache/prometheus

if [ -n "${PROMETHEUS_BIN:-}" ]; then echo "$PROMETHEUS_BIN"; exit; fi
if found=$(command -v promtool) && command -v prometheus > /dev/null; then dirname "$found"; exit; fi
if [ ! -x "$folder/prometheus" ]; then
    fail() { echo "scripts/prometheus.sh: $*" >&2; exit 1; }
    command -v apt-get > /dev/null || fail "neither promtool and prometheus nor apt-get are here; install Prometheus, or name its folder: PROMETHEUS_BIN=/path"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    chmod 755 "$scratch"
    fetch() { (cd "$scratch" && apt-get download -qq prometheus > /dev/null 2>&1); }
    fetch || { [ "$(id -u)" = 0 ] && apt-get update -qq > /dev/null 2>&1 && fetch; } || fail "apt-get cannot fetch the package prometheus; try apt-get update"
    dpkg-deb --fsys-tarfile "$scratch"/prometheus_*.deb | tar -x -C "$scratch" ./usr/bin/promtool ./usr/bin/prometheus
    mkdir -p "$folder"
    # In one move each: several may fetch at once.
    for tool in promtool prometheus; do
        cp "$scratch/usr/bin/$tool" "$folder/.$tool.$$"
        mv "$folder/.$tool.$$" "$folder/$tool"
    done
fi
echo "$folder"
