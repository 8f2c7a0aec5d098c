#!/usr/bin/env bash
# Profiles a running Outrider with AIPerf, a public load tool, and prints its figures, those of speculation among them:
#
#     scripts/load_tool.sh [URL [LOAD...]]
#
# URL, such as http://127.0.0.1:8000, defaults to that of the cluster that `outrider status` finds. LOAD is what `aiperf
# profile` takes in place of the small load below. Prompts are made with the tokenizer in the folder TOKENIZER
# (models/tiny/target); nothing is fetched. AIPERF names the program where it is not on the PATH (docs/benchmarks.md says how
# to install it). The folder OUT gets the exports; without it they are thrown away. OUTRIDER_API_KEY is shown to the server.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
aiperf=${AIPERF:-aiperf}
fail() { echo "scripts/load_tool.sh: $*" >&2; exit 1; }
pick() { python3 -c "import json, sys; print(json.load(sys.stdin)$1)"; }

command -v "$aiperf" > /dev/null || fail "there is no $aiperf; install it as docs/benchmarks.md says, and name it: AIPERF=PATH"
if [ $# -gt 0 ]; then
    url=$1
    shift
else
    status=$(outrider status --json)
    url=$(pick '["http_url"]' <<< "$status")
fi
url=${url%/}
url=${url%/v1}
[ -n "$url" ] || fail "the cluster has no HTTP port; set router.http_port"
key=()
header=()
if [ -n "${OUTRIDER_API_KEY:-}" ]; then
    key=(--api-key "$OUTRIDER_API_KEY")
    header=(-H "Authorization: Bearer $OUTRIDER_API_KEY")
fi
model=$(curl -fsS --max-time 30 "${header[@]}" "$url/v1/models" | pick '["data"][0]["id"]') || fail "$url/v1/models does not answer"
if [ -z "${OUT:-}" ]; then OUT=$(mktemp -d); trap 'rm -rf "$OUT"' EXIT; fi
[ $# -gt 0 ] || set -- --concurrency 2 --request-count 16 --isl 64 --osl 64 --extra-inputs ignore_eos:true --random-seed 7

"$aiperf" profile --url "$url" --model "$model" --streaming --use-server-token-count \
    --tokenizer "${TOKENIZER:-$root/models/tiny/target}" --ui none --no-gpu-telemetry --artifact-dir "$OUT" "${key[@]}" "$@"
