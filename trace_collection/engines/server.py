"""What the engines that ask a running server share: many requests at once, and making sure of who answers."""

from __future__ import annotations

import abc
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ecospec.predictor.checkpoint_files import resolve_checkpoint
from ecospec.predictor.fingerprint import target_fingerprint
from ecospec.trace_collection.engines.json_client import AnswerError, JsonClient
from ecospec.trace_collection.engines.replies import Reply, name_of, trace_of_reply
from ecospec.trace_collection.engines.target_files import TargetFiles
from ecospec.trace_collection.planned import PlannedSequence
from ecospec.trace_collection.records import RoutingTrace

#: Requests at once at most; a server queues the rest itself.
MAX_IN_FLIGHT = 256
#: Tokens spread over the vocabulary whose text both sides tokenise, to see that they agree.
PROBED_TOKENS = 512

# What a route answers that a server does not have, or has switched off.
_NOT_THERE = frozenset({403, 404, 405, 501})
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class ServerEngine(abc.ABC):
    """An engine that asks a running server; subclasses know one server's routes and fields.

    Args:
        client: Reaches the server.
        target: The target according to its files: the server cannot be asked for its fingerprint.
        temperature: Sampling temperature, 0 for greedy.

    Attributes:
        context: Positions the server was started with; None where it does not say.
        description: What is known about the server, for the provenance of a store.
        uses_host: See `Engine`.
    """

    uses_host = False

    def __init__(self, client: JsonClient, target: TargetFiles, *, temperature: float) -> None:
        self._client = client
        self._target = target
        self._temperature = temperature
        self.context: int | None = None
        self.description: dict[str, Any] = {"server": client.url}

    @abc.abstractmethod
    def _ask(self, sequence: PlannedSequence) -> Reply:
        """Ask for one sequence."""

    def process(self, batch: Sequence[PlannedSequence]) -> list[RoutingTrace]:
        """Ask for all sequences of a batch at once; see `Engine.process`.

        Raises:
            ConnectionError: The server cannot be reached.
            TimeoutError: It took too long.
            ValueError: It refused, gave up, or its rows are wrong.
        """
        with ThreadPoolExecutor(max_workers=min(len(batch), MAX_IN_FLIGHT)) as pool:
            return list(pool.map(self._trace, batch))  # the first error cancels what has not begun

    def _trace(self, sequence: PlannedSequence) -> RoutingTrace:
        try:
            reply = self._ask(sequence)
        except AnswerError as error:
            raise ValueError(f"{name_of(sequence)}: {_advised(str(error))}") from error
        return trace_of_reply(sequence, reply, self._target.layout, self._target.eos_ids)

    def _optional(self, *paths: str) -> Any:
        """Answer of the first of several routes that the server has, or None."""
        for path in paths:
            try:
                return self._client.get(path)
            except AnswerError as error:
                if error.status not in _NOT_THERE:
                    raise
        return None

    def _check_tokenizer(self, model: str | None) -> None:
        """Compare tokenizers on a text made of tokens from all over the vocabulary, if the server has the route."""
        tokenizer = self._target.tokenizer
        spread = np.unique(np.linspace(0, len(tokenizer) - 1, PROBED_TOKENS).astype(int)).tolist()
        text = tokenizer.decode(spread, skip_special_tokens=True)
        mine = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        body = {"prompt": text, "add_special_tokens": False} | ({} if model is None else {"model": model})
        try:
            answer = self._client.post("/tokenize", body)
        except AnswerError as error:
            if error.status not in _NOT_THERE:
                raise
            self.description["tokenizer"] = "not compared: the server has no /tokenize"
            return
        theirs = answer.get("tokens") if isinstance(answer, dict) else None
        if theirs != mine:
            raise ValueError(
                f"the server at {self._client.url} tokenises otherwise than --target-path {self._target.path}; "
                "another model is behind it"
            )
        self.description["tokenizer"] = f"agrees on {len(mine)} tokens"

    def _check_model(self, served: str) -> None:
        """Compare the checkpoint a server names with the target's files, as far as both can be seen from here."""
        self.description["model"] = served
        mine = self._target.layout.spec
        try:
            theirs = target_fingerprint(resolve_checkpoint(served))
        except FileNotFoundError:  # a path of another machine, or a hub id that is not in this one's cache
            given = str(self._target.path)
            if _HUB_ID.fullmatch(served) and not self._target.path.is_dir() and served != given:
                raise ValueError(
                    f"the server at {self._client.url} runs {served}, --target-path names {given}; give the same"
                ) from None
            self.description["fingerprint"] = "not compared: the server's checkpoint cannot be read here"
            return
        if theirs != mine.target_fingerprint:
            raise ValueError(
                f"the server at {self._client.url} runs {served}, whose routers differ from those of --target-path "
                f"{self._target.path}; another model is behind it"
            )
        self.description["fingerprint"] = "equals that of the server's checkpoint"


def _advised(message: str) -> str:
    """A server's error with advice where it is a known one."""
    if "BlockObjectStore" in message:
        return f"{message}; its expert rows were evicted before they were read: lower --batch-size, then --resume"
    return message


def field_of(answer: Any, name: str, kind: type | tuple[type, ...], where: str, advice: str = "") -> Any:
    """A required field of an answer.

    Args:
        answer: The parsed object.
        name: The field.
        kind: Its type.
        where: Beginning of messages.
        advice: What to do where it is missing.

    Raises:
        ValueError: The field is missing or of another type.
    """
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(
            f"{where}: the server's answer has no {name}{'; ' + advice if advice else ', is it the right server?'}"
        )
    return value


def check_prompt_size(sequence: PlannedSequence, seen: object) -> None:
    """Refuse an answer about another prompt than the one sent (a server that adds or cuts tokens).

    Raises:
        ValueError: The server counts other tokens than were sent.
    """
    if seen is not None and seen != sequence.ids.size:
        raise ValueError(
            f"{name_of(sequence)}: sent {sequence.ids.size} tokens, the engine counts {seen}; it adds or cuts some"
        )
