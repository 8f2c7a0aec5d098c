"""Profiles as messages of ``outrider.v1``."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.router.profile_plans import ProfileSettings, Sample, Spread, Stage
from outrider.router.profiler import Profile, ProposalTime
from outrider.v1 import admin_pb2


def profile_settings(request: admin_pb2.ProfileRequest) -> ProfileSettings:
    """What a request asks for, defaults filled in."""
    defaults = ProfileSettings()
    return ProfileSettings(
        rows=tuple(request.rows),
        contexts=tuple(request.contexts),
        num_sequences=tuple(request.num_sequences),
        num_runs=request.num_runs or defaults.num_runs,
        num_proposals=request.num_proposals if request.HasField("num_proposals") else defaults.num_proposals,
    )


def profile_to_wire(profile: Profile) -> admin_pb2.ProfileResult:
    drafts = sorted({proposal.draft_id for proposal in profile.proposals})
    return admin_pb2.ProfileResult(
        group_id=profile.info.group_id,
        epoch=profile.epoch,
        model=profile.info.model,
        dtype=profile.info.dtype,
        tensor_parallel_size=profile.info.tensor_parallel_size,
        passes=[
            _pass_cost(measured.stage, rows, measured.samples[rows])
            for measured in profile.stages
            for rows in measured.stage.rows
        ],
        drafts=[_draft_cost(draft_id, profile.proposals) for draft_id in drafts],
        left_out=profile.left_out,
    )


def _pass_cost(stage: Stage, rows: int, samples: Sequence[Sample]) -> admin_pb2.PassCost:
    return admin_pb2.PassCost(
        context=stage.context,
        num_sequences=stage.num_sequences,
        rows=rows,
        num_runs=len(samples),
        forward_ms=_spread([sample.forward_ms for sample in samples]),
        overhead_ms=_spread([sample.overhead_ms for sample in samples]),
        plan_ms=_spread([sample.plan_ms for sample in samples]),
        verify_ms=_spread([sample.verify_ms for sample in samples]),
    )


def _draft_cost(draft_id: str, proposals: Sequence[ProposalTime]) -> admin_pb2.DraftCost:
    own = [proposal for proposal in proposals if proposal.draft_id == draft_id]
    return admin_pb2.DraftCost(
        draft_id=draft_id,
        num_proposals=len(own),
        ms_per_token=_spread([proposal.draft_ms / proposal.num_tokens for proposal in own]),
        ms_per_proposal=_spread([proposal.draft_ms for proposal in own]),
        tokens_per_proposal=sum(proposal.num_tokens for proposal in own) / len(own),
    )


def _spread(values: Sequence[float]) -> admin_pb2.Spread:
    spread = Spread.of(values)
    return admin_pb2.Spread(p50=spread.p50, min=spread.min, max=spread.max)
