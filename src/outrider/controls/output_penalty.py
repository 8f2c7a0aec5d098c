"""What OpenAI's two penalties on tokens of the output have in common."""

from __future__ import annotations

from outrider.controls.base import NumberControl, Stage

MAX_PENALTY = 2.0  # OpenAI's limit


class OutputPenalty(NumberControl):
    """Subtracted from the logits of tokens that the output holds; negative values favour them."""

    stage = Stage.LOGITS
    neutral = 0.0
    needs_text = True

    def limit(self, value: float) -> str | None:
        return None if -MAX_PENALTY <= value <= MAX_PENALTY else f"from -{MAX_PENALTY:g} to {MAX_PENALTY:g}"
