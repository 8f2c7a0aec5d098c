"""The tokenizer of a model folder, and its chat template as transformers renders it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.core.errors import ConfigError, InvalidRequest
from outrider.core.fingerprint import tokenizer_fingerprint, tokenizer_vocab_size
from outrider.router.tokenizer import TextTokenizer

CHATML = """{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if message.content == 'skip me' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content | tojson }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
{% generation %}<|im_start|>assistant
{% endgeneration %}
{%- endif %}{{ eos_token }}"""


def model_folder(path: Path, **files: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>"), AddedToken("<|end|>")])
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        target = path / name.replace("__", ".")
        target.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_round_trip_and_facts(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    tokenizer = TextTokenizer(folder)
    assert tokenizer.vocab_size == 259 == tokenizer_vocab_size(folder)
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.fingerprint == tokenizer_fingerprint(folder)
    text = "héllo 😀<|im_end|>"
    ids = tokenizer.encode(text)
    assert ids[-1] == 257
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, ids)) == "héllo 😀"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config__json": {"eos_token_id": [257, 258]}, "config__json": {"eos_token_id": 1}}, {257, 258}),
        ({"config__json": {"eos_token_id": 258}, "tokenizer_config__json": {"eos_token": "<|im_end|>"}}, {258}),
        ({"tokenizer_config__json": {"eos_token": {"content": "<|im_end|>"}}}, {257}),
        ({}, set()),
    ],
)
def test_eos(tmp_path: Path, files: dict[str, object], expected: set[int]) -> None:
    assert TextTokenizer(model_folder(tmp_path, **files)).eos_token_ids == expected


MESSAGES = [
    {"role": "system", "content": "<b>é</b>"},
    {"role": "user", "content": "skip me"},
    {"role": "user", "content": "hi"},
]


# Where the chat template stands: a file of its own, the tokenizer's configuration, or there under a name.
HOMES: dict[str, dict[str, object]] = {
    "file": {},
    "config": {"chat_template": CHATML},
    "named": {"chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "no"}]},
}
RENDER = """
import json, sys
from transformers import AutoTokenizer
for folder in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = json.loads(sys.argv[1])
    print(json.dumps(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))
"""


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """For each home a folder, and the chat as transformers renders it, in one process for all."""
    folders = []
    for home, template in HOMES.items():
        config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast", **template}
        files: dict[str, object] = {"chat_template__jinja": CHATML} if home == "file" else {}
        folders.append(model_folder(tmp_path_factory.mktemp(home), tokenizer_config__json=config, **files))
    command = [sys.executable, "-c", RENDER, json.dumps(MESSAGES), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line) for line in done.stdout.splitlines()[-len(HOMES) :]]
    return dict(zip(HOMES, zip(folders, texts, strict=True), strict=True))


@pytest.mark.parametrize("home", HOMES)
def test_chat_template_as_transformers_renders_it(rendered: dict[str, tuple[Path, str]], home: str) -> None:
    folder, expected = rendered[home]
    ours = TextTokenizer(folder)
    text = ours.render_chat(MESSAGES)
    assert text == expected
    assert ours.decode(ours.encode_chat(MESSAGES)) == text


def test_no_template_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        TextTokenizer(model_folder(tmp_path)).encode_chat(MESSAGES)
    assert caught.value.field == "chat"


def test_a_template_that_refuses_names_the_field(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(model_folder(tmp_path, chat_template__jinja=CHATML))
    with pytest.raises(InvalidRequest, match="unknown role wizard") as caught:
        tokenizer.encode_chat([{"role": "wizard", "content": "hi"}])
    assert caught.value.field == "chat"


def test_templates_are_sandboxed(tmp_path: Path) -> None:
    evil = "{{ ().__class__.__base__.__subclasses__() }}"
    tokenizer = TextTokenizer(model_folder(tmp_path, chat_template__jinja=evil))
    with pytest.raises(InvalidRequest):
        tokenizer.encode_chat(MESSAGES)


def test_broken_folders_give_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        TextTokenizer(tmp_path)
    with pytest.raises(ConfigError, match="chat template"):
        TextTokenizer(model_folder(tmp_path / "b", chat_template__jinja="{% if %}"))


def test_neither_transformers_nor_torch_is_imported() -> None:
    script = (
        "import sys, outrider.router.tokenizer; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_text_of_one_token(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(model_folder(tmp_path))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("a b")] == ["a", " ", "b"]
    assert tokenizer.token_text(257) == "<|im_end|>"
    assert [tokenizer.token_text(token) for token in tokenizer.encode("é")] == ["\ufffd", "\ufffd"]


def test_the_text_of_one_token_keeps_the_blank_that_a_decoder_drops(tmp_path: Path) -> None:
    """In vocabularies of SentencePiece a word's token begins with a blank, and a text does not."""
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581": 0, "a": 1, "b": 2, "\u2581b": 3}, merges=[("\u2581", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = TextTokenizer(tmp_path)
    assert ours.decode([3]) == "b"
    assert [ours.token_text(token) for token in (1, 2, 3)] == ["a", "b", " b"]


def test_tokens_that_end_a_text_have_no_text_though_they_are_not_special(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(model_folder(tmp_path, config__json={"eos_token_id": 65}))
    letter = tokenizer.decode([65])
    assert letter != ""
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, [65, 66])) == tokenizer.decode([66])
