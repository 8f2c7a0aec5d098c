"""Every option of a request from the command line to real processes and back.

Under ``coupled`` the text depends on the seed alone, so what speculation must not change are the tokens themselves;
``test_combinations.py`` looks for that under any settings.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster
else:
    Cluster = Any

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "examples" / "schemas" / "person.json"
PROMPT = "The with statement"
LENGTH = ("--max-tokens", "32")
SAMPLED = ("--temperature", "1", "--seed", "11")


@pytest.fixture(scope="module")
def free(running_cluster: Cluster) -> dict[str, Any]:
    """The answer without any control."""
    return running_cluster.generate(PROMPT, *LENGTH, *SAMPLED)


def with_and_without(cluster: Cluster, *args: str) -> dict[str, Any]:
    """The answer, whose tokens are those of the answer without speculation.

    Whether a draft was in time is left open here: on the tiny pair it often is not, and then nobody waits for it.
    """
    answer = cluster.generate(PROMPT, *LENGTH, *args)
    plain = cluster.generate(PROMPT, *LENGTH, *args, "--num-speculative-tokens", "0")
    assert plain["speculation"]["num_draft_tokens"] == 0
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == (
        plain["token_ids"],
        plain["text"],
        plain["finish_reason"],
    )
    return answer


def test_each_number_reaches_the_target(running_cluster: Cluster, free: dict[str, Any]) -> None:
    for option, value in {
        "--min-p": "0.2",
        "--typical-p": "0.5",
        "--repetition-penalty": "1.5",
        "--presence-penalty": "2",
        "--frequency-penalty": "2",
    }.items():
        assert running_cluster.generate(PROMPT, *LENGTH, *SAMPLED, option, value)["token_ids"] != free["token_ids"], (
            option
        )


def test_tokens_and_words(running_cluster: Cluster, free: dict[str, Any]) -> None:
    some = sorted(set(free["token_ids"]))[:5]

    def tokens(*options: str) -> list[int]:
        ids: list[int] = running_cluster.generate(PROMPT, *LENGTH, *SAMPLED, *options)["token_ids"]
        assert ids != free["token_ids"]
        return ids

    assert not set(tokens("--banned-token-ids", ",".join(map(str, some)))) & set(some)
    assert set(tokens("--allowed-token-ids", json.dumps(some), "--ignore-eos")) <= set(some)
    assert set(tokens("--logit-bias", json.dumps({some[0]: 100}))) == {some[0]}
    spelt = running_cluster.generate(PROMPT, *LENGTH, *SAMPLED, "--logprobs", "0")["logprobs"]
    word = next(entry for entry in spelt if re.fullmatch(" [a-z]{2,}", entry["token"]))  # one token is the whole word
    assert word["token_id"] not in tokens("--bad-words", word["token"].strip())


def test_ends(running_cluster: Cluster, free: dict[str, Any]) -> None:
    ids = free["token_ids"]
    end = ids[6]
    early = with_and_without(running_cluster, *SAMPLED, "--stop-token-ids", str(end))
    position = ids.index(end)
    assert early["token_ids"][:position] == ids[:position]
    assert early["finish_reason"] == "stop"
    late = with_and_without(running_cluster, *SAMPLED, "--stop-token-ids", str(end), "--min-tokens", "10")
    assert end not in late["token_ids"][:10]
    stop = free["text"][5:8]
    for args, included in (((), False), (("--include-stop",), True)):
        cut = with_and_without(running_cluster, *SAMPLED, "--stop", stop, *args)
        assert cut["matched_stop"] == stop
        assert cut["text"].endswith(stop) == included
        assert free["text"].startswith(cut["text"])
    assert with_and_without(running_cluster, *SAMPLED, "--ignore-eos")["finish_reason"] == "length"


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_languages(running_cluster: Cluster, mode: str, tmp_path: Path) -> None:
    import jsonschema

    options = SAMPLED if mode == "coupled" else ("--temperature", "1", "--verifier", "rejection")

    def text(*args: str) -> str:
        if mode == "rejection":
            answer = running_cluster.generate(PROMPT, "--max-tokens", "200", *options, *args)
        else:
            answer = with_and_without(running_cluster, "--max-tokens", "200", *options, *args)
        assert answer["finish_reason"] == "stop"
        assert answer["speculation"]["grammar_ms"] > 0
        return str(answer["text"])

    jsonschema.validate(json.loads(text("--json-schema", str(SCHEMA))), json.loads(SCHEMA.read_text()))
    assert re.fullmatch("(yes|no), [a-f]{4,9}[.]", text("--regex", "(yes|no), [a-f]{4,9}[.]"))
    grammar = tmp_path / "sum.lark"
    grammar.write_text('start: NUMBER ("+" NUMBER){1,4} ";"\nNUMBER: /[0-9]{1,3}/\n')
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){1,4};", text("--grammar", str(grammar)))


@pytest.mark.parametrize("mode", ["coupled", "greedy"])
def test_log_probabilities(running_cluster: Cluster, mode: str) -> None:
    args = (
        *(SAMPLED if mode == "coupled" else ("--temperature", "0")),
        "--logprobs",
        "3",
        "--prompt-logprobs",
        "1",
        "--echo",
    )
    answer = with_and_without(running_cluster, *args)
    plain = running_cluster.generate(PROMPT, *LENGTH, *args, "--num-speculative-tokens", "0")
    assert answer["prompt"] == PROMPT
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0]["logprob"] is None
    entries = answer["logprobs"] + answer["prompt_logprobs"][1:]
    others = plain["logprobs"] + plain["prompt_logprobs"][1:]
    assert len(entries) == len(others)
    for entry, other in zip(entries, others, strict=True):
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert entry["logprob"] < 0
        assert entry["top"][0]["logprob"] >= entry["logprob"]
    assert "".join(entry["token"] for entry in answer["logprobs"]) == answer["text"]
    if mode == "greedy":
        assert {entry["rank"] for entry in answer["logprobs"]} == {1}


def test_processed_log_probabilities(running_cluster: Cluster) -> None:
    args = (*SAMPLED, "--top-k", "2", "--logprobs", "5", "--logprobs-mode", "processed")
    for entry in with_and_without(running_cluster, *args)["logprobs"]:
        assert entry["rank"] <= 2
        assert sum(math.exp(top["logprob"]) for top in entry["top"]) == pytest.approx(1.0, abs=1e-4)


def test_choices(running_cluster: Cluster) -> None:
    args = (*LENGTH, *SAMPLED, "--n", "3", "--logprobs", "0")
    answer = running_cluster.generate(PROMPT, *args)
    plain = running_cluster.generate(PROMPT, *args, "--num-speculative-tokens", "0")
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for choice in plain["choices"]]
    assert len(set(texts)) == 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert [entry["token_id"] for entry in choice["logprobs"]] == choice["token_ids"]
    assert texts[0] == running_cluster.generate(PROMPT, *LENGTH, *SAMPLED)["text"]
    printed = running_cluster.ok("generate", "-p", PROMPT, *args)
    assert re.findall(r"^--- choice (\d)", printed, re.MULTILINE) == ["0", "1", "2"]
    assert all(text in printed for text in texts)


def test_everything_at_once(running_cluster: Cluster) -> None:
    options = {
        "--min-p": "0.01",
        "--typical-p": "0.95",
        "--top-k": "200",
        "--top-p": "0.95",
        "--repetition-penalty": "1.1",
        "--presence-penalty": "0.3",
        "--frequency-penalty": "0.2",
        "--logit-bias": '{"5": -3}',
        "--bad-words": "zebra",
        "--min-tokens": "5",
        "--json-schema": str(SCHEMA),
        "--logprobs": "2",
        "--logprobs-mode": "processed",
    }
    answer = with_and_without(running_cluster, *SAMPLED, *(part for item in options.items() for part in item))
    assert len(answer["logprobs"]) == len(answer["token_ids"])


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--min-p", "1.5"), "--min-p is 1.5, but must be from 0 to 1"),
        (("--logit-bias", '{"99999": 1}'), "--logit-bias[99999] is 99999"),
        (("--banned-token-ids", "1,99999"), "--banned-token-ids[1] is 99999"),
        (("--min-tokens", "9", "--max-tokens", "8"), "--min-tokens is 9"),
        (("--logprobs", "21"), "--logprobs is 21"),
        (("--n", "2", "--temperature", "0"), "--n is 2"),
        (("--regex", "("), "--regex is '('"),
        (("--ignore-eos", "--regex", "a"), "--ignore-eos is True"),
    ],
)
def test_the_server_refuses_by_option(running_cluster: Cluster, args: tuple[str, ...], line: str) -> None:
    assert running_cluster.refusal("generate", "-p", "x", *args).startswith(f"error: {line}")


def test_grammars_that_do_not_compile_are_refused_by_option(running_cluster: Cluster, tmp_path: Path) -> None:
    for option, text in (("--json-schema", '{"type": "nonsense"}'), ("--grammar", "start: missing")):
        file = tmp_path / "bad"
        file.write_text(text)
        assert running_cluster.refusal("generate", "-p", "x", option, str(file)).startswith(f"error: {option} is ")


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_json_under_ten_schemas(running_cluster: Cluster, verifier: str) -> None:
    command = [sys.executable, "-P", str(ROOT / "scripts" / "generate_json.py"), "--address", running_cluster.address]
    done = subprocess.run(
        [*command, "-n", "10", "--concurrency", "4", "--verifier", verifier, "--json"],
        env=running_cluster.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert (facts["valid"], facts["total"]) == (10, 10)
    assert facts["proposed_free"] > 0
    assert facts["grammar_ms_per_token"] > 0
