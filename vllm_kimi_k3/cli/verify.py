"""``vllm-kimi-k3 verify``: does a running endpoint do what a K3 endpoint must?"""

import argparse
import json
import os
import sys
import time
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add ``verify``."""
    parser = subparsers.add_parser("verify", help="check a running endpoint as a client")
    parser.add_argument("--url", required=True, help="of the server, for example http://127.0.0.1:8000")
    parser.add_argument("--api-key", help="default: the variable VLLM_API_KEY")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that an answer may take (default 600)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from vllm_kimi_k3.endpoint.client import Client, EndpointError

    key = options.api_key or os.environ.get("VLLM_API_KEY")
    try:
        client = Client(options.url, key, options.model, options.timeout)
    except EndpointError as error:
        print(f"vllm-kimi-k3 verify: {error}", file=sys.stderr)
        return 2
    results = check_all(client)
    failed = sum(result["outcome"] == "failed" for result in results)
    if options.json:
        print(json.dumps({"model": client.model, "server": _version(client), "failed": failed, "checks": results}))
    else:
        print(f"{client.model}, server version {_version(client)}")
        for result in results:
            print(f"{result['outcome']:<8} {result['check']} ({result['seconds']} s): {result['detail']}")
        print(f"{failed} of {len(results)} checks failed")
    return 1 if failed else 0


def check_all(client: Any) -> list[dict[str, Any]]:
    """Run every check; a failure of one does not stop the others.

    Returns:
        for each its name, "ok", "failed" or "skipped", what was seen, and the seconds that it took.
    """
    from vllm_kimi_k3.endpoint.checks import CHECKS, CheckFailedError, CheckSkippedError
    from vllm_kimi_k3.endpoint.client import EndpointError

    results = []
    for name, check in CHECKS.items():
        began = time.monotonic()
        try:
            outcome, detail = "ok", check(client)
        except CheckSkippedError as reason:
            outcome, detail = "skipped", str(reason)
        except (CheckFailedError, EndpointError, KeyError) as reason:
            outcome, detail = "failed", str(reason)
        seconds = round(time.monotonic() - began, 1)
        results.append({"check": name, "outcome": outcome, "detail": detail, "seconds": seconds})
    return results


def _version(client: Any) -> str:
    from vllm_kimi_k3.endpoint.client import EndpointError

    try:
        return str(client.get("/version")["version"])
    except (EndpointError, KeyError, TypeError):
        return "unknown"
