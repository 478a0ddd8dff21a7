"""What is evaluated: a server, or a model in this process with its cache stored under a scheme."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any

import httpx

from kvlab.checks import check_integer
from kvlab.evaluation.harness import harness
from kvlab.models.default import MODEL_NAME
from kvlab.models.model_config import read_model_config

SECONDS = 30
"""How long a server may take to name its models."""


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server.

    Attributes
    ----------
    base_url
        As OpenAI's client takes it, ending in ``/v1``.
    model
        What the server calls the model; None takes the only one it serves.
    concurrent
        Requests at a time; None leaves it to the harness (1).
    timeout
        Seconds a request may take; None leaves it to the harness (300).
    scheme
        What its cache stores, for the record: a server calls its model the same whatever that is.
    """

    base_url: str
    model: str | None = None
    concurrent: int | None = None
    timeout: int | None = None
    scheme: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the server."""
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url is {self.base_url!r}; accepted: a URL, as http://127.0.0.1:8000/v1")
        if self.model == "":
            raise ValueError("model is ''; accepted: the name of a model that the server serves")

    def served(self) -> dict[str, Any]:
        """Return the server's own entry of the model: ``id`` and, from vLLM, ``max_model_len``.

        Raises
        ------
        ValueError
            The server does not answer, or serves no such model, or several and none was named.
        """
        url = f"{self.base_url.rstrip('/')}/models"
        try:
            answer = httpx.get(url, timeout=SECONDS).raise_for_status().json()
            models = {entry["id"]: entry for entry in answer["data"]}
            if not all(isinstance(name, str) for name in models):
                raise TypeError("a model's id is no text")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"base_url is {self.base_url!r}, where no server names its models ({error}); "
                "accepted: an OpenAI-compatible server, as http://127.0.0.1:8000/v1"
            ) from None
        name = next(iter(models), None) if self.model is None and len(models) == 1 else self.model
        if name not in models:
            raise ValueError(f"model is {self.model!r}; accepted at {self.base_url}: {', '.join(models) or 'none'}")
        return models[name]

    def described(self) -> dict[str, object]:
        """Return what identifies the set-up: the model's name there, and what its cache is said to store."""
        return {"model": self.served()["id"], "scheme": self.scheme}

    def tokenizer(self) -> str:
        """Name of the model's tokenizer: the model's own name."""
        return self.served()["id"]

    def longest(self) -> int | None:
        """Return the server's longest context in tokens, where it says so.

        Raises
        ------
        TypeError, ValueError
            As `served`, or what it says is no number of tokens.
        """
        longest = self.served().get("max_model_len")
        return None if longest is None else check_integer(longest, f"max_model_len at {self.base_url}", minimum=1)

    @contextmanager
    def open(self, *, seed: int, chat: bool) -> Iterator[Any]:
        """Yield the harness's client, which sends prompts as text."""
        harness()
        from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

        kind, path = (LocalChatCompletion, "chat/completions") if chat else (LocalCompletionsAPI, "completions")
        given = {"num_concurrent": self.concurrent, "timeout": self.timeout}

        class Client(kind):
            """The harness's own stops with an error of its parser, or scores what it cannot read as an empty answer."""

            def parse_generations(self, outputs: object, **_: object) -> list[str | None]:
                return [answer_text(outputs, chat=chat)]

        try:
            yield Client(
                base_url=f"{self.base_url.rstrip('/')}/{path}",
                model=self.served()["id"],
                tokenizer_backend="none",
                tokenized_requests=False,
                seed=seed,
                **{name: value for name, value in given.items() if value is not None},
            )
        except _server_errors() as error:
            reason = f"{type(error).__name__}: {error}"
            message = (
                f"the server at {self.base_url} failed ({reason}); what was finished is kept: run it again to go on"
            )
            raise ConnectionError(message) from None


class AnswerError(Exception):
    """A server's answer is not of the form that OpenAI's API has."""


def answer_text(answer: object, *, chat: bool) -> str | None:
    """Return the text of a server's answer to one prompt.

    Parameters
    ----------
    answer
        The JSON document.
    chat
        Whether it is one of chat completions; there a message may be without text, null, where a model has used its
        tokens up while it reasoned.

    Raises
    ------
    AnswerError
        It has not one choice with a text.
    """
    try:
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if chat else choice["text"]
        if not isinstance(text, str | None if chat else str):
            raise TypeError
        # JSON can spell halves of surrogate pairs, which no file of samples can hold.
        (text or "").encode()
    except (TypeError, KeyError, ValueError):
        wanted = "choices[0].message.content" if chat else "choices[0].text"
        raise AnswerError(f"its answer {reprlib.repr(answer)} has no text as its only {wanted}") from None
    return text


def _server_errors() -> tuple[type[Exception], ...]:
    """Return what the harness's client raises once its retries are used up, answers that are no JSON among it."""
    import aiohttp
    import requests

    return requests.RequestException, aiohttp.ClientError, TimeoutError, AnswerError, JSONDecodeError, RecursionError


@dataclass(frozen=True)
class InProcess:
    """A transformers model in this process.

    Attributes
    ----------
    model
        A folder, a hub name, or the embedded default's name.
    scheme
        The scheme of `kvlab.apply` for the full-attention layers; None leaves the model's own cache.
    device
        "cuda" or "cpu"; None takes CUDA where there is one.
    """

    model: str
    scheme: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the model."""
        from kvlab.capture_job import choose_device

        if not self.model:
            raise ValueError(f"model is {self.model!r}; accepted: a folder, a hub name, or {MODEL_NAME!r}")
        choose_device(self.device)

    def described(self) -> dict[str, object]:
        """Return what identifies the set-up: model and scheme."""
        return {"model": self.model, "scheme": self.scheme}

    def tokenizer(self) -> str:
        """Name or folder of the model's tokenizer."""
        if self.model == MODEL_NAME:
            from kvlab.models.default import default_folder

            return str(default_folder())
        return self.model

    def longest(self) -> int | None:
        """Return the model's longest context in tokens."""
        config = read_model_config(self.tokenizer())
        return getattr(config.get_text_config(), "max_position_embeddings", None)

    @contextmanager
    def open(self, *, seed: int, chat: bool) -> Iterator[Any]:
        """Yield the harness's model, its cache stored under the scheme."""
        harness()
        from lm_eval.models.huggingface import HFLM

        from kvlab.applying import apply
        from kvlab.capture_job import choose_device

        model, tokenizer = self._load()
        device = choose_device(self.device)
        with apply(model.to(device), self.scheme) if self.scheme else nullcontext():
            yield HFLM(pretrained=model, tokenizer=tokenizer, device=str(device))

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if self.model == MODEL_NAME:
            from kvlab.models.default import default_model

            return default_model()
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype="auto").eval()
        return model, AutoTokenizer.from_pretrained(self.model)


Setup = Server | InProcess
