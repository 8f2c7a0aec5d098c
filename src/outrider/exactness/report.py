"""The verdict, and how it is shown."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.exactness.family import FAMILY_LEVEL, MAX_TESTS, rejected
from outrider.exactness.power import POWER
from outrider.exactness.rows import Counts


class Verdict(enum.Enum):
    """Passed: every test had its say and none objected. Unknown: too little was seen to say so."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def exit_code(self) -> int:
        return {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.UNKNOWN: 2}[self]


@dataclass(frozen=True)
class Speculation:
    """What speculation did in the judged texts.

    Attributes:
        num_tokens: of all texts.
        num_speculated: those of them that came in rounds with a proposal.
        num_proposed, num_accepted: without tokens in whose place a grammar left no choice.
    """

    verifier: str
    num_speculative_tokens: int
    num_tokens: int
    num_speculated: int
    num_proposed: int
    num_accepted: int

    @property
    def acceptance(self) -> float | None:
        return self.num_accepted / self.num_proposed if self.num_proposed else None

    @property
    def share(self) -> float:
        return self.num_speculated / self.num_tokens if self.num_tokens else 0.0

    def missing(self, least: int, least_share: float) -> str | None:
        """What was not seen often enough to know anything of it, in words; None where nothing is missing."""
        if self.num_speculative_tokens == 0:
            return None
        seen = {
            "proposed": self.num_proposed,
            "accepted": self.num_accepted,
            "rejected": self.num_proposed - self.num_accepted,
        }
        rare = [f"{count} {what}" for what, count in seen.items() if count < least]
        if rare:
            return f"only {', '.join(rare)} tokens: that says nothing about speculation"
        if self.share < least_share:
            return f"only {self.share:.1%} of the tokens came in rounds with a proposal"
        return None


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        faults: what is wrong with certainty, in words: impossible tokens, other texts for the same seed, ...
        doubts: why the check cannot say ``passed``, in words.
        p_values: by the names of the tests.
        smallest_deviation: the total variation that this many tokens would have shown with probability ``POWER``.
        seconds: time that drawing and judging took.
    """

    settings: Mapping[str, Any]
    counts: Counts
    num_texts: int
    num_prompts: int
    num_plain_texts: int
    wanted_deviation: float
    smallest_deviation: float
    speculation: Speculation
    faults: Sequence[str] = ()
    doubts: Sequence[str] = ()
    p_values: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed_tests(self) -> list[str]:
        return rejected(self.p_values)

    @property
    def verdict(self) -> Verdict:
        if self.faults or self.failed_tests:
            return Verdict.FAILED
        return Verdict.UNKNOWN if self.doubts else Verdict.PASSED

    def to_dict(self) -> dict[str, Any]:
        """The object that ``outrider check-exactness --json`` prints."""
        failed = set(self.failed_tests)
        spec = self.speculation
        return {
            "verdict": self.verdict.value,
            "faults": list(self.faults),
            "doubts": list(self.doubts),
            "settings": dict(self.settings),
            "tokens": {**asdict(self.counts), "uncertain_mass": round(self.counts.uncertain_mass, 6)},
            "texts": {
                "judged": self.num_texts,
                "prompts": self.num_prompts,
                "without_speculation": self.num_plain_texts,
            },
            "speculation": {
                "verifier": spec.verifier,
                "num_speculative_tokens": spec.num_speculative_tokens,
                "share_of_tokens": round(spec.share, 4),
                "num_proposed_tokens": spec.num_proposed,
                "num_accepted_tokens": spec.num_accepted,
                "acceptance_rate": spec.acceptance,
            },
            "deviation": {
                "wanted": self.wanted_deviation,
                "smallest_found": self.smallest_deviation,
                "power": POWER,
            },
            "false_alarm_rate": FAMILY_LEVEL,
            "tests": [
                {
                    "name": name,
                    "p_value": p_value,
                    "adjusted": min(1.0, p_value * MAX_TESTS),
                    "failed": name in failed,
                }
                for name, p_value in sorted(self.p_values.items(), key=lambda item: item[1])
            ],
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
        }

    def table(self) -> str:
        """For people."""
        counts, spec = self.counts, self.speculation
        acceptance = "-" if spec.acceptance is None else f"{spec.acceptance:.3f}"
        lines = [
            f"{counts.judged} tokens judged in {self.num_texts} texts of {self.num_prompts} prompts; besides "
            f"{counts.forced} that leave no choice, {counts.uncertain} rows on the border of a filter, "
            f"{counts.on_border} tokens on one",
            f"{spec.verifier}, {spec.num_speculative_tokens} tokens proposed a round: {spec.num_accepted} of "
            f"{spec.num_proposed} accepted ({acceptance}), {spec.share:.1%} of all tokens in rounds with a proposal; "
            f"{self.num_plain_texts} texts without speculation",
            f"a total variation of {self.smallest_deviation:.4f} would be found with probability {POWER:g}; "
            f"false alarms at most {FAMILY_LEVEL:g}",
        ]
        if self.p_values:
            width = max(len(name) for name in self.p_values) + 2
            failed = set(self.failed_tests)
            lines += ["", f"{'test':{width}}{'p':>10}{'adjusted':>10}"]
            for name, p_value in sorted(self.p_values.items(), key=lambda item: item[1]):
                mark = "  FAILED" if name in failed else ""
                lines.append(f"{name:{width}}{p_value:>10.2g}{min(1.0, p_value * MAX_TESTS):>10.2g}{mark}")
        lines += [""] + [f"fault: {fault}" for fault in self.faults] + [f"doubt: {doubt}" for doubt in self.doubts]
        return "\n".join([*lines, self.verdict.value])
