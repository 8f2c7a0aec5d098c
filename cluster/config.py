"""Settings of a cluster: one YAML file, checked when it is read.

Each section is a frozen object that one room takes. Values may name environment variables as ``${NAME}``; relative
paths are taken from the settings file's folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PositiveInt = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]


class _Section(BaseModel):
    # What was given may be secret: pydantic's own words, which a traceback shows, leave it out.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class RedisConfig(_Section):
    """Where Redis is. Without a URL a redis-server is started on this machine."""

    # redis:// or, for TLS, rediss://.
    url: str | None = None
    # Of its user; none is the default one.
    username: str | None = None
    # File that holds the password and nothing else, in place of one in the URL; read for each new connection.
    password_file: str | None = None
    # CAs, in PEM, that its certificate may come from beside those that the system trusts.
    ca_certs: str | None = None

    @model_validator(mode="after")
    def _login_belongs_to_the_url(self) -> RedisConfig:
        given = [name for name in ("username", "password_file", "ca_certs") if getattr(self, name) is not None]
        if given and self.url is None:
            raise ValueError(f"{given[0]} is set, but url is not")
        if self.url is not None:
            if "ca_certs" in given and not self.url.startswith("rediss://"):
                raise ValueError("ca_certs is set, but url does not begin with rediss://")
            if {"username", "password_file"} & set(given) and "@" in self.url:
                raise ValueError(f"{given[0]} is set, but url has a user or password in it too")
        return self


class RayConfig(_Section):
    """Which Ray cluster hosts the actors. Without an address a local one is started."""

    address: str | None = None
    # CPUs that a local cluster offers; None lets Ray count them.
    num_cpus: PositiveInt | None = None


class EngineConfig(_Section):
    """One model and its cache: what target and draft have in common."""

    # Folder of a causal LM in Hugging Face format.
    model: str
    # Of the weights. On a CPU, bfloat16 and int8 weights are multiplied with activations of activation_dtype.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # Of what a product multiplies bfloat16 or int8 weights with, on a CPU; sums and all else stay float32. bfloat16 may
    # round rows to that, which only AMX gains from: other processors keep them as they are.
    activation_dtype: Literal["float32", "bfloat16"] = "float32"
    # Linear layers in int8, on a CPU: a scale for each output, or for quantization_group_size inputs of each.
    quantization: Literal["int8"] | None = None
    quantization_group_size: PositiveInt | None = None
    # Of cached keys and values; auto is the type of the activations.
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Positions of the longest sequence; None takes the model's own limit.
    max_model_len: PositiveInt | None = None
    # Positions in a KV block.
    block_size: PositiveInt = 16
    # KV blocks on each rank; None takes what max_num_seqs sequences of an eighth of the context need.
    num_kv_blocks: PositiveInt | None = None
    # Rows of one forward pass.
    max_num_batched_tokens: PositiveInt = 256
    # Sequences of one forward pass.
    max_num_seqs: PositiveInt = 64
    # Threads of each rank; None shares the machine's cores among the ranks on it.
    num_threads: PositiveInt | None = None

    @model_validator(mode="after")
    def _activation_dtype_has_a_use(self) -> EngineConfig:
        if self.activation_dtype == "bfloat16" and self.dtype != "bfloat16" and self.quantization is None:
            raise ValueError(f"activation_dtype is bfloat16, but dtype is {self.dtype} and quantization is not set")
        return self

    @model_validator(mode="after")
    def _group_size_has_a_use(self) -> EngineConfig:
        if self.quantization_group_size is not None and self.quantization is None:
            raise ValueError("quantization_group_size is set, but quantization is not")
        return self


class TargetConfig(EngineConfig):
    """The model whose text is wanted."""

    tensor_parallel_size: PositiveInt = 1
    # How ranks lie on nodes: Ray's placement group strategies.
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    # Custom Ray resources that each rank asks for, such as {"target": 1}: ties ranks to nodes.
    resources: dict[str, float] = Field(default_factory=dict)
    # A step that takes longer stops the group.
    step_timeout_s: Annotated[float, Field(gt=0)] = 120.0


class DraftConfig(EngineConfig):
    """A pool of draft workers."""

    name: Name = "draft"
    replicas: PositiveInt = 1
    draft_tensor_parallel_size: Literal[1] = 1
    placement: Literal["any", "sameNode", "remote"] = "any"
    resources: dict[str, float] = Field(default_factory=dict)
    # Entries of a q row that are sampled from and sent.
    top_m: PositiveInt = 64
    # Most tokens of one proposal.
    max_num_tokens: PositiveInt = 16


class RouterConfig(_Section):
    """The process that clients talk to."""

    # Address to listen on; port 0 takes a free one.
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    # Of the OpenAI-compatible API over HTTP; 0 takes a free one, null turns it off.
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = 0
    # gRPC for other routers, which send the owner of the target their requests; plain, like the ports of ranks and
    # drafts, so not for clients. 0 takes a free one.
    group_port: Annotated[int, Field(ge=0, le=65535)] = 0
    # Plain HTTP for Prometheus and the kubelet: /metrics, /livez, /readyz; 0 takes a free one, null turns it off.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    # Names of the model over HTTP, the first of which answers carry; none: the name of the model's folder.
    served_model_name: tuple[str, ...] = ()
    # Keys that let a client in, one a line ("Authorization: Bearer KEY" over HTTP, and in the metadata of gRPC); read
    # again when it changes.
    api_key_file: str | None = None
    # TLS of gRPC and HTTP: certificate chain and key in PEM; with a CA, clients must show a certificate that it signed.
    # Read again when they change.
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    # How the model writes calls of tools where it is free to: what its chat template taught it.
    tool_call_parser: Literal["hermes", "llama3_json"] = "hermes"
    # Whether answers over HTTP tell what speculation did (metrics.speculative_decoding), where a request says nothing.
    per_request_spec_decode_metrics: Literal["none", "summary"] = "summary"
    # Requests that run at once; None takes the target's max_num_seqs, which is the most.
    max_num_seqs: PositiveInt | None = None
    # Requests that wait meanwhile; one more is refused.
    max_queue: PositiveInt = 256
    # Whether a request takes over the keys and values that others computed of its text.
    enable_prefix_caching: bool = True
    # How many times as long a step may take for the rows of prompts that are entered beside running streams; 0 for no
    # limit. At least 16 such rows run in any case, and more where many requests enter beside few that run. Steps
    # scatter: with 1.75 the 99th percentile of what running streams wait stays below twice that without prompts.
    max_prefill_slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.75
    # Whether the next step may be planned while one runs, where nobody is drafted for: less time between the steps, but
    # a request that comes in the last 10 ms of a step waits for one more.
    plan_ahead: bool = False
    # Applied where a request names no deadline.
    default_timeout_s: Annotated[float, Field(gt=0)] = 600.0

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _one_name_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _certificate_has_a_key(self) -> RouterConfig:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile need each other")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("ssl_ca_certs is set, but ssl_certfile is not")
        return self

    @field_validator("max_prefill_slowdown")
    @classmethod
    def _no_step_is_faster_with_a_prompt(cls, value: float) -> float:
        if 0 < value < 1:
            raise ValueError("must be 0 or at least 1")
        return value


class SupervisorConfig(_Section):
    """The process that starts ranks and drafts, and answers for them."""

    # Plain HTTP on router.host: /metrics of supervisor, ranks and drafts, /livez, /readyz; 0 takes a free one, null
    # turns it off.
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None


class SpeculationConfig(_Section):
    """Defaults of speculation; the first two can change while the server runs."""

    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 4
    # For requests that sample and name no verifier.
    verifier: Literal["coupled", "rejection"] = "coupled"
    # n-gram lookup: tokens at the end of a text that must have occurred before, at least and at most, for what followed
    # there to be proposed. One of them stands for both; without either there is no lookup.
    prompt_lookup_min: Annotated[int, Field(ge=1, le=32)] | None = None
    prompt_lookup_max: Annotated[int, Field(ge=1, le=32)] | None = None

    @property
    def lookup_lengths(self) -> tuple[int, int] | None:
        """The shortest and the longest n-gram that is looked up; None for no lookup."""
        shortest = self.prompt_lookup_min or self.prompt_lookup_max
        longest = self.prompt_lookup_max or self.prompt_lookup_min
        return (shortest, longest) if shortest is not None and longest is not None else None

    @model_validator(mode="after")
    def _lookup_has_a_range(self) -> SpeculationConfig:
        lengths = self.lookup_lengths
        if lengths is not None and lengths[0] > lengths[1]:
            raise ValueError(f"prompt_lookup_min is {lengths[0]}, above prompt_lookup_max, which is {lengths[1]}")
        return self


class LoggingConfig(_Section):
    """What the log of every process says. OUTRIDER_LOG_LEVEL and OUTRIDER_LOG_FORMAT override it."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    # json: one object a line, for collectors of logs.
    format: Literal["text", "json"] = "text"

    @field_validator("level", "format", mode="before")
    @classmethod
    def _in_any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class TracingConfig(_Section):
    """Where spans of OpenTelemetry go, over OTLP with gRPC. OTEL_EXPORTER_OTLP_ENDPOINT works too."""

    # Of a collector, such as http://collector:4317 (https:// for TLS); null: no spans, unless the variable is set.
    otlp_endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")] | None = None
    # Share of the requests that are traced where the client's own trace does not decide it.
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0


