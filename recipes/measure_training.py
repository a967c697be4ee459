"""Measures the throughput of stage 1 of Medusa training, relative to the target's forward pass on the same batches.

    accelerate launch recipes/measure_training.py --config recipes/configs/medusa_reference.yaml --steps 6

A step is forward pass, loss, backward pass and optimizer of all heads, as in train_medusa.py. Prints the median and the
range over the steps; the first step is a warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch

from common import parse_config
from distillation import answers, load_target, target_states
from hf_specgen.evaluation.measure import wait
from hf_specgen.targets.model_parts import output_logits
from train_medusa import HeadsTraining, Settings, make_heads
from training_setup import start


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Parse, load, measure, print; returns the ratios."""
    settings = parse_config(Settings, __doc__, arguments)
    accelerator = start(settings, "measure_training")
    target, tokenizer = load_target(settings.target, accelerator)
    heads, lora = make_heads(settings, target, tokenizer)
    module = HeadsTraining(heads, lora)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate)
    module, optimizer, loader = accelerator.prepare(module, optimizer, answers(settings, tokenizer))
    ratios: list[float] = []
    for step, batch in enumerate(loader):
        if step > settings.steps:
            break
        wait(accelerator.device)
        begin = perf_counter()
        with torch.no_grad():
            output_logits(target, target_states(target, batch)[0])
        wait(accelerator.device)
        forward = perf_counter() - begin
        begin = perf_counter()
        loss = cast(Any, module)(batch, [target], target_states(target, batch)[0])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        wait(accelerator.device)
        if step:
            ratios.append(forward / (perf_counter() - begin))
    accelerator.print(
        f"training throughput / throughput of the forward pass: {median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}, {len(ratios)} steps)"
    )
    return ratios


if __name__ == "__main__":
    main()
