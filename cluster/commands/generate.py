"""``outrider generate``: one request, with every option that there is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cluster.commands.common import Json, fail
from outrider.cluster.commands.controls import json_or_list, with_control_options
from outrider.cluster.commands.router_options import RouterOptions, with_router_options
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.client import Client, Completion, Prompt

SAMPLING = "Sampling"
LANGUAGE = "Structured output"
ENDS = "Where the text ends"
ANSWER = "Answer"
SPECULATION = "Speculation"


def _option(*names: str, help: str, panel: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel, **more)


def _file(name: str, help: str) -> Any:
    return _option(name, help=help, panel=LANGUAGE, metavar="FILE", exists=True, dir_okay=False, readable=True)


def _generate(
    *,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The prompt; else standard input, as it is.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")] = False,
    n: Annotated[
        int | None, _option("--n", help="Choices to generate. Default: 1.", panel=ANSWER, metavar="INTEGER")
    ] = None,
    echo: Annotated[bool, _option("--echo", help="Tell the prompt's text too.", panel=ANSWER)] = False,
    logprobs: Annotated[
        int | None,
        _option(
            "--logprobs",
            help="With --json: the log-probability of each token, and of that many most likely ones.",
            panel=ANSWER,
            metavar="INTEGER",
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        _option("--prompt-logprobs", help="The same for the tokens of the prompt.", panel=ANSWER, metavar="INTEGER"),
    ] = None,
    logprobs_mode: Annotated[
        str | None,
        _option(
            "--logprobs-mode",
            help="Output's: raw, of the model's own distribution (default), or processed, of what is sampled from.",
            panel=ANSWER,
            metavar="TEXT",
        ),
    ] = None,
    temperature: Annotated[
        float | None, _option("--temperature", help="0 is greedy. Default: 1.", panel=SAMPLING, metavar="FLOAT")
    ] = None,
    top_k: Annotated[
        int | None,
        _option(
            "--top-k", help="Sample from that many most likely tokens. Default: all.", panel=SAMPLING, metavar="INTEGER"
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        _option(
            "--top-p",
            help="Sample from the most likely tokens of that mass. Default: 1.",
            panel=SAMPLING,
            metavar="FLOAT",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _option(
            "--seed",
            help="Source of all random numbers. Default: the server picks one.",
            panel=SAMPLING,
            metavar="INTEGER",
        ),
    ] = None,
    json_schema: Annotated[
        Path | None, _file("--json-schema", "The output is JSON of the JSON schema in this file.")
    ] = None,
    regex: Annotated[
        str | None,
        _option(
            "--regex", help="The output matches this regular expression as a whole.", panel=LANGUAGE, metavar="TEXT"
        ),
    ] = None,
    grammar: Annotated[
        Path | None, _file("--grammar", "The output belongs to the grammar in this file: Lark's notation, or GBNF.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        _option(
            "--max-tokens",
            help="Output tokens wanted. Default: as many as the context holds.",
            panel=ENDS,
            metavar="INTEGER",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        _option("--stop", help="String that ends the text; may be given several times.", panel=ENDS, metavar="TEXT"),
    ] = None,
    stop_token_ids: Annotated[
        str | None,
        _option("--stop-token-ids", help="Tokens that end the text, such as 1,2,3.", panel=ENDS, metavar="IDS"),
    ] = None,
    ignore_eos: Annotated[
        bool,
        _option("--ignore-eos", help="The model's own end-of-text tokens do not end the text.", panel=ENDS),
    ] = False,
    include_stop: Annotated[
        bool,
        _option("--include-stop", help="Leave the stop string, or the stop token's text, in the text.", panel=ENDS),
    ] = False,
    num_speculative_tokens: Annotated[
        int | None,
        _option(
            "--num-speculative-tokens",
            help="Proposed tokens for each round; 0 turns speculation off.",
            panel=SPECULATION,
            metavar="INTEGER",
        ),
    ] = None,
    verifier: Annotated[
        str | None, _option("--verifier", help="greedy, rejection or coupled.", panel=SPECULATION, metavar="TEXT")
    ] = None,
    router: RouterOptions,
    as_json: Json = False,
    **controls: Any,
) -> None:
    """Continue a prompt; the text is printed as it comes."""
    from outrider.client import Client

    languages = {
        "json_schema": _contents("--json-schema", json_schema),
        "regex": regex,
        "ebnf": _contents("--grammar", grammar),
    }
    if sum(language is not None for language in languages.values()) > 1:
        raise typer.BadParameter("give only one of --json-schema, --regex and --grammar")
    text = prompt if prompt is not None else _standard_input()
    options: dict[str, Any] = {
        **languages,
        **controls,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": (
            None if stop_token_ids is None else json_or_list("--stop-token-ids", stop_token_ids, is_list=True)
        ),
        "ignore_eos": ignore_eos or None,
        "include_stop": include_stop or None,
        "num_speculative_tokens": num_speculative_tokens,
        "verifier": verifier,
        "n": n,
        "echo": echo or None,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logprobs_mode": logprobs_mode,
    }
    with Client(router.endpoint()) as client:
        answer = _ask(client, [{"role": "user", "content": text}] if chat else text, options, silent=as_json)
    if as_json:
        print(json.dumps(answer.to_dict()))
    if any(choice.finish_reason == "abort" for choice in answer.choices):
        fail(f"the request {answer.request_id} was aborted", 1)


generate = with_control_options(with_router_options(_generate), after="top_p", panel=SAMPLING)


def _ask(client: Client, prompt: Prompt, options: dict[str, Any], *, silent: bool) -> Completion:
    """The answer; unless ``silent``, its text is printed: as it comes, or, of several choices, at the end."""
    if silent:
        return client.generate(prompt, **options)
    if (options["n"] or 1) > 1:
        answer = client.generate(prompt, **options)
        for choice in answer.choices:
            print(f"--- choice {choice.index} ({choice.finish_reason})")
            _print_line((answer.prompt_text or "") + choice.text)
        return answer
    with client.stream(prompt, **options) as stream:
        written = ""
        for piece in stream:
            written = piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    if not written.endswith("\n"):
        print()
    return stream.completion


def _print_line(text: str) -> None:
    print(text, end="" if text.endswith("\n") else "\n")


def _contents(option: str, path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint=f"'{option}'") from error


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError("give a prompt with -p TEXT or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input is not UTF-8 ({error.reason})") from error
