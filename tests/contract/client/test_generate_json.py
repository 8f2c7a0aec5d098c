"""``scripts/generate_json.py`` counts what a server answers, and lets nothing pass that does not follow its schema."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from outrider.core.errors import InvalidRequest
from outrider.core.errors_wire import error_to_status
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, group_pb2

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "generate_json.py"
SCHEMAS = {
    "a": {"title": "A number", "type": "integer", "maximum": 9},
    "b": {"title": "A day", "type": "string", "format": "date"},
}
GOOD = {"A number": "7", "A day": '"2024-02-29"'}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_json_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Answering(generation_pb2_grpc.GenerationServiceServicer):
    """Answers by the schema's title; ``wrong`` names texts and ends for some seeds."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.wrong: dict[int, tuple[str, int]] = {}
        self.refuse = False

    def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        sampling = request.sampling
        if self.refuse:
            status = error_to_status(InvalidRequest("sampling.verifier", "greedy", "something else"))
            details = (("grpc-status-details-bin", status.SerializeToString()),)
            context.set_trailing_metadata(details)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, status.message)
        if sampling.seed == 13:
            context.abort(grpc.StatusCode.INTERNAL, "a row of NaN")
        title = json.loads(sampling.grammar.json_schema)["title"]
        text, reason = self.wrong.get(sampling.seed, (GOOD[title], group_pb2.FINISH_REASON_STOP))
        yield generation_pb2.GenerateResponse(
            started=generation_pb2.Started(seed=sampling.seed, verifier=common_pb2.VERIFIER_COUPLED)
        )
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text=text, token_ids=[1, 2, 3, 4]))
        stats = group_pb2.SpeculationStats(
            num_draft_tokens=8, num_accepted_tokens=5, num_forced_tokens=4, num_forced_accepted=4, grammar_ms=2.0
        )
        finish = group_pb2.Finish(reason=reason, speculation=stats)  # type: ignore[arg-type]
        yield generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(finish=finish, prompt_tokens=1, completion_tokens=4)
        )


@pytest.fixture
def servicer() -> Answering:
    return Answering()


@pytest.fixture
def arguments(servicer: Answering, tmp_path: Path) -> Iterator[list[str]]:
    for name, schema in SCHEMAS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(schema))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield ["--address", f"127.0.0.1:{port}", "--schemas", str(tmp_path), "--timeout", "20"]
    server.stop(None).wait(5)


def test_what_is_valid_is_counted(
    script: ModuleType, servicer: Answering, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-n", "6", "--seed", "100", "--verifier", "rejection", "-k", "3", "--json"]
    assert script.main([*arguments, *options]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["valid"], facts["total"], facts["tokens"], facts["failures"]) == (6, 6, 24, [])
    assert (facts["acceptance"], facts["free_acceptance"]) == (5 / 8, 1 / 4)
    assert facts["grammar_ms_per_token"] == 0.5
    assert facts["tokens_per_second"] > 0
    assert {name: row["total"] for name, row in facts["schemas"].items()} == {"a": 3, "b": 3}
    assert err.splitlines()[-1] == "6/6 generated, 0 not valid"
    assert sorted(request.sampling.seed for request in servicer.requests) == list(range(100, 106))
    for request in servicer.requests:
        assert request.sampling.temperature == 1.0
        assert request.sampling.verifier == common_pb2.VERIFIER_REJECTION
        assert request.num_speculative_tokens == 3
    assert script.main([*arguments, "-n", "2"]) == 0
    table = capsys.readouterr().out
    assert "0.625 of 16" in table
    assert "0.250 of 8" in table


@pytest.mark.parametrize(
    ("seed", "text", "reason", "fault"),
    [
        (0, "10", group_pb2.FINISH_REASON_STOP, "10 is greater than the maximum of 9"),
        (0, "{", group_pb2.FINISH_REASON_STOP, "it is no JSON"),
        (0, "7", group_pb2.FINISH_REASON_LENGTH, "it ended by length"),
        (1, '"2023-02-29"', group_pb2.FINISH_REASON_STOP, "is not a 'date'"),
        (13, "", group_pb2.FINISH_REASON_STOP, "GenerationFailed"),
    ],
)
def test_one_wrong_answer_fails_the_run(
    script: ModuleType,
    servicer: Answering,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    seed: int,
    text: str,
    reason: int,
    fault: str,
) -> None:
    servicer.wrong[seed] = (text, reason)
    assert script.main([*arguments, "-n", "20", "--json"]) == 1
    failures = json.loads(capsys.readouterr().out)["failures"]
    wrong = [failure for failure in failures if failure["seed"] == seed]
    assert [failure["text"] for failure in wrong] == [text]
    assert fault in wrong[0]["fault"]
    assert {failure["seed"] for failure in failures} == {seed, 13}


def test_a_refusal_ends_the_run(
    script: ModuleType, servicer: Answering, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer.refuse = True
    assert script.main([*arguments, "-n", "5", "--concurrency", "1"]) == 1
    assert "sampling.verifier is 'greedy', but must be something else" in capsys.readouterr().err
    assert len(servicer.requests) == 1


def test_a_folder_without_schemas(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--address", "127.0.0.1:1", "--schemas", str(tmp_path)]) == 1
    assert "there is no *.json" in capsys.readouterr().err
