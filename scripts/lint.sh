#!/usr/bin/env bash
# Every check that needs no running process. All of them run; the first failure does not hide the others.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONSAFEPATH=1
failed=()

check() {
    local name=$1; shift
    local output
    if output=$("$@" 2>&1); then echo "ok      $name"; else echo "FAILED  $name"; echo "$output"; failed+=("$name"); fi
}

check "ruff check" ruff check
check "ruff format" ruff format --check
check "mypy" mypy
check "lint-imports" lint-imports --no-cache
check "buf lint" buf lint
check "buf breaking" scripts/breaking.sh
check "chart's values" python scripts/chart_docs.py --check
check "generated stubs" scripts/proto.sh --check

if [ ${#failed[@]} -gt 0 ]; then
    printf 'make lint: failed:'; printf ' %s;' "${failed[@]}"; echo
    exit 1
fi
