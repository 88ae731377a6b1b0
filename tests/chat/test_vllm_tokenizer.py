import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_k3.chat.tokenizer import K3Tokenizer, TokenizerFilesError
from vllm_kimi_k3.chat.vllm_tokenizer import KimiK3Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: K3Tokenizer) -> KimiK3Tokenizer:
    return KimiK3Tokenizer(tiny)


def test_spellings_and_ids_are_one_to_one(tokenizer: KimiK3Tokenizer) -> None:
    ids = list(range(len(tokenizer)))
    spellings = tokenizer.convert_ids_to_tokens(ids)
    assert isinstance(spellings, list) and len(set(spellings)) == len(ids)
    assert tokenizer.convert_tokens_to_ids(spellings) == ids
    assert tokenizer.get_vocab() == dict(zip(spellings, ids, strict=True))
    assert tokenizer.convert_tokens_to_ids("no such token") == tokenizer.unk_token_id


@given(st.text())
def test_spellings_become_text_again(tokenizer: KimiK3Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    spellings = tokenizer.convert_ids_to_tokens(ids)
    assert isinstance(spellings, list)
    assert tokenizer.convert_tokens_to_string(spellings) == text == tokenizer.decode(ids)


def test_raw_prompts_may_spell_control_tokens(tokenizer: KimiK3Tokenizer) -> None:
    assert tokenizer.encode("<|open|>think<|sep|>")[0] == tokenizer.special.open


def test_what_skip_special_tokens_drops(tokenizer: KimiK3Tokenizer) -> None:
    ids = tokenizer.encode("<|open|>a<|close|><|sep|><|end_of_msg|>[PAD]")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|open|>a<|close|><|sep|>"
    kept = tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True)
    assert kept == ["<|open|>", "a", "<|close|>", "<|sep|>"]


@pytest.mark.parametrize(("side", "kept"), [("left", "cd"), ("right", "ab")])
def test_truncation(tiny: K3Tokenizer, side: str, kept: str) -> None:
    tokenizer = KimiK3Tokenizer(tiny, truncation_side=side)
    ids = tokenizer.encode("abcd", truncation=True, max_length=2)
    assert tokenizer.decode(ids) == kept


def test_call(tokenizer: KimiK3Tokenizer) -> None:
    one, many = tokenizer("hello"), tokenizer(["hello", "hello world"])
    assert one.input_ids == one["input_ids"] == tokenizer.encode("hello")
    assert many["attention_mask"] == [[1] * len(ids) for ids in many["input_ids"]]
    assert not hasattr(one, "offsets")
    with pytest.raises(ValueError, match="not a pair"):
        tokenizer("a", "b")


def test_chat_template_gives_ids_or_text(tokenizer: KimiK3Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(messages, reasoning_effort="none")
    text = tokenizer.apply_chat_template(messages, reasoning_effort="none", tokenize=False)
    assert isinstance(ids, list) and tokenizer.decode(ids) == text
    assert text == (
        '<|open|>message role="user"<|sep|>hello<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def test_copies_encode_the_same(tokenizer: KimiK3Tokenizer) -> None:
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other.encode("hello world[EOT]") == tokenizer.encode("hello world[EOT]")
        assert other.special == tokenizer.special


@pytest.mark.parametrize("text", ["héllo 😀 <|open|>中文 👩‍👩‍👧", "a\ufffdb"], ids=["mixed", "replacement"])
def test_vllm_detokenises_token_by_token(tokenizer: KimiK3Tokenizer, text: str) -> None:
    from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

    ids = tokenizer.encode(text)
    tokens: list[str] = []
    written, prefix, read = "", 0, 0
    for position in range(1, len(ids) + 1):
        new, piece, prefix, read = detokenize_incrementally(
            tokenizer, ids[:position], tokens if position > 1 else None, prefix, read, False, False
        )
        tokens += new
        written += piece
    assert written == text


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFilesError, match=r"tiktoken\.model"):
        KimiK3Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(TokenizerFilesError, match=r"'nobody/no-such-model' is no directory with tiktoken\.model"):
        KimiK3Tokenizer.from_pretrained("nobody/no-such-model")


def test_the_protocol_imports_no_torch() -> None:
    """Everything of the chat protocol but the modules that vLLM loads by name."""
    directory = Path(__file__).resolve().parents[2] / "vllm_kimi_k3" / "chat"
    modules = [path.stem for path in directory.glob("*.py") if not path.stem.startswith(("_", "vllm_"))]
    assert "render" in modules and "parser" in modules
    imports = ", ".join(f"vllm_kimi_k3.chat.{name}" for name in [*modules, "vllm_tokenizer"])
    script = f"import {imports}, sys; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
