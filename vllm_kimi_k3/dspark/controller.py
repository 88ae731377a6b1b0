"""How many tokens to draft for each request of a step: from measured acceptance and measured step times.

A draft at position i is worth the probability that it and all before it are accepted. Sorted by that, drafts of all
requests are taken as long as expected tokens a second rise (DSpark's scheduler, arXiv 2607.05147); the best number may
be none. Pure Python, so that it is simulated and tested without an engine.
"""

import math
from collections.abc import Mapping, Sequence

#: Observations that the prior of a position counts for.
_PRIOR_WEIGHT = 3.0
#: First guess of the first position's acceptance: high, so that the first drafts tell.
_FIRST = 0.8
#: What of older observations is left after each step of a request that drafted; about 100 steps are remembered.
_MEMORY = 0.99
#: The same for all requests together, by step of one of them.
_COMMON_MEMORY = 0.999
#: Weight of a new step time among those of its kind.
_TIME_WEIGHT = 0.2
#: Share of the time that requests without drafts may spend on drafts that look whether they would be accepted again.
_PROBE_SHARE = 0.015


class Acceptance:
    """How often drafts are accepted, by position; older steps count less.

    Args:
        positions: the most drafts of a step.
        memory: what of older observations is left after each step.
        prior: tells of a position what is not known of it here; without one it is taken to be accepted as often as
            the one before.
    """

    def __init__(self, positions: int, memory: float = _MEMORY, prior: "Acceptance | None" = None) -> None:
        self._memory, self._prior = memory, prior
        self._reached = [0.0] * positions
        self._accepted = [0.0] * positions

    def observe(self, drafted: int, accepted: int) -> None:
        """Enter a step's result.

        Args:
            drafted: tokens that were verified, at most ``positions``.
            accepted: how many of them were accepted; the one after these, if there was one, was rejected.

        Raises:
            ValueError: ``accepted`` exceeds ``drafted``, or ``drafted`` the positions.
        """
        if not 0 <= accepted <= drafted <= len(self._reached):
            raise ValueError(f"{accepted} accepted of {drafted} drafts of at most {len(self._reached)}")
        self._reached = [self._memory * count for count in self._reached]
        self._accepted = [self._memory * count for count in self._accepted]
        for position in range(min(accepted + 1, drafted)):
            self._reached[position] += 1
            self._accepted[position] += position < accepted

    def rates(self) -> list[float]:
        """For each position the probability that a draft there is accepted, given that those before it are."""
        priors = self._prior.rates() if self._prior else None
        rates: list[float] = []
        for place, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            prior = priors[place] if priors else rates[-1] if rates else _FIRST
            rates.append((accepted + _PRIOR_WEIGHT * prior) / (reached + _PRIOR_WEIGHT))
        return rates


class StepTimes:
    """Measured times of steps, with a draft pass and without, by how many tokens the target saw."""

    def __init__(self) -> None:
        self._times: dict[bool, dict[int, float]] = {False: {}, True: {}}

    def observe(self, tokens: int, drafted: bool, seconds: float) -> None:
        """Enter a step's time.

        Args:
            tokens: that the target saw: one a request and its drafts.
            drafted: whether the draft ran.
            seconds: of the whole step.
        """
        known = self._times[drafted]
        known[tokens] = seconds if tokens not in known else known[tokens] + _TIME_WEIGHT * (seconds - known[tokens])

    def expect(self, tokens: int, drafted: bool) -> float | None:
        """Seconds of such a step: between the measured ones next to it; None if none with or without drafts was.

        Below all that drafted, the next one without drafts stands in. Beyond what was measured a step is as long as
        the last one, so that what looks free gets tried.
        """
        known = self._times[drafted]
        if not known:
            return None
        above = min((count for count in known if count >= tokens), default=None)
        below, start = _last(known, tokens)
        if below is None and drafted:
            below, start = _last(self._times[False], tokens)
        if above is None:
            return start
        if below is None or above == below:
            return known[above]
        return start + (known[above] - start) * (tokens - below) / (above - below)


def _last(times: Mapping[int, float], tokens: int) -> tuple[int | None, float]:
    """The largest count up to ``tokens`` and its time."""
    below = max((count for count in times if count <= tokens), default=None)
    return below, math.nan if below is None else times[below]


class DraftLength:
    """Chooses draft lengths for the requests of a step.

    Args:
        most: the draft's block, the most tokens that it guesses.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.times = StepTimes()
        self._common = Acceptance(most, _COMMON_MEMORY)
        self._acceptance: dict[str, Acceptance] = {}
        #: by request, steps without drafts since it last drafted
        self._idle: dict[str, int] = {}

    def choose(
        self, requests: Sequence[str], confidence: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, int]:
        """Draft lengths, 0 to ``most``, of the requests that decode in a step.

        Args:
            requests: their names.
            confidence: by request, the draft's own probability for each position that it is accepted, given that those
                before it are; taken instead of what was measured.
        """
        gains = []
        for name in requests:
            stated = (confidence or {}).get(name)
            survival = _products(self._known(name).rates() if stated is None else stated[: self.most])
            gains += [(gain, -place, name) for place, gain in enumerate(survival)]
        gains.sort(reverse=True)
        lengths = dict.fromkeys(requests, 0)
        for _, _, name in gains[: self._worth(len(requests), [gain for gain, _, _ in gains])]:
            lengths[name] += 1
        for name in requests:
            self._idle[name] = 0 if lengths[name] else self._idle.get(name, 0) + 1
            if self._idle[name] >= self._patience(len(requests)):
                lengths[name], self._idle[name] = 1, 0
        return lengths

    def observe(self, name: str, drafted: int, accepted: int) -> None:
        """Enter what became of one request's drafts; see :meth:`Acceptance.observe`."""
        if drafted:
            self._known(name).observe(drafted, accepted)
            self._common.observe(drafted, accepted)

    def finish(self, name: str) -> None:
        """Forget a request."""
        self._acceptance.pop(name, None)
        self._idle.pop(name, None)

    def _known(self, name: str) -> Acceptance:
        return self._acceptance.setdefault(name, Acceptance(self.most, prior=self._common))

    def _worth(self, requests: int, gains: Sequence[float]) -> int:
        """How many of the drafts, best first, give the most expected tokens a second."""
        plain = self.times.expect(requests, drafted=False)
        if plain is None:
            # Nothing to compare with yet: one step without drafts tells.
            return 0
        best, rate, tokens = 0, requests / plain, float(requests)
        for count, gain in enumerate(gains, 1):
            tokens += gain
            seconds = self.times.expect(requests + count, drafted=True)
            if seconds is None:
                return len(gains)
            if tokens / seconds > rate:
                best, rate = count, tokens / seconds
        return best

    def _patience(self, requests: int) -> float:
        """Steps without drafts after which one draft is tried, so that trying costs a small share of the time."""
        plain = self.times.expect(requests, drafted=False)
        tried = self.times.expect(requests + 1, drafted=True)
        if plain is None or tried is None:
            return math.inf
        # The whole batch waits for a request's try, and each of its requests tries in its turn.
        return max(8.0, requests * (tried / plain - 1) / _PROBE_SHARE)


def _products(values: Sequence[float]) -> list[float]:
    product, products = 1.0, []
    for value in values:
        product *= value
        products.append(product)
    return products
