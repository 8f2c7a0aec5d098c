"""One check from beginning to end: draw, judge, compare with plain decoding, reach a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.client import Client, Endpoint
from outrider.core.errors import ConfigError
from outrider.exactness import power, prompts
from outrider.exactness.compare import different_texts, two_samples
from outrider.exactness.family import FREEDOM, LEVEL, MIN_COUNT, family
from outrider.exactness.judge import Judge
from outrider.exactness.oracle import Oracle, require_known
from outrider.exactness.report import Report, Speculation
from outrider.exactness.sampler import Text, Wanted, draw

DEFAULT_MAX_TOKENS = 48
# Prompts that sampled texts share: many texts of each, so that texts of one prompt can be compared.
NUM_PROMPTS = 16
# Least number of tokens of a check at temperature 0, where few suffice.
MIN_GREEDY_TOKENS = 2000
# Share of the texts that is drawn again without speculation.
PLAIN_SHARE = 0.25
# Proposed, accepted and rejected tokens below which nothing is known of speculation.
MIN_EVENTS = 20
# So is a share of the tokens, in rounds with a proposal, below which a fault there would drown among the others.
MIN_SPECULATED_SHARE = 0.05
# Texts are drawn in waves until enough tokens were judged; so many times the number that was expected to do.
MAX_STRETCH = 12
# Above this share of rows on borders, too much went unjudged.
MAX_UNCERTAIN_SHARE = 0.1
SHOWN_FAULTS = 3
SMALL_MODEL_BYTES = 200 << 20

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, what is done of it and how much it is in all; both in tokens."""


@dataclass(frozen=True)
class Check:
    """What to check.

    Attributes:
        address: of a router, or all that an ``Endpoint`` says of one.
        model: folder of the target model.
        options: of the requests, by the names of the client's keyword arguments.
        draft: folder of the draft model; None: the check does without its order.
        tokens: to be judged; None: as many as ``deviation`` takes.
        deviation: total variation that must be found.
        prompt_file: a prompt in each line; None: built-in ones.
        concurrency: requests at once.
        seed: of the check's own random numbers, and of the requests' seeds.
    """

    address: str | Endpoint
    model: Path
    options: dict[str, Any] = field(default_factory=dict)
    draft: Path | None = None
    tokens: int | None = None
    deviation: float = 0.02
    prompt_file: Path | None = None
    concurrency: int = 16
    seed: int = 0
    timeout_s: float = 600.0


def run(check: Check, progress: Progress = lambda stage, done, total: None) -> Report:
    """Carry a check out.

    Raises:
        OutriderError: the server cannot be reached or refuses the requests, or the oracle does not know the settings.
    """
    if not 0.0 < check.deviation < 1.0:
        raise ConfigError(f"--deviation is {check.deviation}, but must be above 0 and below 1")
    options = {"max_tokens": DEFAULT_MAX_TOKENS, **{k: v for k, v in check.options.items() if v is not None}}
    require_known(options)
    with Client(check.address, timeout=30.0) as client:
        k = options.setdefault("num_speculative_tokens", client.get_settings()["num_speculative_tokens"])
        # What is wrong with the settings is told before the model is loaded.
        client.generate([0], **{**options, "max_tokens": 1, "min_tokens": None, "n": None})
    with one_thread_if_small(check.model):
        oracle = Oracle(check.model, options, draft=check.draft)
        return _Run(check, options, oracle, int(k), progress).report()


