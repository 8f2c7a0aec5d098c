"""Generate JSON under schemas at a running server, and judge every answer with a validator of its own.

    python scripts/generate_json.py --address HOST:PORT [-n 500] [--concurrency 4] [--verifier rejection] [-k 4]
        [--seed 0] [--temperature 1] [--schemas FOLDER] [--json]

Takes the schemas of a folder (``examples/schemas``) in turn, each time with another seed. An answer counts as valid if
it ended by itself, is JSON, and the package jsonschema finds that it follows its schema; one that was cut by length
does not count. Exit code 0 only if all of them are valid.

The table shows for each schema: answers that are valid, proposed tokens that were accepted, the same of those in whose
place the grammar left a choice, the grammar's own time at the target, and tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from rich.console import Console
from rich.table import Table

from outrider.client import AsyncClient, Completion, InvalidRequest, OutriderError

SCHEMAS = Path(__file__).resolve().parents[1] / "examples" / "schemas"
SHOWN = 200  # characters of an answer that is wrong


@dataclass(frozen=True)
class Settings:
    """How to generate.

    Attributes:
        seed: of the first answer; the others count on from it.
        options: of each request, as the client takes them.
    """

    number: int
    concurrency: int
    seed: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One answer. ``fault`` says why it is not valid; None where it is."""

    schema: str
    seed: int
    fault: str | None
    text: str = ""
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    proposed_free: int = 0
    accepted_free: int = 0
    grammar_ms: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What some answers come to. Rates are None where nothing was proposed."""

    valid: int
    total: int
    tokens: int
    proposed: int
    acceptance: float | None
    proposed_free: int
    free_acceptance: float | None
    grammar_ms_per_token: float | None


def load_schemas(folder: Path) -> dict[str, dict[str, Any]]:
    """Schemas by name. Raises ``ValueError`` for a folder without any, ``SchemaError`` for what is none."""
    schemas = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    if not schemas:
        raise ValueError(f"there is no *.json in {folder}")
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    return schemas


def prompt_for(schema: dict[str, Any]) -> str:
    """A prompt that a model without instructions can continue."""
    return f"An example in JSON. {schema.get('title', 'A value')}:\n"


def fault_of(text: str, finish_reason: str, schema: dict[str, Any]) -> str | None:
    """Why an answer does not follow its schema; None if it does."""
    if finish_reason != "stop":
        return f"it ended by {finish_reason}"
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"it is no JSON: {error}"
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    violation = next(iter(validator.iter_errors(value)), None)
    return None if violation is None else f"{violation.json_path}: {violation.message}"


def answer_from(name: str, seed: int, completion: Completion, schema: dict[str, Any]) -> Answer:
    """A completion, judged."""
    stats = completion.speculation
    return Answer(
        schema=name,
        seed=seed,
        fault=fault_of(completion.text, completion.finish_reason, schema),
        text=completion.text,
        tokens=completion.usage.completion_tokens,
        proposed=stats.num_draft_tokens,
        accepted=stats.num_accepted_tokens,
        proposed_free=stats.num_draft_tokens - stats.num_forced_tokens,
        accepted_free=stats.num_accepted_tokens - stats.num_forced_accepted,
        grammar_ms=stats.grammar_ms,
    )


async def generate_all(
    client: AsyncClient,
    schemas: dict[str, dict[str, Any]],
    settings: Settings,
    progress: Callable[[Sequence[Answer]], None],
) -> list[Answer]:
    """As many answers as were asked for; ``progress`` gets those that there are, after each one."""
    names = list(schemas)
    answers: list[Answer] = []
    numbers = iter(range(settings.number))

    async def work() -> None:
        for number in numbers:
            name, seed = names[number % len(names)], settings.seed + number
            schema = schemas[name]
            try:
                completion = await client.generate(
                    prompt_for(schema), json_schema=schema, seed=seed, **settings.options
                )
                answers.append(answer_from(name, seed, completion, schema))
            except InvalidRequest:
                raise  # the next one would be refused too
            except OutriderError as error:
                answers.append(Answer(name, seed, f"{type(error).__name__}: {error}"))
            progress(answers)

    workers = [asyncio.create_task(work()) for _ in range(min(settings.concurrency, settings.number))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
    return answers


def figures(answers: Sequence[Answer]) -> Figures:
    """What answers come to, together."""
    tokens = sum(answer.tokens for answer in answers)
    proposed = sum(answer.proposed for answer in answers)
    proposed_free = sum(answer.proposed_free for answer in answers)
    return Figures(
        valid=sum(answer.fault is None for answer in answers),
        total=len(answers),
        tokens=tokens,
        proposed=proposed,
        acceptance=sum(answer.accepted for answer in answers) / proposed if proposed else None,
        proposed_free=proposed_free,
        free_acceptance=sum(answer.accepted_free for answer in answers) / proposed_free if proposed_free else None,
        grammar_ms_per_token=sum(answer.grammar_ms for answer in answers) / tokens if tokens else None,
    )


def report(answers: Sequence[Answer], elapsed_s: float) -> dict[str, Any]:
    """Everything as JSON."""
    total = figures(answers)
    return {
        **asdict(total),
        "seconds": round(elapsed_s, 3),
        "tokens_per_second": total.tokens / elapsed_s,
        "schemas": {
            name: asdict(figures([answer for answer in answers if answer.schema == name]))
            for name in sorted({answer.schema for answer in answers})
        },
        "failures": [
            {"schema": answer.schema, "seed": answer.seed, "fault": answer.fault, "text": answer.text}
            for answer in answers
            if answer.fault is not None
        ],
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """The report as a table."""
    table = Table()
    table.add_column("schema")
    for column in ("valid", "accepted", "where there was a choice", "grammar ms/token", "tokens"):
        table.add_column(column, justify="right")
    for name, row in [*facts["schemas"].items(), ("all", facts)]:
        if name == "all":
            table.add_section()
        table.add_row(
            name,
            f"{row['valid']}/{row['total']}",
            _share(row["acceptance"], row["proposed"]),
            _share(row["free_acceptance"], row["proposed_free"]),
            "-" if row["grammar_ms_per_token"] is None else f"{row['grammar_ms_per_token']:.3f}",
            str(row["tokens"]),
        )
    console.print(table)
    console.print(f"{facts['tokens_per_second']:.1f} tokens/s in {facts['seconds']:.1f} s")
    for failure in facts["failures"]:
        text = failure["text"]
        shown = text if len(text) <= SHOWN else text[:SHOWN] + "..."
        console.print(
            f"not valid: {failure['schema']}, seed {failure['seed']}: {failure['fault']}: {shown!r}", markup=False
        )


def _share(rate: float | None, count: int) -> str:
    return "-" if rate is None else f"{rate:.3f} of {count}"


def _progress(total: int) -> Callable[[Sequence[Answer]], None]:
    """Keeps one line up to date on a terminal; elsewhere a line comes for each tenth."""
    is_terminal = sys.stderr.isatty()
    step = max(1, total // 10)

    def tell(answers: Sequence[Answer]) -> None:
        done, bad = len(answers), sum(answer.fault is not None for answer in answers)
        line = f"{done}/{total} generated, {bad} not valid"
        if is_terminal:
            print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done % step == 0 or done == total:
            print(line, file=sys.stderr, flush=True)

    return tell


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", help="HOST:PORT of the router; without it OUTRIDER_ADDRESS")
    parser.add_argument("-n", "--number", type=int, default=100, help="generations (100)")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time (4)")
    parser.add_argument("--verifier", help="rejection or coupled; default: the server's")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, help="default: the server's; 0 turns it off")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=400, help="an answer of that length fails (400)")
    parser.add_argument("--seed", type=int, default=0, help="of the first answer; the others count on (0)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each answer (300)")
    parser.add_argument("--schemas", type=Path, default=SCHEMAS, help="folder of *.json (examples/schemas)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args(argv)
    if arguments.number < 1 or arguments.concurrency < 1:
        parser.error("--number and --concurrency must be at least 1")
    return arguments


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        number=arguments.number,
        concurrency=arguments.concurrency,
        seed=arguments.seed,
        options={
            "temperature": arguments.temperature,
            "max_tokens": arguments.max_tokens,
            "verifier": arguments.verifier,
            "num_speculative_tokens": arguments.num_speculative_tokens,
        },
    )
    schemas = load_schemas(arguments.schemas)
    async with AsyncClient(arguments.address, timeout=arguments.timeout) as client:
        begun = time.perf_counter()
        answers = await generate_all(client, schemas, settings, _progress(settings.number))
        return report(answers, time.perf_counter() - begun)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    try:
        facts = asyncio.run(_run(arguments))
    except (OutriderError, SchemaError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(facts))
    else:
        console = Console(highlight=False, soft_wrap=True)
        if not console.is_terminal:
            console.width = 120
        show(facts, console)
    return 0 if facts["valid"] == facts["total"] == arguments.number else 1


if __name__ == "__main__":
    sys.exit(main())
