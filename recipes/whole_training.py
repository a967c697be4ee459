"""A whole training: answers of the target, training, and a comparison of the result; the command `hf-specgen train`.

A first measurement on a few prompts gives the time of everything. The plan is kept beside the result, so that the same
command goes on with it: a stage that is done is left out, one that was stopped continues.
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from dataclasses import asdict
from importlib import import_module
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import yaml
from rich.console import Console

import generate_answers
from arguments import Options, differences, parse, preset
from conversations import ChatFormat, read_rows
from hf_specgen.candidates import CombinedCandidates
from hf_specgen.cli.checkpoints import without_weights
from hf_specgen.cli.doctor import judge, line, ranking
from hf_specgen.cli.generate import write_rows
from hf_specgen.cli.settings import TrainSettings
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.measure import Comparison, Variant, measure_call
from target import weights_version

SCRIPTS = {"eagle3": "train_eagle", "layer-skip": "train_layer_skip"}
"""Recipes whose names are not those of the kind."""
SIZES = {"0.5b": 2e9, "8b": 2e10, "70b": float("inf")}
"""Presets of the recipes, and the number of parameters below which a target has that size."""
FEW = 8
"""Prompts by which times are measured in the beginning, and the speed in the end."""
MEASURED = 64
"""Answers whose time the measurements in the end take, about."""
EPOCHS, LEAST_STEPS = 10, 300
"""Passes over the answers, if the time is enough, and steps where that would be fewer."""


class Training:
    """One training: where its files are, and the recipe with its arguments."""

    def __init__(self, settings: TrainSettings, console: Console):
        self.settings = settings
        self.console = console
        self.recipe = import_module(SCRIPTS.get(settings.kind, f"train_{settings.kind}"))
        self.source = workloads.checkpoint(settings.model, revision_in(settings.recipe_arguments))
        self.target = without_weights(self.source)
        self.output = settings.output or Path(f"{Path(settings.model).name}-{settings.kind}")
        self.work = self.output.with_name(f"{self.output.name}-work")
        self.held_out = self.work / "held-out.jsonl"
        self.data = self.work / "answers.jsonl.gz"
        self.work.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        plan = self.plan()
        self.console.print(self.description(plan), highlight=False)
        if self.settings.dry_run:
            return
        if not self.data.exists():
            generate_answers.main([*self.answer_arguments(), "--limit", str(plan["answers"])])
        if not plan["trained"]:
            self.recipe.main([*self.recipe_arguments(plan), "--data", str(self.data), "--resume", "true"])
            self.keep(plan | {"trained": True})
        self.compare()

    def keep(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the plan; the file is complete whenever it is there."""
        write_rows(self.work / "plan.json", [plan])
        return plan

    def plan(self) -> dict[str, Any]:
        """The plan of an earlier run with the same settings, or a new one."""
        chosen = {
            name: str(value) for name, value in asdict(self.settings).items() if name not in ("dry_run", "output")
        }
        chosen["model_weights"] = weights_version(self.settings.model, self.source.revision or "main")
        file = self.work / "plan.json"
        if not file.exists():
            return self.keep({"settings": chosen, "trained": False, **self.measured_plan()})
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if changed := differences(plan["settings"], chosen):
            remedy = (
                f". To keep its answers, first copy {self.data.name} of that folder into one called like the new "
                "--output and -work"
            )
            if differences(plan["settings"], {"model_weights": chosen["model_weights"]}):
                remedy = ""  # they are the answers of other weights
            raise ValueError(
                f"{self.work} has a run with {changed}; give another --output, or delete that folder{remedy}"
            )
        return plan

    def measured_plan(self) -> dict[str, Any]:
        """How many prompts to answer and how many steps to train, so that all stages fit into `hours`.

        The times of an answer and of a step are measured: a few prompts are answered, and three steps are trained on
        these answers. Answers get at most half of `hours`. Training gets what remains after the answers, after
        these measurements and after the comparison at the end, whose prompts are held out here. Answers that were
        copied from another run are all used.
        """
        started = perf_counter()
        rows = list(read_rows(self.settings.data))
        if len(rows) < 2 * FEW:
            raise ValueError(f"{self.settings.data} has {len(rows)} rows; give at least {2 * FEW}, better thousands")
        held_out = rows[:: max(5, len(rows) // 100)]  # a fifth of few rows, about 100 of many
        write_rows(self.held_out, held_out)
        args = parse(generate_answers.AnswerArguments, None, self.answer_arguments())
        prompts = list(generate_answers.chosen_prompts(args).items())
        begin = perf_counter()
        answers = [row for _, row, _ in generate_answers.local_answers(args, prompts[:FEW])]
        answer_time = (perf_counter() - begin) / len(answers)
        seconds = 3600 * self.settings.hours
        count = min(len(prompts), max(FEW, int(seconds / 2 / answer_time)))
        missing = count
        if self.data.exists():
            count = sum(1 for _ in read_rows(str(self.data)))
            missing = 0
        batch = rows_per_step(count)
        plan = {"answers": count, "batch": batch, "steps": max(LEAST_STEPS, EPOCHS * count // batch)}
        plan["features"] = self.feature_bytes(count) < shutil.disk_usage(self.work).free / 2
        # The answers that there are, repeated until they fill four batches.
        few = self.work / "few.jsonl"
        write_rows(few, answers * ceil(4 * batch / len(answers)))
        dry = ["--data", str(few), "--dry-run", "true"]
        step_time, steps = self.recipe.main([*self.recipe_arguments(plan), *dry])
        if steps == plan["steps"]:  # not chosen by an argument of the recipe
            measuring = perf_counter() - started
            left = seconds - measuring - (missing + MEASURED) * answer_time
            steps = max(1, min(steps, int(left / step_time)))
        return plan | {"steps": steps, "seconds": [answer_time, step_time]}

    def feature_bytes(self, answers: int) -> int:
        """The size of the stored hidden states: four of each token in float32, a prompt being as long as its answer."""
        tokens = answers * 2 * self.settings.max_new_tokens
        return tokens * 4 * self.target.config.get_text_config().hidden_size * 4

    def description(self, plan: dict[str, Any]) -> str:
        """The stages with their times."""
        answer, step = (seconds / 60 for seconds in plan["seconds"])  # minutes of each
        answers = plan["answers"]
        missing = 0 if self.data.exists() else answers
        steps = plan["steps"]
        return (
            f"1. {answers} answers of up to {self.settings.max_new_tokens} tokens: {missing * answer:.1f} minutes\n"
            f"2. hidden states and training, {steps} steps of {plan['batch']} rows: {steps * step:.1f} minutes\n"
            f"3. measured on the prompts of {self.held_out}: about {MEASURED * answer:.1f} minutes\n"
            f"the result will be in {self.output}, everything else in {self.work}; a stopped run continues with the "
            "same command"
        )

    def answer_arguments(self) -> list[str]:
        """The arguments of generate_answers.py."""
        arguments = ["--target", self.settings.model, "--prompts", self.settings.data, "--exclude", str(self.held_out)]
        if self.source.revision:
            arguments += ["--target-kwargs", json.dumps({"dtype": "auto", "revision": self.source.revision})]
        return [*arguments, "--output", str(self.data), "--max-new-tokens", str(self.settings.max_new_tokens)]

    def recipe_arguments(self, plan: dict[str, Any]) -> list[str]:
        """The arguments of the recipe but for the data."""
        size = next(name for name, most in SIZES.items() if self.target.num_parameters() < most)
        micro = min(plan["batch"], preset(size, "")["per_device_train_batch_size"])
        layers = self.target.config.get_text_config().num_hidden_layers
        for_kind = {
            "draft": ["--layers", *map(str, range(0, layers, 4))],
            "layer-skip": ["--exit-layer", str(layers // 2)],
        }
        arguments = ["--preset", size, "--target", self.settings.model, "--output", str(self.output)]
        arguments += ["--batch-size", str(plan["batch"]), "--micro-batch-size", str(micro)]
        arguments += ["--steps", str(plan["steps"]), "--evaluation", str(self.held_out), "--save-steps", "0.05"]
        arguments += for_kind.get(self.settings.kind, [])
        if plan["features"]:
            arguments += ["--features", str(self.work / "features")]
        return [*arguments, *self.settings.recipe_arguments]

    def compare(self) -> None:
        """Print the speed of the result, of n-grams and of plain `generate` on held-out prompts."""
        model, tokenizer = workloads.load(self.source, "auto")
        strategies = workloads.strategies([str(self.output)], tokenizer=tokenizer)
        variants = [strategy.variant(compile=False) for strategy in strategies]
        measured = Comparison([Variant(workloads.PLAIN, dict), *variants])
        generation = workloads.generation_settings(self.settings.max_new_tokens, 0)
        chat = ChatFormat(tokenizer)
        rows = list(read_rows(str(self.held_out)))[:FEW]
        for number, row in enumerate(rows):
            ids = torch.tensor([chat.prompt(row)])
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if number == 0:  # not counted: this loads drafters and prepares kernels
                for variant in measured.variants:
                    measure_call(model, inputs, variant, generation | {"max_new_tokens": 8}, 0)
            for _ in measured.measure(model, inputs, generation):
                pass
        trained = next(each for each in reversed(strategies) if not isinstance(each.candidates, CombinedCandidates))
        self.console.print(ranking(measured, f"{len(rows)} held-out prompts, greedy"))
        for finding in judge(measured, [variant.name for variant in variants], model.dtype == torch.float32):
            self.console.print(line(finding), highlight=False)
        self.console.print(
            f"model.generate(**inputs, candidate_generator={trained.code})", highlight=False, soft_wrap=True
        )


def revision_in(arguments: list[str]) -> str:
    """The target's revision among the arguments of a recipe, or in the file of its --config; empty if not given."""
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    finder.add_argument("--target-kwargs", "--target_kwargs", type=Options)
    given = finder.parse_known_args(arguments)[0]
    kwargs = given.target_kwargs
    if kwargs is None and given.config is not None:
        kwargs = (yaml.safe_load(given.config.read_text(encoding="utf-8")) or {}).get("target_kwargs")
    return str((kwargs or {}).get("revision") or "")


def rows_per_step(answers: int) -> int:
    """Rows of a training step: a power of two from 4 to 64, with which an epoch has at least 64 steps if possible.

    What a drafter has learnt depends on the number of steps first: in the same time, 8 rows a step made of 700 answers
    a better head than 64 did.
    """
    return min(64, 2 ** max(2, (answers // 64).bit_length() - 1))
