"""`hf-specgen export`: writes heads of any known format in the layout of another program."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from hf_specgen.cli.settings import ExportSettings
from hf_specgen.heads import load_medusa
from hf_specgen.heads.checkpoint import Source, source_errors
from hf_specgen.heads.export import export_head
from hf_specgen.heads.head_formats import holds_medusa, load_head
from hf_specgen.heads.medusa_formats import export_medusa


def export_heads(settings: ExportSettings) -> list[Path]:
    """Write the heads.

    Returns:
        the files written.

    Raises:
        FileNotFoundError: if there are no heads.
        ValueError: for an unknown layout, or heads that it cannot express.
    """
    if not holds_medusa(Source(settings.heads)):
        return export_head(load_head(settings.heads), settings.output, settings.to)
    model = None
    if settings.target:
        with source_errors(settings.target):
            model = AutoModelForCausalLM.from_pretrained(settings.target, dtype="auto")
    return export_medusa(load_medusa(settings.heads, model), settings.output, settings.to, model)
