"""Runs a recipe: checks, data, the target's states, `Trainer`, the result with its measured acceptance and its card."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import transformers
import yaml
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import HfApi, ModelCard, ModelCardData
from jinja2 import Template
from transformers import AutoTokenizer, EvalPrediction, PreTrainedModel, Trainer, set_seed
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from arguments import Arguments, differences, parse
from conversations import (
    ChatFormat,
    StepSampler,
    check_row_count,
    collate,
    domain_of,
    encoded,
    first_of_domains,
    messages_of,
    prompt_of,
    read_rows,
)
from drafter import Drafter
from generate_answers import Numbered, answer_rows, completions
from hf_specgen import AutoCandidates, FixedDepth, NgramCandidates, __version__
from hf_specgen.call_statistics import Statistics
from hf_specgen.candidates.auto import chat_template_hash
from hf_specgen.heads.source import source_errors
from target import StoredStates, check_target, is_stored, load_target, stored_states, target_without_layers

RUN = "run.json"  # file in the output folder: the arguments that decide the result
RECORD = "training.json"  # file beside the weights: for which target, chat template and length they were trained
RESULTS = ("README.md", "config.json", "adapter_config.json", "model.safetensors")
LENGTHENED = ("max_steps", "num_train_epochs")  # arguments that may change when a run is resumed
TEMPLATES = Path(__file__).with_name("templates")
UNDRAFTED = NgramCandidates(policy=FixedDepth(0))
"""Plain decoding, with the same passes in all processes, which a sharded target needs."""


def run(
    recipe: type[Drafter], arguments_class: type[Any], documentation: str | None, arguments: list[str] | None = None
) -> None:
    """Everything that a recipe's script does: parse, check, load, train, save, measure."""
    args = parse(arguments_class, documentation, arguments)
    check_arguments(args)
    with source_errors(args.target):
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    chat = ChatFormat(tokenizer, args.chat_template_kwargs)
    source = read_rows(args.data, args.data_split, args.data_config, args.streaming)
    messages_of(next(iter(source)))  # refuses other columns now, and below not after the training
    asked = read_rows(args.evaluation) if args.evaluation else []
    prompts = list(enumerate(first_of_domains(asked, {"default": args.evaluation_per_domain})))
    for _, row in prompts:
        prompt_of(row)
    needs_answers = bool(prompts) and (args.eval_strategy != "no" or args.simulate)
    folders = [Path(args.features or "") / name for name in ("train", "evaluation")[: 1 + needs_answers]]
    is_complete = args.features is not None and all(map(is_stored, folders))
    target = target_without_layers(args) if is_complete else load_target(args)
    if not is_complete:
        check_target(target, args.packing)
    recipe.check(args, target)
    data = encoded(source, chat, args.max_length, args.packing)
    check_row_count(data, args.rows_per_step)
    set_seed(args.seed)
    drafter = recipe(args, target, data)

    def answers() -> Any:
        return encoded(target_answers(args, drafter.target, chat, prompts), chat, args.max_length)

    rows, held_out = data, None
    if args.features:
        tokens, call = [data["input_ids"][:], data["labels"][:]], [prompts, args.generation, args.evaluation_tokens]
        rows = stored_states(args, drafter, "train", tokens, lambda: data)
        held_out = stored_states(args, drafter, "evaluation", call, answers) if needs_answers else None
        drafter.use_target(target_without_layers(args))
    elif needs_answers:
        held_out = answers()
    del target
    trainer = DrafterTrainer(args, drafter, tokenizer.pad_token_id or 0, rows, held_out)
    if args.simulate:
        return trainer.log_metrics("eval", trainer.evaluate())
    if args.dry_run:
        return trainer.dry_run()
    if PartialState().is_main_process:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        (Path(args.output_dir) / RUN).write_text(json.dumps(args.own_values(), indent=2) + "\n", encoding="utf-8")
    trainer.train(resume_from_checkpoint=last_checkpoint(args) if args.resume else None)
    finish(recipe, trainer, data, chat, prompts)


