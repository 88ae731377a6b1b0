"""The worker's side: which states a prefill step leaves in which pages, read off the block table.

The scheduler's manager gives a block to each column of the KDA block table whose state is wanted; the null block is 0.
So the table itself carries the decision, and the two sides cannot disagree.
"""

from collections.abc import Sequence

NULL_PAGE = 0


def step_exports(
    table: Sequence[Sequence[int]], lengths: Sequence[int], new: Sequence[int], unit: int
) -> list[tuple[int, int, int]]:
    """States to leave on the way through a step.

    Args:
        table: block tables of the step's prefills, a row each; column c is for the state after (c + 1) * unit tokens.
        lengths: tokens of each after the step.
        new: tokens of each in the step.
        unit: tokens of a column.

    Returns:
        (sequence, tokens of the step, page), in order. The state after the step's last token is not among them: it
        stays in the running state's page, which is the column it belongs to.
    """
    exports = []
    for sequence, (row, length, count) in enumerate(zip(table, lengths, new, strict=True)):
        start = length - count
        for column in range(start // unit, (length - 1) // unit):
            if row[column] != NULL_PAGE:
                exports.append((sequence, (column + 1) * unit - start, row[column]))
    return exports
