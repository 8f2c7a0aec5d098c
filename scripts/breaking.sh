#!/usr/bin/env bash
# Checks that messages and services of an earlier protocol still mean the same (buf breaking, WIRE_JSON).
#
# Earlier is, whichever is found first: the commit that BREAKING_AGAINST names; the newest release tag; origin/main where
# work is ahead of it; HEAD where proto/ has changes that are not committed; the commit before HEAD.
set -euo pipefail
cd "$(dirname "$0")/.."

exists() { git rev-parse --quiet --verify "$1^{commit}" > /dev/null; }
has_proto() { [ -n "$(git ls-tree --name-only "$1" proto 2> /dev/null)" ]; }

if ! git rev-parse --git-dir > /dev/null 2>&1 || ! exists HEAD; then
    echo "no history: there is no earlier protocol to compare with"
    exit 0
fi
against=${BREAKING_AGAINST:-$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2> /dev/null || true)}
if [ -n "$against" ]; then
    exists "$against" || { echo "there is no commit $against to compare the protocol with" >&2; exit 1; }
elif exists origin/main && [ "$(git rev-parse origin/main)" != "$(git rev-parse HEAD)" ]; then
    against=origin/main
elif [ -n "$(git status --porcelain -- proto)" ]; then
    against=HEAD
else
    against=HEAD~1
fi
if ! exists "$against" || ! has_proto "$against"; then
    echo "$against holds no protocol to compare with"
    exit 0
fi

earlier=$(mktemp -d)
trap 'rm -rf "$earlier"' EXIT
git archive "$against" proto buf.yaml | tar -x -C "$earlier"
buf breaking --against "$earlier"
