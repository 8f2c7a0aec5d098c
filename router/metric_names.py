"""The metrics of a router, as data. docs/metrics.md tells what to ask of them; names follow vLLM's where they exist."""

from __future__ import annotations

from outrider.metrics.declared import BUILD_INFO, PROCESS, Declared

# What clients meet: of every router.
OPEN = Declared("outrider_num_requests_open", "gauge", "Requests that this router is answering.")
FINISHED = Declared(
    "outrider_request_success_total",
    "counter",
    "Choices that ended without an error, by why; a client that went away is an abort.",
    ("finished_reason",),
)
ERRORS = Declared(
    "outrider_request_errors_total", "counter", "Requests that ended with an error, by its gRPC status.", ("code",)
)
FIRST_TOKEN = Declared(
    "outrider_time_to_first_token_seconds", "histogram", "From the arrival of a request to its first tokens."
)
GAP = Declared(
    "outrider_inter_token_latency_seconds",
    "histogram",
    "Between messages with tokens of one choice, however many tokens each carries.",
)
PER_TOKEN = Declared(
    "outrider_time_per_output_token_seconds",
    "histogram",
    "Time between messages of one choice, shared among the tokens of the later one; each token counts.",
)
WHOLE = Declared(
    "outrider_e2e_request_latency_seconds", "histogram", "From the arrival of a request to its end without an error."
)
REQUEST_PROMPT = Declared(
    "outrider_request_prompt_tokens", "histogram", "Tokens of the prompt, of requests that ended without an error."
)
REQUEST_OUTPUT = Declared(
    "outrider_request_generation_tokens", "histogram", "Tokens of the output, of requests that ended without an error."
)
DRAINING = Declared("outrider_router_draining", "gauge", "1 while the router takes no new requests since it is to end.")

# The group: of the router that owns it.
ATTACHED = Declared("outrider_target_attached", "gauge", "1 while this router owns the target group and is attached.")
EPOCH = Declared("outrider_group_epoch", "gauge", "Epoch of the target group that was attached last.")
RESETS = Declared(
    "outrider_group_resets_total", "counter", "Times that running requests started over on a target attached anew."
)
INFO = Declared(
    "outrider_group_info",
    "gauge",
    "Always 1; the labels say what the target group is.",
    ("group_id", "model", "dtype", "tensor_parallel_size", "row_invariant"),
)
RUNNING = Declared("outrider_num_requests_running", "gauge", "Choices that take part in steps.")
WAITING = Declared("outrider_num_requests_waiting", "gauge", "Choices that wait for a place or for blocks.")
KV_USAGE = Declared(
    "outrider_kv_cache_usage_perc", "gauge", "Share of the KV blocks that requests hold, as a ratio from 0 to 1."
)
KV_BLOCKS = Declared(
    "outrider_kv_cache_blocks",
    "gauge",
    "KV blocks: held by requests, cached (held by nobody, but found by their text), or free.",
    ("state",),
)
PREFIX_QUERIES = Declared(
    "outrider_prefix_cache_queries_total", "counter", "Tokens of texts that were looked up in the prefix cache."
)
PREFIX_HITS = Declared("outrider_prefix_cache_hits_total", "counter", "Tokens that were found there.")
PREEMPTIONS = Declared(
    "outrider_num_preemptions_total", "counter", "Times that a request gave up its place in the cache for others."
)
PROMPT_TOKENS = Declared("outrider_prompt_tokens_total", "counter", "Tokens of prompts that were computed.")
GENERATION_TOKENS = Declared("outrider_generation_tokens_total", "counter", "Tokens that became text.")
QUEUE_TIME = Declared(
    "outrider_request_queue_time_seconds", "histogram", "From the arrival of a choice at its group to its first step."
)
ROUND_TIME = Declared(
    "outrider_round_time_seconds",
    "histogram",
    "From one commit of a choice to the next, of rounds that verified a proposal.",
)
STEP_TIME = Declared(
    "outrider_step_time_seconds",
    "histogram",
    "From handing a plan to the target to the commit of its result: prompts alone (prefill) or beside others (mixed), "
    "proposals (verify), or neither (decode).",
    ("kind",),
)
STEP_OVERHEAD = Declared(
    "outrider_step_overhead_seconds", "histogram", "T_o: the time of a step less the forward pass of the leader."
)

# Speculation: of the router that owns the group.
NUM_DRAFTS = Declared("outrider_spec_decode_num_drafts_total", "counter", "Proposals that were verified.")
NUM_DRAFT_TOKENS = Declared(
    "outrider_spec_decode_num_draft_tokens_total", "counter", "Proposed tokens that were verified."
)
NUM_ACCEPTED = Declared(
    "outrider_spec_decode_num_accepted_tokens_total", "counter", "Proposed tokens that became text."
)
NUM_ACCEPTED_PER_POS = Declared(
    "outrider_spec_decode_num_accepted_tokens_per_pos_total",
    "counter",
    "Proposed tokens that became text, by their position in the proposal, from 0.",
    ("position",),
)
DRAFTER_TOKENS = Declared(
    "outrider_drafter_draft_tokens_total",
    "counter",
    "Proposed tokens that were verified, by the kind of drafter: a model, or lookup of n-grams.",
    ("drafter",),
)
DRAFTER_ACCEPTED = Declared(
    "outrider_drafter_accepted_tokens_total", "counter", "Those of them that became text.", ("drafter",)
)
PAUSED_FOR_LOAD = Declared(
    "outrider_spec_decode_paused_for_load",
    "gauge",
    "1 while as many streams run as are faster without proposals, trials of speculation aside.",
)
GOODPUT = Declared(
    "outrider_spec_decode_goodput",
    "gauge",
    "Tokens per second of one stream among as many as run now, by how much is speculated (none: plain, half, full), "
    "as last measured or as predicted; 0 where nothing is known.",
    ("level",),
)
POOL = Declared("outrider_draft_workers", "gauge", "Draft workers that are registered, by their state.", ("state",))
POOL_SESSIONS = Declared("outrider_draft_worker_sessions", "gauge", "Requests that draft workers draft for.")
PROPOSALS = Declared(
    "outrider_draft_worker_proposals_total",
    "counter",
    "Proposals of draft workers that could continue a text when they came (kept), or not (dropped).",
    ("outcome",),
)
PROPOSAL_TIME = Declared(
    "outrider_draft_worker_proposal_time_seconds",
    "histogram",
    "From telling a draft worker of a commit to its proposal, as the router sees it.",
)

FRONTEND = (*(OPEN, FINISHED, ERRORS, FIRST_TOKEN, GAP, PER_TOKEN, WHOLE, REQUEST_PROMPT, REQUEST_OUTPUT, DRAINING),)
GROUP = (
    *(ATTACHED, EPOCH, RESETS, INFO, RUNNING, WAITING, KV_USAGE, KV_BLOCKS, PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS),
    *(PROMPT_TOKENS, GENERATION_TOKENS, QUEUE_TIME, ROUND_TIME, STEP_TIME, STEP_OVERHEAD),
    *(NUM_DRAFTS, NUM_DRAFT_TOKENS, NUM_ACCEPTED, NUM_ACCEPTED_PER_POS, DRAFTER_TOKENS, DRAFTER_ACCEPTED),
    *(PAUSED_FOR_LOAD, GOODPUT),
    *(POOL, POOL_SESSIONS, PROPOSALS, PROPOSAL_TIME),
)
ROUTER = (BUILD_INFO, *FRONTEND, *GROUP, *PROCESS)
