"""Measurements of single parts. Each is a function of (repeats, quick, maybe further options): the rows of a table."""

from collections.abc import Callable
from typing import Any

from benchmarks.micro.block_verification import block_verification
from benchmarks.micro.draft_window import draft_window
from benchmarks.micro.first_call import first_call
from benchmarks.micro.grammars import grammar_drafts, grammar_verification
from benchmarks.micro.harness import harness_scores
from benchmarks.micro.known_acceptance import known_acceptance
from benchmarks.micro.large_target import large_target, large_target_graphs
from benchmarks.micro.learnt_latency import learnt_latency
from benchmarks.micro.linear_products import linear_products
from benchmarks.micro.ngram_lookup import ngram_lookup
from benchmarks.micro.other_tokenizer import other_tokenizer
from benchmarks.micro.quantised_cost import quantised_cost
from benchmarks.micro.repeated_prompts import repeated_prompts
from benchmarks.micro.serving import batch_of_eight, generate_batch, packed_passes, replaced_rows, rollouts
from benchmarks.micro.step_operations import step_operations
from benchmarks.micro.trace_replay import trace_replay

MICRO: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "ngram-lookup": ngram_lookup,
    "linear-products": linear_products,
    "other-tokenizer": other_tokenizer,
    "step-operations": step_operations,
    "trace-replay": trace_replay,
    "packed-passes": packed_passes,
    "generate-batch": generate_batch,
    "generate-many": replaced_rows,
    "batch-of-eight": batch_of_eight,
    "rollouts": rollouts,
    "repeated-prompts": repeated_prompts,
    "draft-window": draft_window,
    "first-call": first_call,
    "learnt-latency": learnt_latency,
    "block-verification": block_verification,
    "grammar-drafts": grammar_drafts,
    "grammar-verification": grammar_verification,
    "lm-eval": harness_scores,
    "large-target": large_target,
    "large-target-graphs": large_target_graphs,
    "known-acceptance": known_acceptance,
    "quantised-cost": quantised_cost,
}
IF_NAMED = (
    "packed-passes", "generate-batch", "generate-many", "batch-of-eight", "rollouts", "repeated-prompts",
    "grammar-drafts", "lm-eval", "large-target", "large-target-graphs", "known-acceptance", "quantised-cost",
    "first-call",
)  # fmt: skip
"""Measurements that are made only if they are named: of minutes, or for a GPU."""
