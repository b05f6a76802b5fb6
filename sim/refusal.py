"""Why a request cannot be served at all, or the head of the queue stays where it is."""

from typing import overload

from sim.columns import BoolArray
from sim.request import Request
from workloads.record import IntArray


@overload
def can_be_served(num_prompt_tokens: int, max_model_len: int) -> bool: ...
@overload
def can_be_served(num_prompt_tokens: IntArray, max_model_len: int) -> BoolArray: ...
def can_be_served(num_prompt_tokens: int | IntArray, max_model_len: int) -> bool | BoolArray:
    """Answer whether a prompt, or each of several, leaves room for one output token.

    The rule of vLLM 0.33.0's front end (``v1/engine/input_processor.py``).
    """
    return num_prompt_tokens < max_model_len


class HeadRefusal:
    """Remembers where the head of the queue was refused, so that it is not asked for again.

    Attributes:
        length: tokens that it would have had to get at once, if the budget was in its way; else 0.
    """

    def __init__(self) -> None:
        self._request: Request | None = None
        self._generation = 0
        self._budget = 0
        self.length = 0

    def note(self, request: Request, generation: int, budget: int, length: int = 0) -> None:
        """Remember that *request* was refused at the allocator's *generation* with *budget* left.

        For memory; or, with a *length*, because its prompt is that long.
        """
        self._request = request
        self._generation = generation
        self._budget = budget
        self.length = length

    def stands(self, head: Request, generation: int, budget: int) -> bool:
        """Answer whether *head* was refused, and would be refused again.

        For memory: as long as none came free, and with no less budget (a shorter chunk needs less
        room). For budget: as long as its whole prompt is longer.
        """
        if self._request is not head or self._generation != generation:
            return False
        if self.length:
            return self.length > budget
        return self._budget <= budget
