"""``verify`` finds a planted fault, and only that one."""

import pytest

from tests.endpoint.fake import Fake
from vllm_kimi_k3.cli.main import main
from vllm_kimi_k3.cli.verify import check_all
from vllm_kimi_k3.endpoint.client import Client

#: fault -> (the check that must fail, a part of what it says)
FAULTS = {
    "warm": ("cold equals warm", "the second answer differs"),
    "stream": ("stream equals whole", "the stream differs"),
    "no end": ("stream equals whole", "ended without [DONE]"),
    "speculation": ("tokens are the model's own", "3 of 3 tokens are not the most likely ones"),
    "thinking dropped": ("thinking is kept", "adds"),
    "one name only": ("thinking is kept", "`reasoning_content`"),
    "no call": ("tool calls go round", "no tool call"),
    "undeclared call": ("tool calls go round", "'delete_all', which was not declared"),
    "broken arguments": ("tool calls go round", "no JSON"),
    "no id": ("tool calls go round", "no id"),
    "control tokens": ("text stays text", "read as control tokens"),
    "bad requests die": ("bad requests are refused", "expected 4xx, found"),
    "bad requests pass": ("bad requests are refused", "as if it were right"),
    "limits": ("limits are kept", "completion_tokens 99"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    name, said = FAULTS[fault]
    with Fake(fault) as server:
        failed = {r["check"]: r["detail"] for r in check_all(Client(server.url)) if r["outcome"] == "failed"}
    # Both checks read streams to their end.
    allowed = {name, "tool calls go round"} if fault == "no end" else {name}
    assert name in failed and set(failed) <= allowed
    assert said in failed[name]


def test_nothing_is_found_where_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with Fake() as server:
        assert main(["verify", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("k3, server version unknown\nok ")
    assert "0 of 8 checks failed" in out


def test_what_the_server_does_not_offer_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    with Fake("no token ids") as server:
        assert main(["verify", "--url", server.url]) == 0
    assert "skipped  tokens are the model's own" in capsys.readouterr().out


def test_a_fault_is_exit_code_1() -> None:
    with Fake("limits") as server:
        assert main(["verify", "--url", server.url, "--json"]) == 1


def test_no_server_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with Fake() as server:
        url = server.url
    assert main(["verify", "--url", url]) == 2
    assert url in capsys.readouterr().err
