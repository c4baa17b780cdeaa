"""Many customers, one adapter each: names by Zipf, the base model among them."""

from __future__ import annotations

from loadtests.errors import UsageFault
from loadtests.workloads.base import FIXED_LENGTH, Item, Setting, Workload, log_normal, zipf


class Adapters(Workload):
    """Every request names an adapter of the server, the first ones far more often than the last."""

    name = "adapters"
    about = "Short prompts for the adapters of the server and the base model, popular ones more often (Zipf)."

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if not setting.adapters:
            raise UsageFault(
                "This server has no adapters. Serve a spec with a section lora, for example "
                "SPEC=build_engines/specs/smollm2-135m-lora.yaml."
            )
        self._names: tuple[str | None, ...] = (None, *setting.adapters)

    def item(self, index: int) -> Item:
        """The request at a position."""
        rng = self.rng(index)
        adapter = self._names[zipf(rng, len(self._names))]
        question, _ = self.prose(log_normal(rng, 40, 0.5, 16, 128), index)
        fields = {"messages": [{"role": "user", "content": question}], **FIXED_LENGTH}
        return Item(index, self.name, fields, log_normal(rng, 40, 0.4, 16, 96), adapter)