@contextlib.contextmanager
def one_thread_if_small(model: Path) -> Iterator[None]:
    """A small model's pass ends sooner on one thread than on several that wait for each other beside a busy server."""
    threads = torch.get_num_threads()
    if sum(file.stat().st_size for file in model.glob("*.safetensors")) < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Run:
    def __init__(self, check: Check, options: dict[str, Any], oracle: Oracle, k: int, progress: Progress) -> None:
        self.check = check
        self.options = options
        self.oracle = oracle
        self.k = k
        self.progress = progress
        self.judge = Judge(oracle, options, check.seed)
        self.seconds = {"drawing": 0.0, "judging": 0.0}
        if oracle.is_greedy:
            self.needed = power.greedy_tokens_needed(check.deviation)
            self.target = check.tokens or max(self.needed, MIN_GREEDY_TOKENS)
        else:
            self.needed = power.tokens_needed(check.deviation, freedom=FREEDOM, level=LEVEL)
            self.target = check.tokens or self.needed
        self.texts_at_first = max(1, math.ceil(self.target / (options["max_tokens"] * int(options.get("n", 1)))))
        self.requests = self._requests()

    def report(self) -> Report:
        texts, wanted = self._draw_and_judge()
        faults = self.judge.faults(SHOWN_FAULTS)
        evidence = self.judge.evidence()
        p_values = family(evidence, self.k) if evidence is not None else {}
        plain: list[Text] = []
        if self.k > 0:
            plain_options = {**self.options, "num_speculative_tokens": 0}
            same = all(text.reproducible for text in texts)
            count = self._num_plain(len(wanted), same=same)
            if same:
                plain = self._draw("without speculation", wanted[:count], plain_options)
                different = different_texts(texts[: len(plain)], plain)
                if different:
                    faults.append(
                        f"{len(different)} of {len(plain)} texts differ from those without speculation, such as "
                        + "; ".join(different[:SHOWN_FAULTS])
                    )
            elif not self.oracle.is_greedy and evidence is not None:  # else there is nothing to compare with
                plain = self._draw("without speculation", list(itertools.islice(self.requests, count)), plain_options)
                other = Judge(self.oracle, plain_options, self.check.seed + 1)
                self._judge(other, plain)
                theirs = other.evidence()
                if theirs is not None:
                    p_values |= two_samples(evidence, theirs, self.k)
        judged = self.judge.counts.judged
        return Report(
            settings=self.options,
            counts=self.judge.counts,
            num_texts=len(texts),
            num_prompts=len({text.prompt for text in texts}),
            num_plain_texts=len(plain),
            wanted_deviation=self.check.deviation,
            smallest_deviation=(
                power.greedy_smallest_deviation(judged)
                if self.oracle.is_greedy
                else power.smallest_deviation(judged, freedom=FREEDOM, level=LEVEL)
            ),
            speculation=(spec := self._speculation(texts)),
            faults=faults,
            doubts=self._doubts(spec),
            p_values=p_values,
            seconds=self.seconds,
        )

    def _num_plain(self, num_requests: int, *, same: bool) -> int:
        """How many requests are sent without speculation: enough for the tests that compare two samples.

        Args:
            same: they are those that were sent with speculation, so that there are no more than ``num_requests``.
        """
        if self.oracle.is_greedy:
            return num_requests
        for_tests = math.ceil(1.5 * MIN_COUNT * num_requests / max(1, self.judge.counts.judged))
        count = max(for_tests, math.ceil(PLAIN_SHARE * num_requests))
        return min(count, num_requests if same else MAX_STRETCH * self.texts_at_first)

    def _requests(self) -> Any:
        """Endlessly many requests; every prompt comes as often as the others, every seed once."""
        encode = self.oracle.encode
        # Greedy texts of one prompt are all the same: each needs a prompt of its own.
        count = self.texts_at_first * MAX_STRETCH if self.oracle.is_greedy else NUM_PROMPTS
        if self.check.prompt_file is not None:
            texts = prompts.from_file(self.check.prompt_file)
            found = prompts.different(iter(texts), encode, len(texts))
        else:
            found = prompts.different(prompts.built_in(self.check.seed), encode, count)
        seeds = itertools.count(1 + (self.check.seed << 20))
        numbers = range(len(found)) if self.oracle.is_greedy else itertools.cycle(range(len(found)))
        return iter(Wanted(number, found[number], seed) for number, seed in zip(numbers, seeds, strict=False))

    def _draw_and_judge(self) -> tuple[list[Text], list[Wanted]]:
        texts: list[Text] = []
        wanted: list[Wanted] = []
        size = self.texts_at_first
        while True:
            wave = list(itertools.islice(self.requests, size))
            drawn = self._draw("drawing", wave, self.options)
            wanted += wave
            texts += drawn
            self._judge(self.judge, drawn)
            missing = self.target - self.judge.counts.judged
            room = MAX_STRETCH * self.texts_at_first - len(wanted)
            if missing <= 0 or room <= 0 or not wave or self.judge.is_hopeless:
                return texts, wanted
            rate = max(self.judge.counts.judged / len(wanted), 0.1)
            size = min(room, math.ceil(1.05 * missing / rate) + 1)

    def _draw(self, stage: str, wanted: Sequence[Wanted], options: dict[str, Any]) -> list[Text]:
        begin, done = time.monotonic(), 0
        total = len(wanted) * int(options["max_tokens"]) * int(options.get("n", 1))

        def on_text(num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            self.progress(stage, done, total)

        self.progress(stage, 0, total)
        drawn = asyncio.run(
            draw(
                self.check.address,
                wanted,
                options,
                concurrency=self.check.concurrency,
                timeout_s=self.check.timeout_s,
                on_text=on_text,
            )
        )
        self.progress(stage, total, total)
        self.seconds["drawing"] += time.monotonic() - begin
        return drawn

    def _judge(self, judge: Judge, texts: Sequence[Text]) -> None:
        begin, done = time.monotonic(), 0
        total = sum(len(text.output) for text in texts)
        for text in texts:
            judge.take(text)
            done += len(text.output)
            self.progress("judging", done, total)
        self.seconds["judging"] += time.monotonic() - begin

    def _speculation(self, texts: Sequence[Text]) -> Speculation:
        return Speculation(
            verifier="/".join(sorted({text.verifier for text in texts})),
            num_speculative_tokens=self.k,
            num_tokens=sum(len(text.output) for text in texts),
            num_speculated=sum(text.num_speculated for text in texts),
            num_proposed=sum(text.num_proposed for text in texts),
            num_accepted=sum(text.num_accepted for text in texts),
        )

    def _doubts(self, spec: Speculation) -> list[str]:
        counts = self.judge.counts
        doubts = []
        if counts.judged < self.needed:
            doubts.append(
                f"{counts.judged} tokens were judged, but a total variation of {self.check.deviation:g} takes "
                f"{self.needed}"
                + (": the settings leave no choice in most places" if counts.forced > counts.judged else "")
            )
        missing = spec.missing(MIN_EVENTS, MIN_SPECULATED_SHARE)
        if missing is not None:
            doubts.append(missing)
        if counts.uncertain > MAX_UNCERTAIN_SHARE * max(1, counts.uncertain + counts.judged):
            doubts.append(f"{counts.uncertain} rows lie on the border of a filter and were not judged")
        return doubts
