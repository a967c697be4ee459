"""Policies change how many steps a text takes, never its tokens: plain steps may come anywhere between drafts."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_specgen
from hf_specgen import AdaptiveDepth, CombinedCandidates, DraftModelCandidates, FixedDepth, NgramCandidates
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.depth.calibrate import from_first_rank, lockstep_group
from tests.fuzz.scripted import RandomDepths
from tests.helpers import assert_same_tokens, perturbed_copy, prompts, shared_draft, tiny_model
from tests.helpers.depth import Clock, Model, Target, depth_call, run
from tests.helpers.models import fresh_model
from tests.helpers.processes import run_in_ranks

FREE_TOKENS = LatencyModel.from_curves(CostCurve((1, 32), (0.010, 0.0101), 256, 1))
"""Verifying 32 tokens takes about as long as verifying one."""


@pytest.mark.parametrize("batch", [1, 3])
def test_draft_model_equal_to_target_after_plain_steps_all_accepted(batch: int) -> None:
    """All tokens are accepted only if the draft has read the tokens of plain steps, each of them once."""
    model = tiny_model("llama")
    candidates = DraftModelCandidates(model, k=5, policy=RandomDepths())
    statistics = assert_same_tokens(model, prompts(batch), candidates, max_new_tokens=60)
    assert statistics.accepted == statistics.drafted > 20


def test_adaptive_depth_with_given_latency_repeats() -> None:
    """Would catch: decisions that depend on the measured time of a step, or on an earlier call."""
    model = tiny_model("llama")
    candidates = DraftModelCandidates(shared_draft(model), k="auto", policy=AdaptiveDepth(FREE_TOKENS))
    depths = []
    for _ in range(2):
        statistics = assert_same_tokens(model, prompts(3), candidates, max_new_tokens=40)
        depths.append([[step.depth for step in row] for row in statistics.rows])
    assert depths[0] == depths[1]


def assumed_answers(rank: int, folder: str) -> list[Any]:
    """In a process of its own, with a clock of its own: drafts and tokens of two calls for each way to repeat."""
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/target", dtype=torch.bfloat16).eval()
    found: list[Any] = []
    with mock.patch.object(time, "thread_time", lambda: (1 + rank) * time.perf_counter() ** 2):
        for policy, is_deterministic in ((AdaptiveDepth("assumed"), False), (AdaptiveDepth(), True)):
            torch.use_deterministic_algorithms(is_deterministic)
            for strategy in (NgramCandidates(policy=policy), DraftModelCandidates(f"{folder}/draft", policy=policy)):
                for _ in range(2):
                    tokens = model.generate(**prompts(2), max_new_tokens=40, candidate_generator=strategy)
                    steps = [[(step.depth, step.drafted) for step in row] for row in strategy.speculation.rows]
                    found.append((steps, tokens.tolist()))
    return found


def test_adaptive_depth_with_assumed_latency_drafts_alike_in_every_process(tmp_path: Path) -> None:
    """Would catch: drafts by measured times, which in half precision may change near-ties from process to process."""
    target = fresh_model("llama")
    target.save_pretrained(tmp_path / "target")
    perturbed_copy(target).save_pretrained(tmp_path / "draft")
    first, *others = run_in_ranks(assumed_answers, [(rank, str(tmp_path)) for rank in range(3)])
    assert others == [first] * 2
    assert first[0::2] == first[1::2], "two calls of one process"
    assert first[:4] == first[4:] and any(drafted for row in first[0][0] for _, drafted in row)
    assert repr(AdaptiveDepth("assumed")) == "AdaptiveDepth(latency='assumed')"


def test_ngrams_with_assumed_latency_draft_for_short_answers_to_long_prompts() -> None:
    """Would catch: n-grams that wait for passes over the prompt, which only drafters with a model make."""
    model, candidates = tiny_model("llama"), NgramCandidates(policy=AdaptiveDepth("assumed"))
    text = prompts(1)["input_ids"].repeat(1, 20)
    statistics = assert_same_tokens(model, {"input_ids": text}, candidates, max_new_tokens=16)
    assert statistics.drafted > 0


def test_policy_of_a_call_overrides_that_of_the_strategy_once() -> None:
    """Would catch: a policy that is ignored, or that stays with the strategy for later calls."""
    model, ngram = tiny_model("llama"), NgramCandidates(k=5, policy=FixedDepth(2))
    model.generate(**prompts(1), max_new_tokens=40, candidate_generator=ngram, policy=FixedDepth(0))
    assert ngram.speculation is not None and ngram.speculation.drafted == 0
    model.generate(**prompts(1), max_new_tokens=40, candidate_generator=ngram)
    assert 0 < max(step.depth for step in ngram.speculation.rows[0]) <= 2


# Ranks of one tensor-parallel model draft alike although their clocks differ; replicas do not wait for each other

Requested = dict[str, list[list[int]]]


def requested_depths(rank: int, store: str) -> Requested:
    """In a rank of its own: the depths of every step, by layout of the four ranks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    requested = {}
    for layout in ("one mesh", "replicas", "apart"):
        model = Model()
        if layout != "apart":
            dims, names = {"one mesh": ((4,), ("tp",)), "replicas": ((2, 2), ("dp", "tp"))}[layout]
            model.tp_size, model._device_mesh = dims[-1], init_device_mesh("cpu", dims, mesh_dim_names=names)
        replica = rank // model.tp_size
        # Verification is cheap on the first rank, expensive on the others: alone, they would decide differently.
        is_cheap = rank % model.tp_size == 0 if layout != "apart" else rank == 0
        clock = Clock()

        def relative(q: int, slope: float = 0.01 if is_cheap else 0.9) -> float:
            return 1 + slope * (q - 1)

        target: Any = Target(clock, relative)
        with mock.patch.object(time, "thread_time", clock):
            session = AdaptiveDepth().start(depth_call(model=model, negligible_draft_cost=False))
            session.prefilled(target)
        steps = 100 + 50 * replica if layout == "replicas" else 100  # replicas take different numbers of steps
        requested[layout] = run(session, steps, [2], relative)
        dist.barrier()
    dist.destroy_process_group()
    return requested