class ClusterConfig(_Section):
    """Everything that `outrider up -f FILE` reads."""

    cluster: Name = "outrider"
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    target: TargetConfig
    drafts: tuple[DraftConfig, ...] = ()
    router: RouterConfig = RouterConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    logging: LoggingConfig = LoggingConfig()
    tracing: TracingConfig = TracingConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once."""
        return self.router.max_num_seqs or self.target.max_num_seqs

    @model_validator(mode="after")
    def _target_has_room(self) -> ClusterConfig:
        if self.max_num_seqs > self.target.max_num_seqs:
            raise ValueError(
                f"router.max_num_seqs is {self.max_num_seqs}, but target.max_num_seqs allows {self.target.max_num_seqs}"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterConfig:
        names = [draft.name for draft in self.drafts]
        if len(set(names)) != len(names):
            raise ValueError("drafts: each needs a name of its own")
        return self


def load_config(path: Path) -> ClusterConfig:
    """Read and check a settings file. Raises ``ConfigError`` in one line that names the field."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    return parse_config(text, base=path.resolve().parent, source=str(path))


def parse_config(text: str, *, base: Path, source: str = "settings") -> ClusterConfig:
    """Check settings given as YAML text; ``base`` is the folder that relative model paths start from."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {_yaml_fault(error)}") from None  # which would quote the text
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping with at least the section 'target'")
    data = _expand(data, source)
    drafts = data.get("drafts")
    for section in [data.get("target"), *(drafts if isinstance(drafts, list) else [])]:
        if isinstance(section, dict) and isinstance(section.get("model"), str):
            section["model"] = str((base / section["model"]).resolve())
    redis = data.get("redis")
    for name in ("password_file", "ca_certs"):
        if isinstance(redis, dict) and isinstance(redis.get(name), str):
            redis[name] = str((base / redis[name]).absolute())
    router = data.get("router")
    for name in ("api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if isinstance(router, dict) and isinstance(router.get(name), str):
            router[name] = str((base / router[name]).absolute())  # what is mounted may be a link that moves
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{source}: {field}: {first['msg']}{_shown(first)}") from error


def _shown(fault: ErrorDetails) -> str:
    """What was given, where no password or key can be in it: one value of a field that is known, outside ``redis``."""
    value, where = fault["input"], fault["loc"]
    if where[:1] == ("redis",) or fault["type"] == "extra_forbidden" or not isinstance(value, str | int | float | None):
        return ""
    return f" (got {value!r:.80})"


def _yaml_fault(error: yaml.YAMLError) -> str:
    """Where and what, without the line of the file that yaml quotes: a password may be in it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or error.context}"
    return type(error).__name__


def _expand(value: Any, source: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, source) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, source) for item in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        try:
            return os.environ[match[1]]
        except KeyError:
            raise ConfigError(f"{source} uses ${{{match[1]}}}, but that environment variable is not set") from None

    return re.sub(r"\$\{(\w+)\}", variable, value)
