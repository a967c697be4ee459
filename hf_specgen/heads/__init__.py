"""Small trained parts that guess from a target's hidden states, and where they attach to it."""

from hf_specgen.heads.exit_head import ExitHead, load_exit_head
from hf_specgen.heads.formats import load_medusa
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads

__all__ = ["ExitHead", "MedusaConfig", "MedusaHeads", "load_exit_head", "load_medusa"]
