"""Models by name from the Hugging Face hub: what a model needs and nothing more, into the hub's own
cache.

huggingface_hub does the work and honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.errors import ClearheadError

# Settings, tokenisers and weights; no code, no pictures, no other frameworks' weights.
SETTINGS = ["*.json", "*.txt", "*.model", "*.spm", "*.jinja", "1_Pooling/config.json"]


def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model of the hub, downloaded where it is not in the cache."""
    from huggingface_hub import errors, snapshot_download

    try:
        wanted = [*SETTINGS, *_weights(name, revision)]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except errors.GatedRepoError as error:
        raise ClearheadError(
            f'"{name}" is only for those who accepted its terms: do so on its page, then set '
            "HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ClearheadError(
            f'"{name}" has no revision "{revision}" ({_first_line(error)}): name a branch, a tag '
            "or a commit of it."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ClearheadError(
            f'There is no folder "{name}" here and no model of that name on the hub: check the '
            "spelling (hub names look like owner/model), or set HF_TOKEN if it is private."
        ) from error
    except Exception as error:  # what the client's HTTP library raises differs between versions
        raise ClearheadError(
            f'There is no folder "{name}" here, and the hub could not be asked for it '
            f"({_first_line(error)}): check the path, the connection, or HF_HUB_OFFLINE."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def _weights(name: str, revision: str | None) -> list[str]:
    """Safetensors where there are any, otherwise pickles; whatever the cache has when offline."""
    from huggingface_hub import HfApi, constants, errors

    cached = ["*.safetensors", "pytorch_model*.bin"]
    if constants.HF_HUB_OFFLINE:
        return cached
    try:
        found = HfApi().model_info(name, revision=revision, timeout=10).siblings or []
    except (errors.HfHubHTTPError, errors.HFValidationError):
        raise  # the hub answered
    except Exception:
        return cached  # no connection: what was downloaded before may still do
    top = [file.rfilename for file in found if "/" not in file.rfilename]
    safe = [file for file in top if re.match(r"model.*\.safetensors", file)]
    return safe or [file for file in top if re.match(r"pytorch_model.*\.bin", file)]
