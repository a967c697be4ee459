"""A target whose layers are spread over two processes (`tp_plan="auto"`): the tokens of plain decoding on both."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_specgen import CombinedCandidates, DraftModelCandidates, NgramCandidates, generate_many
from tests.helpers import perturbed_copy, prompts
from tests.helpers.models import fresh_model
from tests.helpers.processes import run_in_ranks

GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.7}


def answers(folder: str) -> dict[str, Any]:
    """In a rank of its own: the tokens of plain decoding and of every strategy."""
    logging.disable(logging.WARNING)
    sharded: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/target", dtype=torch.float32, **sharded).eval()
    inputs = prompts(2)

    def run(arguments: dict[str, Any], **more: Any) -> list[list[int]]:
        torch.manual_seed(4)
        return model.generate(**inputs, **arguments, **more).tolist()

    found: dict[str, Any] = {"processes": model.tp_size}
    strategies = {
        "plain": None,
        "ngram": NgramCandidates(k=5),
        "auto": CombinedCandidates(),
        "draft model": DraftModelCandidates(f"{folder}/draft"),
    }
    for name, strategy in strategies.items():
        more = {} if strategy is None else {"candidate_generator": strategy}
        found[name] = [run(arguments, **more) for arguments in (GREEDY, SAMPLED)]
    rows = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    many = generate_many(model, rows, CombinedCandidates(), max_rows=2, ordered=True, **GREEDY)
    found["many"] = [rows[completion.index] + completion.tokens for completion in many]
    found["alone"] = [
        model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.long), **GREEDY)[
            0
        ].tolist()
        for row in rows
    ]
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
