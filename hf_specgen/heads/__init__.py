"""Draft heads: small trained modules that propose tokens from the target's hidden states, and their file formats."""

from hf_specgen.heads.exit_head import ExitHead, load_exit_head
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads
from hf_specgen.heads.medusa_formats import load_medusa

__all__ = ["ExitHead", "MedusaConfig", "MedusaHeads", "load_exit_head", "load_medusa"]
