"""The error a bad request gets."""


class RequestError(ValueError):
    """A request that cannot be rendered; the server answers 400 with this text.

    Args:
        field: where the fault is, as a path in the request body (`messages[3].content`).
        value: what was found there.
        fix: what to send instead.
    """

    def __init__(self, field: str, value: object, fix: str) -> None:
        shown = repr(value)
        if len(shown) > 200:
            shown = f"{shown[:200]}…"
        super().__init__(f"{field}: {shown}: {fix}")
        self.field = field
        self.value = value
