"""Text to tokens and chats to text, as the model's folder says. Imports neither transformers nor torch."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from outrider.core.end_tokens import end_token_ids, read_json_object
from outrider.core.errors import ConfigError, InvalidRequest
from outrider.core.fingerprint import vocab_fingerprint, vocab_size
from outrider.router.text import IncrementalDetokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTokenizer:
    """The tokenizer and chat template of one model.

    Attributes:
        vocab_size: ids run from 0 to this number less one.
        fingerprint: SHA-256 of the token table (``outrider.core.fingerprint``).
        eos_token_ids: tokens that end a text.
        special_ids: tokens without text: ids of added tokens that the tokenizer calls special.
    """

    def __init__(self, model_dir: str | Path) -> None:
        """Raises ``ConfigError`` in one line if the folder cannot be read."""
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"the model folder {folder} holds no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of a file
            raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = vocab_size(vocab)
        self.fingerprint = vocab_fingerprint(vocab)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        settings = read_json_object(folder / "tokenizer_config.json")
        self._special_tokens = _special_tokens(settings)
        self.eos_token_ids = end_token_ids(folder, vocab)
        self._template = _read_template(folder, settings)
        self._texts: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ``add_special_tokens`` adds what the model expects around a plain text, such as BOS."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat up to the point where the assistant speaks.

        Raises ``InvalidRequest`` if the model has no chat template or its template refuses the messages.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of the messages. Raises ``InvalidRequest``.

        ``tools``: functions that the model may call, as templates take them; ``extra``: further names for the template.
        """
        if self._template is None:
            raise InvalidRequest("chat", "a chat", "absent: the model has no chat template; send text or token_ids")
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **(extra or {}),
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": True,
                    "tools": tools,
                    "documents": None,
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest("chat", _roles(messages), f"what the chat template takes: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest("chat", _roles(messages), f"what the chat template takes ({error!r})") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_text(self, token: int) -> str:
        """How one token is spelt within a text; special ones too. What is no character of its own is U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            # Some decoders drop the blank that a text's first token begins with, so it comes second here.
            first = self._tokenizer.encode("a", add_special_tokens=False).ids
            text = self._texts[token] = self.decode([*first, token])[len(self.decode(first)) :]
        return text

    def detokenizer(self, prompt: Sequence[int] = ()) -> IncrementalDetokenizer:
        """Spells what follows ``prompt``; special tokens and those that end a text have no text."""
        return IncrementalDetokenizer(self.decode, skip=self.special_ids | self.eos_token_ids, prompt=prompt)


def compile_chat_template(source: str) -> jinja2.Template:
    """A chat template as transformers compiles it: sandboxed, with the names that templates of the hub use."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        nodes: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_template(folder: Path, settings: dict[str, Any]) -> jinja2.Template | None:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not source:
        return None
    try:
        return compile_chat_template(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template in {folder} is not valid: {error}") from error


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [message.get("role", "") for message in messages]
