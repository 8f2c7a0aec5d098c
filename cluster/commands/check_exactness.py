"""``outrider check-exactness``: does a running server write what its target model says?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cluster.commands.common import Json, fail, in_words_of_the_command
from outrider.cluster.commands.controls import json_or_list, with_control_options
from outrider.cluster.commands.router_options import RouterOptions, with_router_options
from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from outrider.exactness.check import Check
    from outrider.exactness.report import Report

# Passed, failed and unknown end with 0, 1 and 2; a check that could not be carried out ends with this.
NOT_CHECKED = 3
SETTINGS = "Settings to check"


def _option(*names: str, help: str, metavar: str, panel: str | None = SETTINGS, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel, **more)


def _check_exactness(
    *,
    model: Annotated[
        Path,
        typer.Option("--model", help="Folder of the target model.", metavar="DIR", exists=True, file_okay=False),
    ],
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft",
            help="Folder of the draft model: adds a test that looks for the draft's favourites.",
            metavar="DIR",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        _option("--tokens", help="Tokens to judge. Default: what --deviation takes.", metavar="N", panel=None, min=1),
    ] = None,
    deviation: Annotated[
        float, typer.Option("--deviation", help="Total variation to be found with probability 0.99.", metavar="FLOAT")
    ] = 0.02,
    prompts: Annotated[
        Path | None,
        _option("--prompts", help="A prompt in each line. Default: built-in ones.", metavar="FILE", panel=None),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests at once.", metavar="N", min=1)] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the check and of its requests.", metavar="N", min=0)] = 0,
    sampling: Annotated[
        str | None,
        _option(
            "--sampling",
            help="Any settings as one JSON object, by the names of the Python client.",
            metavar="JSON",
        ),
    ] = None,
    temperature: Annotated[float | None, _option("--temperature", help="0 is greedy.", metavar="FLOAT")] = None,
    top_k: Annotated[int | None, _option("--top-k", help="That many most likely tokens.", metavar="INTEGER")] = None,
    top_p: Annotated[float | None, _option("--top-p", help="Tokens of that mass.", metavar="FLOAT")] = None,
    json_schema: Annotated[Path | None, _option("--json-schema", help="JSON of a schema.", metavar="FILE")] = None,
    regex: Annotated[str | None, _option("--regex", help="Output of this form.", metavar="TEXT")] = None,
    grammar: Annotated[Path | None, _option("--grammar", help="Output of this grammar.", metavar="FILE")] = None,
    max_tokens: Annotated[
        int | None, _option("--max-tokens", help="Tokens of a text. Default: 48.", metavar="INTEGER")
    ] = None,
    stop: Annotated[list[str] | None, _option("--stop", help="String that ends a text.", metavar="TEXT")] = None,
    stop_token_ids: Annotated[
        str | None, _option("--stop-token-ids", help="Tokens that end a text, such as 1,2.", metavar="IDS")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=SETTINGS)] = False,
    n: Annotated[int | None, _option("--n", help="Choices of each request.", metavar="INTEGER")] = None,
    logprobs: Annotated[
        int | None, _option("--logprobs", help="Check log-probabilities too, with that many.", metavar="INTEGER")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, _option("--prompt-logprobs", help="Those of the prompt too.", metavar="INTEGER")
    ] = None,
    logprobs_mode: Annotated[str | None, _option("--logprobs-mode", help="raw or processed.", metavar="TEXT")] = None,
    num_speculative_tokens: Annotated[
        int | None, _option("--num-speculative-tokens", help="Proposed tokens for each round.", metavar="INTEGER")
    ] = None,
    verifier: Annotated[str | None, _option("--verifier", help="greedy, rejection or coupled.", metavar="TEXT")] = None,
    router: RouterOptions,
    as_json: Json = False,
    **controls: Any,
) -> None:
    """Draw texts from a running server and judge them against transformers' own distributions.

    Ends with 0 if the server passed, 1 if it failed, 2 if too little was seen to say so, 3 if the check could not be
    carried out. Loads the model in float32; a check of the default size takes some minutes even for small models.
    """
    given: dict[str, Any] = {
        **controls,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "json_schema": _contents(json_schema),
        "regex": regex,
        "ebnf": _contents(grammar),
        "max_tokens": max_tokens,
        "stop": stop,
        "stop_token_ids": None
        if stop_token_ids is None
        else json_or_list("--stop-token-ids", stop_token_ids, is_list=True),
        "ignore_eos": ignore_eos or None,
        "n": n,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logprobs_mode": logprobs_mode,
        "num_speculative_tokens": num_speculative_tokens,
        "verifier": verifier,
    }
    options = _merged(_object(sampling), {name: value for name, value in given.items() if value is not None})
    try:
        from outrider.exactness.check import Check

        check = Check(
            router.endpoint(),
            model,
            options,
            draft=draft,
            tokens=tokens,
            deviation=deviation,
            prompt_file=prompts,
            concurrency=concurrency,
            seed=seed,
        )
        report = _run(check)
    except OutriderError as error:
        fail(in_words_of_the_command(error), NOT_CHECKED)
    except ImportError as error:
        fail(f"{error}: the check needs transformers and torch, `pip install 'outrider[engine]'`", NOT_CHECKED)
    print(json.dumps(report.to_dict()) if as_json else report.table())
    raise typer.Exit(report.verdict.exit_code)


check_exactness = with_control_options(with_router_options(_check_exactness), after="top_p", panel=SETTINGS)


def _run(check: Check) -> Report:
    """With a bar for each stage, where standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from outrider.exactness.check import run

    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        return run(check, progress)


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text[:60]!r} is not JSON ({error}).", param_hint="'--sampling'") from None
    if not isinstance(value, dict):
        raise typer.BadParameter('an object such as {"temperature": 0.8} is wanted.', param_hint="'--sampling'")
    return value


def _merged(named: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    twice = sorted(named.keys() & given.keys())
    if twice:
        raise typer.BadParameter(f"{', '.join(twice)}: given as an option too.", param_hint="'--sampling'")
    return named | given


def _contents(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from error
