"""The programs and commands of docs/clients.md and the README, each at a running server."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from outrider.v1 import common_pb2, generation_pb2, group_pb2
from outrider_certificates import Files
from outrider_testbed import Cluster, Testbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[3]
PAGE, README = ROOT / "docs" / "clients.md", ROOT / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
GRPC_ADDRESS, HTTP_ADDRESS = "127.0.0.1:7070", "127.0.0.1:8000"  # of the pages
KEY = "one-of-the-keys"
TIMEOUT_S = 60.0
TRIES = 8


def blocks(language: str, *pages: Path) -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages or (PAGE, README))
    return [block for kind, block in BLOCK.findall(text) if kind == language]


def commands(program: str) -> list[str]:
    """Those that begin with the program's name, each in one line."""
    lines = "\n".join(blocks("console")).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith(f"$ {program} ")]


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, testbed: Testbed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """ "secure" with keys and TLS, and what it takes to be let in where the page's programs look for it, or "plain"."""
    settings: dict[str, Any] = {
        "router": {"served_model_name": "tiny"},
        # Looked up within the router, so that something is proposed however late a draft would be.
        "speculation": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "secure":
            files = Files(tmp_path_factory.mktemp("tls"))
            (files.folder / "keys").write_text(f"{KEY}\n")
            settings["router"] |= {**files.router, "api_key_file": str(files.folder / "keys")}
            patch.chdir(files.folder)
            patch.setenv("OUTRIDER_API_KEY", KEY)
            patch.setenv("OUTRIDER_CA_CERTS", str(files.ca_certs))  # for the cluster itself
        with testbed.cluster(testbed.target("one"), (), **settings) as cluster:
            yield cluster


def each(language: str, texts: Sequence[str]) -> pytest.MarkDecorator:
    """One test for each, at the cluster that it is about."""
    cases = [
        pytest.param("secure" if "ca.crt" in text else "plain", text, id=f"{language}-{number}")
        for number, text in enumerate(texts)
    ]
    return pytest.mark.parametrize(("cluster", "text"), cases, indirect=["cluster"])


def placed(text: str, cluster: Cluster) -> str:
    """With the cluster's addresses in place of the page's."""
    there = text.replace(GRPC_ADDRESS, cluster.address)
    there = there.replace(HTTP_ADDRESS, urlsplit(cluster.status()["http_url"]).netloc)
    assert there != text, "it talks to no server"
    return there


def run_python(program: str) -> str:
    """What it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "a page", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def run_curl(command: str) -> subprocess.CompletedProcess[str]:
    command = command.replace("curl ", "curl --fail-with-body -sS ", 1)  # else it ends with 0 whatever comes
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.filterwarnings("ignore:.*max_token is not default")  # LangChain says so before it fails
@each("python", blocks("python"))
def test_python(cluster: Cluster, text: str) -> None:
    program = placed(text, cluster)
    # A text that is drawn may end before it says anything; programs of a page name no seed.
    assert any(run_python(program).strip() for _ in range(TRIES))
    with pytest.raises(TypeError):  # so a name that is none would be noticed
        run_python(program.replace("max_tokens=", "max_token="))


@each("curl", commands("curl"))
def test_curl(cluster: Cluster, text: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is missing")
    command = placed(text, cluster)
    done = run_curl(command)
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream"' in command:
        *events, end = [line for line in done.stdout.splitlines() if line]
        assert end == "data: [DONE]"
        assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
    else:
        assert json.loads(done.stdout)
    if '"max_tokens"' in command:
        refused = run_curl(command.replace('"max_tokens"', '"max_token"'))
        assert refused.returncode != 0
        assert json.loads(refused.stdout)["error"]["param"] == "max_token"


@each("generate", commands("outrider generate"))
def test_generate(cluster: Cluster, text: str) -> None:
    command = [sys.executable, "-P", "-m", "outrider.cluster.cli", *shlex.split(text)[1:]]
    environment = {**os.environ, "OUTRIDER_ADDRESS": cluster.address}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def grpcurl_words(command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-plaintext", action="store_true")
    parser.add_argument("-cacert")
    parser.add_argument("-H", dest="header", default="")
    parser.add_argument("-d", dest="data", default="{}")
    parser.add_argument("address")
    parser.add_argument("words", nargs="+")
    return parser.parse_args(shlex.split(command)[1:])


class _Header(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Goes with each call; none where the name is empty."""

    def __init__(self, name: str, value: str) -> None:
        self._metadata = [(name, value)] if name else []

    def _continue(self, continuation, details, request):
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _continue


def as_grpcurl(command: str) -> list[str]:
    """What the command would print, by the means that grpcurl has: the server's reflection and JSON."""
    asked = grpcurl_words(os.path.expandvars(command))
    if asked.plaintext:
        opened = grpc.insecure_channel(asked.address)
    else:
        opened = grpc.secure_channel(asked.address, grpc.ssl_channel_credentials(Path(asked.cacert).read_bytes()))
    name, _, value = asked.header.partition(": ")
    with grpc.intercept_channel(opened, _Header(name, value)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        match asked.words:
            case ["list"]:
                return list(database.get_services())
            case ["describe", name]:
                return [field.json_name for field in pool.FindMessageTypeByName(name).fields]
        ((name, method_name),) = [word.split("/") for word in asked.words]
        method = pool.FindServiceByName(name).methods_by_name[method_name]
        asked_for = json_format.Parse(asked.data, GetMessageClass(method.input_type)(), descriptor_pool=pool)
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = kind(
            f"/{name}/{method_name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = call(asked_for, timeout=TIMEOUT_S)
        return [json_format.MessageToJson(message) for message in (answer if method.server_streaming else [answer])]


@each("grpcurl", commands("grpcurl"))
def test_grpcurl(cluster: Cluster, text: str) -> None:
    command = placed(text, cluster)
    said = as_grpcurl(command)
    assert said
    if command.endswith("Generate"):
        assert json.loads(said[-1])["finished"]["completionTokens"] <= 16
        with pytest.raises(json_format.ParseError):
            as_grpcurl(command.replace("maxTokens", "maxToken"))
    grpcurl = os.environ.get("GRPCURL") or shutil.which("grpcurl")
    if grpcurl is not None:
        command = command.replace("grpcurl", shlex.quote(grpcurl), 1)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_program_in_go_uses_names_of_the_protocol() -> None:
    (program,) = blocks("go", PAGE)
    files = (common_pb2, generation_pb2, group_pb2)
    messages = [message for file in files for message in file.DESCRIPTOR.message_types_by_name.values()]
    fields = {_in_go(field.name) for message in messages for field in message.fields}
    oneofs = {_in_go(oneof.name) for message in messages for oneof in message.oneofs}
    types = {message.name for message in messages}
    types |= {
        f"{message.name}_{_in_go(field.name)}"
        for message in messages
        for oneof in message.oneofs
        for field in oneof.fields
    }
    types |= {f"New{name}Client" for file in files for name in file.DESCRIPTOR.services_by_name}
    used = set(re.findall(r"outriderpb\.(\w+)", program))
    assert {"GenerateRequest", "NewGenerationServiceClient"} <= used <= types
    set_or_read = {
        *re.findall(r"\b([A-Z]\w+): ", program),
        *(
            name
            for chain in re.findall(r"\b(?:response|event|finish)((?:\.[A-Z]\w+)+)", program)
            for name in chain.split(".")
        ),
    } - {""}
    assert {"MaxTokens", "Seed", "NumAcceptedTokens", "Event"} <= set_or_read <= fields | oneofs


def _in_go(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
