"""The checkpoint's own tokenizer: from texts and conversations to tokens, and back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_backend.engine.config import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = Mapping[str, str]
"""A message of a conversation: role and content."""


class Tokenizer:
    """The tokenizer of a checkpoint and, if it has one, its chat template.

    Args:
        folder: has `tokenizer.json`, or other files that `transformers` can read.
    """

    def __init__(self, folder: str | Path):
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(f"tokenizers need more packages: pip install transformers jinja2 ({error})") from error
        self.folder = Path(folder)
        try:
            self._own = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers passes on any exception of a file's reader
            raise ValueError(f"folder must have a tokenizer that transformers can read; {folder}: {error}") from error

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        """Whether a checkpoint has a tokenizer."""
        return any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._own, "chat_template", None))

    @property
    def eos_token(self) -> int | None:
        return self._own.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the special tokens that the tokenizer adds."""
        return self._own(text)["input_ids"]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to the beginning of the assistant's next answer."""
        if not self.has_chat_template:
            raise ValueError(f"messages need a chat template; the tokenizer in {self.folder} has none")
        try:
            return self._own.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        except Exception as error:  # a template may raise anything
            raise ValueError(f"messages can't be put into the chat template: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self._own.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def save(tokenizer: "PreTrainedTokenizerFast", folder: str | Path) -> None:
    """Writes a tokenizer into a checkpoint so that transformers 4 and 5 both read it: vLLM 0.23 runs with either.
    Version 5 writes a new class name, which 4 doesn't know; both know the old one."""
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def end_tokens(folder: str | Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer: `eos_token_id` of `generation_config.json`, or else of `config.json`, and the
    tokenizer's own."""
    found = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError(f"{path} must be a JSON object; got {str(config)[:60]}")
        tokens = config.get("eos_token_id")
        if tokens is None:
            continue
        tokens = tokens if isinstance(tokens, list) else [tokens]
        if not all(type(token) is int for token in tokens):
            raise ValueError(f"{path}: eos_token_id must be a token or a list of tokens; got {str(tokens)[:60]}")
        found.update(tokens)
        break
    if tokenizer is not None and tokenizer.eos_token is not None:
        found.add(tokenizer.eos_token)
    return frozenset(found)
