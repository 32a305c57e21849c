"""What an engine has drafted so far, from vLLM's own counters in its process.

Owns the counts and what they say of a drafting head. Leaves reading them at the right time
to `probes` and `watchdog`.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry

_NAME = "vllm:spec_decode_num_"
_NAMES = {
    "drafts": f"{_NAME}drafts_total",
    "drafted": f"{_NAME}draft_tokens_total",
    "accepted": f"{_NAME}accepted_tokens_total",
}
_PER_POSITION = f"{_NAME}accepted_tokens_per_pos_total"
# A healthy head is accepted less from place to place (72/53/40 %); a text that goes round in
# circles keeps it up (99/97/94 %). Both were reported in fastllm issue 728.
FLAT_FROM = 0.93
# One place alone says less: good heads reach 0.95 on code.
FLAT_FROM_ALONE = 0.985


@dataclass(frozen=True, slots=True)
class Drafting:
    """Counts as vLLM defines them; `per_position[i]` drafts had token i accepted."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def since(self, before: Drafting) -> Drafting:
        """What came after `before`."""
        earlier = (*before.per_position, *(0,) * len(self.per_position))
        return Drafting(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.per_position, earlier, strict=False)),
        )

    @property
    def acceptance(self) -> float:
        """accepted / drafted tokens; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def flat_near_one(self) -> bool:
        """Whether drafts are accepted almost always at every place, as in a text that loops."""
        rates = [count / self.drafts for count in self.per_position] if self.drafts else []
        least = FLAT_FROM if len(rates) > 1 else FLAT_FROM_ALONE
        return bool(rates) and min(rates) >= least

    def __str__(self) -> str:
        places = " ".join(f"{count / self.drafts:.2f}" for count in self.per_position)
        return f"{self.acceptance:.3f} of {self.drafted} draft tokens (by place: {places})"


def read(registry: CollectorRegistry = REGISTRY) -> Drafting:
    """The counts of this process since it started; all 0 in an engine that does not draft."""
    found = registry.restricted_registry([*_NAMES.values(), _PER_POSITION]).collect()
    samples = [sample for metric in found for sample in metric.samples]
    sums = {
        field: int(sum(sample.value for sample in samples if sample.name == name))
        for field, name in _NAMES.items()
    }
    places: dict[int, int] = {}
    for sample in samples:
        if sample.name == _PER_POSITION:
            place = int(sample.labels["position"])
            places[place] = places.get(place, 0) + int(sample.value)
    return Drafting(**sums, per_position=tuple(places[place] for place in sorted(places)))
