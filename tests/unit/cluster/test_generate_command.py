"""``outrider generate`` against a server that only listens: what it sends, what it prints, and how it refuses."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest
import typer
from google.protobuf.json_format import MessageToDict

from outrider.client._controls import takes_list
from outrider.cluster import cli
from outrider.cluster.commands import controls as control_options
from outrider.cluster.commands.common import in_words_of_the_command
from outrider.cluster.commands.controls import json_or_list, option_name, parsed
from outrider.controls import CONTROLS, Control, NumberControl, Stage
from outrider.core.errors import InvalidRequest
from outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc, group_pb2


class Listening(generation_pb2_grpc.GenerationServiceServicer):
    """Remembers requests and answers each choice with two tokens."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.reason = group_pb2.FINISH_REASON_LENGTH

    def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> Iterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        yield response(started=generation_pb2.Started(seed=7, verifier=common_pb2.VERIFIER_COUPLED))
        if request.echo:
            yield response(prompt=generation_pb2.Prompt(text=request.text, token_ids=[1]))
        for choice in range(request.n or 1):
            entries = [
                generation_pb2.TokenLogprob(token_id=token, token=word, logprob=-1.0, rank=1)
                for token, word in ((4, "one"), (5, " two"))
                if request.sampling.HasField("logprobs")
            ]
            delta = generation_pb2.Delta(text="one two", token_ids=[4, 5], choice=choice, logprobs=entries)
            yield response(delta=delta)
            finish = group_pb2.Finish(reason=self.reason)
            yield response(
                finished=generation_pb2.Finished(finish=finish, prompt_tokens=1, completion_tokens=2, choice=choice)
            )


def response(**event: Any) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(request_id="abc", **event)


@dataclass
class Command:
    """Runs ``outrider generate`` in this process."""

    server: Listening
    address: str
    run: Callable[..., tuple[int, str, str]]

    def ok(self, *args: str) -> str:
        status, out, err = self.run(*args)
        assert (status, err) == (0, "")
        return out

    def refused(self, *args: str, status: int = 1) -> str:
        got, out, err = self.run(*args)
        assert (got, out) == (status, ""), (args, err)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    def sent(self, *args: str) -> generation_pb2.GenerateRequest:
        self.ok(*args)
        return self.server.requests[-1]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    servicer = Listening()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outrider", "generate", "-p", "hi", "--address", address, *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    handler = signal.getsignal(signal.SIGTERM)
    yield Command(servicer, address, run)
    signal.signal(signal.SIGTERM, handler)
    server.stop(None).wait(5)


