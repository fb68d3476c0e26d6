"""A tokenizer folder, read with the `tokenizers` library alone, and a byte-level BPE trained on a text.

Chat templates render in Jinja's immutable sandbox. This module does not know which text it is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from qdc.core import canonical
from qdc.core.errors import COULD_NOT, QdcError

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


class Tokenizer:
    """Token ids of text and of chats; `pad_id` (eos when there is none), `eos_id` from `tokenizer_config.json`."""

    def __init__(self, backend: Backend, settings: dict[str, Any], template: str) -> None:
        self.backend = backend
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(template)
        if settings.get("eos_token") is None:
            raise QdcError("methods.tokenizer.eos", "the tokenizer names no end token", exit_code=COULD_NOT)
        self.eos = _text(settings["eos_token"])
        self.pad = _text(settings.get("pad_token") or self.eos)
        self.eos_id, self.pad_id = self.token_id(self.eos), self.token_id(self.pad)

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int:
        """The id of one whole token. Raises QdcError if the vocabulary has no such token."""
        found = self.backend.token_to_id(token)
        if found is None:
            raise QdcError("methods.tokenizer.token", f"the vocabulary has no token {token}", exit_code=COULD_NOT)
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, none are added."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text."""
        return [list(e.ids) for e in self.backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def render_chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> str:
        """The chat as text, by the folder's chat template; message keys other than role and content are dropped."""
        turns = [{"role": m["role"], "content": m["content"]} for m in messages]
        return self._template.render(
            messages=turns,
            add_generation_prompt=add_generation_prompt,
            eos_token=self.eos,
            pad_token=self.pad,
        )


def _raise(message: str) -> None:
    raise QdcError("methods.tokenizer.template", f"the chat template refuses: {message}", exit_code=COULD_NOT)


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = (folder / "chat_template.jinja").read_text()
    return Tokenizer(Backend.from_file(str(folder / "tokenizer.json")), settings, template)


def train_byte_bpe(texts: Iterable[str], vocab_size: int, mask_token: str) -> Backend:
    """A byte-level BPE of `vocab_size` entries; ids 0..3 are pad, turn start, turn end (eos) and the mask token.

    Numbers with their leading space are split off before merging, so a frequent number is one token.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END, mask_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def write_tokenizer(backend: Backend, folder: Path, template: str, max_length: int, mask_token: str) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers and vLLM read them."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START, mask_token],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes(canonical.pretty(settings))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
