"""Where checkpoints lie, a folder or a repository of the Hub, and their files: cached, downloaded or out of reach."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import constants, errors

DOWNLOAD_PATTERNS = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.model", "*.txt", "*.jinja")
"""Files of a repository that are downloaded: configs, tensors and tokenizers; no code."""
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Form of a repository id: "name" or "owner/name"."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message (at most 300 characters); the type of an error without a message."""
    return next((line.strip(" :") for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def check_source(source: str) -> None:
    """Raise `FileNotFoundError` if `source` is neither a folder nor of the form of a repository id."""
    if not source or (not Path(source).is_dir() and not REPOSITORY.fullmatch(source)):
        raise FileNotFoundError(f"there is no folder {source!r}")


@contextmanager
def source_errors(source: str) -> Iterator[None]:
    """Names the source in what Transformers raises inside while it loads from it."""
    check_source(source)
    try:
        yield
    except OSError as error:
        reason = first_line(error)
        reason = reason if source in reason else f"cannot load {source!r}: {reason}"
        hint = offline_hint(source)
        raise OSError(reason if hint in reason else reason.rstrip(".") + hint) from error
    except (ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged files raise errors of many types, some with the reason in the second line
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "give a language model with its tokenizer; for a draft head use AutoCandidates.from_pretrained"
        raise ValueError(f"cannot load {source!r}: {reason}; {remedy}") from error


def offline_hint(source: str) -> str:
    """The end of a message about a file that was not found."""
    local = Path(source).is_dir() or not constants.HF_HUB_OFFLINE
    return "" if local else "; HF_HUB_OFFLINE is set, so only files in the local cache are found"


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies, in the terms of `from_pretrained`."""

    path_or_id: str
    revision: str | None = None
    token: str | bool | None = None
    subfolder: str | None = None
    cache_dir: str | Path | None = None
    trust_remote_code: bool = False

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.path_or_id + (f"/{self.subfolder}" if self.subfolder else "") + revision

    def file(self, name: str) -> Path | None:
        """The local path of a file, downloaded if necessary; None if there is no such file.

        Without a network it is that of the cached revision.
        """
        folder = Path(self.path_or_id)
        if folder.is_dir():
            path = folder / (self.subfolder or "") / name
            return path if path.is_file() else None
        check_source(self.path_or_id)
        options = {field: getattr(self, field) for field in ("subfolder", "revision", "token", "cache_dir")}
        inside = f"{self.subfolder}/{name}" if self.subfolder else name
        try:
            cached = huggingface_hub.try_to_load_from_cache(self.path_or_id, inside, self.cache_dir, self.revision)
            if not (isinstance(cached, str) or constants.HF_HUB_OFFLINE):
                # One request that is not repeated: without a network the download tries for half a minute.
                huggingface_hub.get_hf_file_metadata(
                    huggingface_hub.hf_hub_url(self.path_or_id, inside, revision=self.revision), token=self.token
                )
            return Path(huggingface_hub.hf_hub_download(self.path_or_id, name, **options))
        except errors.GatedRepoError:
            raise
        except (errors.HFValidationError, errors.RepositoryNotFoundError):
            raise FileNotFoundError(f"{self.path_or_id} is neither a folder nor a repository of the Hub") from None
        except errors.LocalEntryNotFoundError:
            self._cached_folder()
            return None
        except errors.EntryNotFoundError:
            return None
        except Exception as error:  # every HTTP library has its own type for "no connection"
            if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
                raise
            found = self._cached_folder(f" ({first_line(error)})") / inside
            return found if found.is_file() else None

    def _cached_folder(self, reason: str = "") -> Path:
        """The cached revision; raises `FileNotFoundError`, with the reason why the Hub was not asked, without one."""
        where: Any = {"revision": self.revision, "cache_dir": self.cache_dir}
        try:
            return Path(huggingface_hub.snapshot_download(self.path_or_id, local_files_only=True, **where))
        except errors.LocalEntryNotFoundError:
            hint = offline_hint(self.path_or_id)
            message = f"{self} is not in the local cache, and the Hub cannot be reached{reason}{hint}"
            raise FileNotFoundError(message) from None

    def inside(self, folder: str) -> Source:
        """A folder of the checkpoint."""
        return replace(self, subfolder=f"{self.subfolder}/{folder}" if self.subfolder else folder)

    def local_name(self) -> str:
        """The folder or Hub id of the checkpoint; with further options, the folder that it is downloaded to."""
        name = self.path_or_id
        subfolder = self.subfolder or ""
        if not Path(name).is_dir():
            if self == Source(name, trust_remote_code=self.trust_remote_code):
                return name
            patterns = [*DOWNLOAD_PATTERNS, *(["*.py"] if self.trust_remote_code else [])]
            try:
                name = huggingface_hub.snapshot_download(
                    name,
                    revision=self.revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    allow_patterns=[f"{subfolder}/{kind}" if subfolder else kind for kind in patterns],
                )
            except errors.LocalEntryNotFoundError:
                raise FileNotFoundError(
                    f"{self} is not in the local cache, and the Hub cannot be reached{offline_hint(name)}"
                ) from None
        return str(Path(name) / subfolder) if subfolder else name

    def required_file(self, name: str, remedy: str) -> Path:
        """As `file`, but raises `FileNotFoundError` with a remedy if there is no such file."""
        path = self.file(name)
        if path is None:
            raise FileNotFoundError(f"{self} has no {name}{remedy}{offline_hint(self.path_or_id)}")
        return path
