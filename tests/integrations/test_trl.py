"""TRL: the rollouts of GRPO."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_specgen
from hf_specgen import NgramCandidates
from tests.helpers.paths import REFERENCE_LM

trl = pytest.importorskip("trl", exc_type=ImportError)
datasets = pytest.importorskip("datasets")


def train(folder: Path, tokenizer: Any, prompt: str, *, speculate: bool, **more: Any) -> tuple[list[float], Any]:
    """Two steps of GRPO from one seed: the mean reward of each, and the trained model."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32)
    if speculate:
        hf_specgen.attach(model, NgramCandidates(k=4))
    group = {"per_device_train_batch_size": 2, "num_generations": 2}
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=2,
        max_completion_length=24,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        seed=3,
        learning_rate=1e-3,
        **{**group, **more},
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt}, {"prompt": "The quick brown fox"}]),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry], model


def test_grpo_two_steps_same_rewards(tokenizer: Any, prompt: str, tmp_path: Path) -> None:
    plain, _ = train(tmp_path, tokenizer, prompt, speculate=False)
    ours, model = train(tmp_path, tokenizer, prompt, speculate=True)
    totals = hf_specgen.statistics(model)
    assert len(plain) == 2 and ours == plain
    assert totals.calls >= 2 and totals.drafted > 0 and totals.plain_calls == {}


@pytest.mark.parametrize("group", [2, 4])
def test_grpo_with_continuous_batching_speculates_with_changing_weights(
    tokenizer: Any, prompt: str, tmp_path: Path, group: int
) -> None:
    """Greedy rollouts: plain continuous batching samples by draws that depend on the whole step."""
    batching = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 256},
        "num_generations": group,
        "per_device_train_batch_size": group,
        "generation_kwargs": {"do_sample": False},
    }
    plain, _ = train(tmp_path, tokenizer, prompt, speculate=False, **batching)
    ours, model = train(tmp_path, tokenizer, prompt, speculate=True, **batching)
    totals = hf_specgen.statistics(model)
    assert len(plain) == 2 and ours == plain
    assert totals.calls >= 2 and totals.accepted > 0 and totals.plain_calls == {}
