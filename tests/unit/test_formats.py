"""`python -m benchmarks formats`: heads by their configs and the headers of their files, here those of the fixtures."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo
from safetensors.torch import load_file, save_file

from benchmarks.__main__ import main
from benchmarks.formats import check, published
from tests.helpers.head_fixtures import FIXTURES

HEADS = [name for name, one in FIXTURES.items() if not name.startswith("pard")]


def test_every_head_of_the_fixtures_loads_without_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch: a reader that looks at numbers, so that a head cannot be checked by its header."""
    arguments = [f"{FIXTURES[name].checkpoint_folder}={FIXTURES[name].target_folder}" for name in HEADS]
    assert main(["formats", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(HEADS) and all(line.startswith("loads ") for line in lines)
    assert sum(" for /" in line for line in lines) > 10


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("eagle3_original", lambda t: t.pop("midlayer.mlp.up_proj.weight"), "1 tensors are missing"),
        ("eagle3_original", lambda t: t.update({"fc.weight": torch.zeros(64, 100)}), "fc.weight"),
        ("mtp_transformers_glm4_moe", lambda t: t.pop(_last(t, "o_proj.weight")), "missing_keys: .*o_proj"),
        ("mtp_transformers_glm4_moe", lambda t: t.update({_last(t, "o_proj.weight"): torch.zeros(3, 3)}), "do not fit"),
        ("mtp_transformers_deepseek_v3_fp8", lambda t: t.pop(_last(t, "o_proj.weight_scale_inv")), "quantised MTP"),
    ],
)
def test_heads_that_do_not_load_are_refused_by_their_headers(
    name: str, damage: Any, words: str, tmp_path: Path
) -> None:
    """Would catch: a check by headers that passes what reading the numbers refuses."""
    shutil.copytree(FIXTURES[name].checkpoint_folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    row = check(str(tmp_path))
    assert row.result == "refused" and re.search(words, row.found), row


def _last(tensors: dict[str, torch.Tensor], part: str) -> str:
    """The tensor of the last layer."""
    return max(name for name in tensors if name.endswith(part))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Serves fixtures as repositories "org/NAME": small files whole, of others the headers; the names that are read."""
    read: set[str] = set()

    def local(repository: str, name: str) -> Path:
        path = FIXTURES[repository.removeprefix("org/")].checkpoint_folder / name
        if not path.exists():
            raise EntryNotFoundError("404")
        read.add(name)
        return path

    def download(repository: str, name: str, **where: Any) -> str:
        path = local(repository, name)
        assert not name.endswith((".safetensors", ".bin")), "weights are downloaded"
        return str(path)

    def header(repository: str, name: str, **where: Any) -> SafetensorsFileMetadata:
        content = local(repository, name).read_bytes()
        parsed = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        parsed.pop("__metadata__", None)
        tensors = {name: TensorInfo(one["dtype"], one["shape"], one["data_offsets"]) for name, one in parsed.items()}
        return SafetensorsFileMetadata({}, tensors)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", header)
    return read


def test_heads_on_the_hub_load_by_their_headers_alone(hub: set[str]) -> None:
    """Would catch: weights that are downloaded, dtypes of a header read wrongly, scales that are not seen."""
    layers = FIXTURES["mtp_transformers_deepseek_v3_fp8"].target_folder
    for name in ("eagle3_original", "speculators_dspark_vanilla_vd48", "dflash_zlab", "medusa_v1"):
        assert check(f"org/{name}").result == "loads"
    row = check("org/mtp_transformers_deepseek_v3_fp8", str(layers))
    assert str(row).endswith("1 MTP layers of DeepseekV3DecoderLayer") and row.result == "loads"
    assert hub == {"config.json", "model.safetensors", "medusa_lm_head.safetensors"}


def test_published_heads_are_pairs_of_repositories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a name that is none, and a repository out of reach taken for a head that is refused."""
    names = published()
    assert len(names) > 40 and all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in (*names, *names.values()))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert check("org/none").result == "absent"
