"""The bundled models and prompts of hf_specgen as an installable package; see `pyproject.toml` beside this file."""
