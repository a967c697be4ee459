"""Which target a set of heads was trained for. Heads on another target would run, but nothing would be accepted."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel

from hf_specgen.targets.model_parts import decoder_layers, output_matrix

Fingerprint = dict[str, Any]
COMPARED = {
    "model_type": "architecture",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary size",
    "num_hidden_layers": "number of layers",
}


def fingerprint(model: PreTrainedModel, tokenizer: Any = None) -> Fingerprint:
    """What is stored with heads to recognise their target."""
    matrix = output_matrix(model)
    return {
        "name_or_path": model.name_or_path,
        "model_type": model.config.get_text_config().model_type,
        "hidden_size": matrix.in_features,
        "vocab_size": matrix.out_features,
        "num_hidden_layers": len(decoder_layers(model)),
        "chat_template": chat_template_hash(tokenizer),
    }


def chat_template_hash(tokenizer: Any) -> str | None:
    """The first 16 hexadecimal digits of the SHA-256 of a tokenizer's chat template; None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def other_chat_template(base: Fingerprint | None, tokenizer: Any) -> str | None:
    """A warning if the heads were trained with another chat template than this tokenizer's, else None."""
    trained = (base or {}).get("chat_template")
    if trained is None or trained == chat_template_hash(tokenizer):
        return None
    return "the heads were trained with another chat template than this tokenizer's: fewer draft tokens are accepted"


def check_fingerprint(base: Fingerprint | None, model: PreTrainedModel, what: str) -> None:
    """Raise unless `model` can be the target that `base` describes."""
    actual = fingerprint(model)
    for field, name in COMPARED.items():
        expected = (base or {}).get(field)
        if expected and expected != actual[field]:
            origin = (base or {}).get("name_or_path")
            raise ValueError(
                f"{what} was made for a target with {name} {expected}{f' ({origin})' if origin else ''}, but this "
                f"target has {actual[field]}; load the heads that belong to it"
            )


def check_heads(config: Any, model: PreTrainedModel, what: str) -> None:
    """Raise unless heads of this `MedusaConfig` fit `model`: their sizes, then the target they were trained for."""
    for base in ({"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}, config.base):
        check_fingerprint(base, model, what)
