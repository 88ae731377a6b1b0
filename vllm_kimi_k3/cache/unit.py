"""The hash unit: how many tokens apart the boundaries are at which a prefix can be found."""

#: Units that the settings may choose, in tokens.
HASH_UNITS = (64, 128)

#: vLLM finds partly matched pages only where a state's block is larger than a hash block, so a unit is two of these.
_HASH_BLOCKS = 2


def hash_unit(hash_block: int) -> int:
    """Tokens of a unit, from vLLM's hash block (its ``prefix_match_unit``)."""
    return hash_block * _HASH_BLOCKS


def hash_block(unit: int) -> int:
    """Tokens of vLLM's hash block, from the unit."""
    return unit // _HASH_BLOCKS
