"""K3's tokenizer in vLLM's terms: the tokenizer mode `kimi_k3`. Runs no code from the checkpoint."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_kimi_k3.chat.effort import resolve
from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.request import ChatRequest
from vllm_kimi_k3.chat.tokenizer import CONFIG_FILE, VOCABULARY_FILE, K3Tokenizer, TokenizerFilesError


def _printable_bytes() -> list[str]:
    """A visible character for each byte: itself where it has a glyph in Latin-1, else the next one from U+0100 on.

    The mapping of GPT-2, which grammar back-ends expect of a byte-level vocabulary.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(spare)) for byte in range(256)]


_CHARACTERS = _printable_bytes()
_BYTES = {character: bytes([byte]) for byte, character in enumerate(_CHARACTERS)}


class Encoded(dict[str, Any]):
    """What calling the tokenizer gives: `input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class KimiK3Tokenizer:
    """The interface that vLLM expects of a tokenizer.

    `encode` makes control tokens out of their spelling, as raw completion prompts need; chat prompts never go through
    it, they use `k3` directly. The end-of-sequence token is `<|end_of_msg|>`, at which K3 stops.
    """

    is_fast = True

    def __init__(self, k3: K3Tokenizer, name_or_path: str = "", truncation_side: str = "left") -> None:
        self.k3 = k3
        self.special = k3.special
        self.name_or_path = name_or_path
        self.truncation_side = truncation_side

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: object,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        truncation_side: str = "left",
        **kwargs: object,
    ) -> "KimiK3Tokenizer":
        """Load from a directory or, through the Hugging Face cache, from a repository.

        Raises TokenizerFilesError if the files are not there or damaged.
        """
        directory = Path(path_or_repo_id)
        if not directory.is_dir():
            directory = _fetch(str(path_or_repo_id), revision, download_dir)
        return cls(K3Tokenizer.from_directory(directory), str(path_or_repo_id), truncation_side)

    def __deepcopy__(self, memo: object) -> "KimiK3Tokenizer":
        return self

    def __len__(self) -> int:
        return self.special.vocab_size

    @property
    def tokenizer(self) -> Any:
        """The tiktoken object, by which xgrammar recognises the kind of vocabulary."""
        return self.k3.encoding

    @property
    def vocab_size(self) -> int:
        return self.special.vocab_size

    @property
    def max_token_id(self) -> int:
        return self.special.vocab_size - 1

    @property
    def max_chars_per_token(self) -> int:
        return self.k3.longest_token

    @property
    def bos_token_id(self) -> int:
        return self.special.bos

    @property
    def eos_token_id(self) -> int:
        return self.special.end_of_msg

    @property
    def pad_token_id(self) -> int:
        return self.special.pad

    @property
    def unk_token_id(self) -> int:
        return self.special.unk

    @property
    def bos_token(self) -> str:
        return self.special.names[self.special.bos]

    @property
    def eos_token(self) -> str:
        return self.special.names[self.special.end_of_msg]

    @property
    def pad_token(self) -> str:
        return self.special.names[self.special.pad]

    @cached_property
    def all_special_ids(self) -> list[int]:
        """What `skip_special_tokens` drops. The three structure tokens stay: the released tokenizer keeps them too."""
        structure = {self.special.open, self.special.close, self.special.sep}
        return [token_id for token_id in self.special.names if token_id not in structure]

    @cached_property
    def all_special_tokens(self) -> list[str]:
        return [self.special.names[token_id] for token_id in self.all_special_ids]

    @cached_property
    def _skipped(self) -> frozenset[int]:
        return frozenset(self.all_special_ids)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {self._spell(token_id): token_id for token_id in range(len(self))}

    def num_special_tokens_to_add(self) -> int:
        return 0

    def get_vocab(self) -> dict[str, int]:
        """Every token, bytes shown as printable characters, with its id. Shared: do not change it."""
        return self._vocabulary

    def get_added_vocab(self) -> dict[str, int]:
        """The 256 special tokens with their ids."""
        return dict(self.special.ids)

    def __call__(
        self,
        text: str | list[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        **kwargs: object,
    ) -> Encoded:
        if text_pair is not None:
            raise ValueError("K3's tokenizer takes one text, not a pair")
        if isinstance(text, str):
            ids = self.encode(text, truncation=truncation, max_length=max_length)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        batch = [self.encode(one, truncation=truncation, max_length=max_length) for one in text]
        return Encoded(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def encode(
        self,
        text: str,
        truncation: bool | None = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of a raw prompt; nothing is added in front, K3 has no BOS."""
        ids = self.k3.encode(text, allow_special=True)
        if truncation and max_length is not None and len(ids) > max_length:
            return ids[len(ids) - max_length :] if self.truncation_side == "left" else ids[:max_length]
        return ids

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **kwargs: object) -> str:
        """Text of one id or many."""
        listed = [ids] if isinstance(ids, int) else ids
        return self.k3.decode(listed, self._skipped if skip_special_tokens else frozenset())

    def batch_decode(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Texts of several sequences."""
        return [self.decode(ids, skip_special_tokens) for ids in batch]

    def convert_ids_to_tokens(self, ids: Sequence[int] | int, skip_special_tokens: bool = False) -> list[str] | str:
        """Spelling of each id, special ones by name; an unknown id gives an empty string."""
        if isinstance(ids, int):
            return self._spell(ids)
        return [self._spell(token_id) for token_id in ids if not (skip_special_tokens and token_id in self._skipped)]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        """Id of each spelling, that of `[UNK]` for an unknown one."""
        if isinstance(tokens, str):
            return self._vocabulary.get(tokens, self.special.unk)
        return [self._vocabulary.get(token, self.special.unk) for token in tokens]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of spellings; what is not UTF-8 yet becomes U+FFFD."""
        ids = self.special.ids
        return b"".join(
            token.encode()
            if token in ids
            else b"".join(_BYTES.get(character) or character.encode() for character in token)
            for token in tokens
        ).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokenize: bool = True,
        tool_choice: object = None,
        response_format: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[int] | str:
        """Ids of the rendered conversation, or their text with `tokenize=False`; never tokenise that text again."""
        request = ChatRequest(
            messages=conversation,
            tools=tools or (),
            thinking=resolve(kwargs.get("reasoning_effort"), kwargs=kwargs),
            tool_choice=tool_choice,
            response_format=response_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        ids = render(self.k3, request)
        return ids if tokenize else self.decode(ids)

    def _spell(self, token_id: int) -> str:
        name = self.special.names.get(token_id)
        return "".join(_CHARACTERS[byte] for byte in self.k3.token_bytes(token_id)) if name is None else name


def _fetch(repository: str, revision: str | None, cache: str | None) -> Path:
    """Directory of a repository's tokenizer files in the Hugging Face cache, downloaded if that is allowed."""
    from huggingface_hub import errors, hf_hub_download

    try:
        found = hf_hub_download(repository, VOCABULARY_FILE, revision=revision, cache_dir=cache)
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        raise TokenizerFilesError(
            f"{repository!r} is no directory with {VOCABULARY_FILE}, and the Hugging Face hub did not give it: {error}"
        ) from error
    # Names there win over the built-in table; a checkpoint may do without.
    with suppress(errors.EntryNotFoundError):
        hf_hub_download(repository, CONFIG_FILE, revision=revision, cache_dir=cache)
    return Path(found).parent
