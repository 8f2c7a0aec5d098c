"""The oracle's rows against what ``transformers.generate`` samples from, and against plain definitions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import ConfigError
from outrider.exactness.oracle import Oracle, require_known

TARGET = Path(__file__).resolve().parents[3] / "models" / "tiny" / "target"
PROMPT = "The with statement is"


def generated(oracle: Oracle, settings: dict[str, Any]) -> tuple[list[int], list[int], torch.Tensor]:
    """A prompt, a text of transformers' own, and the scores [T, V] that it was drawn by."""
    prompt = oracle.encode(PROMPT)
    torch.manual_seed(1)
    given = {"top_k": 0, **settings}  # transformers' own default for top_k is 50
    with torch.inference_mode():
        made = oracle._model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **given,
        )
    scores = torch.cat(made.scores)[:, : oracle.vocab_size]
    return prompt, made.sequences[0, len(prompt) :].tolist(), scores


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95}, None),
        ({"repetition_penalty": 1.4, "temperature": 1.2}, None),
        ({"logit_bias": {"100": 4.0, "7": -3.0}}, {"sequence_bias": {(100,): 4.0, (7,): -3.0}}),
        ({"banned_token_ids": [11, 200]}, {"suppress_tokens": [11, 200]}),
        ({"min_tokens": 5}, {"min_new_tokens": 5}),
        (
            {"repetition_penalty": 1.2, "logit_bias": {"300": 5.0}, "min_tokens": 3, "top_p": 0.8, "min_p": 0.02},
            {
                "repetition_penalty": 1.2,
                "sequence_bias": {(300,): 5.0},
                "min_new_tokens": 3,
                "top_p": 0.8,
                "min_p": 0.02,
            },
        ),
    ],
    ids=str,
)
def test_rows_are_those_that_transformers_samples_from(ours: dict[str, Any], theirs: dict[str, Any] | None) -> None:
    oracle = Oracle(TARGET, ours)
    prompt, output, scores = generated(oracle, {"do_sample": True, **(ours if theirs is None else theirs)})
    (rows,) = oracle.rows(prompt, output)
    certain = rows.borders.uncertain_mass < 1e-9
    assert int(certain.sum()) > len(output) // 2
    wanted, found = torch.softmax(scores, -1)[certain], torch.softmax(rows.scores, -1)[certain]
    assert torch.allclose(found, wanted, atol=2e-5)
    assert torch.equal(torch.isneginf(rows.scores[certain]), torch.isneginf(scores[certain]))


def test_greedy_rows_choose_what_transformers_chooses() -> None:
    oracle = Oracle(TARGET, {"temperature": 0.0, "repetition_penalty": 1.3})
    prompt, output, _ = generated(oracle, {"do_sample": False, "repetition_penalty": 1.3})
    (rows,) = oracle.rows(prompt, output)
    assert rows.scores.argmax(dim=-1).tolist() == output
    assert float(rows.borders.uncertain_mass.sum()) == 0.0


def test_bad_words_are_spelt_bare_and_with_a_space() -> None:
    oracle = Oracle(TARGET, {"bad_words": ["the"]})
    prompt = oracle.encode(PROMPT)
    output = oracle.tokenizer.encode(" in the list", add_special_tokens=False)
    (rows,) = oracle.rows(prompt, output)
    for text in ("the", " the"):
        spelt = oracle.tokenizer.encode(text, add_special_tokens=False)
        if len(spelt) == 1:
            assert torch.isneginf(rows.scores[:, spelt[0]]).all()


@pytest.mark.parametrize(
    ("settings", "text", "leaves_at"),
    [
        ({"regex": "[ab]{3}c"}, "abac", None),
        ({"regex": "[ab]{3}c"}, "abc", "c"),
        ({"ebnf": 'start: "x" NAME\nNAME: /[0-9]+/'}, "x42", None),
        ({"ebnf": 'root ::= "x" [0-9]+'}, "x42", None),
        (
            {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            '{"a":7}',
            None,
        ),
        ({"json_schema": json.dumps({"type": "boolean"})}, "true", None),
    ],
    ids=str,
)
def test_grammars_are_followed_from_the_start(settings: dict[str, Any], text: str, leaves_at: str | None) -> None:
    oracle = Oracle(TARGET, settings)
    prompt = oracle.encode(PROMPT)
    # Where the language leaves one spelling only, llguidance asks for the tokenizer's own tokens of it.
    pieces = list(text) if leaves_at or "regex" in settings else [text]
    output = [token for piece in pieces for token in oracle.tokenizer.encode(piece, add_special_tokens=False)]
    if leaves_at is None:
        output.append(oracle.eos_token_ids[0])
    (rows,) = oracle.rows(prompt, output)
    allowed = [bool(rows.borders.loose[t, token]) for t, token in enumerate(output)]
    if leaves_at is None:
        assert all(allowed)
        assert int(rows.borders.loose[0].sum()) < oracle.vocab_size
    else:
        index = re.search(leaves_at, text).start()  # type: ignore[union-attr]
        assert allowed == [True] * index + [False] * (len(output) - index)


def test_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"regex": "[a-z ]{2,40}", "frequency_penalty": 0.5, "top_k": 100}
    oracle = Oracle(TARGET, settings, draft=TARGET.parent / "draft")
    prompt, output = oracle.encode(PROMPT), oracle.tokenizer.encode("and the list of the", add_special_tokens=False)
    (whole,) = oracle.rows(prompt, output)
    monkeypatch.setattr("outrider.exactness.oracle.MAX_ENTRIES", 2 * oracle.vocab_size + 1)
    parts = list(oracle.rows(prompt, output))
    assert [rows.start for rows in parts] == list(range(0, len(output), 2))
    for name in ("raw", "scores", "draft"):
        assert torch.equal(torch.cat([getattr(rows, name) for rows in parts]), getattr(whole, name)), name
    assert torch.equal(torch.cat([rows.borders.loose for rows in parts]), whole.borders.loose)
    assert whole.draft is not None
    assert not torch.equal(whole.draft, whole.scores)


def test_prompt_log_probs_are_those_of_one_pass() -> None:
    oracle = Oracle(TARGET, {})
    prompt = oracle.encode(PROMPT)
    with torch.inference_mode():
        logits = oracle._model(torch.tensor([prompt])).logits[0, :-1, : oracle.vocab_size]
    assert torch.allclose(oracle.prompt_log_probs(prompt), torch.log_softmax(logits.double(), -1), atol=1e-5)


def test_what_cannot_be_judged_is_refused() -> None:
    require_known({"temperature": 1.0, "n": 2, "stop": ["x"], "controls": {"min_p": 0.1}})
    with pytest.raises(ConfigError, match="no oracle for top_q"):
        require_known({"top_q": 1})
    with pytest.raises(ConfigError, match="no oracle for top_a"):
        require_known({"controls": {"top_a": 0.1}})
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Oracle(TARGET.parent, {})
