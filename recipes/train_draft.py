"""Distills a small draft model from a target, on the target's own answers.

    accelerate launch recipes/train_draft.py --target ID --draft SMALLER_ID --data answers.jsonl --output my-draft
    accelerate launch recipes/train_draft.py --target ID --layers 0 2 3 --data answers.jsonl --output my-draft

Either `layers` initializes the draft with some of the target's layers, its embeddings and its output matrix, or `draft`
names an existing small model with the same tokenizer, which is trained whole, or with LoRA matrices (`--lora`) that are
merged in the end or saved as an adapter (`--merge false`).
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from arguments import Arguments, Options, launch, option
from conversations import Batch
from drafter import Drafter, with_lora
from hf_specgen.heads.source import source_errors
from hf_specgen.targets.model_parts import decoder_layers, keeps_state, output_logits, output_matrix
from losses import Drafts
from target import States, load_tokenizer, read_target, revision_of, whole
from training import run


@dataclass(kw_only=True)
class DraftArguments(Arguments):
    """The draft model."""

    layers: list[int] | None = option(default=None, help="layers of the target that initialize those of the draft")
    draft: str | None = option(default=None, help="existing small model, instead of `layers`")
    lora: Options | None = option(default=None, help="fields of PEFT's LoraConfig, for an existing model")
    merge: bool = option(default=True, help="merge the LoRA matrices; false: save them as an adapter of `draft`")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.layers is None) == (self.draft is None):
            raise ValueError("give either `layers` of the target, or `draft`, an existing small model")
        if self.lora is not None and self.draft is None:
            raise ValueError("lora needs `draft`, an existing small model; a new one is trained whole")


class ModelDrafter(Drafter):
    """A draft model in training."""

    recipe, kind, library = "train_draft", "a draft model", "transformers"
    args: DraftArguments

    def __init__(self, args: DraftArguments, target: PreTrainedModel, rows: Any):
        super().__init__(args, target, rows)
        self.adapted: Any = None
        if args.layers is not None:
            self.model, self.copied = from_layers(target, args.layers), args.layers
            self.model.config.get_text_config().trained_length = args.max_length
            return
        self.model = AutoModelForCausalLM.from_pretrained(cast(str, args.draft), dtype=torch.float32)
        if args.lora is not None:
            self.adapted = with_lora(self.model, args.lora, target_modules="all-linear", task_type="CAUSAL_LM")

    @classmethod
    def check(cls, args: Any, target: PreTrainedModel) -> None:
        if args.layers is not None:
            count = len(decoder_layers(target))
            if not args.layers or not all(0 <= layer < count for layer in args.layers):
                raise ValueError(f"layers must be indices of the target's layers, 0 to {count - 1}, got {args.layers}")
        elif _vocabulary(args.draft) != _vocabulary(args.target, revision_of(args)):
            raise ValueError(f"{args.draft} and {args.target} have different tokenizers; choose another draft")

    def draft(self, batch: Batch, states: States) -> Drafts:
        hidden = read_target(self.model, batch, ()).hidden
        trained = list(output_matrix(self.model).parameters())
        return Drafts([hidden], [partial(output_logits, self.model)], first=0, trained=trained)

    def settings(self, with_tree: bool) -> dict[str, Any]:
        """Chains only for a draft model with a recurrent state, from which trees cannot branch."""
        return super().settings(with_tree and not keeps_state(self.model.config.get_text_config()))

    def save(self, folder: Path) -> None:
        load_tokenizer(self.args).save_pretrained(folder)
        if self.adapted is not None and not self.args.merge:
            self.adapted.save_pretrained(folder)
            return
        plain: Any = self.model if self.adapted is None else self.adapted.merge_and_unload()
        plain.to(self.target.dtype).save_pretrained(folder)


def _vocabulary(name: str, revision: str = "main") -> dict[str, int]:
    with source_errors(name):
        return dict(AutoTokenizer.from_pretrained(name, revision=revision).get_vocab())


def from_layers(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A model in float32 with some of the target's layers and all its other weights."""
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in layers]
    text.num_hidden_layers = len(layers)
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    given = target.state_dict()
    for name, tensor in draft.state_dict().items():
        # With layers [0, 7], model.layers.1.mlp.weight is model.layers.7.mlp.weight; later numbers belong to experts.
        source = re.sub(r"\.(\d+)\.", lambda number: f".{layers[int(number[1])]}.", name, count=1)
        tensor.copy_(whole(given[source]))
    draft.generation_config = copy.deepcopy(target.generation_config)
    return cast(PreTrainedModel, draft)


# `training.run`: arguments, rows and target; ModelDrafter.check and its constructor; draft() for each batch of
# the Trainer; save(); real generations by domain; the model card.
main = partial(run, ModelDrafter, DraftArguments, __doc__)

if __name__ == "__main__":
    launch(main)