def check_arguments(args: Arguments) -> None:
    """Refuse what would fail, or overwrite something, after hours of training."""
    folder = Path(args.output_dir)
    checkpoint, record = last_checkpoint(args), folder / RUN
    if args.resume and checkpoint and record.exists():
        now = {name: value for name, value in args.own_values().items() if name not in LENGTHENED}
        if changed := differences(json.loads(record.read_text(encoding="utf-8")), now):
            raise ValueError(
                f"{folder} has a run with {changed}; resume it with the same settings, or give another --output"
            )
    elif not (args.overwrite or args.dry_run or args.simulate):
        has_result = any((folder / name).exists() for name in RESULTS)
        if args.resume and has_result and not checkpoint:
            raise ValueError(
                f"{folder} holds a finished result without a checkpoint to resume from; replace it with --overwrite "
                "true, or give another --output"
            )
        if not args.resume and (checkpoint or has_result):
            raise ValueError(
                f"{folder} holds an earlier run: continue it with --resume true, replace it with --overwrite true, or "
                "give another --output"
            )
    elif args.overwrite and PartialState().is_main_process:
        for old in folder.glob("checkpoint-*"):
            shutil.rmtree(old)
    for callback in get_reporting_integration_callbacks(args.report_to):
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"report_to={' '.join(cast(list[str], args.report_to))}: {error}") from None
    if args.push_to_hub:
        HfApi(token=args.hub_token).create_repo(str(args.hub_model_id), exist_ok=True, private=args.hub_private_repo)
        args.push_to_hub = False  # `Trainer` would upload its checkpoints; the result is uploaded in the end
        args.hub_always_push = True
    if args.streaming and (args.features or args.packing or args.max_steps < 1):
        raise ValueError("streaming needs max_steps, and cannot be combined with features or packing")
    args.accelerator_config.dispatch_batches = False  # type: ignore[union-attr]  # streamed batches differ in width


def last_checkpoint(args: Arguments) -> str | None:
    """The last complete checkpoint in the output folder; `Trainer` writes its state last."""
    found = Path(args.output_dir).glob("checkpoint-*/trainer_state.json")
    return str(max((path.parent for path in found), key=lambda path: int(path.name.split("-")[1]), default="")) or None


class DrafterTrainer(Trainer):
    """`Trainer` for a drafter: its order of rows, checkpoints of what is trained only."""

    def __init__(self, args: Arguments, drafter: Drafter, pad_token_id: int, rows: Any, held_out: Any):
        super().__init__(
            model=drafter,
            args=args,
            data_collator=lambda members: collate(members, pad_token_id),
            train_dataset=rows,
            eval_dataset=held_out,
            compute_metrics=acceptance_metrics,
        )
        self.drafter, self.recipe_args, self.begins = drafter, args, list[float]()
        sized = rows.rows if isinstance(rows, StoredStates) else rows
        self.lengths: list[int] = sized["length"][:] if hasattr(rows, "__len__") else []

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return StepSampler(self.lengths, self.recipe_args.rows_per_step, self.args.seed) if self.lengths else None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.drafter.step = self.state.global_step
        self.begins.append(time.perf_counter())
        return super().training_step(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self.drafter.trained(state_dict or self.drafter.state_dict()))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Frozen parameters are not in checkpoints."""

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """The complete trained weights on the CPU, also where they are sharded; in the main process."""
        state = self.drafter.trained(self.accelerator.get_state_dict(self.model_wrapped) or {})
        return {name: tensor.cpu() for name, tensor in state.items()}

    def dry_run(self) -> None:
        """Train a step to warm up and three more, and print what the whole run would take."""
        args, rows = self.recipe_args, self.recipe_args.rows_per_step
        per_epoch = len(self.lengths) // rows
        steps = args.max_steps if args.max_steps > 0 else math.ceil(per_epoch * args.num_train_epochs)
        args.max_steps, args.save_strategy, args.eval_strategy, args.report_to = 4, "no", "no", []
        self.train()
        seconds = (time.perf_counter() - self.begins[args.gradient_accumulation_steps]) / 3
        tokens = rows * sum(self.lengths) / max(1, len(self.lengths))
        parameters = sum(parameter.numel() for parameter in self.drafter.parameters() if parameter.requires_grad)
        is_gpu = args.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated() if is_gpu else psutil.Process().memory_info().rss
        PartialState().print(
            f"trained parameters: {parameters:,}\nmemory: {memory / 2**30:.2f} GiB per process\n"
            f"steps: {steps:,} of {rows} rows\ntime: {seconds:.3f} s per step, {tokens / seconds:,.0f} tokens per "
            f"second, {steps * seconds / 3600:.2f} hours in all"
        )


def acceptance_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Acceptance by depth and tokens per step of greedy chains, of `[rows, depths, 4]` counts."""
    drafts, hits, chains, overlaps = torch.as_tensor(cast(Any, prediction.predictions)).sum(dim=0).unbind(-1)
    drafts = drafts.clamp(min=1)
    metrics = {"tokens_per_step": 1 + float((chains / drafts).sum())}
    for depth in range(len(drafts)):
        metrics[f"agreement_{depth + 1}"] = float(hits[depth] / drafts[depth])
        metrics[f"acceptance_{depth + 1}"] = float(overlaps[depth] / drafts[depth])
    return metrics


