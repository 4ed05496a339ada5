"""What a draft is judged on: prompts of one or several turns, with the target's own answers between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.capture.conversations.normalise import RowError
from eyas.capture.conversations.prepare import parse_row
from eyas.capture.conversations.reading import Reader
from eyas.capture.conversations.template import ChatTemplate, read_stop_ids
from eyas.capture.engines.base import Answer
from eyas.capture.errors import TargetError
from eyas.capture.prepared import RejectedRow
from eyas.capture.regenerate.chat import Chat
from eyas.capture.tokenizer import load_tokenizer
from eyas.taps.errors import EyasError


@dataclass(frozen=True)
class Turn:
    """One question in its conversation, as tokens."""

    prompt: int  # number in the file, from 0
    turn: int
    category: str
    token_ids: list[int]
    seed: int  # of its answer's own random numbers, where a server draws them


class Prompts:
    """The prompts of a file, for one target."""

    def __init__(
        self, path: Path, target: str, *, max_prompts: int | None, revision: str | None, trust_remote_code: bool
    ) -> None:
        """JSON lines with ``turns`` (a list of questions, as MT-bench has them) or conversations of any form that eyas
        prepare reads, whose answers are left out. Raises EyasError for a row that is neither, TargetError."""
        self.tokenizer = load_tokenizer(target, revision, trust_remote_code)
        self.template = ChatTemplate(self.tokenizer, read_stop_ids(target, revision))
        if not self.template.exists:
            raise TargetError(f"--target {target}: its tokenizer has no chat template, so it cannot be asked anything")
        ends = [self.tokenizer.convert_tokens_to_ids(text) for text in self.template.end_texts]
        self.stop_ids = frozenset({*ends, *read_stop_ids(target, revision)} - {None, self.tokenizer.unk_token_id})
        self._chats: list[Chat] = []
        for raw in Reader(str(path)):
            if len(self._chats) == max_prompts:
                break
            try:
                if isinstance(raw, RejectedRow):
                    raise RowError(raw.kind, raw.reason)
                self._chats.append(Chat(parse_row(raw.body), raw.source))
            except RowError as error:
                raise EyasError(f"{raw.source}: {error.reason}; expected turns, or a conversation") from error
        if not self._chats:
            raise EyasError(f"{path} holds no prompts")

    def __len__(self) -> int:
        return len(self._chats)

    def turns(self, *, max_new_tokens: int, max_tokens: int) -> Iterator[Turn]:
        """Each turn of each prompt that leaves room for an answer. ``answer`` each before asking for the next."""
        for number in range(len(self)):
            self._more = True
            while self._more and (turn := self.ask(number, max_new_tokens=max_new_tokens, max_tokens=max_tokens)):
                yield turn

    def ask(self, number: int, *, max_new_tokens: int, max_tokens: int, seed: int = 0) -> Turn | None:
        """The next turn of prompt ``number``; None where it leaves no room for an answer. Raises EyasError."""
        chat = self._chats[number]
        try:
            prompt = chat.prompt(self.template, seed=seed, max_new_tokens=max_new_tokens, max_tokens=max_tokens)
        except RowError as error:
            raise EyasError(f"{chat.source}: {error.reason}") from error
        if prompt is None or prompt.max_new_tokens < max_new_tokens:
            return None
        return Turn(number, chat.turn, chat.category or "all", prompt.input_ids.tolist(), prompt.seed)

    def answer(self, turn: Turn, token_ids: list[int]) -> bool:
        """What the target answered to ``turn``; says whether its prompt has another.

        Where it was cut off it is closed like any other.
        """
        closed = token_ids if token_ids[-1] in self.stop_ids else [*token_ids, self._end]
        self._more = self._chats[turn.prompt].add(Answer(token_ids=closed, finish="stop"), self.tokenizer)
        return self._more

    @property
    def categories(self) -> dict[str, list[int]]:
        """The numbers of the prompts of each category, in the file's order."""
        found: dict[str, list[int]] = {}
        for number, chat in enumerate(self._chats):
            found.setdefault(chat.category or "all", []).append(number)
        return found

    @property
    def _end(self) -> int:
        """The token that ends an answer in this template."""
        ends = [self.tokenizer.convert_tokens_to_ids(text) for text in self.template.end_texts]
        return int(next((end for end in ends if end in self.stop_ids), min(self.stop_ids)))
