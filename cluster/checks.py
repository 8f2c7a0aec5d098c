"""What is checked before a cluster starts, so that a mistake costs a second and not a model load."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

from outrider.cluster.config import ClusterConfig, EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.fingerprint import tokenizer_fingerprint


def check_models(config: ClusterConfig) -> None:
    """Raises ``ConfigError`` in one line that names the field: a missing or unusable model, tokenizers that differ.

    Embeddings padded to different numbers of rows are no fault: only the tables of token ids must agree.
    """
    for field, engine in _engines(config):
        check_model_folder(field, engine)
    expected = tokenizer_fingerprint(config.target.model)
    for field, engine in _engines(config):
        found = tokenizer_fingerprint(engine.model)
        if found != expected:
            raise ConfigError(
                f"{field}: the tokenizer of {engine.model} ({found}) is not that of the target "
                f"{config.target.model} ({expected}); a draft needs the target's token table"
            )


def check_model_folder(field: str, engine: EngineConfig) -> None:
    """Raises ``ConfigError`` if the folder is not that of a Hugging Face causal LM with its tokenizer and weights."""
    folder = Path(engine.model)
    if not folder.is_dir():
        raise ConfigError(f"{field}: the model folder {folder} does not exist")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{field}: {folder} holds no {name}, so it is no model folder in Hugging Face format")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(f"{field}: {folder} holds no weights (*.safetensors)")
    try:
        model = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(f"{field}: {folder / 'config.json'} is not JSON ({error})") from error
    limit = model.get("max_position_embeddings")
    if engine.max_model_len is not None and isinstance(limit, int) and engine.max_model_len > limit:
        raise ConfigError(
            f"{field.removesuffix('model')}max_model_len is {engine.max_model_len}, but the model ends at {limit}"
        )


def _engines(config: ClusterConfig) -> Iterator[tuple[str, EngineConfig]]:
    yield "target.model", config.target
    for index, draft in enumerate(config.drafts):
        yield f"drafts.{index}.model", draft


def check_router_port(config: ClusterConfig) -> None:
    """Raises ``ConfigError`` if one of the addresses of router and supervisor cannot be listened on."""
    router = config.router
    ports = {
        "router.port": router.port,
        "router.http_port": router.http_port,
        "router.group_port": router.group_port,
        "router.metrics_port": router.metrics_port,
        "supervisor.metrics_port": config.supervisor.metrics_port,
    }
    fields: dict[int, str] = {}
    for field, port in ports.items():
        if port is None:
            continue
        _check_port(field, router.host, port)
        if port in fields:
            raise ConfigError(f"{field} is {port}, which is {fields[port]} too; choose another")
        if port:
            fields[port] = field


def _check_port(field: str, host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"router.host is {host!r}, which is no address here ({error.strerror})") from error
    with socket.socket(family, kind, protocol) as probe:
        # As gRPC does it: an address that a closed connection still occupies is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"{field}: cannot listen on {host}:{port} ({error.strerror}); choose another, or 0 for a free one"
            ) from error


def require_others(config: ClusterConfig) -> None:
    """Raises ``ConfigError`` if the settings leave Redis or Ray to be started here."""
    for field, value in (("redis.url", config.redis.url), ("ray.address", config.ray.address)):
        if value is None:
            raise ConfigError(f"{field} is missing: `outrider supervise` starts neither Redis nor Ray")
