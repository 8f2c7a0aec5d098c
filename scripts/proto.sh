#!/usr/bin/env bash
# Generates src/outrider/v1 from proto/. With --check, fails if the committed stubs differ from what proto/ gives.
set -euo pipefail
cd "$(dirname "$0")/.."
out=src
if [ "${1:-}" = "--check" ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
mkdir -p "$out/outrider/v1"
python -m grpc_tools.protoc -I proto --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
    proto/outrider/v1/*.proto
if [ "${1:-}" = "--check" ]; then
    diff -r --exclude=__pycache__ --exclude=__init__.py "$out/outrider/v1" src/outrider/v1 \
        || { echo "src/outrider/v1 is stale: run 'make proto'" >&2; exit 1; }
fi
