"""Do a draft and its target mean the same token by the same number?

Sizes say nothing: Qwen's models have tables of 151,936 and 152,064 entries for one tokenizer, the rest being padding.
So the tokenizers themselves are compared, where they can be found.
"""

from __future__ import annotations

from functools import lru_cache

from transformers import AutoTokenizer, PreTrainedModel


def check_vocabularies(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise unless the two models share a tokenizer; tables padded to different sizes are fine.

    Args:
        draft, target: loaded models. Their tokenizers are looked for where the models came from.

    Raises:
        ValueError: if the tokenizers differ, or cannot be found while the sizes differ.
    """
    if draft is target or draft.name_or_path == target.name_or_path != "":
        return
    vocabularies = vocabulary_of(draft.name_or_path), vocabulary_of(target.name_or_path)
    sizes = [model.config.get_text_config().vocab_size for model in (draft, target)]
    if None in vocabularies:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft has a vocabulary of {sizes[0]}, the target of {sizes[1]}, and no tokenizers were found to "
                "tell whether the difference is padding; load both models from folders that hold their tokenizers"
            )
        return
    if vocabularies[0] != vocabularies[1]:
        different = len(vocabularies[0] ^ vocabularies[1])  # type: ignore[operator]
        raise ValueError(
            f"the draft {draft.name_or_path!r} and the target {target.name_or_path!r} have different tokenizers "
            f"({different} entries differ); use a draft of the target's own family"
        )


@lru_cache(maxsize=16)
def vocabulary_of(name: str) -> frozenset[tuple[str, int]] | None:
    """Every token with its number; None if there is no tokenizer to be found."""
    if not name:
        return None
    try:
        return frozenset(AutoTokenizer.from_pretrained(name).get_vocab().items())
    except (OSError, ValueError):
        return None
