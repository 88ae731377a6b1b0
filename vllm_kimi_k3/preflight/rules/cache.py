"""Prefix cache, recurrent state, and connectors that move them."""

from collections.abc import Iterator

from vllm_kimi_k3.plan.pages import BLOCK_MULTIPLE
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.finding import Finding, error, warning

#: LMCache's own default.
_LMCACHE_CHUNK = 256


def check(facts: Facts) -> Iterator[Finding]:
    """Findings about the cache."""
    yield from _prefix_caching(facts)
    yield from _sizes(facts)
    yield from _state(facts)
    yield from _connector(facts)


def _prefix_caching(facts: Facts) -> Iterator[Finding]:
    serving = facts.serving
    caching = serving.get("enable_prefix_caching")
    if not caching:
        yield warning(
            "prefix-caching-off",
            "--enable-prefix-caching is not given" if caching is None else "--no-enable-prefix-caching",
            "every turn of a conversation computes its whole history again",
            "--enable-prefix-caching",
        )
    mode = serving.get("mamba_cache_mode")
    if mode not in (None, "align", "none"):
        yield error("mamba-cache-mode", f"--mamba-cache-mode {mode}", "vLLM no longer has this mode", "leave it out")
    if not caching:
        return
    if serving.get("enable_chunked_prefill") is False:
        yield error(
            "chunked-prefill-off",
            "--no-enable-chunked-prefill with prefix caching",
            "states are kept where a step of a prompt ends, so prompts must be cut into steps",
            "leave --no-enable-chunked-prefill out",
        )
    if mode == "none" and serving.frontend:
        yield error(
            "mamba-cache-mode",
            "--mamba-cache-mode none with prefix caching",
            "no KDA state is kept, so no prefix is ever found",
            "leave it out",
        )


def _sizes(facts: Facts) -> Iterator[Finding]:
    serving = facts.serving
    block = facts.plan.tightest.pages.block if facts.plan else None
    unit = serving.get("prefix_match_unit")
    if unit is not None and BLOCK_MULTIPLE % int(unit):
        yield error(
            "prefix-match-unit",
            f"--prefix-match-unit {unit}",
            f"blocks are a multiple of {BLOCK_MULTIPLE} tokens, and the unit must divide them",
            f"--prefix-match-unit {BLOCK_MULTIPLE}, or leave it out",
        )
    if not block:
        return
    asked = serving.get("block_size")
    if serving.frontend and asked is not None and (int(asked) < block or int(asked) % BLOCK_MULTIPLE):
        yield warning(
            "block-size",
            f"--block-size {asked}",
            f"a page must hold a KDA state, which takes {block} tokens of rows; vLLM takes that instead",
            "leave it out",
        )
    interval = serving.get("prefix_cache_retention_interval")
    if interval and int(interval) % block:
        yield error(
            "retention-interval",
            f"--prefix-cache-retention-interval {interval}",
            f"it must be a multiple of the block, {block} tokens",
            f"{-(-int(interval) // block) * block}, or leave it out",
        )


def _state(facts: Facts) -> Iterator[Finding]:
    serving = facts.serving
    for option in ("mamba_ssm_cache_dtype", "mamba_cache_dtype"):
        if serving.get(option) == "float16":
            yield error(
                "state-dtype",
                f"--{option.replace('_', '-')} float16",
                "the recurrent state outgrows fp16",
                "leave it out (fp32), or bfloat16",
            )
    if serving.get("disable_hybrid_kv_cache_manager", False):
        yield error(
            "hybrid-manager-off",
            "--disable-hybrid-kv-cache-manager",
            "K3 has two kinds of cache, KDA states and MLA rows",
            "leave it out",
        )
    if serving.get("use_replayssm", False) and not serving.speculative:
        yield error(
            "replayssm-without-draft",
            "--use-replayssm without --speculative-config",
            "for K3 it only replaces the states of a verify step",
            "leave it out",
        )


def _connector(facts: Facts) -> Iterator[Finding]:
    serving = facts.serving
    name = str(serving.connector.get("kv_connector") or "")
    if not name:
        return
    if not serving.get("enable_prefix_caching"):
        yield error(
            "connector-without-prefix-caching",
            f"{name} without --enable-prefix-caching",
            "KDA states are not kept at block ends, so the connector has none to store",
            "--enable-prefix-caching",
        )
    if "Nixl" in name and serving.environ.get("VLLM_SSM_CONV_STATE_LAYOUT") != "DS":
        yield error(
            "conv-state-layout",
            f"{name} with VLLM_SSM_CONV_STATE_LAYOUT={serving.environ.get('VLLM_SSM_CONV_STATE_LAYOUT')}",
            "slices of the conv window are contiguous, and can be sent, in the DS layout only",
            "VLLM_SSM_CONV_STATE_LAYOUT=DS on both sides",
        )
    if "LMCache" not in name or not facts.plan:
        return
    block = facts.plan.tightest.pages.block
    extra = serving.connector.get("kv_connector_extra_config") or {}
    chunk = int(extra.get("lmcache.chunk_size") or serving.environ.get("LMCACHE_CHUNK_SIZE") or _LMCACHE_CHUNK)
    if chunk % block:
        yield error(
            "lmcache-chunk",
            f"LMCache's chunk is {chunk} tokens, a block {block}",
            "a chunk that is not whole blocks has no KDA state at its end, so nothing of K3 is stored",
            f"LMCACHE_CHUNK_SIZE={block}",
        )
