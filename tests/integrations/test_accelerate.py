"""accelerate: prompts divided between processes."""

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specgen
from tests.helpers.paths import REFERENCE_LM
from tests.helpers.processes import run_in_ranks

PROMPTS = ["def add(x, y):", "1, 2, 3, 1, 2,", "The quick brown fox"]


def generate_share() -> tuple[int, list[tuple[str, bool, int]]]:
    """In a rank of its own: by prompt of all ranks whether the tokens are the same, and how many calls drafted."""
    state = PartialState(cpu=True)
    model = hf_specgen.attach(AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_LM)
    results = []
    with state.split_between_processes(PROMPTS) as mine:
        for prompt in mine:
            inputs = tokenizer(prompt, return_tensors="pt")
            ours = model.generate(**inputs, max_new_tokens=8, do_sample=False)
            plain = model.generate(**inputs, max_new_tokens=8, do_sample=False, candidate_generator=None)
            results.append((prompt, torch.equal(ours, plain), hf_specgen.statistics(model).calls))
    return state.num_processes, gather_object(results)


def test_split_between_processes_same_tokens_in_every_process() -> None:
    """Would catch: a strategy that waits for the other process, or tokens that differ in one of them."""
    (processes, results), _ = run_in_ranks(generate_share, [()] * 2)
    assert processes == 2
    assert results == [(PROMPTS[0], True, 1), (PROMPTS[1], True, 2), (PROMPTS[2], True, 1)]