def finish(recipe: type[Drafter], trainer: DrafterTrainer, rows: Any, chat: ChatFormat, prompts: Any) -> None:
    """Save the result, then measure it as it is loaded, write the card, upload."""
    args, drafter, state = trainer.recipe_args, trainer.drafter, PartialState()
    weights, folder = trainer.trained_weights(), Path(args.output_dir)
    if any(hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") for parameter in drafter.parameters()):
        drafter = recipe(args, drafter.target, rows)  # the trained one is sharded
    if state.is_main_process:
        drafter.load_state_dict(weights, strict=False)
        drafter.eval().save(folder)
        write_card(drafter, chat, trainer.state.log_history, {})
    state.wait_for_everyone()
    if prompts:
        target = load_target(args) if args.features else drafter.target
        drafter.use_target(target)
        results = measure(args, target, chat, prompts, drafter.settings)
        if state.is_main_process:
            write_card(drafter, chat, trainer.state.log_history, results)
    if args.hub_always_push and state.is_main_process:
        HfApi(token=args.hub_token).upload_folder(
            repo_id=str(args.hub_model_id),
            folder_path=folder,
            ignore_patterns=["checkpoint*", "*/checkpoint*", "runs/*", "wandb/*", "training_args.bin"],
        )
    state.wait_for_everyone()


@dataclass
class Measured:
    """What was counted in the generations of one domain: with chains, with trees; whether tokens are those of plain."""

    chain: Statistics = field(default_factory=lambda: Statistics([]))
    tree: Statistics = field(default_factory=lambda: Statistics([]))
    identical: int = 0
    prompts: int = 0


def target_answers(args: Arguments, target: PreTrainedModel, chat: ChatFormat, prompts: Numbered) -> Dataset:
    """The target's own answers to the held-out prompts."""
    with torch.random.fork_rng():
        call = {"max_new_tokens": args.evaluation_tokens, "max_rows": 16}
        answers = dict(answer_rows(target, chat, prompts, UNDRAFTED, 0, args.generation, **call))
    return Dataset.from_list([answers[number] for number, _ in prompts])


def measure(args: Arguments, target: Any, chat: ChatFormat, prompts: Numbered, settings: Any) -> dict[str, Measured]:
    """Generate answers with the drafter as it was saved, and count; the random state is left unchanged."""
    if not PartialState().is_main_process and not args.shard_target:  # a sharded target needs all in each pass
        return {}
    load, policy = AutoCandidates.from_pretrained, FixedDepth()
    drafters = [load(args.output_dir, policy=policy, **settings(with_tree)) for with_tree in (False, True)]
    call = {"max_new_tokens": args.evaluation_tokens, "max_rows": 16}
    with torch.random.fork_rng():
        plain, chains, trees = (
            dict(completions(target, chat, prompts, drafter, 0, args.generation, **call))
            for drafter in (UNDRAFTED, *drafters)
        )
    results: dict[str, Measured] = {}
    for number, row in prompts:
        result, tokens = results.setdefault(domain_of(row), Measured()), plain[number].tokens
        result.chain += chains[number].statistics
        result.tree += trees[number].statistics
        result.identical += chains[number].tokens == tokens == trees[number].tokens
        result.prompts += 1
    return results


def write_card(drafter: Any, chat: ChatFormat, history: list[dict[str, Any]], results: dict[str, Measured]) -> None:
    """Write card, record and custom code into the output folder."""
    args, folder = drafter.args, Path(drafter.args.output_dir)
    record = {"target": args.target, "chat_template": chat_template_hash(chat.tokenizer)}
    record |= {"chat_template_kwargs": dict(args.chat_template_kwargs), "max_length": args.max_length}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    write_custom_generate(folder, args.hub_model_id or args.output_dir)
    data = ModelCardData(
        library_name=drafter.library,
        tags=["speculative-decoding", "hf_specgen"],
        base_model=args.target if not Path(args.target).exists() else None,  # ids of the Hub only
    )
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    card = ModelCard.from_template(
        data,
        str(TEMPLATES / "card.md.j2"),
        title=folder.name,
        name=args.hub_model_id or args.output_dir,
        drafter=drafter,
        args=args,
        parameters=trained / 1e6,
        results=results,
        dtype=str(drafter.target.dtype).removeprefix("torch."),
        arguments=yaml.safe_dump(args.own_values(), sort_keys=False),
        loss=next((entry["loss"] for entry in reversed(history) if "loss" in entry), None),
        versions=f"hf-specgen {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    )
    card.save(folder / "README.md")


def write_custom_generate(folder: Path, name: str) -> None:
    """Write `custom_generate/generate.py` into the folder of a drafter that is loaded from `name`."""
    path, template = folder / "custom_generate" / "generate.py", TEMPLATES / "custom_generate.py.j2"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(Template(template.read_text(encoding="utf-8")).render(name=name) + "\n", encoding="utf-8")
