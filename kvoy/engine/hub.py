"""Fetches models from the Hugging Face hub through huggingface_hub, into that library's own cache.

Owns the list of files that kvoy needs of a model and the sentences for what can go wrong. The library is imported
only here, when a hub id is asked for. Torch-free.
"""

from collections.abc import Callable
from pathlib import Path

from kvoy.core.errors import ModelError

WANTED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)


def fetch(hub_id: str, progress: Callable[[str], None]) -> Path:
    """The directory with the files of ``hub_id``; what is in the library's cache is used when there is no network."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - half a second that local models need not pay
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError  # noqa: PLC0415

    progress(f"fetching {hub_id} from the Hugging Face hub")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(WANTED_FILES)))
    except GatedRepoError as error:
        raise ModelError(f"{hub_id} asks for its licence to be accepted on the hub; then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {hub_id}, or it is private (then set HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"cannot reach the Hugging Face hub and {hub_id} is not in its cache; check the network, or give a local "
            "directory or .gguf file"
        ) from error
    except Exception as error:
        # The library lets the errors of its HTTP client through, and changes the client from release to release.
        raise ModelError(f"cannot fetch {hub_id} from the hub: {str(error) or type(error).__name__:.200}") from error
