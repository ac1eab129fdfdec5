"""The Hub: which names may be its ids, what is fetched, and its refusals as sentences."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from llminfer.errors import LlminferError, ModelNotAvailable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
# a Hub id may end like this, but whoever types it means a file
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".json", ".txt")
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_LOG_IN = "log in with `hf auth login`"


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a path: `./x`, `/x`, `~/x`, `C:x`, `x.json`, `a/b/c`, `here/x`."""
    parent = os.path.dirname(os.path.expanduser(name))
    return (
        not _HUB_ID.fullmatch(name)
        or name.lower().endswith(_FILE_SUFFIXES)
        or (parent != "" and os.path.exists(parent))
    )


def hide_bars() -> None:
    """For a program whose own the screen is: the Hub's client shows no bars."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()


def fetch_checkpoint(name: str, *, revision: str | None = None, allow_pickle: bool = False, code: bool = False) -> Path:
    """The local folder of a Hub model, downloaded unless it is in the Hub's cache already.

    Offline (`HF_HUB_OFFLINE=1`) only the cache is looked at. Weights come as safetensors.

    Args:
        allow_pickle: fetch pickled weights too.
        code: fetch the Python files too; nothing here runs them.

    Raises:
        ModelNotAvailable: one sentence each for offline, not found, gated, not logged in, no network.
        LlminferError: when the Hub's cache cannot be written.
    """
    from huggingface_hub import constants, snapshot_download

    patterns = [*_CHECKPOINT_FILES, *(["*.bin"] if allow_pickle else []), *(["*.py"] if code else [])]
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=patterns, local_files_only=constants.HF_HUB_OFFLINE
        )
    except Exception as error:
        raise _hub_error(error, name, revision) from error
    return Path(folder)


def fetch_config(name: str, *, revision: str | None = None) -> Path:
    """The local path of a Hub model's config.json; nothing else of it is fetched.

    Raises:
        ModelNotAvailable: as `fetch_checkpoint`, and for a repository without one.
        LlminferError: when the Hub's cache cannot be written.
    """
    from huggingface_hub import constants, hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision, local_files_only=constants.HF_HUB_OFFLINE))
    except Exception as error:
        raise _hub_error(error, name, revision) from error


def _hub_error(error: Exception, name: str, revision: str | None) -> LlminferError:
    """What went wrong with the Hub, as one sentence without tokens or addresses of requests."""
    from huggingface_hub import constants

    causes = list(_causes(error))
    cache = constants.HF_HUB_CACHE
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _CANNOT_WRITE:
            return LlminferError(f"cannot write to the Hub's cache {cache}: {cause.strerror}", hint="set HF_HOME")
    for cause in causes:
        refusal = _refusal(cause, name, revision)
        if refusal is not None:
            return refusal
    where = f"{name} is not a folder here, not in the Hub's cache ({cache})"
    if constants.HF_HUB_OFFLINE:
        return ModelNotAvailable(f"{where}, and offline mode is on", hint="unset HF_HUB_OFFLINE to download it")
    return ModelNotAvailable(f"{where}, and the Hub cannot be reached", hint="check the network connection")


def _refusal(error: BaseException, name: str, revision: str | None) -> ModelNotAvailable | None:
    """The sentence for one refusal: by the kind of its error first, then by its HTTP status; None for no refusal."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    for kind, message, hint in _refusals_by_kind(name, revision, logged_out=status == 401):
        if isinstance(error, kind):
            return ModelNotAvailable(message, hint=hint)
    if status in _REFUSALS_BY_STATUS:
        message, hint = _REFUSALS_BY_STATUS[status]
        return ModelNotAvailable(message.format(name=name), hint=hint)
    if isinstance(status, int) and status >= 500:
        return ModelNotAvailable(f"the Hub failed to serve {name} (HTTP status {status})", hint="try again later")
    return None


_REFUSALS_BY_STATUS = {
    401: ("the Hub wants a valid login to show {name}", f"{_LOG_IN}; a token in HF_TOKEN may have expired"),
    403: ("the Hub refuses access to {name}", "the token in use may lack the right to read it"),
    429: ("the Hub takes no more requests for now, for {name}", "try again later"),
}


def _refusals_by_kind(
    name: str, revision: str | None, *, logged_out: bool
) -> Iterator[tuple[type[Exception] | tuple[()], str, str | None]]:
    """Kinds of errors, subclasses before their bases, each with its message and hint."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    not_found = f"{name} is not a folder here, and not found on the Hub"
    yield errors.GatedRepoError, f"{name} is gated on the Hub", f"accept its licence at {page} and {_LOG_IN}"
    yield errors.RevisionNotFoundError, f"{name} has no revision {revision} on the Hub", None
    if logged_out:
        # so the Hub answers to those who are not logged in, for private and for missing models alike
        yield errors.RepositoryNotFoundError, f"{not_found} without a login", f"check the spelling, or {_LOG_IN}"
    yield errors.RepositoryNotFoundError, not_found, f"check the spelling; for a private model, {_LOG_IN}"
    yield errors.DisabledRepoError, f"{name} is disabled on the Hub", f"its page may say why: {page}"
    yield getattr(errors, "RemoteEntryNotFoundError", ()), f"{name} on the Hub has no config.json", None
    yield errors.HFValidationError, f"{name} is neither a folder here nor a Hub id", None
    yield (
        # newer than the oldest huggingface_hub that we run with
        getattr(errors, "IncompleteSnapshotError", ()),
        f"{name} is in the Hub's cache ({constants.HF_HUB_CACHE}) only in part, and the rest cannot be fetched",
        "unset HF_HUB_OFFLINE to download it" if constants.HF_HUB_OFFLINE else "check the network connection",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from: the Hub's client wraps what it met."""
    while error is not None:
        yield error
        error = error.__cause__
