"""Compare greedy text of a running server, token by token, with transformers' own greedy ``generate``.

    python scripts/compare_with_transformers.py MODEL_DIR --address HOST:PORT [--max-tokens 64] [--cache FILE] [--json]
    python scripts/compare_with_transformers.py MODEL_DIR --reference-only --cache FILE

For each prompt the tokens must be equal; where they differ, the gap between the two best logits of transformers at the
first difference is shown. Logits that are equal up to rounding may order two tokens differently, so a gap below
``--max-gap`` is an explanation and anything else a failure. Exit code 0 only if every prompt is equal or explained.

The reference is slow (one forward pass for each token, in float32), so ``--cache`` keeps it in a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = (
    "def quicksort(items):\n",
    "# Read a CSV file and print the sum of the column 'price'.\nimport csv\n",
    "class LRUCache:\n    def __init__(self, capacity: int):\n",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
    "SELECT name, count(*)\nFROM orders\n",
    "The three laws of thermodynamics are:\n1.",
    "import torch\n\n\ndef attention(query, key, value):\n",
    "Q: A train travels 60 miles in 1.5 hours. What is its speed in miles per hour?\nA:",
    "fn main() {\n    let mut total = 0;\n",
    "Dear team,\n\nI am writing to let you know that",
    "def longest_common_subsequence(a: str, b: str) -> int:\n",
    '{"name": "Ada", "born": 1815, "fields": [',
)


def reference(model_dir: Path, prompts: tuple[str, ...], max_tokens: int) -> list[dict[str, Any]]:
    """Greedy tokens of transformers and, for each, the gap between the two best logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = []
    for number, prompt in enumerate(prompts, 1):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                repetition_penalty=1.0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        gaps = []
        for logits in out.logits:
            best = torch.topk(logits[0].float(), 2).values
            gaps.append(float(best[0] - best[1]))
        rows.append({"prompt": prompt, "prompt_ids": ids[0].tolist(), "tokens": tokens, "gaps": gaps})
        print(f"reference {number}/{len(prompts)}", file=sys.stderr)
    return rows


def compare(row: dict[str, Any], tokens: list[int], max_gap: float) -> dict[str, Any]:
    """How the server's tokens relate to the reference: equal, explained by a small gap, or different."""
    expected = row["tokens"]
    length = min(len(expected), len(tokens))
    first = next((i for i in range(length) if expected[i] != tokens[i]), None)
    if first is None:
        # Transformers keeps the end-of-text token; so do we.
        verdict = "equal" if len(expected) == len(tokens) else "different"
        return {"prompt": row["prompt"], "verdict": verdict, "tokens": len(tokens), "expected": len(expected)}
    gap = row["gaps"][first]
    return {
        "prompt": row["prompt"],
        "verdict": "explained" if gap < max_gap else "different",
        "first_difference": first,
        "gap": gap,
        "tokens": len(tokens),
        "expected": len(expected),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--address", help="router, host:port")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-gap", type=float, default=1e-3)
    parser.add_argument("--cache", type=Path, help="file that keeps the reference")
    parser.add_argument("--reference-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.reference_only and not args.address:
        parser.error("--address is needed, unless --reference-only")

    if args.cache and args.cache.exists():
        rows = json.loads(args.cache.read_text())
    else:
        rows = reference(args.model_dir, PROMPTS, args.max_tokens)
        if args.cache:
            args.cache.write_text(json.dumps(rows))
    if args.reference_only:
        return 0

    from outrider.client import Client

    report = []
    with Client(args.address) as client:
        for row in rows:
            completion = client.generate(row["prompt"], max_tokens=args.max_tokens, temperature=0.0)
            outcome = compare(row, list(completion.token_ids), args.max_gap)
            outcome["speculation"] = completion.to_dict()["speculation"]
            report.append(outcome)
            print(f"{len(report)}/{len(rows)} {outcome['verdict']}", file=sys.stderr)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for outcome in report:
            speculation = outcome["speculation"]
            rate = speculation["draft_acceptance_rate"]
            where = f" at token {outcome['first_difference']}, gap {outcome['gap']:.2e}" if "gap" in outcome else ""
            print(
                f"{outcome['verdict']:9} {outcome['tokens']:3} tokens{where}  "
                f"acceptance {'none' if rate is None else format(rate, '.2f')}, "
                f"{speculation['target_calls']} target calls  {outcome['prompt']!r:.40}"
            )
    return 0 if all(outcome["verdict"] != "different" for outcome in report) else 1


if __name__ == "__main__":
    sys.exit(main())
