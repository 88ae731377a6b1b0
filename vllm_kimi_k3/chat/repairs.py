"""Repairs of model output: each has a name, a counter and a debug log line."""

import logging
from enum import StrEnum
from functools import cache
from typing import Any

logger = logging.getLogger("vllm.vllm_kimi_k3.chat")

METRIC = "vllm:kimi_k3_output_repairs"


class Repair(StrEnum):
    """What the parser put right. The value is the label of the metric and the name in `docs/chat.md`."""

    THINK_CLOSE_INFERRED = "think_close_inferred"
    THINK_REPEATED = "think_repeated"
    RESPONSE_CLOSE_ORPHAN = "response_close_orphan"
    ANSWER_FROM_REASONING = "answer_from_reasoning"
    RESPONSE_OPEN_INFERRED = "response_open_inferred"
    RESPONSE_CLOSE_INFERRED = "response_close_inferred"
    RESPONSE_REPEATED = "response_repeated"
    TOOLS_CLOSE_INFERRED = "tools_close_inferred"
    TOOLS_REPEATED = "tools_repeated"
    CALL_CLOSE_INFERRED = "call_close_inferred"
    CALL_OUTSIDE_TOOLS = "call_outside_tools"
    CALL_WITHOUT_NAME = "call_without_name"
    CALL_CUT = "call_cut"
    CALL_NOT_WANTED = "call_not_wanted"
    ARGUMENT_CLOSE_INFERRED = "argument_close_inferred"
    ARGUMENT_WITHOUT_KEY = "argument_without_key"
    ARGUMENT_REPEATED = "argument_repeated"
    VALUE_BROKEN = "value_broken"
    VALUE_MISTYPED = "value_mistyped"
    TYPE_FROM_SCHEMA = "type_from_schema"
    TYPE_UNKNOWN = "type_unknown"
    JSON_ELEMENT_BROKEN = "json_element_broken"
    JSON_ELEMENT_MIXED = "json_element_mixed"
    SECOND_MESSAGE = "second_message"
    TEXT_DROPPED = "text_dropped"
    TAG_BROKEN = "tag_broken"
    TAG_CUT = "tag_cut"
    TAG_STRAY = "tag_stray"
    TAG_UNKNOWN = "tag_unknown"
    SEP_MISSING = "sep_missing"
    SPECIAL_DROPPED = "special_dropped"
    BYTES_INVALID = "bytes_invalid"
    BYTES_CUT = "bytes_cut"


@cache
def counter() -> Any:
    """The Prometheus counter of all repairs, labelled by name; made on first use, in the API process."""
    from prometheus_client import Counter

    metric = Counter(METRIC, "Repairs made to Kimi K3's output while parsing it.", ["repair"])
    for repair in Repair:
        metric.labels(repair.value)
    return metric


def record(repair: Repair) -> None:
    """Count one repair and log it at debug level."""
    counter().labels(repair.value).inc()
    logger.debug("repaired the output: %s", repair.value)


def ignore(repair: Repair) -> None:
    """Count nothing: for passes over ids that somebody else parses as well."""
