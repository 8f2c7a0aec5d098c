"""What is made of one text's rows, by the definitions: sums over plain lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from outrider.exactness.evidence import concatenate
from outrider.exactness.processors import Borders
from outrider.exactness.rows import NUM_HASH_CELLS, RANKS, Hashing, Rows, measure

VOCAB = 900
PROMPT = (5, 6, 6)
OUTPUT = (7, 6, 7, 7, 899)


def made_rows(count: int = len(OUTPUT), seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(count, VOCAB, generator=generator) * 2
    scores = raw / 0.8
    scores[:, 100:200] = -torch.inf
    draft = scores + torch.randn(count, VOCAB, generator=generator)
    return Rows(0, raw, scores, Borders(~torch.isneginf(scores), torch.zeros(count, dtype=torch.float64)), draft)


def measured(rows: Rows, output: tuple[int, ...] = OUTPUT) -> tuple:
    return measure(
        rows,
        PROMPT,
        output,
        labels={"text": 3, "prompt": 1},
        place=[0, 1, 2, 0, 1],
        hashing=Hashing(VOCAB, 0),
        rng=np.random.default_rng(0),
    )


def test_u_and_cells_by_their_definitions() -> None:
    rows = made_rows()
    hashing = Hashing(VOCAB, 0)
    evidence, counts, impossible = measured(rows)
    shares = np.random.default_rng(0).random(len(OUTPUT))
    assert (counts.judged, impossible) == (len(OUTPUT), [])
    probs = torch.softmax(rows.scores.double(), dim=-1)
    for t, token in enumerate(OUTPUT):
        p = probs[t].tolist()
        place = hashing.place.tolist()
        keys = {
            "likelihood": lambda v, p=p, place=place: (-p[v], place[v]),
            "token id": lambda v: v,
            "shuffle": lambda v, place=place: place[v],
            "effect of the settings": lambda v, t=t, place=place: (
                -float(rows.scores[t, v].double() - rows.raw[t, v].double()),
                place[v],
            ),
        }
        for order, key in keys.items():
            before = sum(p[v] for v in range(VOCAB) if p[v] and key(v) < key(token))
            assert evidence.u[order][t] == pytest.approx(before + shares[t] * p[token], abs=1e-9), order
        assert 0.0 <= evidence.u["draft against target"][t] <= 1.0
        assert evidence.tail[t] == pytest.approx(sum(x for x in p if x <= p[token]), abs=1e-12)
        assert evidence.log_likelihood[t] == pytest.approx(np.log(p[token]))
        logs = [np.log(x) for x in p if x]
        mean = sum(x * y for x, y in zip([x for x in p if x], logs, strict=True))
        assert evidence.log_mean[t] == pytest.approx(mean)
        rank = sum(x > p[token] for x in p)
        cell = sum(rank >= bound for bound in RANKS) - 1
        assert evidence.cells["rank"].cell[t] == cell
        ranked = sorted(p, reverse=True)
        bounds = [*RANKS, VOCAB]
        masses = [sum(ranked[a:b]) for a, b in itertools.pairwise(bounds)]
        assert np.allclose(evidence.cells["rank"].mass[t], masses)
        by_cell = np.bincount(hashing.cell, probs[t], minlength=NUM_HASH_CELLS)
        assert np.allclose(evidence.cells["tokens"].mass[t], by_cell)
    assert evidence.place.tolist() == [0, 1, 2, 0, 1]
    assert set(evidence.text) == {3}
    assert set(evidence.prompt) == {1}


def test_repeats_count_what_stands_before_the_row_once_each() -> None:
    evidence, _, _ = measured(made_rows())
    probs = torch.softmax(made_rows().scores.double(), dim=-1)
    # 7: new, 6: in the prompt, 7: once in the output, 7: twice, 899: new
    assert evidence.cells["repeats"].cell.tolist() == [0, 1, 2, 3, 0]
    for t, (prompt_only, once, often) in enumerate(
        [({5, 6}, (), ()), ({5, 6}, {7}, ()), ({5}, {6, 7}, ()), ({5}, {6}, {7}), ({5}, {6}, {7})]
    ):
        mass = evidence.cells["repeats"].mass[t]
        for cell, tokens in ((1, prompt_only), (2, once), (3, often)):
            assert mass[cell] == pytest.approx(sum(float(probs[t, v]) for v in tokens))
        assert mass.sum() == pytest.approx(1.0)


def test_a_token_that_the_settings_exclude_is_impossible() -> None:
    evidence, counts, impossible = measured(made_rows(), (7, 150, 7, 7, 899))
    assert impossible == [1]
    assert (counts.judged, counts.impossible, len(evidence)) == (4, 1, 4)


def test_borders_are_kept_apart() -> None:
    rows = made_rows()
    loose = rows.borders.loose.clone()
    loose[1, 150] = True  # rounding may allow what was drawn
    uncertain_mass = torch.tensor([0.0, 1e-4, 2e-3, 0.0, 0.0], dtype=torch.float64)
    rows = Rows(0, rows.raw, rows.scores, Borders(loose, uncertain_mass), rows.draft)
    evidence, counts, impossible = measured(rows, (7, 150, 7, 7, 899))
    assert impossible == []
    assert (counts.on_border, counts.uncertain, counts.judged) == (1, 1, 3)
    assert evidence.index.tolist() == [0, 3, 4]


def test_rows_without_a_choice_are_not_judged() -> None:
    rows = made_rows()
    scores = torch.full_like(rows.scores, -torch.inf)
    scores[:, 7] = 0.0
    forced = Rows(0, rows.raw, scores, Borders(~torch.isneginf(scores), rows.borders.uncertain_mass), rows.draft)
    evidence, counts, impossible = measured(forced)
    assert (counts.judged, counts.forced, len(evidence)) == (0, 3, 0)
    assert impossible == [1, 4]


def test_rows_of_a_part_are_those_of_the_whole() -> None:
    whole = made_rows()
    evidence, counts, _ = measured(whole)
    rng = np.random.default_rng(0)
    parts = []
    for start, stop in ((0, 2), (2, 5)):
        assert whole.draft is not None
        rows = Rows(
            start,
            whole.raw[start:stop],
            whole.scores[start:stop],
            Borders(whole.borders.loose[start:stop], whole.borders.uncertain_mass[start:stop]),
            whole.draft[start:stop],
        )
        part, _, _ = measure(
            rows,
            PROMPT,
            OUTPUT,
            labels={"text": 3, "prompt": 1},
            place=[0, 1, 2, 0, 1],
            hashing=Hashing(VOCAB, 0),
            rng=rng,
        )
        parts.append(part)
    together = concatenate(parts)
    assert together.index.tolist() == evidence.index.tolist()
    assert together.place.tolist() == evidence.place.tolist()
    assert counts.judged == len(together)
    for order in evidence.u:
        assert np.allclose(together.u[order], evidence.u[order], atol=1e-12)
    for name, cells in evidence.cells.items():
        assert np.array_equal(together.cells[name].cell, cells.cell)
        assert np.allclose(together.cells[name].mass, cells.mass)


def test_evidence_is_put_together_and_chosen_from() -> None:
    one, _, _ = measured(made_rows(seed=1))
    two, _, _ = measured(made_rows(seed=2))
    both = concatenate([one, two])
    assert len(both) == 10
    assert np.array_equal(both.where(np.arange(10) >= 5).u["likelihood"], two.u["likelihood"])
    assert np.array_equal(both.where(np.arange(10) < 5).cells["rank"].mass, one.cells["rank"].mass)