@pytest.fixture(scope="module")
def requested(tmp_path_factory: pytest.TempPathFactory) -> list[Requested]:
    """The depths of every step by rank and layout of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_in_ranks(requested_depths, [(rank, str(folder / "store")) for rank in range(4)])


@pytest.mark.parametrize(
    ("layout", "groups"), [("one mesh", [[0, 1, 2, 3]]), ("replicas", [[0, 1], [2, 3]]), ("apart", [])]
)
def test_ranks_of_one_model_decide_alike_and_replicas_do_not_wait(requested: Any, layout: str, groups: Any) -> None:
    """Would catch: agreement on the world group makes replicas wait for each other, so that one never returns."""
    depths = [of_rank[layout] for of_rank in requested]
    for group in groups:
        assert all(depths[rank] == depths[group[0]] for rank in group)
    if not groups:
        assert depths[0] != depths[1]
    assert max(depth for (depth,) in depths[0]) > 3


def test_model_of_one_process_needs_no_agreement() -> None:
    """Would catch: a collective operation, which never returns, in a process that is alone."""
    assert lockstep_group(None) is None
    assert lockstep_group(SimpleNamespace(tp_size=None)) is None
    assert lockstep_group(SimpleNamespace(tp_size=4, _device_mesh=None)) is None
    assert from_first_rank("value", None) == "value"


# A target whose layers are spread over two processes (`tp_plan="auto"`): the tokens of plain decoding on both

GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.7}


def answers(folder: str) -> dict[str, Any]:
    """In a rank of its own: the tokens of plain decoding and of every strategy."""
    logging.disable(logging.WARNING)
    sharded: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/target", dtype=torch.float32, **sharded).eval()
    inputs = prompts(2)

    def tokens_of(arguments: dict[str, Any], **more: Any) -> list[list[int]]:
        torch.manual_seed(4)
        return model.generate(**inputs, **arguments, **more).tolist()

    found: dict[str, Any] = {"processes": model.tp_size}
    strategies = {"plain": None, "ngram": NgramCandidates(k=5), "auto": CombinedCandidates()}
    strategies["draft model"] = DraftModelCandidates(f"{folder}/draft")
    for name, strategy in strategies.items():
        more = {} if strategy is None else {"candidate_generator": strategy}
        found[name] = [tokens_of(arguments, **more) for arguments in (GREEDY, SAMPLED)]
    rows = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    many = hf_specgen.generate_many(model, rows, CombinedCandidates(), max_rows=2, ordered=True, **GREEDY)
    found["many"] = [rows[completion.index] + completion.tokens for completion in many]
    found["alone"] = []
    for ids in (torch.tensor([row]) for row in rows):
        found["alone"] += model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY).tolist()
    with pytest.raises(ValueError, match="tensor parallel"):
        model.generate_batch(rows, candidate_generator=NgramCandidates())
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_ranks_generate_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    """Would catch: ranks that draft differently by their clocks, so that a collective waits for ever; other noise."""
    target = fresh_model("llama")
    target.save_pretrained(tmp_path / "target")
    perturbed_copy(target).save_pretrained(tmp_path / "draft")
    first, second = run_in_ranks(answers, [(str(tmp_path),)] * 2)
    assert first == second and first["processes"] == 2
    for name in ("ngram", "auto", "draft model"):
        assert first[name] == first["plain"], name
    assert first["many"] == first["alone"]
