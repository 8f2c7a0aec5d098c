# syntax=docker/dockerfile:1
# Images of Outrider: `docker build --target cpu -t outrider:0.1.0-cpu .`, or `--target cuda`.
# Both run as user 10001 with a read-only root; what is written goes to /tmp and /var/lib/outrider.
# scripts/image.sh holds every step that needs no container engine, so that CI runs the same ones.

# The tag is exact, but a registry may move it. `--build-arg PYTHON_IMAGE=python:3.11.9-slim-bookworm@sha256:…` pins the
# bytes; `docker buildx imagetools inspect python:3.11.9-slim-bookworm` tells the digest that your registry has.
ARG PYTHON_IMAGE=python:3.11.9-slim-bookworm

# ---- what both images are made of: Debian's part, and who runs there ----
FROM ${PYTHON_IMAGE} AS base
# g++ compiles the CPU kernels for the processor that they run on, and Triton's launchers; libgomp1 is OpenMP's. The
# rest of Debian stays out. The list of packages goes into the bill of materials.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin outrider \
    && install -d -o 10001 -g 10001 /var/lib/outrider \
    && install -d /usr/share/outrider \
    && dpkg-query --show --showformat='${binary:Package} ${Version}\n' > /usr/share/outrider/debian-packages
ENV PATH=/opt/outrider/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    OUTRIDER_STATE_DIR=/var/lib/outrider \
    TORCH_EXTENSIONS_DIR=/tmp/torch-extensions \
    RAY_USAGE_STATS_ENABLED=0
LABEL org.opencontainers.image.title="Outrider" \
      org.opencontainers.image.description="Speculative decoding across machines" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /tmp
USER 10001:10001
CMD ["outrider", "--help"]

# ---- what is installed, in /opt/outrider/venv; nothing of these stages is shipped but that folder ----
FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONSAFEPATH=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY scripts/image.sh scripts/image.sh

# Before the source: a change of it does not install torch anew.
FROM build AS dependencies-cpu
# An index of torch's CPU builds; without it the wheel of the default index comes, with CUDA's libraries.
ARG TORCH_INDEX=
RUN scripts/image.sh dependencies /opt/outrider/venv cpu "${TORCH_INDEX}"

FROM build AS dependencies-cuda
RUN scripts/image.sh dependencies /opt/outrider/venv cuda

FROM scratch AS source
COPY cluster /cluster
COPY workers /workers
COPY router /router
COPY kernels /kernels
COPY bench /bench
COPY src /src

FROM dependencies-cpu AS build-cpu
COPY --from=source / ./
COPY --from=base /usr/share/outrider/debian-packages ./
RUN scripts/image.sh package /opt/outrider/venv \
    && scripts/image.sh sbom /opt/outrider/venv /opt/outrider/sbom.cdx.json debian-packages
# The CPU trial's pair.
COPY models /opt/outrider/models

FROM dependencies-cuda AS build-cuda
COPY --from=source / ./
COPY --from=base /usr/share/outrider/debian-packages ./
RUN scripts/image.sh package /opt/outrider/venv \
    && scripts/image.sh sbom /opt/outrider/venv /opt/outrider/sbom.cdx.json debian-packages

# ---- the two images ----
FROM base AS cpu
COPY --from=build-cpu /opt/outrider /opt/outrider

FROM base AS cuda
# The CUDA libraries come with torch's wheels; the driver comes from the node.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/outrider /opt/outrider
