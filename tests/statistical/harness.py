"""Speculative decoding of made-up models through the product's kernels, and a judge of the texts that come out.

The loop is the service's: a draft proposes k tokens from its own conditional model and keeps its own cache; the target
runs them, verifies, commits; both roll back. Many texts are decoded side by side: ``draft.draw_rows`` and
``verify.verify_chains`` take them as batches. (``SingleDecoder`` decodes one by one through ``draft.draw`` and
``verify.verify_chain`` instead; a test shows that both give the same texts.) Each step is a method, so that a planted
bug overrides the one that it spoils.

The judge compares, with exact truth from ``models``: token frequencies at each position, frequencies given the
context, whole texts, likelihood, and how often proposals are accepted. **False-alarm rate**: each test is made at level
``LEVEL`` = 1e-6; the suite makes fewer than ``MAX_TESTS`` = 1000 of them, so that right code fails somewhere with
probability below 1e-3 over the choice of seeds. Seeds are fixed: the outcome of a run is always the same.

Verdicts: *failed* if a test fails or something of probability 0 was committed; *unknown* if nothing was accepted or
nothing was rejected, for then the run says nothing about verification; else *passed*.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import scipy.stats
import torch

from outrider.kernels.reference import draft, verify

from . import models

MAX_TESTS = 1000
LEVEL = 1e-3 / MAX_TESTS
MIN_EXPECTED = 5.0
MASK = (1 << 64) - 1
PROMPT_LENGTH = len(models.PROMPT)


@dataclass(frozen=True)
class Scenario:
    """A pair of models, settings, and how much to decode."""

    name: str
    verifier: str
    num_proposals: int
    vocab_size: int = 6
    length: int = 4
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_m: int = 64
    one_hot: bool = False  # the draft proposes its argmax, and says so
    num_texts: int = 8000
    model_seed: int = 1
    batch: int = 8000

    @cached_property
    def pair(self) -> tuple[models.Model, models.Model]:
        if self.vocab_size > 1000:
            return models.full_pair(self.model_seed, self.vocab_size)
        return models.small_pair(self.vocab_size, self.model_seed)

    @cached_property
    def truth(self) -> models.Truth:
        target, _ = self.pair
        vocab_size = target.vocab_size
        contexts = np.arange(target.num_contexts)[:, None]
        next_context = target.context(contexts % vocab_size, np.arange(vocab_size)[None, :])
        probs = models.filtered_probs(target.logits, self.temperature, self.top_k, self.top_p)
        if vocab_size > 1000:
            bins, symbols = _full_bins(probs), np.arange(vocab_size) % target.num_contexts
        else:
            bins = np.arange(vocab_size)
            symbols = bins if vocab_size**self.length <= 5000 else bins % 4
        start = int(target.context(np.array(models.PROMPT[0]), np.array(models.PROMPT[1])))
        next_context = np.broadcast_to(next_context, probs.shape)
        return models.Truth(probs, next_context, start, bins, symbols, self.length)

    @cached_property
    def acceptance(self) -> np.ndarray:
        """[C]: the chance that a proposal made in a context is accepted."""
        _, proposer = self.pair
        p = self.truth.probs
        q = models.filtered_probs(proposer.logits, self.temperature, self.top_k, self.top_p)
        if self.one_hot:
            return p[np.arange(len(p)), proposer.logits.argmax(axis=1)]
        if self.verifier == "coupled":
            return models.coupled_acceptance(p, q)
        return models.rejection_acceptance(p, models.truncated_probs(q, self.top_m))


def _full_bins(probs: np.ndarray) -> np.ndarray:
    """Bins of a full vocabulary: each token that is likely somewhere, and the tail by decades of its likelihood."""
    likely = probs.max(axis=0)
    head = np.flatnonzero(likely > 0.02)
    bins = np.full(probs.shape[1], -1)
    bins[head] = np.arange(len(head))
    tail = bins < 0
    decade = np.floor(np.log10(np.maximum(likely[tail], 1e-15)))
    bins[tail] = len(head) + np.unique(decade, return_inverse=True)[1]
    return bins


@dataclass
class Texts:
    """What a run committed, and what happened to proposals. ``context`` is the true one, from the committed text."""

    tokens: np.ndarray  # [num_texts, length]
    judged_contexts: list[np.ndarray] = field(default_factory=list)
    judged_accepted: list[np.ndarray] = field(default_factory=list)


class Decoder:
    """Decodes ``num_texts`` texts. The methods are the steps of a round, right as they stand here.

    Arrays of one round: n texts are unfinished; ``lengths`` [n] counts their tokens, prompt included.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.target, self.proposer = scenario.pair
        self.k = scenario.num_proposals
        self.filters = {
            "temperature": scenario.temperature,
            "top_k": scenario.top_k,
            "top_p": scenario.top_p,
        }
        self.target_logits = torch.from_numpy(self.target.logits)
        self.draft_logits = torch.from_numpy(self.proposer.logits)

    def run(self) -> Texts:
        parts = []
        for first in range(0, self.scenario.num_texts, self.scenario.batch):
            count = min(self.scenario.batch, self.scenario.num_texts - first)
            parts.append(self._run_batch(np.arange(first, first + count)))
        return Texts(
            np.concatenate([part.tokens for part in parts]),
            [array for part in parts for array in part.judged_contexts],
            [array for part in parts for array in part.judged_accepted],
        )

    def _run_batch(self, names: np.ndarray) -> Texts:
        end = PROMPT_LENGTH + self.scenario.length
        # Three memories: the committed text, and what each cache holds at each position.
        self.text = np.zeros((len(names), end + 2 * self.k + 2), dtype=np.int64)
        self.text[:, :PROMPT_LENGTH] = models.PROMPT
        self.target_cache, self.draft_cache = self.text.copy(), self.text.copy()
        self.length = np.full(len(names), PROMPT_LENGTH)
        self.seed = names + 1_000_003 * (1 + self.scenario.model_seed)
        result = Texts(self.text)
        while (going := np.flatnonzero(self.length < end)).size:
            tokens, rows = self.propose(going)
            num_accepted, next_tokens = self.judge(going, tokens, rows)
            self.record(result, going, tokens, num_accepted)
            self.commit(going, tokens, num_accepted, next_tokens)
        result.tokens = self.text[:, PROMPT_LENGTH:end]
        return result

    # The draft.

    def propose(self, going: np.ndarray) -> tuple[np.ndarray, list]:
        """Tokens [n, k] (-1: not offered) and their k rows (token_ids [n, m], probs [n, m]), or none."""
        tokens = np.empty((len(going), self.k), dtype=np.int64)
        rows = []
        for i in range(self.k):
            position = self.length[going] + i
            logits = self.draft_logits[self.draft_context(going, position)]
            tokens[:, i], row = self.draw(going, position, logits)
            rows.append(row)
            self.draft_cache[going, position] = tokens[:, i]
        return tokens, [] if rows and rows[0] is None else rows

    def draft_context(self, going: np.ndarray, position: np.ndarray) -> np.ndarray:
        cache = self.draft_cache[going]
        index = np.arange(len(going))
        return self.proposer.context(cache[index, position - 2], cache[index, position - 1])

    def draw(self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, tuple | None]:
        if self.scenario.one_hot:
            return logits.argmax(dim=-1).numpy(), None
        draws = self.draw_rows(going, position, logits)
        return draws.tokens.numpy(), None if draws.probs is None else (draws.token_ids, draws.probs)

    def draw_rows(
        self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor, **changes: object
    ) -> draft.Draws:
        arguments = self.filters | {
            "seeds": self.seed[going].tolist(),
            "choices": [0] * len(going),
            "verifier": self.scenario.verifier,
            "prefix_hashes": self.prefix_hashes(going, position),
            "top_m": self.scenario.top_m,
        }
        return draft.draw_rows(logits, self.noise_positions(position), **arguments | changes)

    def prefix_hashes(self, going: np.ndarray, position: np.ndarray) -> list[int]:
        """A hash of what the draft's cache holds before each position."""
        hashes = np.zeros(len(going), dtype=np.uint64)
        columns = np.arange(self.text.shape[1])
        held = np.where(columns[None, :] < position[:, None], self.draft_cache[going] + 1, 0).astype(np.uint64)
        for column in range(int(position.max(initial=0))):
            hashes = hashes * np.uint64(6364136223846793005) + held[:, column]
        return hashes.tolist()

    def noise_positions(self, position: np.ndarray) -> list[int]:
        """What the keyed noise is told: the absolute position."""
        return position.tolist()

    # The target.

    def target_rows(self, going: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
        """Runs the proposals: logits [n, k + 1, V]; the cache then holds them."""
        length, index = self.length[going], np.arange(len(going))
        for i in range(self.k):
            self.target_cache[going, length + i] = tokens[:, i]
        cache = self.target_cache[going]
        contexts = [
            self.target.context(cache[index, length + i - 2], cache[index, length + i - 1]) % self.target.num_contexts
            for i in range(self.k + 1)
        ]
        return self.target_logits[torch.from_numpy(np.stack(contexts, axis=1))]

    def judge(self, going: np.ndarray, tokens: np.ndarray, rows: list) -> tuple[np.ndarray, np.ndarray]:
        """Accepted counts and next tokens, [n] each."""
        return self.verify(going, self.target_rows(going, tokens), tokens, rows)

    def verify(
        self, going: np.ndarray, logits: torch.Tensor, tokens: np.ndarray, rows: list, **changes: object
    ) -> tuple[np.ndarray, np.ndarray]:
        arguments = self.filters | {
            "first_positions": self.noise_positions(self.length[going]),
            "seeds": self.seed[going].tolist(),
            "choices": [0] * len(going),
            "verifier": self.scenario.verifier,
        }
        verdicts = verify.verify_chains(logits, torch.from_numpy(tokens), rows or None, **arguments | changes)
        return verdicts.num_accepted.numpy(), verdicts.next_tokens.numpy()

    # The commit.

    def record(self, result: Texts, going: np.ndarray, tokens: np.ndarray, num_accepted: np.ndarray) -> None:
        """Notes what became of each proposal that was judged."""
        continued = self.text[going]
        index, length = np.arange(len(going)), self.length[going]
        for i in range(self.k):
            judged = (num_accepted >= i) & (tokens[:, i] >= 0)
            context = self.target.context(continued[index, length + i - 2], continued[index, length + i - 1])
            result.judged_contexts.append(context[judged])
            result.judged_accepted.append((num_accepted > i)[judged])
            continued[index, length + i] = np.maximum(tokens[:, i], 0)

    def commit(self, going: np.ndarray, tokens: np.ndarray, num_accepted: np.ndarray, next_tokens: np.ndarray) -> None:
        """The only place where text becomes permanent; both caches are brought to hold exactly it."""
        length = self.length[going]
        for i in range(self.k):
            kept = num_accepted > i
            self.text[going[kept], length[kept] + i] = tokens[kept, i]
        self.text[going, length + num_accepted] = next_tokens
        self.roll_back(going, length + num_accepted)
        self.length[going] = length + num_accepted + 1

    def roll_back(self, going: np.ndarray, last: np.ndarray) -> None:
        """``last`` [n]: position of the last committed token. What the caches held there and beyond is void."""
        self.target_cache[going, last] = self.text[going, last]
        self.draft_cache[going, last] = self.text[going, last]


class SingleDecoder(Decoder):
    """One text at a time, through the functions that take one."""

    def draw_rows(
        self, going: np.ndarray, position: np.ndarray, logits: torch.Tensor, **changes: object
    ) -> draft.Draws:
        hashes = self.prefix_hashes(going, position)
        draws = [
            draft.draw(
                logits[j],
                int(position[j]),
                seed=int(self.seed[text]),
                choice=0,
                verifier=self.scenario.verifier,
                prefix_hash=hashes[j],
                top_m=self.scenario.top_m,
                **self.filters,
            )
            for j, text in enumerate(going)
        ]
        tokens = torch.tensor([token for token, _, _ in draws])
        if draws[0][2] is None:
            return draft.Draws(tokens)
        return draft.Draws(tokens, [row for _, row, _ in draws], [row for _, _, row in draws])  # type: ignore[arg-type]

    def verify(
        self, going: np.ndarray, logits: torch.Tensor, tokens: np.ndarray, rows: list, **changes: object
    ) -> tuple[np.ndarray, np.ndarray]:
        verdicts = [
            verify.verify_chain(
                logits[j],
                tokens[j].tolist(),
                [(token_ids[j], probs[j]) for token_ids, probs in rows] or None,
                first_position=int(self.length[text]),
                seed=int(self.seed[text]),
                choice=0,
                verifier=self.scenario.verifier,
                **self.filters,
            )
            for j, text in enumerate(going)
        ]
        return np.array([v.num_accepted for v in verdicts]), np.array([v.next_token for v in verdicts])


class Outcome(enum.Enum):
    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Report:
    outcome: Outcome
    p_values: dict[str, float]
    num_accepted: int
    num_rejected: int

    def __str__(self) -> str:
        worst = sorted(self.p_values.items(), key=lambda item: item[1])[:4]
        listed = ", ".join(f"{name} p={value:.2g}" for name, value in worst)
        return f"{self.outcome.value}: {self.num_accepted} accepted, {self.num_rejected} rejected; lowest {listed}"


def judge(scenario: Scenario, texts: Texts) -> Report:
    """Compare texts with the target's own distribution."""
    truth, tokens = scenario.truth, texts.tokens
    count = len(tokens)
    p_values: dict[str, float] = {}
    for t in range(truth.length):
        observed = np.bincount(truth.bins[tokens[:, t]], minlength=truth.bin_probs.shape[1])
        p_values[f"token {t}"] = multinomial_test(observed[None], count * truth.marginals[t][None])

    contexts = np.empty_like(tokens)
    contexts[:, 0] = truth.start
    for t in range(1, truth.length):
        contexts[:, t] = truth.next_context[contexts[:, t - 1], tokens[:, t - 1]]
    observed = np.zeros(truth.bin_probs.shape)
    np.add.at(observed, (contexts.ravel(), truth.bins[tokens].ravel()), 1)
    expected = observed.sum(axis=1, keepdims=True) * truth.bin_probs
    p_values["token given context"] = multinomial_test(observed, expected)
    p_values["rare bins"] = rare_test(observed.sum(axis=0), expected.sum(axis=0))

    num_symbols = int(truth.symbols.max()) + 1
    spelt = np.zeros(count, dtype=np.int64)
    for t in range(truth.length):
        spelt = spelt * num_symbols + truth.symbols[tokens[:, t]]
    observed = np.bincount(spelt, minlength=len(truth.text_probs))
    p_values["whole text"] = multinomial_test(observed[None], count * truth.text_probs[None])

    chances = truth.probs[contexts, tokens]
    if np.any(chances <= 0.0):
        p_values["impossible token"] = 0.0
    else:
        p_values["likelihood"] = likelihood_test(truth, contexts, chances)

    judged = np.concatenate(texts.judged_contexts) if texts.judged_contexts else np.empty(0, dtype=np.int64)
    accepted = np.concatenate(texts.judged_accepted) if texts.judged_accepted else np.empty(0, dtype=bool)
    if judged.size:
        p_values["acceptance"] = acceptance_test(scenario.acceptance, judged, accepted)
    num_accepted, num_rejected = int(accepted.sum()), int((~accepted).sum())
    if min(p_values.values()) < LEVEL:
        outcome = Outcome.FAILED
    elif not num_accepted or not num_rejected:
        outcome = Outcome.UNKNOWN
    else:
        outcome = Outcome.PASSED
    return Report(outcome, p_values, num_accepted, num_rejected)


def multinomial_test(observed: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's chi-square over independent rows [r, cells]; cells that expect less than ``MIN_EXPECTED`` are pooled in
    each row, and rows that then have fewer than two cells are left out."""
    statistic, freedom = 0.0, 0
    for seen, wanted in zip(observed, expected, strict=True):
        large = wanted >= MIN_EXPECTED
        seen_cells, wanted_cells = list(seen[large]), list(wanted[large])
        if wanted[~large].sum() >= MIN_EXPECTED:
            seen_cells.append(seen[~large].sum())
            wanted_cells.append(wanted[~large].sum())
        elif wanted_cells:
            least = int(np.argmin(wanted_cells))
            seen_cells[least] += seen[~large].sum()
            wanted_cells[least] += wanted[~large].sum()
        if len(wanted_cells) > 1:
            seen_array, wanted_array = np.array(seen_cells, dtype=float), np.array(wanted_cells)
            statistic += float(((seen_array - wanted_array) ** 2 / wanted_array).sum())
            freedom += len(wanted_cells) - 1
    return float(scipy.stats.chi2.sf(statistic, freedom)) if freedom else 1.0


def rare_test(observed: np.ndarray, expected: np.ndarray) -> float:
    """Bins that are too rare for chi-square, each by its exact Poisson tail; Bonferroni over them."""
    rare = expected < 2 * MIN_EXPECTED
    if not rare.any():
        return 1.0
    above = scipy.stats.poisson.sf(observed[rare] - 1, expected[rare])
    return min(1.0, float(above.min()) * int(rare.sum()))


def likelihood_test(truth: models.Truth, contexts: np.ndarray, chances: np.ndarray) -> float:
    """Sum of log p over all tokens against its expectation: a martingale, so nearly normal."""
    logs = np.log(np.where(truth.probs > 0.0, truth.probs, 1.0))
    mean = (truth.probs * logs).sum(axis=1)
    variance = (truth.probs * logs**2).sum(axis=1) - mean**2
    total = (np.log(chances) - mean[contexts]).sum()
    return float(2 * scipy.stats.norm.sf(abs(total) / np.sqrt(variance[contexts].sum())))


def acceptance_test(acceptance: np.ndarray, contexts: np.ndarray, accepted: np.ndarray) -> float:
    """How often proposals were accepted, in each context and in all, against the chance that theory gives."""
    offered = np.bincount(contexts, minlength=len(acceptance))
    kept = np.bincount(contexts, accepted, minlength=len(acceptance))
    cells = np.stack([kept, offered - kept], axis=1)
    chance = np.stack([offered * acceptance, offered * (1.0 - acceptance)], axis=1)
    each = multinomial_test(cells, chance)
    spread = np.sqrt((offered * acceptance * (1.0 - acceptance)).sum())
    overall = 2 * scipy.stats.norm.sf(abs((kept - chance[:, 0]).sum()) / max(spread, 1e-9))
    return float(min(1.0, 2 * min(each, overall)))


def check(scenario: Scenario, decoder: type[Decoder] = Decoder) -> Report:
    return judge(scenario, decoder(scenario).run())


SMALL = (
    Scenario("rejection", "rejection", 3),
    Scenario("rejection-truncated", "rejection", 2, vocab_size=8, temperature=0.7, top_m=3, model_seed=2),
    Scenario("rejection-filtered", "rejection", 4, vocab_size=8, temperature=1.3, top_k=5, top_p=0.9, model_seed=3),
    Scenario("rejection-one-hot", "rejection", 3, one_hot=True, model_seed=4),
    Scenario("rejection-k8", "rejection", 8, vocab_size=4, length=6, temperature=0.8, model_seed=5),
    Scenario("rejection-v32", "rejection", 1, vocab_size=32, top_p=0.95, model_seed=6),
    Scenario("coupled", "coupled", 3, model_seed=7),
    Scenario("coupled-cool", "coupled", 1, vocab_size=8, temperature=0.7, top_k=4, model_seed=8),
    Scenario("coupled-k8", "coupled", 8, vocab_size=4, length=6, temperature=1.3, top_p=0.9, model_seed=9),
    Scenario("coupled-v32", "coupled", 2, vocab_size=32, temperature=1.5, model_seed=10),
)
_FULL = Scenario("", "", 2, vocab_size=151_936, num_texts=100, batch=1, length=4)
FULL = (
    replace(_FULL, name="full-rejection", verifier="rejection", temperature=0.9, model_seed=11),
    replace(_FULL, name="full-coupled", verifier="coupled", model_seed=12),
    replace(_FULL, name="full-rejection-filtered", verifier="rejection", top_k=500, top_p=0.95, model_seed=13),
    replace(_FULL, name="full-coupled-filtered", verifier="coupled", temperature=0.8, top_p=0.98, model_seed=14),
)
SCENARIOS = {scenario.name: scenario for scenario in SMALL + FULL}