def test_each_option_reaches_the_server(command: Command, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    request = command.sent(
        *("--max-tokens", "3", "--temperature", "0.5", "--top-k", "5", "--top-p", "0.5", "--seed", "9"),
        *("--stop", "a", "--stop", "b", "--stop-token-ids", "7", "--ignore-eos", "--include-stop", "--echo"),
        *("--num-speculative-tokens", "0", "--verifier", "rejection", "--n", "1"),
        *("--logprobs", "2", "--prompt-logprobs", "0", "--logprobs-mode", "processed"),
        *("--json-schema", str(schema)),
    )
    assert request == generation_pb2.GenerateRequest(
        text="hi",
        max_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[7],
        num_speculative_tokens=0,
        n=1,
        ignore_eos=True,
        include_stop=True,
        echo=True,
        sampling=generation_pb2.SamplingParams(
            temperature=0.5,
            top_k=5,
            top_p=0.5,
            seed=9,
            verifier=common_pb2.VERIFIER_REJECTION,
            logprobs=2,
            prompt_logprobs=0,
            logprobs_mode=common_pb2.LOGPROBS_MODE_PROCESSED,
            grammar=common_pb2.Grammar(json_schema='{"type": "integer"}'),
        ),
    )
    assert command.sent("--regex", "[ab]+").sampling == generation_pb2.SamplingParams(
        grammar=common_pb2.Grammar(regex="[ab]+")
    )
    assert command.sent("--grammar", str(schema)).sampling.grammar.ebnf == '{"type": "integer"}'
    assert command.sent() == generation_pb2.GenerateRequest(text="hi")
    assert command.sent("--chat").chat.messages[0].content == "hi"


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_each_control_is_an_option(command: Command, control: Control) -> None:
    if isinstance(control, NumberControl):
        written: list[str] = ["0.5"]
        given: Any = 0.5
    elif control.repeated:
        written, given = ["one", "two"], ["one", "two"]
    elif control.metavar in ("INT", "INTEGER"):
        written, given = ["3"], 3
    elif takes_list(control.name):
        written, given = ["5, 6"], [5, 6]
    else:
        written, given = ['{"5": -1.5}'], {"5": -1.5}
    args = [part for value in written for part in (option_name(control), value)]
    sampling = MessageToDict(command.sent(*args).sampling, preserving_proto_field_name=True)
    assert (sampling.get("controls") or sampling) == {control.name: given}


def test_the_help_names_every_control(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = command.ok("--help")
    assert CONTROLS
    for control in CONTROLS:
        assert option_name(control) in text
        assert control.help in text


class Novel(Control):
    """A control that somebody adds."""

    name: ClassVar[str] = "novel_thing"
    stage: ClassVar[Stage] = Stage.LOGITS
    order: ClassVar[int] = 1
    help: ClassVar[str] = "Something new."
    metavar: ClassVar[str] = "JSON"

    def resolve(self, value: Any, facts: Any) -> Any:
        return value

    def fault(self, value: Any, vocab_size: int) -> None:
        return None

    def reference(self, row: Any, value: Any, text: Any) -> Any:
        return row

    def apply(self, scores: Any, token_ids: Any, values: Any, texts: Any) -> None:
        return None


def test_values_of_controls_as_they_are_written() -> None:
    novel = Novel()
    assert option_name(novel) == "--novel-thing"
    assert parsed(novel, '{"a": [1]}') == {"a": [1]}
    assert parsed(novel, "5") == 5
    assert json_or_list("--x", "5", is_list=True) == [5]
    assert json_or_list("--x", " 1, 2 ,3 ", is_list=True) == [1, 2, 3]
    assert json_or_list("--x", "[1, 2]", is_list=True) == [1, 2]
    assert math.isnan(json_or_list("--x", "NaN"))  # the client refuses it by the field's name


def test_a_control_that_is_added_is_an_option_without_a_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*, first: int = 0, **controls: Any) -> None:
        print(json.dumps([first, controls]))

    monkeypatch.setattr(control_options, "CONTROLS", (*CONTROLS, Novel()))
    app = typer.Typer(add_completion=False)
    app.command()(control_options.with_control_options(command, after="first", panel="Sampling"))
    run = typer.main.get_command(app).main
    run(["--novel-thing", '{"a": [1]}', "--min-p", "0.5"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == [0, {"min_p": 0.5, "novel_thing": {"a": [1]}}]
    run(["--first", "2"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == [2, {}]


def test_json_of_one_choice_and_of_several(command: Command) -> None:
    one = json.loads(command.ok("--json"))
    assert (one["text"], one["logprobs"], one["prompt_logprobs"]) == ("one two", None, None)
    assert "choices" not in one
    assert one["speculation"]["free_acceptance_rate"] is None
    with_logprobs = json.loads(command.ok("--json", "--logprobs", "0", "--echo"))
    assert [entry["token_id"] for entry in with_logprobs["logprobs"]] == with_logprobs["token_ids"]
    assert with_logprobs["prompt"] == "hi"
    two = json.loads(command.ok("--json", "--n", "2"))
    assert (two["request_id"], two["seed"]) == ("abc", 7)
    assert two["usage"] == {"prompt_tokens": 1, "completion_tokens": 4}
    assert [choice["text"] for choice in two["choices"]] == ["one two", "one two"]


def test_text_of_one_choice_and_of_several(command: Command) -> None:
    assert command.ok() == "one two\n"
    assert command.ok("--echo") == "hione two\n"
    assert command.ok("--n", "2") == "--- choice 0 (length)\none two\n--- choice 1 (length)\none two\n"
    assert command.ok("--n", "2", "--echo").splitlines()[1::2] == ["hione two", "hione two"]


def test_an_aborted_choice_is_a_failure(command: Command) -> None:
    command.server.reason = group_pb2.FINISH_REASON_ABORT
    status, out, err = command.run("--n", "2", "--json")
    assert (status, err) == (1, "error: the request abc was aborted\n")
    assert len(json.loads(out)["choices"]) == 2


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--top-p", "nan"), "--top-p is nan, but must be above 0 and at most 1"),
        (("--min-p", "nan"), "--min-p is nan, but must be from 0 to 1"),
        (("--temperature", "inf"), "--temperature is inf, but must be"),
        (("--frequency-penalty", "-inf"), "--frequency-penalty is -inf, but must be"),
        (("--logit-bias", '{"5": NaN}'), "--logit-bias[5] is nan, but must be"),
        (("--logit-bias", "[5]"), "--logit-bias is [5], but must be"),
        (("--banned-token-ids", "5,-1"), "--banned-token-ids[1] is -1, but must be"),
        (("--stop-token-ids", "4294967296"), "--stop-token-ids[0] is 4294967296, but must be"),
        (("--n", "-1"), "--n is -1, but must be"),
        (("--min-tokens", "-1"), "--min-tokens is -1, but must be"),
        (("--logprobs", "-1"), "--logprobs is -1, but must be"),
        (("--logprobs-mode", "cooked"), "--logprobs-mode is 'cooked', but must be 'raw' or 'processed'"),
        (("--verifier", "lucky"), "--verifier is 'lucky', but must be"),
    ],
)
def test_wrong_values_are_one_line_that_names_the_option(command: Command, args: tuple[str, ...], line: str) -> None:
    assert command.refused(*args).startswith(f"error: {line}")
    assert not command.server.requests


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--logit-bias", "{"), "'--logit-bias': '{' is not JSON"),
        (("--logit-bias", '{"5": 1, "5": 2}'), "a key is there twice"),
        (("--banned-token-ids", "five"), "'--banned-token-ids': 'five' is not a list such as 1,2,3, or JSON"),
        (("--min-p", "much"), "'--min-p'"),
        (("--json-schema", "/no/such/file"), "'--json-schema'"),
        (("--grammar", "/"), "'--grammar'"),
        (("--regex", "a", "--grammar", __file__), "only one of --json-schema, --regex and --grammar"),
    ],
)
def test_a_command_line_that_cannot_be_read_ends_with_2(command: Command, args: tuple[str, ...], part: str) -> None:
    assert part in command.refused(*args, status=2)
    assert not command.server.requests


def test_files_that_are_no_schema(command: Command, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_bytes(b"\xff\xfe")
    assert "'--json-schema'" in command.refused("--json-schema", str(schema), status=2)
    schema.write_text("{'type': 'integer'}")
    assert "--json-schema is" in command.refused("--json-schema", str(schema))


def test_refusals_of_the_server_name_the_option() -> None:
    fields = {
        "sampling.grammar.ebnf": "--grammar",
        "sampling.grammar.json_schema": "--json-schema",
        "sampling.grammar.regex": "--regex",
        "sampling.logit_bias[5]": "--logit-bias[5]",
        "chat.messages[0].content": "-p",
        "text": "-p",
        "max_tokens": "--max-tokens",
    }
    for field, option in fields.items():
        error = InvalidRequest(field, "x", "y")
        assert in_words_of_the_command(error) == f"{option} is 'x', but must be y"
