#!/usr/bin/env bash
# The steps of the Dockerfile that need no container engine; the tests run them too.
#   image.sh dependencies VENV cpu|cuda [INDEX]   everything but Outrider, at the versions of constraints.txt
#   image.sh requirements VENV                    what the second half of `dependencies` installs, one a line
#   image.sh package VENV                         Outrider itself, as a wheel; works without a network
#   image.sh sbom VENV FILE [PACKAGES]            what is installed, as CycloneDX in JSON; PACKAGES lists Debian's
set -euo pipefail
cd "$(dirname "$0")/.."
step=${1:?usage: image.sh STEP VENV …} venv=${2:?usage: image.sh STEP VENV …}
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1

install() { "$venv/bin/python" -m pip install --quiet --constraint constraints.txt "$@"; }

case $step in
dependencies)
    variant=${3:?cpu or cuda} index=${4:-}
    case $variant in
    cpu | cuda) ;;
    *) echo "image.sh: there is no variant $variant, only cpu and cuda" >&2; exit 2 ;;
    esac
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    torch=(torch)
    [ "$variant" != cpu ] || [ -z "$index" ] || torch+=(--index-url "$index")
    install "${torch[@]}"
    install numpy "setuptools>=77" wheel ninja
    # It looks for torch while it is built; its operators are compiled where they are used.
    DS_BUILD_OPS=0 install --no-build-isolation deepspeed
    scripts/image.sh requirements "$venv" > "$venv/requirements.txt"
    install --no-build-isolation --requirement "$venv/requirements.txt"
    ;;
requirements)
    # The words of the extras, without Outrider, whose source need not be there yet.
    "$venv/bin/python" - << 'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
names = ("router", "engine", "worker", "tracing")
words = [*project["dependencies"], *(word for name in names for word in extras[name])]
print("\n".join(sorted({word for word in words if not word.startswith("outrider[")})))
PY
    ;;
package)
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    "$venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir "$wheels" .
    "$venv/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall "$wheels"/outrider-*.whl
    ;;
sbom)
    "$venv/bin/python" - "${3:?the file to write}" "${4:-}" << 'PY'
import json
import sys
from importlib.metadata import distributions
from urllib.parse import quote

found = {}
for each in distributions():
    name = each.metadata["Name"].lower().replace("_", "-")
    component = {"type": "library", "name": name, "version": each.version, "purl": f"pkg:pypi/{name}@{each.version}"}
    licence = each.metadata.get("License-Expression")
    if licence:
        component["licenses"] = [{"expression": licence}]
    found.setdefault(name, component)
components = [found[name] for name in sorted(found)]
if sys.argv[2]:
    with open(sys.argv[2]) as file:
        for line in file:
            name, version = line.split()
            purl = f"pkg:deb/debian/{name.partition(':')[0]}@{quote(version, safe='')}"
            components.append({"type": "library", "name": name, "version": version, "purl": purl})
bom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}
with open(sys.argv[1], "w") as file:
    json.dump(bom, file, indent=1)
PY
    ;;
*)
    echo "image.sh: there is no step $step" >&2
    exit 2
    ;;
esac
