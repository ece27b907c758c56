"""Sends a finished folder to a hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_grpo.policy.hub import answers
from lit_grpo.process.terminal import first_line, shell

PATIENCE_S = 60.0
"""How long a hub may be silent."""


class Hub:
    """A repository of a hub that a finished folder is sent to, with the user's own token.

    The hub is that of huggingface_hub (``HF_ENDPOINT``), and so are the places where the token is looked for.

    Args:
        repository: Name of the repository, ``OWNER/NAME``.
        public: Whether everybody may see the repository if it is created; one that exists stays as it is.

    Raises:
        ValueError: The name is none, there is no token, the hub does not answer, or it does not accept the token.
    """

    def __init__(self, repository: str, public: bool) -> None:
        from huggingface_hub import HfApi, constants, get_session, get_token
        from huggingface_hub.utils import validate_repo_id

        self.repository, self.public, self.endpoint = repository, public, constants.ENDPOINT
        try:
            validate_repo_id(repository)
        except ValueError as error:
            raise ValueError(f"--push is {repository!r}, which names no repository ({first_line(error)}).") from error
        if repository.count("/") != 1:
            raise ValueError(f"--push is {repository!r}, which names no owner; give OWNER/{repository}.")
        if constants.HF_HUB_OFFLINE:
            raise ValueError("--push needs the hub, and HF_HUB_OFFLINE is set; unset it, or leave --push out.")
        with _in_a_sentence("--push needs your token, which could not be read"):
            token = get_token()
        if token is None:
            raise ValueError(
                "--push needs your token, and there is none; log in with hf auth login, or set HF_TOKEN to one "
                "that may write."
            )
        if not answers(self.endpoint):
            raise ValueError(f"The hub {self.endpoint} does not answer; mend the network, or leave --push out.")
        self._api = HfApi(endpoint=self.endpoint, token=token)
        get_session().timeout = PATIENCE_S  # huggingface_hub would wait for ever
        with _in_a_sentence(f"The hub {self.endpoint} did not accept your token"):
            self.user = str(self._api.whoami()["name"])

    def push(self, folder: Path) -> str:
        """Have the hub check the card, create the repository if it is missing, and send the folder.

        Returns:
            The address of the repository.

        Raises:
            ValueError: The hub refuses, breaks off, or answers what cannot be read.
        """
        from huggingface_hub import ModelCard

        by_hand = f"; the folder is complete, and hf upload {self.repository} {shell(str(folder))} sends it too"
        with _in_a_sentence(f"The hub {self.endpoint} did not accept the model card", by_hand):
            ModelCard.load(folder / "README.md").validate()
        with _in_a_sentence(f"{self.repository} could not be created on {self.endpoint}", by_hand):
            self._api.create_repo(self.repository, private=not self.public, exist_ok=True)
        with _in_a_sentence(f"{folder} could not be sent to {self.repository} on {self.endpoint}", by_hand):
            self._api.upload_folder(
                repo_id=self.repository, folder_path=folder, commit_message="Finished with lit_grpo"
            )
        return f"{self.endpoint}/{self.repository}"


@contextmanager
def _in_a_sentence(what: str, remedy: str = "") -> Iterator[None]:
    """Say in one sentence what a hub has answered, whatever that was: its answers are read by huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    of_http: Any = HfHubHTTPError.__bases__  # OSError, and the error of the HTTP library that huggingface_hub has
    try:
        yield
    except (*of_http, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        told = f"{type(error).__name__} {first_line(error)}" if isinstance(error, LookupError) else first_line(error)
        before = error.__context__
        if isinstance(before, HfHubHTTPError) and not isinstance(error, HfHubHTTPError):
            told = first_line(before)  # huggingface_hub asked something else after this refusal
        raise ValueError(f"{what} ({told:.300}){remedy}.") from error
